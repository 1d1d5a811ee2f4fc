"""The same request is the same call: what a repeat learns, by its key or by its mark."""

from __future__ import annotations

import pytest

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import core
from callforest_mesh.ledger.attempt import AttemptView
from tests.unit.ledger.calls import (
    FIRST,
    KEY,
    SECOND,
    Attempt,
    Items,
    digest,
    facts,
    failure,
    first_told,
    intent,
    record,
    said,
    user,
    withdrawal,
)

PENDING = capture_admission_pb2.EARLIER_STATE_PENDING
COMMITTED = capture_admission_pb2.EARLIER_STATE_COMMITTED
FAILED = capture_admission_pb2.EARLIER_STATE_FAILED
LATER_S = 1_700_000_060


def asked(
    call_id: str,
    *,
    body: str = "body",
    items: Items = FIRST,
    keyed: bool = False,
    retry: bool = False,
) -> attempt_pb2.CallIntent:
    """Make an intent that comes a minute after those of `intent`."""
    made = intent(call_id, items, body=body)
    made.is_keyed, made.is_retry = keyed, retry
    made.admit_time.FromSeconds(LATER_S)
    return made


def announce(attempt: Attempt, made: attempt_pb2.CallIntent) -> capture_admission_pb2.Verdict:
    return attempt.apply(core.record_intent(attempt.view, made)).answer


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize("keyed", [True, False])
def test_a_repeat_of_a_call_learns_its_verdict_and_how_far_it_is(keyed: bool) -> None:
    attempt = Attempt()
    first = intent("c")
    first.is_keyed = keyed
    verdict = announce(attempt, first)
    assert not verdict.HasField("earlier")
    for state in (PENDING, COMMITTED):
        if state == COMMITTED:
            attempt.commit(record("c"))
        for view in (attempt.view, attempt.replayed()):
            decision = core.record_intent(view, asked("c", keyed=keyed))
            assert decision.events == ()
            assert first_told(decision.answer) == verdict
            assert decision.answer.earlier == capture_admission_pb2.EarlierCall(
                call_id="c", state=state, admit_time=first.admit_time
            )
    assert attempt.log[1].intent.is_keyed is keyed
    assert not attempt.log[1].intent.verdict.HasField("earlier"), "never stored"


@pytest.mark.requirement("CAP-13")
def test_a_failed_call_is_repeated_by_its_key() -> None:
    attempt = Attempt()
    announce(attempt, asked("c", keyed=True))
    attempt.fail(failure("c"))
    assert announce(attempt, asked("c", keyed=True)).earlier.state == FAILED
    lost = [user("x"), said("never"), user("y")]
    assert announce(attempt, asked("u", items=lost, keyed=True)).HasField("uncaptured")
    repeat = announce(attempt, asked("u", items=lost, keyed=True))
    assert repeat.HasField("uncaptured")
    assert (repeat.earlier.state, repeat.earlier.call_id) == (FAILED, "u")
    with pytest.raises(Refusal) as caught:
        announce(attempt, asked("c", body="other", keyed=True))
    assert caught.value.reason == er.ERROR_REASON_CALL_MISMATCH


@pytest.mark.requirement("CAP-13")
def test_a_marked_repeat_is_the_one_unkeyed_call_of_its_body() -> None:
    attempt = Attempt()
    announce(attempt, asked("keyed", keyed=True))
    first = announce(attempt, asked("r0", retry=True))
    assert not first.HasField("earlier"), "the first never came; a keyed call is not it"
    for state in (PENDING, COMMITTED):
        if state == COMMITTED:
            attempt.commit(record("r0"))
        for view in (attempt.view, attempt.replayed()):
            decision = core.record_intent(view, asked("r1", retry=True))
            assert decision.events == ()
            assert first_told(decision.answer) == first
            assert (decision.answer.earlier.call_id, decision.answer.earlier.state) == ("r0", state)
    assert attempt.view.call("r1") is None
    assert not announce(attempt, asked("other", body="other", retry=True)).HasField("earlier")


@pytest.mark.requirement("CAP-13")
def test_equal_requests_without_key_and_mark_are_two_calls() -> None:
    attempt = Attempt()
    for call_id in ("a", "b"):
        assert not announce(attempt, asked(call_id)).HasField("earlier")
    before = facts(attempt.view)
    refused = announce(attempt, asked("r", retry=True)).refused
    assert refused.reason == er.ERROR_REASON_AMBIGUOUS_RETRY
    assert refused.metadata == {"capture_key": KEY, "candidates": "a,b"}
    assert refused.message.endswith("Candidates: a, b")
    assert facts(attempt.view) == before
    assert announce(attempt, asked("a", retry=True)).earlier.call_id == "a", "its id names it"
    assert not announce(attempt, asked("k", keyed=True, retry=True)).HasField("earlier")


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize("how", ["failed", "withdrawn", "unresolved"])
def test_calls_that_failed_or_never_were_do_not_count(how: str) -> None:
    attempt = Attempt()
    items = [user("x"), said("never"), user("y")] if how == "unresolved" else FIRST
    announce(attempt, asked("row", body="another"))
    attempt.fail(failure("row"))
    announce(attempt, asked("a", items=items))
    if how == "failed":
        attempt.fail(failure("a"))
    elif how == "withdrawn":
        attempt.withdraw(withdrawal("a"))
    assert not announce(attempt, asked("b", items=FIRST, retry=True)).HasField("earlier")
    for view in (attempt.view, attempt.replayed()):
        assert list(view.unkeyed_call_ids(digest("body"))) == ["b"]
        repeat = core.record_intent(view, asked("c", retry=True)).answer
        assert repeat.earlier.call_id == "b"


@pytest.mark.requirement("CAP-13")
def test_many_candidates_are_cut_and_counted() -> None:
    attempt = Attempt()
    for number in range(20):
        announce(attempt, asked(f"c{number}"))
    refused = announce(attempt, asked("r", retry=True)).refused
    assert refused.metadata["candidates"] == ",".join(f"c{number}" for number in range(16))
    assert refused.message.endswith(" and 4 more")


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize("state", ["closed", "sealed"])
def test_a_closed_attempt_answers_repeats_and_refuses_new_calls(state: str) -> None:
    attempt = Attempt()
    announce(attempt, asked("a"))
    attempt.commit(record("a"))
    announce(attempt, asked("p", body="pending", keyed=True))
    attempt.close()
    if state == "sealed":
        attempt.seal()
    before = facts(attempt.view)
    assert announce(attempt, asked("r", retry=True)).earlier.state == COMMITTED
    assert announce(attempt, asked("p", body="pending", keyed=True)).earlier.state == PENDING
    for new in (asked("n"), asked("n", body="new", retry=True), asked("n", keyed=True)):
        refused = announce(attempt, new).refused
        assert refused.reason == er.ERROR_REASON_ATTEMPT_CLOSED
        assert refused.metadata == {"capture_key": KEY, "state": state}
    assert facts(attempt.view) == before


@pytest.mark.requirement("CAP-13", "LED-10")
def test_a_log_of_before_repeats_is_read_and_its_calls_have_no_key() -> None:
    attempt = Attempt()
    attempt.admit("a")
    attempt.commit(record("a"))
    attempt.admit("b", SECOND)
    # What an earlier release wrote of an intent: call, digest, time, verdict; nothing after them.
    assert {field.number for field, _ in attempt.log[1].intent.ListFields()} == {1, 2, 3, 4}
    stored = [type(one).FromString(one.SerializeToString()) for one in attempt.log]
    view = AttemptView.replay(stored)
    assert view is not None
    assert list(view.unkeyed_call_ids(digest("body"))) == ["a", "b"]
    assert core.record_intent(view, intent("a")).answer.earlier.state == COMMITTED


def test_an_unknown_attempt_is_a_verdict_with_its_name() -> None:
    refused = core.record_intent(None, intent("a")).answer.refused
    assert refused.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    assert refused.metadata == {"capture_key": KEY}
