"""Calls that were refused before anything was generated: settled, and as if they never were."""

from __future__ import annotations

import pytest

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_event_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits, core
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import LogError
from tests.unit.ledger.calls import (
    FIRST,
    KEY,
    SECOND,
    Attempt,
    facts,
    failure,
    intent,
    record,
    user,
    withdrawal,
)
from tests.unit.ledger.forest_calls import ENGINE, ForestAttempt, forest_intent, forest_record

ROOT = "root"


@pytest.mark.requirement("LED-1", "LED-2")
def test_a_withdrawal_settles_its_call_and_is_no_row() -> None:
    attempt = Attempt()
    attempt.admit("a")
    attempt.admit("w")
    attempt.withdraw(withdrawal("w", detail="too long"))
    shown = attempt.view.attempt(superseded=False)
    assert list(shown.pending_call_ids) == ["a"]
    assert (shown.record_count, shown.failure_count) == (0, 0)
    assert attempt.view.summary().pending_count == 1
    assert not attempt.view.chain.has_rows()
    found = core.get_call(attempt.view, KEY, "w")
    assert found.withdrawal == withdrawal("w", detail="too long")
    assert not found.failures
    assert not core.get_call(attempt.view, KEY, "a").HasField("withdrawal")
    seeded = [user("x"), {"role": "assistant", "content": "given"}, user("y")]
    assert attempt.admit("s", seeded).HasField(ROOT), "still the seeded attempt"
    assert facts(attempt.replayed()) == facts(attempt.view)
    attempt.close()
    attempt.seal()
    assert list(attempt.log[-1].sealed.pending_call_ids) == ["a", "s"]


@pytest.mark.requirement("LED-1")
@pytest.mark.parametrize("field", ["record", "failure"])
def test_what_has_a_row_is_not_withdrawn(field: str) -> None:
    attempt = Attempt()
    attempt.admit("a")
    if field == "record":
        attempt.commit(record("a"))
    else:
        attempt.fail(failure("a"))
    before = facts(attempt.view)
    with pytest.raises(Refusal) as caught:
        commits.commit_withdrawal(attempt.view, withdrawal("a"))
    assert caught.value.facts == {"capture_key": KEY, "call_id": "a", "field": field}
    assert facts(attempt.view) == before


@pytest.mark.requirement("LED-1")
def test_what_was_withdrawn_gets_no_row() -> None:
    attempt = ForestAttempt()
    attempt.announce("w")
    attempt.withdraw(withdrawal("w"))
    astray = forest_record("w")
    astray.coords.parent_call_id = "z"
    for asked in (
        lambda: commits.commit_record(attempt.view, forest_record("w")),
        lambda: commits.commit_record(attempt.view, astray),
        lambda: commits.commit_failure(attempt.view, failure("w")),
    ):
        with pytest.raises(Refusal) as caught:
            asked()
        assert caught.value.reason == er.ERROR_REASON_CALL_MISMATCH
        assert caught.value.facts["field"] == "withdrawal"
    with pytest.raises(Refusal) as caught:
        commits.commit_withdrawal(attempt.view, withdrawal("w", "CONFIGURATION_CHANGED"))
    assert caught.value.facts["field"] == "reason"
    assert attempt.announce("b", SECOND).HasField(ROOT), "no candidate"


@pytest.mark.requirement("LED-1", "CAP-13")
def test_a_withdrawn_call_is_announced_anew_by_the_same_request() -> None:
    attempt = ForestAttempt()
    attempt.announce("a")
    first = forest_intent("w", SECOND)
    assert attempt.apply(core.record_intent(attempt.view, first)).answer.HasField(ROOT)
    attempt.withdraw(withdrawal("w"))
    attempt.commit(forest_record("a"))
    again = forest_intent("w", SECOND)
    again.admit_time.FromSeconds(1_800_000_000)
    decision = attempt.apply(core.record_intent(attempt.view, again))
    assert not decision.answer.HasField("earlier"), "it never was"
    assert decision.answer.continuation.parent_call_id == "a", "judged as of now"
    assert attempt.view.pending_call_ids() == ["w"]
    assert not core.get_call(attempt.view, KEY, "w").HasField("withdrawal")
    repeat = core.record_intent(attempt.view, again).answer.earlier
    assert (repeat.state, repeat.admit_time) == (
        capture_admission_pb2.EARLIER_STATE_PENDING,
        again.admit_time,
    )
    assert facts(attempt.replayed()) == facts(attempt.view)
    attempt.withdraw(withdrawal("w", "CONFIGURATION_CHANGED"))
    with pytest.raises(Refusal) as caught:
        core.record_intent(attempt.view, forest_intent("w", SECOND, body="other"))
    assert caught.value.reason == er.ERROR_REASON_CALL_MISMATCH
    attempt.close()
    assert core.record_intent(attempt.view, again).answer.refused.metadata == {
        "capture_key": KEY,
        "state": "closed",
    }


def test_announcing_anew_has_the_limit_of_all_announcements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "CALLS_MAX", 3)
    attempt = Attempt()
    for _ in range(3):
        attempt.admit("w")
        attempt.withdraw(withdrawal("w"))
    assert attempt.view.call_count == 1
    refused = core.record_intent(attempt.view, intent("w")).answer.refused
    assert refused.reason == er.ERROR_REASON_ATTEMPT_CLOSED


@pytest.mark.requirement("CAP-11")
def test_a_withdrawn_call_leaves_the_attempt_bound() -> None:
    """The first intent bound it; a worker of another engine is the reason to withdraw."""
    attempt = ForestAttempt()
    attempt.announce("w")
    attempt.withdraw(withdrawal("w", "CONFIGURATION_CHANGED"))
    assert attempt.view.configuration_digest == attempt.replayed().configuration_digest == ENGINE


def test_a_log_with_a_withdrawal_out_of_place_is_refused() -> None:
    attempt = Attempt()
    attempt.admit("a")
    event = ledger_event_pb2.LedgerEvent(withdrawal=withdrawal("a"))
    for log in (
        [attempt.log[0], event],
        [*attempt.log, event, event],
        [*attempt.log, event, ledger_event_pb2.LedgerEvent(record=record("a", FIRST))],
        [*attempt.log, event, ledger_event_pb2.LedgerEvent(failure=failure("a"))],
    ):
        with pytest.raises(LogError):
            AttemptView.replay(log)
    unknown = attempt_pb2.CallWithdrawal(capture_key=KEY, call_id="z", reason="x")
    with pytest.raises(Refusal) as caught:
        commits.commit_withdrawal(attempt.view, unknown)
    assert caught.value.reason == er.ERROR_REASON_CALL_NOT_ADMITTED
