"""Verdicts, coordinates and the seal, as decisions over a view."""

from __future__ import annotations

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits, core
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import CLOSED, SEALED, LogError
from tests.unit.ledger.calls import (
    FIRST,
    KEY,
    SECOND,
    THIRD,
    Attempt,
    asking,
    failure,
    intent,
    length,
    record,
    said,
    user,
)


@pytest.fixture
def attempt() -> Attempt:
    return Attempt()


@pytest.fixture
def chain(attempt: Attempt) -> Attempt:
    """A root `a` that answered A."""
    attempt.admit("a")
    attempt.commit(record("a"))
    return attempt


@pytest.mark.requirement("ADM-1")
def test_a_continuation_names_its_parent_with_length_and_chain_hash(chain: Attempt) -> None:
    root = record("a")
    verdict = chain.admit("b", SECOND)
    assert verdict.continuation.parent_call_id == "a"
    assert verdict.continuation.prev_token_count == length(root) == 4
    assert verdict.continuation.parent_chain_hash == root.coords.chain_hash
    chain.commit(record("b", SECOND, "B", parent=root))
    deeper = chain.admit("c", THIRD).continuation
    assert (deeper.parent_call_id, deeper.prev_token_count) == ("b", 8)


@pytest.mark.requirement("ADM-1")
def test_a_seeded_history_is_a_root_until_the_first_row(attempt: Attempt) -> None:
    seeded = [user("x"), said("given"), user("y")]
    assert attempt.admit("a", seeded).HasField("root")
    assert attempt.admit("b", seeded).HasField("root"), "an intent is no row"
    attempt.fail(failure("a"))
    assert attempt.admit("c", seeded).HasField("uncaptured")
    assert attempt.admit("d", FIRST).HasField("root"), "a fresh context is a root at any time"


@pytest.mark.requirement("ADM-1", "LED-12")
def test_an_unresolved_call_leaves_its_failure_row_at_once(chain: Attempt) -> None:
    decision = core.record_intent(chain.view, intent("b", [*FIRST, said("edited"), user("two")]))
    assert decision.answer.uncaptured.reason == "unresolved_parent"
    assert [event.WhichOneof("event") for event in decision.events] == ["intent", "failure"]
    row = decision.events[1].failure
    assert (row.capture_key, row.call_id, row.reason) == (KEY, "b", "unresolved_parent")
    assert row.detail == decision.answer.uncaptured.detail == "no_match"
    chain.apply(decision)
    assert chain.view.failure_count == 1
    assert chain.view.pending_call_ids() == [], "a call with a failure row is not pending"
    with pytest.raises(Refusal) as caught:
        commits.commit_record(chain.view, record("b"))
    assert caught.value.reason == er.ERROR_REASON_CALL_MISMATCH


@pytest.mark.requirement("ADM-1")
def test_an_ambiguity_names_the_candidates_as_far_as_there_is_room(chain: Attempt) -> None:
    chain.admit("twin")
    chain.commit(record("twin"))
    assert chain.admit("b", SECOND).uncaptured.detail == "ambiguous: a, twin"
    for number in range(40):
        call_id = f"{number:03}".ljust(100, "x")
        chain.admit(call_id)
        chain.commit(record(call_id))
    detail = chain.admit("c", SECOND).uncaptured.detail
    assert len(detail) <= 1024
    assert detail.startswith("ambiguous: a, twin, 000x")
    assert detail.endswith(f" and {42 - detail.count(',') - 1} more")


@pytest.mark.requirement("LED-2")
def test_finding_a_predecessor_announces_nothing(chain: Attempt) -> None:
    before = chain.view.revision
    found = core.find_predecessor(chain.view, asking(SECOND))
    assert found == core.record_intent(chain.view, intent("b", SECOND)).answer
    assert chain.view.revision == before
    chain.close()
    assert core.find_predecessor(chain.view, asking(SECOND)).HasField("refused")


@pytest.mark.requirement("LED-1")
def test_a_record_without_fingerprints_has_no_children(attempt: Attempt) -> None:
    attempt.admit("a")
    bare = record("a")
    bare.ClearField("fingerprints")
    attempt.commit(bare)
    assert attempt.admit("b", SECOND).HasField("uncaptured")


def test_other_fingerprint_rules_never_match(attempt: Attempt) -> None:
    newer = asking([said("x")], version=3)
    assert core.judge(attempt.view, newer).HasField("root"), "no rows: seeded"
    attempt.admit("a")
    attempt.commit(record("a", version=3))
    assert core.judge(attempt.view, asking(SECOND)).HasField("uncaptured")
    assert core.judge(attempt.view, asking(SECOND, version=3)).HasField("uncaptured")
    assert core.judge(attempt.view, asking(FIRST, version=3)).HasField("root")


@pytest.mark.requirement("LED-13")
@pytest.mark.parametrize(
    "fault", ["parent for a root", "root for a child", "other parent", "length"]
)
def test_coordinates_that_leave_their_admission_are_refused_with_a_row(
    chain: Attempt, fault: str
) -> None:
    root = record("a")
    chain.admit("b", FIRST if fault == "parent for a root" else SECOND)
    wrong = record("b", SECOND, "B", parent=root)
    if fault == "root for a child":
        wrong = record("b", SECOND, "B")
    elif fault == "other parent":
        wrong.coords.parent_call_id = "b0"
    elif fault == "length":
        wrong.coords.prev_token_count = 5
    decision = commits.commit_record(chain.view, wrong)
    assert decision.refusal is not None
    assert decision.refusal.reason == er.ERROR_REASON_COORDINATES_MISMATCH
    field = "prev_token_count" if fault == "length" else "parent_call_id"
    assert decision.refusal.facts == {"capture_key": KEY, "call_id": "b", "field": field}
    [event] = decision.events
    assert event.failure.reason == "invalid_worker_commit_coordinates"
    chain.apply(decision)
    for seal in (False, True):  # a repeat is answered as at first, also behind the seal
        if seal:
            chain.seal()
        with pytest.raises(Refusal) as caught:
            commits.commit_record(chain.view, wrong)
        assert caught.value.reason == er.ERROR_REASON_COORDINATES_MISMATCH
    assert chain.view.record_count == 1


@pytest.mark.requirement("LED-13")
def test_right_coordinates_after_wrong_ones_do_not_clean_the_call(chain: Attempt) -> None:
    chain.admit("b", SECOND)
    chain.apply(commits.commit_record(chain.view, record("b", SECOND, "B")))
    with pytest.raises(Refusal) as caught:
        commits.commit_record(chain.view, record("b", SECOND, "B", parent=record("a")))
    assert caught.value.facts["field"] == "failure"


@pytest.mark.requirement("LED-5")
def test_only_a_committed_call_can_be_a_parent(attempt: Attempt) -> None:
    attempt.admit("a")
    other = record("o", [user("other")], "O")
    attempt.admit("o", [user("other")])
    attempt.commit(other)
    assert attempt.admit("early", SECOND).HasField("uncaptured")
    attempt.commit(record("a"))
    assert attempt.admit("late", SECOND).continuation.parent_call_id == "a"


@pytest.mark.requirement("LED-2")
def test_has_rows_counts_records_and_failures_but_no_intents(attempt: Attempt) -> None:
    attempt.admit("a")
    assert not attempt.view.chain.has_rows()
    attempt.fail(failure("a"))
    assert attempt.view.chain.has_rows()


def test_the_seal_fixes_revision_and_pending_calls(chain: Attempt) -> None:
    chain.admit("b")
    chain.admit("c")
    chain.fail(failure("c"))
    chain.close()
    revision = chain.view.revision
    [event] = core.seal(chain.view, KEY).events
    assert event.sealed.epoch == 1
    assert event.sealed.revision == revision + 1
    assert list(event.sealed.pending_call_ids) == ["b"]
    chain.seal()
    shown = chain.view.attempt(superseded=True)
    assert (shown.state, shown.revision, shown.epoch) == (SEALED, revision + 1, 1)
    assert list(shown.pending_call_ids) == ["b"]
    assert shown.superseded
    assert not core.seal(chain.view, KEY).events
    assert not core.close(chain.view, KEY).events


def test_closing_keeps_what_was_admitted(chain: Attempt) -> None:
    chain.admit("b", SECOND)
    chain.close()
    assert chain.view.state == CLOSED
    assert not core.close(chain.view, KEY).events
    chain.commit(record("b", SECOND, "B", parent=record("a")))
    assert chain.view.record_count == 2


def test_an_attempt_takes_so_many_calls_and_no_more(
    chain: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CALLS_MAX", 1)
    assert core.record_intent(chain.view, intent("b")).answer.HasField("refused")
    assert core.find_predecessor(chain.view, asking(SECOND)).HasField("refused")
    assert core.record_intent(chain.view, intent("a")).answer.HasField("root"), "a repeat"


def test_pending_calls_have_a_limit_that_ends(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "PENDING_MAX", 1)
    attempt.admit("a")
    with pytest.raises(Refusal) as caught:
        core.record_intent(attempt.view, intent("b"))
    assert caught.value.reason == er.ERROR_REASON_OVERLOADED
    assert caught.value.retry_after_ms
    attempt.commit(record("a"))
    assert core.record_intent(attempt.view, intent("b")).answer.HasField("root")


@pytest.mark.parametrize("harm", ["headless", "second opening", "after the seal", "unknown", "row"])
def test_events_that_are_no_log_are_refused(chain: Attempt, harm: str) -> None:
    log = list(chain.log)
    if harm == "headless":
        log = log[1:]
    elif harm == "second opening":
        log.append(log[0])
    elif harm == "after the seal":
        chain.seal()
        log = [*chain.log, log[1]]
    elif harm == "unknown":
        log.append(type(log[0])())
    else:
        log.append(log[-1])
    with pytest.raises(LogError):
        AttemptView.replay(log)


def test_no_events_are_no_attempt() -> None:
    assert AttemptView.replay([]) is None


def test_a_record_within_another_trace_is_the_same(chain: Attempt) -> None:
    traced = record("a")
    traced.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert commits.commit_record(chain.view, traced).events == (), "a repeat"
    other = record("a", answer="Z")
    other.traceparent = traced.traceparent
    with pytest.raises(Refusal) as refused:
        commits.commit_record(chain.view, other)
    assert refused.value.reason == er.ERROR_REASON_CALL_MISMATCH
    assert refused.value.facts["field"] != "traceparent"
