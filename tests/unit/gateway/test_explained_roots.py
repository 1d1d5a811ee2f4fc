"""Where a request left the history before it: for people, from what the gateway still keeps."""

from __future__ import annotations

import pytest

from callforest.capture.v1 import call_record_pb2, capture_admission_pb2
from callforest_mesh.chassis.validation import check
from callforest_mesh.gateway.forest_reading import ForestReader
from callforest_mesh.gateway.histories import Histories
from tests.unit.gateway.read_requests import CHAT, GO, RESPONSES, body_of, serve


@pytest.fixture
def reader() -> ForestReader:
    return ForestReader(Histories(64 << 20, 10_000))


def root(
    reason: capture_admission_pb2.RootReason.ValueType, nearest: str = ""
) -> capture_admission_pb2.Verdict:
    found = capture_admission_pb2.Root(reason=reason, nearest_call_id=nearest)
    return capture_admission_pb2.Verdict(root=found)


NOT_RECORDED = root(capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED)


@pytest.mark.requirement("OPS-4")
@pytest.mark.parametrize(
    ("changed", "kind", "place"),
    [
        ({0: {"role": "system", "content": "other rules"}}, "SYSTEM_TEXT", 0),
        ({1: {"role": "user", "content": "g o"}}, "WHITESPACE", 1),
        ({1: {"role": "user", "content": "stop"}}, "REWRITTEN_HISTORY", 1),
        ({2: {"role": "assistant", "content": "another"}}, "REWRITTEN_HISTORY", 2),
    ],
)
def test_a_root_says_where_it_left_the_history(
    reader: ForestReader, changed: dict[int, object], kind: str, place: int
) -> None:
    turns: list[object] = [{"role": "system", "content": "rules"}, GO]
    serve(reader.read("k", body_of(CHAT, turns), CHAT), "c1", {"content": "HAVING"})
    turns += [{"role": "assistant", "content": "HAVING"}, GO]
    second = reader.read("k", body_of(CHAT, turns), CHAT)
    assert second.evidence.explain(root(capture_admission_pb2.ROOT_REASON_NO_MODEL_ITEMS)) is None
    for index, turn in changed.items():
        turns[index] = turn
    difference = reader.read("k", body_of(CHAT, turns), CHAT).evidence.explain(NOT_RECORDED)
    assert difference is not None
    check(difference)
    assert call_record_pb2.DifferenceClass.Name(difference.kind) == f"DIFFERENCE_CLASS_{kind}"
    assert (difference.atom_index, difference.against_call_id) == (place, "c1")


RULES = {"role": "system", "content": "Agent A rules  here"}
OTHERS: dict[str, list[object]] = {
    "another agent": [{"role": "system", "content": "agent B"}, {"role": "user", "content": "x"}],
    "no system text": [{"role": "user", "content": "x"}],
}


@pytest.mark.requirement("OPS-4")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("count", [1, 6, 31])
@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ("Agent A rules here", "WHITESPACE"),
        ("Agent A rules  here 12:30", "SYSTEM_TEXT"),
    ],
)
def test_calls_that_have_nothing_to_do_with_it_do_not_explain_it(
    reader: ForestReader, other: str, count: int, system: str, kind: str
) -> None:
    """However many agents share the attempt, what is compared is the conversation that was left."""
    turns: list[object] = [RULES, {"role": "user", "content": "task"}]
    answer = {"role": "assistant", "content": "HAVING"}
    serve(reader.read("k", body_of(CHAT, turns), CHAT), "a", answer)
    for number in range(count):
        unrelated = [*OTHERS[other], {"role": "user", "content": f"{number}"}]
        options = {"reasoning_effort": "low"}
        request = reader.read("k", body_of(CHAT, unrelated, **options), CHAT)
        serve(request, f"b{number}", {"content": "no"})
    changed = [{**RULES, "content": system}, turns[1], answer, GO]
    difference = reader.read("k", body_of(CHAT, changed), CHAT).evidence.explain(NOT_RECORDED)
    assert difference is not None
    assert call_record_pb2.DifferenceClass.Name(difference.kind) == f"DIFFERENCE_CLASS_{kind}"
    assert (difference.against_call_id, difference.atom_index) == ("a", 0)


@pytest.mark.requirement("OPS-4")
def test_of_equal_differences_that_of_the_same_api_and_options_is_named(
    reader: ForestReader,
) -> None:
    turns: list[object] = [RULES, {"role": "user", "content": "task"}]
    asked = {
        "same": (CHAT, {}),
        "other options": (CHAT, {"reasoning_effort": "low"}),
        "other api": (RESPONSES, {"reasoning": {"effort": "low"}}),
    }
    for name, (dialect, fields) in asked.items():
        first = [{**RULES, "content": f"rules of {name}"}, turns[1]]
        serve(reader.read("k", body_of(dialect, first, **fields), dialect), name, {"content": "x"})
    changed = [*turns, {"role": "assistant", "content": "x"}, GO]
    for name, (dialect, fields) in asked.items():
        request = reader.read("k", body_of(dialect, changed, **fields), dialect)
        difference = request.evidence.explain(NOT_RECORDED)
        assert difference is not None
        assert difference.against_call_id == name


@pytest.mark.requirement("OPS-4")
def test_the_end_of_a_conversation_that_a_request_left_is_found(reader: ForestReader) -> None:
    """Retries of the first turn came later; what was left is deeper, and spelt otherwise."""
    turns: list[object] = [RULES, GO]
    for number in range(3):
        request = reader.read("k", body_of(CHAT, turns), CHAT)
        serve(request, f"c{number}", {"content": f"answer {number}"})
        answer = {"role": "assistant", "content": f"answer {number}"}
        turns += [answer, {"role": "user", "content": f"result  {number}"}]
    for number in range(5):
        retry = reader.read("k", body_of(CHAT, turns[:2]), CHAT)
        serve(retry, f"r{number}", {"content": f"rejected {number}"})
    changed = [*turns[:5], {"role": "user", "content": "result 1"}, turns[6], GO]
    difference = reader.read("k", body_of(CHAT, changed), CHAT).evidence.explain(
        root(capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED, "c1")
    )
    assert difference is not None
    assert difference.kind == call_record_pb2.DIFFERENCE_CLASS_WHITESPACE
    assert (difference.atom_index, difference.against_call_id) == (5, "c2")


@pytest.mark.requirement("OPS-4")
@pytest.mark.parametrize("changes", [1, 5])
def test_an_answer_that_was_never_echoed_as_it_was_is_compared_too(
    reader: ForestReader, changes: int
) -> None:
    """Earlier changes of it went on, and are no better explanation of the next one."""
    serve(reader.read("k", body_of(CHAT, [RULES, GO]), CHAT), "a", {"content": "some  text"})
    for number in range(changes):
        other = {"role": "assistant", "content": f"text {number}"}
        request = reader.read("k", body_of(CHAT, [RULES, GO, other, GO]), CHAT)
        serve(request, f"b{number}", {"content": "no"})
    spaced = {"role": "assistant", "content": "some text"}
    request = reader.read("k", body_of(CHAT, [RULES, GO, spaced, GO]), CHAT)
    difference = request.evidence.explain(NOT_RECORDED)
    assert difference is not None
    assert difference.kind == call_record_pb2.DIFFERENCE_CLASS_WHITESPACE
    assert (difference.against_call_id, difference.atom_index) == ("a", 2)


@pytest.mark.requirement("OPS-4")
def test_the_changed_option_is_named(reader: ForestReader) -> None:
    tools = [{"type": "function", "function": {"name": "run"}}]
    serve(reader.read("k", body_of(CHAT, [GO], tools=tools), CHAT), "c1", {"content": "x"})
    turns = [GO, {"role": "assistant", "content": "x"}, GO]
    verdict = root(capture_admission_pb2.ROOT_REASON_RENDER_OPTIONS_CHANGED, "c1")
    for fields, kind, name in (
        ({}, "TOOL_SET", "tools"),
        ({"tools": tools, "reasoning_effort": "low"}, "TEMPLATE", "reasoning_effort"),
    ):
        request = reader.read("k", body_of(CHAT, turns, **fields), CHAT)
        difference = request.evidence.explain(verdict)
        assert difference is not None
        assert call_record_pb2.DifferenceClass.Name(difference.kind) == f"DIFFERENCE_CLASS_{kind}"
        assert (difference.detail, difference.atom_index) == (name, 2)


@pytest.mark.requirement("OPS-4")
def test_what_is_no_longer_kept_is_not_known() -> None:
    reader = ForestReader(Histories(0, 0))
    turns = [GO, {"role": "assistant", "content": "x"}, GO]
    request = reader.read("k", body_of(CHAT, turns), CHAT)
    options = root(capture_admission_pb2.ROOT_REASON_RENDER_OPTIONS_CHANGED, "c1")
    for verdict in (NOT_RECORDED, options):
        difference = request.evidence.explain(verdict)
        assert difference is not None
        assert difference.kind == call_record_pb2.DIFFERENCE_CLASS_NOT_KNOWN
