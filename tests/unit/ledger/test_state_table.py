"""Every state of a call and of its attempt, against every request that can come."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import reason_name
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits, core
from callforest_mesh.ledger.attempt import AttemptView
from tests.unit.ledger.calls import (
    CAPTURE_FAILED,
    Attempt,
    facts,
    failure,
    first_told,
    intent,
    record,
    withdrawal,
)

ATTEMPT_STATES = ("OPEN", "CLOSED", "SEALED")
OTHER_REASON = "request_finished_without_staged_coordinates"

REQUESTS: dict[str, Callable[[AttemptView], core.Decision]] = {
    "intent same": lambda view: core.record_intent(view, intent("c")),
    "intent other": lambda view: core.record_intent(view, intent("c", body="other")),
    "record same": lambda view: commits.commit_record(view, record("c")),
    "record other": lambda view: commits.commit_record(view, record("c", answer="Z")),
    "failure same": lambda view: commits.commit_failure(
        view, failure("c", detail="told otherwise")
    ),
    "failure other": lambda view: commits.commit_failure(view, failure("c", OTHER_REASON)),
    "withdrawal same": lambda view: commits.commit_withdrawal(view, withdrawal("c", detail="x")),
    "withdrawal other": lambda view: commits.commit_withdrawal(view, withdrawal("c", "OTHER")),
}
# What comes of each: the number of events, or the refusal. `kept` is a record that stands, `shut`
# is a refused verdict.
TABLE: dict[str, dict[str, str]] = {
    "none": {
        "intent same": "1 shut shut",
        "intent other": "1 shut shut",
        "record same": "CALL_NOT_ADMITTED CALL_NOT_ADMITTED ATTEMPT_SEALED",
        "record other": "CALL_NOT_ADMITTED CALL_NOT_ADMITTED ATTEMPT_SEALED",
        "failure same": "CALL_NOT_ADMITTED CALL_NOT_ADMITTED ATTEMPT_SEALED",
        "failure other": "CALL_NOT_ADMITTED CALL_NOT_ADMITTED ATTEMPT_SEALED",
        "withdrawal same": "CALL_NOT_ADMITTED CALL_NOT_ADMITTED ATTEMPT_SEALED",
        "withdrawal other": "CALL_NOT_ADMITTED CALL_NOT_ADMITTED ATTEMPT_SEALED",
    },
    "pending": {
        "intent same": "0 0 0",
        "intent other": "CALL_MISMATCH shut shut",
        "record same": "1 1 ATTEMPT_SEALED",
        "record other": "1 1 ATTEMPT_SEALED",
        "failure same": "1 1 ATTEMPT_SEALED",
        "failure other": "1 1 ATTEMPT_SEALED",
        "withdrawal same": "1 1 ATTEMPT_SEALED",
        "withdrawal other": "1 1 ATTEMPT_SEALED",
    },
    "failed": {
        "intent same": "0 0 0",
        "intent other": "CALL_MISMATCH shut shut",
        "record same": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "record other": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "failure same": "0 0 0",
        "failure other": "1 1 ATTEMPT_SEALED",
        "withdrawal same": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "withdrawal other": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
    },
    "committed": {
        "intent same": "0 0 0",
        "intent other": "CALL_MISMATCH shut shut",
        "record same": "0 0 0",
        "record other": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "failure same": "kept kept kept",
        "failure other": "kept kept kept",
        "withdrawal same": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "withdrawal other": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
    },
    "withdrawn": {
        "intent same": "1 shut shut",
        "intent other": "CALL_MISMATCH shut shut",
        "record same": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "record other": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "failure same": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "failure other": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
        "withdrawal same": "0 0 0",
        "withdrawal other": "CALL_MISMATCH CALL_MISMATCH ATTEMPT_SEALED",
    },
}


class Case(NamedTuple):
    call: str
    request: str
    state: str
    expected: str


CASES = [
    Case(call, request, state, expected)
    for call, row in TABLE.items()
    for request, cell in row.items()
    for state, expected in zip(ATTEMPT_STATES, cell.split(), strict=True)
]


def _attempt(case: Case) -> Attempt:
    attempt = Attempt()
    if case.call != "none":
        assert attempt.admit("c").HasField("root")
    if case.call == "failed":
        attempt.fail(failure("c"))
    elif case.call == "withdrawn":
        attempt.withdraw(withdrawal("c"))
    elif case.call == "committed":
        attempt.commit(record("c"))
    if case.state != "OPEN":
        attempt.close()
    if case.state == "SEALED":
        attempt.seal()
    return attempt


def _outcome(decision: core.Decision) -> str:
    answer = decision.answer
    if getattr(answer, "kept_record", False):
        assert not decision.events
        return "kept"
    if hasattr(answer, "refused") and answer.HasField("refused"):
        assert answer.refused.reason == er.ERROR_REASON_ATTEMPT_CLOSED
        assert not decision.events
        return "shut"
    assert decision.refusal is None
    return str(len(decision.events))


def test_the_table_is_whole() -> None:
    assert set(TABLE) == {"none", "pending", "failed", "committed", "withdrawn"}
    assert all(set(row) == set(REQUESTS) for row in TABLE.values())
    assert len(CASES) == 5 * 8 * 3


@pytest.mark.requirement("LED-1")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.call}-{case.request}-{case.state}")
def test_first_rows_stand_and_repeats_change_nothing(case: Case) -> None:
    attempt = _attempt(case)
    before = facts(attempt.view)
    decision = None
    try:
        decision = REQUESTS[case.request](attempt.view)
        found = _outcome(decision)
    except Refusal as refusal:
        found = reason_name(refusal.reason)
    assert facts(attempt.view) == before, "deciding changes nothing"
    assert found == case.expected
    if decision is not None and decision.events:
        attempt.apply(decision)
        assert attempt.view.revision == before[1].revision + int(found)
        again = REQUESTS[case.request](attempt.view)
        assert not again.events
        if case.request.startswith("intent"):
            assert first_told(again.answer) == decision.answer
    assert facts(attempt.replayed()) == facts(attempt.view)


@pytest.mark.requirement("LED-1")
def test_a_repeat_is_answered_as_at_first() -> None:
    attempt = Attempt()
    first = attempt.admit("c")
    attempt.commit(record("c"))
    attempt.seal()
    assert first_told(core.record_intent(attempt.view, intent("c")).answer) == first
    again = commits.commit_record(attempt.view, record("c"))
    assert again.answer.revision == attempt.view.revision
    assert not again.answer.kept_record


@pytest.mark.requirement("LED-1")
def test_a_mismatch_names_the_field() -> None:
    attempt = Attempt()
    attempt.admit("c")
    committed = record("c")
    attempt.commit(committed)
    other = record("c")
    other.coords.digest = bytes(32)
    late = record("c")
    late.response_id = "chatcmpl-other"
    bare = record("c")
    bare.ClearField("fingerprints")
    for changed, field in (
        (other, "coords.digest"),
        (late, "response_id"),
        (bare, "fingerprints.version"),
    ):
        with pytest.raises(Refusal) as caught:
            commits.commit_record(attempt.view, changed)
        assert caught.value.facts["field"] == field


@pytest.mark.requirement("LED-11")
def test_a_failed_call_poisons_and_never_becomes_a_row() -> None:
    attempt = Attempt()
    attempt.admit("c")
    attempt.fail(failure("c"))
    shown = attempt.view.attempt(superseded=False)
    assert (shown.record_count, shown.failure_count, list(shown.pending_call_ids)) == (0, 1, [])
    with pytest.raises(Refusal) as caught:
        commits.commit_record(attempt.view, record("c"))
    assert caught.value.facts["field"] == "failure"


def test_failure_rows_of_one_call_have_a_limit() -> None:
    attempt = Attempt()
    attempt.admit("c")
    for number in range(commits.FAILURES_MAX):
        attempt.fail(failure("c", f"reason_{number}"))
    with pytest.raises(Refusal) as caught:
        commits.commit_failure(attempt.view, failure("c", "one_more"))
    assert caught.value.reason == er.ERROR_REASON_CALL_MISMATCH
    assert not commits.commit_failure(attempt.view, failure("c", "reason_0")).events


def test_an_attempt_that_was_never_opened() -> None:
    verdict = core.record_intent(None, intent("c")).answer
    assert verdict.refused.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    for ask in (
        lambda: commits.commit_record(None, record("c")),
        lambda: commits.commit_failure(None, failure("c", CAPTURE_FAILED)),
        lambda: core.close(None, "r1"),
        lambda: core.seal(None, "r1"),
    ):
        with pytest.raises(Refusal) as caught:
            ask()
        assert caught.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
        assert caught.value.facts == {"capture_key": "r1"}
