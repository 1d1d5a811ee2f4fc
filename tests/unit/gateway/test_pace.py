"""When a gateway pushes a call back since it could not be answered in time."""

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest.error.v1 import error_reason_pb2 as er
from callforest_mesh.gateway.asked import NEW, Identity
from callforest_mesh.gateway.pace import _ANSWERS, Pace, _Answer, _Level
from callforest_mesh.gateway.refusals import HttpRefusal
from tests.unit.gateway.played_services import REQUEST, RESPONSE, Played, calls_of, refused
from tests.unit.gateway.repeated_calls import (
    COMMITTED,
    KEYED,
    MARKED,
    Held,
    ask,
    began,
    earlier,
    hang_up,
    kept,
    refusal_of,
)

ALLOWED_S = 2.0
LONG_S = 600.0
CROWD = 512


def note_all(
    pace: Pace, answers: Iterable[tuple[int, float]], allowed_s: float = ALLOWED_S, now: float = 0.0
) -> Pace:
    """Note calls, each by how many were in work before it and how long it took."""
    for ahead, took_s in answers:
        pace.note(ahead, took_s, allowed_s, now)
    return pace


def queued(most: int = 40, places: int = 8, took_s: float = 0.2) -> list[tuple[int, float]]:
    """Give the calls of an engine with few places to which more and more came."""
    waits = [(ahead, took_s * max(1.0, ahead / places)) for ahead in range(most + 1)]
    return [wait for wait in waits for _ in range(3)]


def pressed(**options: float) -> Pace:
    """Give the pace of a gateway whose engine makes 40 calls a second, as it has learnt."""
    return note_all(Pace(calls_max=1000), queued(), **options)


def refused_of(pace: Pace, in_work: Iterable[int], allowed_s: float, now: float = 1.0) -> list[int]:
    """Give the numbers in work to which a further call would be pushed back."""
    return [number for number in in_work if pace.delay_s(number, allowed_s, now) is not None]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_the_best_answer_is_of_those_that_count(rates: list[int]) -> None:
    answers = [_Answer(ahead, float(rate)) for ahead, rate in enumerate(rates)]
    level = _Level(answers[0], 0.0)
    for number, answer in enumerate(answers, 1):
        level.add(answer, float(number))
        counted = answers[max(0, number - _ANSWERS) : number]
        assert list(level.answers) == counted
        assert level.best is max(counted, key=lambda one: one.rate)
        assert level.used == number


@pytest.mark.requirement("API-6")
def test_a_call_that_its_queue_would_make_late_is_pushed_back_with_a_delay() -> None:
    pace = pressed()
    assert pace.delay_s(40, ALLOWED_S, 1.0) is None, "a second is half of its time"
    assert pace.delay_s(41, ALLOWED_S, 1.0) == 1.0
    assert pace.delay_s(200, ALLOWED_S, 1.0) == pytest.approx(4.0), "until the queue is short again"
    assert pace.delay_s(999_999, ALLOWED_S, 1.0) == 30.0
    assert pace.delay_s(200, 3.9, 1.0) is not None
    assert pace.delay_s(77, 3.9, 1.0) is None, "a patient caller's call is taken"


def test_callers_that_ask_one_after_the_other_are_taken() -> None:
    pace = Pace(calls_max=1000)
    for second in range(100):
        pace.note(0, 0.3, 1.0, float(second))
        assert pace.delay_s(0, 1.0, second + 0.5) is None
        assert pace.delay_s(0, 0.5, second + 0.5) is None, "it may take longer than half its time"


def test_two_callers_whose_calls_take_most_of_their_time_are_taken() -> None:
    """Nobody waits for another: two in work are answered as fast as one."""
    pace = note_all(Pace(calls_max=1000), [(number % 2, 0.8) for number in range(100)], 1.0)
    assert refused_of(pace, range(100), 1.0) == []


@pytest.mark.parametrize("alone", [0, 1, 20])
def test_the_long_calls_of_others_are_no_callers_queue(alone: int) -> None:
    """Sixty calls that take a minute are in work; a caller with five seconds needs two of them."""
    pace = Pace(calls_max=1000)
    for second in range(120):
        note_all(pace, [(60, 60.0)], LONG_S, second)
        note_all(pace, [(alone, 1.4), (60, 2.0)], 5.0, second)
    assert refused_of(pace, range(62), 5.0, 120.0) == []
    assert refused_of(pace, range(62), LONG_S, 120.0) == []


def test_the_first_call_of_a_caller_is_taken_whatever_others_wait() -> None:
    pace = note_all(pressed(), [(60, 60.0)] * 100, LONG_S)
    assert refused_of(pace, range(1000), 5.0) == []


@pytest.mark.parametrize("before", [[], [(number, 30.0) for number in range(CROWD)]])
@pytest.mark.parametrize("count", [10, 100])
def test_a_crowd_after_a_slow_tail_is_taken(before: list[tuple[int, float]], count: int) -> None:
    """Those of the tail were long by themselves; that few were in work shows no bound."""
    pace = note_all(Pace(calls_max=1024), before, LONG_S)
    for second in range(count):
        note_all(pace, [(10 - second % 10, 155.0 + second % 10)], LONG_S, second)
    assert refused_of(pace, range(CROWD), LONG_S, count) == []


def test_a_crowd_alone_is_no_queue() -> None:
    assert refused_of(Pace(calls_max=1000), range(1000), ALLOWED_S) == []
    quick = [(ahead, 0.2) for ahead in range(CROWD)]
    pace = note_all(Pace(calls_max=1000), quick)
    assert refused_of(pace, range(1000), ALLOWED_S) == [], "all were answered at once"


def test_long_calls_are_no_queue() -> None:
    """Each takes most of its time, however many there are."""
    pace = note_all(Pace(calls_max=1000), [(ahead, 1.6) for ahead in range(100)])
    assert refused_of(pace, range(1000), ALLOWED_S) == []


@pytest.mark.parametrize("took_s", [0.001, 0.3, 7.0])
def test_a_call_whose_time_is_less_than_any_call_takes_says_nothing(took_s: float) -> None:
    hasty = [(ahead, took_s) for ahead in range(100)] * 16
    pace = note_all(Pace(calls_max=1000), hasty, 0.001)
    assert refused_of(pace, range(1000), ALLOWED_S) == []
    assert refused_of(note_all(pressed(), hasty, 0.001), range(41), ALLOWED_S) == []


def test_late_answers_lower_what_is_taken() -> None:
    """An engine that has become slow makes calls late at numbers that were well in time before."""
    pace = note_all(pressed(), [(ahead, ahead / 10) for ahead in range(16, 41) for _ in range(16)])
    assert refused_of(pace, range(100), ALLOWED_S) == list(range(16, 100))


def test_where_calls_were_well_in_time_as_many_are_taken() -> None:
    """Whatever became of those that came to fewer, or of some that came to as many."""
    pace = note_all(pressed(), [(60, 1.9)] * 15 + [(60, 1.0)])
    assert refused_of(pace, range(100), ALLOWED_S) == list(range(61, 100))


@pytest.mark.parametrize(("count", "taken"), [(7, True), (8, False)])
def test_a_few_answers_are_no_evidence(count: int, taken: bool) -> None:
    pace = note_all(Pace(calls_max=1000), [(4, 0.2)] * 8 + [(30, 0.9)] * count)
    assert (pace.delay_s(60, ALLOWED_S, 1.0) is None) == taken


def test_what_was_long_ago_says_nothing() -> None:
    pace = pressed()
    assert pace.delay_s(50, ALLOWED_S, 60.0) is not None
    assert pressed().delay_s(50, ALLOWED_S, 60.1) is None
    # A caller that waits for ten minutes has evidence of as long.
    patient = note_all(Pace(calls_max=1000), queued(took_s=60.0), LONG_S)
    assert patient.delay_s(50, LONG_S, 600.0) is not None


def test_an_overload_that_lasts_is_not_forgotten() -> None:
    """Few are in work no more, so nothing new is learnt of how quick calls are then."""
    pace = pressed()
    for minute in range(60):
        note_all(pace, [(40, 1.0)] * 16, now=30.0 * minute)
        assert pace.delay_s(50, ALLOWED_S, 30.0 * minute) is not None


@pytest.mark.parametrize(
    ("in_work", "limit", "value", "retry_after_s"),
    [(1000, "calls_in_work", 1000, 1), (220, "answer_ms", 2000, 5)],
)
def test_a_refusal_says_which_bound_and_when_to_repeat(
    in_work: int, limit: str, value: int, retry_after_s: int
) -> None:
    with pytest.raises(HttpRefusal) as caught:
        pressed().require_place(in_work, ALLOWED_S, 1.0)
    refusal = caught.value
    assert (refusal.status, refusal.code) == (429, "overloaded")
    assert refusal.facts == {"limit": limit, "limit_value": value}
    assert refusal.retry_after_s == retry_after_s


@pytest.mark.requirement("CAP-7")
async def test_calls_that_could_not_be_staged_are_not_announced_until_the_delay_is_over() -> None:
    """Each would be two durable events of the ledger, and one of its attempt's calls."""
    full = refused(er.ERROR_REASON_STORE_FULL, retry_after_ms=60_000)
    played = Played(generated=full)
    calls = calls_of(played)
    for _ in range(3):
        assert (await refusal_of(calls.serve("k", REQUEST))).status == 503
    assert (len(played.intents), len(played.withdrawals)) == (1, 1)
    assert (await refusal_of(calls.serve("k", REQUEST, KEYED))).status == 503
    assert len(played.intents) == 2, "it may be a repeat, which needs no room"
    await calls.settle(5.0)


def test_a_full_store_is_tried_again_after_its_delay() -> None:
    pace = Pace(10)
    pace.hold(refused(er.ERROR_REASON_OVERLOADED, retry_after_ms=5000), 0.0)
    pace.require_place(0, ALLOWED_S, 1.0)
    pace.hold(refused(er.ERROR_REASON_STORE_FULL, retry_after_ms=5000), 0.0)
    with pytest.raises(HttpRefusal):
        pace.require_place(0, ALLOWED_S, 4.9)
    pace.require_place(0, ALLOWED_S, 5.0)


def test_what_may_be_kept_meets_only_the_most_calls_in_work() -> None:
    pressed().require_place(999, ALLOWED_S, 1.0, may_repeat=True)
    with pytest.raises(HttpRefusal, match="calls_in_work"):
        pressed().require_place(1000, ALLOWED_S, 1.0, may_repeat=True)


@pytest.mark.requirement("CAP-13")
async def test_a_repeat_by_key_of_a_committed_call_is_not_pushed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pace, "delay_s", lambda *_args: 1.0)
    played = Played(verdict=earlier(COMMITTED), kept={"c0": kept()})
    assert (await ask(played, KEYED)).body == RESPONSE
    for identity in (NEW, MARKED):
        assert (await refusal_of(ask(played, identity))).code == "overloaded"


@pytest.mark.parametrize(
    ("played", "identity", "noted"),
    [
        (Played(), NEW, [0]),
        (Played(), KEYED, [0]),
        (Played(verdict=earlier(COMMITTED), kept={"c0": kept()}), KEYED, []),
    ],
)
async def test_calls_are_learnt_from_that_the_engine_made(
    played: Played, identity: Identity, noted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[int] = []
    monkeypatch.setattr(Pace, "note", lambda _pace, ahead, *_times: learnt.append(ahead))
    await ask(played, identity)
    assert learnt == noted


async def test_a_call_that_was_abandoned_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt: list[int] = []
    monkeypatch.setattr(Pace, "note", lambda _pace, ahead, *_times: learnt.append(ahead))
    played, held = Played(), Held()
    played.generating = held
    calls = calls_of(played, repeat_grace_s=0.0)
    first = began(calls, NEW)
    await asyncio.wait_for(held.begun.wait(), 20)
    await hang_up(first)
    await calls.settle(5.0)
    assert learnt == []
