"""When a gateway pushes a call back since it could not be answered in time."""

import pytest

from callforest_mesh.gateway.pace import Pace
from callforest_mesh.gateway.refusals import HttpRefusal

ALLOWED_S = 2.0


def paced(rate: int, took_s: float, seconds: int = 3) -> Pace:
    """Give the pace of a gateway that has answered at a rate, each call in the same time."""
    pace = Pace(calls_max=1000)
    for second in range(seconds):
        for number in range(rate):
            pace.note(took_s, ALLOWED_S, second + number / rate, served=True)
    return pace


def test_a_call_that_its_queue_would_make_late_is_pushed_back_with_a_delay() -> None:
    pace = paced(rate=40, took_s=0.6)
    assert pace.delay_s(39, ALLOWED_S, 3.0) is None, "a second is half of its time"
    assert pace.delay_s(40, ALLOWED_S, 3.0) == 1.0
    assert pace.delay_s(199, ALLOWED_S, 3.0) == 4.0, "until the queue is short again"
    assert pace.delay_s(999_999, ALLOWED_S, 3.0) == 30.0
    assert pace.delay_s(199, 10.0, 3.0) is None, "a patient caller's call is taken"


def test_a_crowd_alone_is_no_queue() -> None:
    assert Pace(calls_max=1000).delay_s(999, ALLOWED_S, 0.0) is None
    assert paced(rate=40, took_s=0.5).delay_s(999, ALLOWED_S, 3.0) is None, "they are quick"


def test_what_was_long_ago_says_nothing() -> None:
    pace = paced(rate=40, took_s=0.6)
    assert pace.delay_s(999, ALLOWED_S, 3.9) is not None
    assert pace.delay_s(999, ALLOWED_S, 4.1) is None, "nobody was slow for a second"
    pace.note(1.0, ALLOWED_S, 20.0, served=False)
    assert pace.delay_s(999, ALLOWED_S, 20.5) is None, "no rate is known"


def test_callers_that_leave_tell_of_the_queue() -> None:
    pace = paced(rate=40, took_s=0.1)
    assert pace.delay_s(199, ALLOWED_S, 3.0) is None
    pace.note(2.0, ALLOWED_S, 3.0, served=False)
    assert pace.delay_s(199, ALLOWED_S, 3.0) == 4.0


def test_the_highest_rate_of_late_counts_and_the_present_second_not_yet() -> None:
    pace = paced(rate=40, took_s=0.6)
    pace.note(0.6, ALLOWED_S, 3.0, served=True)
    assert pace.delay_s(39, ALLOWED_S, 3.1) is None
    for number in range(80):
        pace.note(0.6, ALLOWED_S, 4.0 + number / 100, served=True)
    assert pace.delay_s(79, ALLOWED_S, 4.9) == 1.0
    assert pace.delay_s(79, ALLOWED_S, 5.0) is None


@pytest.mark.parametrize(
    ("in_work", "limit", "value", "retry_after_s"),
    [(1000, "calls_in_work", 1000, 1), (220, "answer_ms", 2000, 5)],
)
def test_a_refusal_says_which_bound_and_when_to_repeat(
    in_work: int, limit: str, value: int, retry_after_s: int
) -> None:
    with pytest.raises(HttpRefusal) as caught:
        paced(rate=40, took_s=0.6).require_place(in_work, ALLOWED_S, 3.0)
    refusal = caught.value
    assert (refusal.status, refusal.code) == (429, "overloaded")
    assert refusal.facts == {"limit": limit, "limit_value": value}
    assert refusal.retry_after_s == retry_after_s
