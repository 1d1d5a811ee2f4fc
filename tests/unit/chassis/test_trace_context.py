"""Trace contexts as text: what is read, what is written, what is none."""

import pytest

from callforest_mesh.chassis.trace_context import TraceContext, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_a_context_survives_the_way() -> None:
    context = parse_traceparent(VALID)
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), 1)
    assert context.traceparent == VALID


@pytest.mark.requirement("OPS-1")
@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_the_lowest_flag_says_whether_it_is_sampled(flags: str, sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert context.is_sampled == sampled
    again = parse_traceparent(context.traceparent)
    assert again is not None
    assert again.is_sampled == sampled


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    context = parse_traceparent(f"01-{TRACE}-{SPAN}-09-what-else-there-is")
    assert context is not None
    assert context.traceparent == VALID


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0\N{FULLWIDTH DIGIT ONE}",
    ],
)
def test_what_is_no_context(text: str) -> None:
    assert parse_traceparent(text) is None
