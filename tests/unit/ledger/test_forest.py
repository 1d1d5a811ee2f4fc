"""Forest mode in the ledger: verdicts, refusals, worker-selected roots, rows beside a record."""

from __future__ import annotations

import pytest

from callforest.capture.v1 import call_record_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_event_pb2
from callforest_core.lineage.forest_view import CANDIDATES_SHOWN, ClaimFault
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits, core, refusals
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import AttemptKey, UnknownLogError
from callforest_mesh.ledger.views import AttemptViews
from tests.unit.ledger.calls import (
    FIRST,
    KEY,
    SECOND,
    TENANT,
    THIRD,
    Attempt,
    facts,
    failure,
    length,
    numbered,
    record,
    said,
    user,
)
from tests.unit.ledger.forest_calls import (
    ForestAttempt,
    decided,
    forest_asking,
    forest_intent,
    forest_record,
)
from tests.unit.ledger.test_views import MemoryLog

UNSTAGED = "request_finished_without_staged_coordinates"


@pytest.fixture
def attempt() -> ForestAttempt:
    """A root `a` that answered A."""
    attempt = ForestAttempt()
    attempt.announce("a")
    attempt.commit(forest_record("a"))
    return attempt


@pytest.mark.requirement("ADM-2", "ADM-8")
def test_a_continuation_names_its_parent_and_in_which_sense_it_matches(
    attempt: ForestAttempt,
) -> None:
    root = forest_record("a")
    verdict = attempt.announce("b", SECOND)
    assert verdict.continuation == capture_admission_pb2.Continuation(
        parent_call_id="a",
        prev_token_count=length(root),
        parent_chain_hash=root.coords.chain_hash,
        match=capture_admission_pb2.HISTORY_MATCH_EXACT,
    )
    attempt.commit(forest_record("b", SECOND, "B", parent=root))
    assert attempt.announce("c", THIRD).continuation.parent_call_id == "b"
    again = attempt.announce("d", [*FIRST, said("A"), user("other")])
    assert again.continuation.parent_call_id == "a", "an older call, after others"
    assert facts(attempt.replayed()) == facts(attempt.view)
    replayed = attempt.replayed()
    assert core.judge(replayed, forest_asking(THIRD)) == core.judge(
        attempt.view, forest_asking(THIRD)
    )


@pytest.mark.requirement("ADM-2", "ADM-3")
def test_a_history_that_is_not_known_is_a_root_and_poisons_nothing(attempt: ForestAttempt) -> None:
    verdict = attempt.announce("b", [*FIRST, said("A"), user("u"), said("edited"), user("two")])
    assert verdict.root == capture_admission_pb2.Root(
        reason=capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED,
        nearest_call_id="a",
        shared_atom_count=2,
    )
    attempt.commit(forest_record("b", [user("other")], "B"))
    assert attempt.view.failure_count == 0
    assert attempt.announce("c", FIRST).root.reason == (
        capture_admission_pb2.ROOT_REASON_NO_MODEL_ITEMS
    )


@pytest.mark.requirement("ADM-2")
def test_an_ambiguity_is_refused_before_anything_is_written(attempt: ForestAttempt) -> None:
    """Bug case B15: both candidates are named, and the attempt is as it was."""
    attempt.announce("twin")
    attempt.commit(forest_record("twin"))
    before = facts(attempt.view)
    decision = core.record_intent(attempt.view, forest_intent("b", SECOND))
    assert decision.events == ()
    refused = decision.answer.refused
    assert refused.reason == er.ERROR_REASON_AMBIGUOUS_HISTORY
    assert refused.message.endswith("Candidates: a, twin")
    assert facts(attempt.view) == before
    assert refused.metadata == {"capture_key": KEY, "call_id": "b", "candidates": "a,twin"}
    asked = core.find_predecessor(attempt.view, forest_asking(SECOND)).refused
    assert (asked.reason, asked.message) == (refused.reason, refused.message)
    assert asked.metadata == {"capture_key": KEY, "candidates": "a,twin"}, "no call, no name"
    echoed = [*FIRST, {**said("A"), "id": "msg_twin"}, user("two")]
    assert attempt.announce("b", echoed).continuation.parent_call_id == "twin"


@pytest.mark.requirement("ADM-2")
def test_an_ambiguity_of_many_still_fits_its_message(attempt: ForestAttempt) -> None:
    for number in range(80):
        call_id = f"{number:03}".ljust(100, "x")
        attempt.announce(call_id)
        attempt.commit(forest_record(call_id))
    message = attempt.announce("b", SECOND).refused.message
    assert len(message) <= 1024
    named, _, more = message.partition("Candidates: ")[2].rpartition(" and ")
    assert more == f"{81 - len(named.split(', '))} more"
    metadata = attempt.announce("b", SECOND).refused.metadata
    assert len(metadata["candidates"].split(",")) == CANDIDATES_SHOWN == 16


@pytest.mark.requirement("ADM-2")
def test_a_claim_that_does_not_hold_is_refused(attempt: ForestAttempt) -> None:
    assert attempt.announce("b", SECOND, claim="a").continuation.parent_call_id == "a"
    refused = attempt.announce("c", SECOND, claim="z").refused
    assert refused.reason == er.ERROR_REASON_HISTORY_CLAIM_REFUSED
    assert " z:" in refused.message
    assert refused.metadata == {
        "capture_key": KEY,
        "call_id": "c",
        "claimed_call_id": "z",
        "fault": "not_this_call",
    }
    for fault in ClaimFault:
        told = refusals.claim_refused(KEY, "c", claimed_call_id="z", fault=fault)
        assert told.facts["fault"] == fault
    assert attempt.view.call("c") is None


@pytest.mark.requirement("ADM-2")
def test_a_pending_or_failed_call_is_no_candidate() -> None:
    attempt = ForestAttempt()
    attempt.announce("a")
    assert attempt.announce("b", SECOND).HasField("root")
    attempt.fail(failure("a"))
    assert attempt.announce("c", SECOND).HasField("root")


def test_a_record_without_a_summary_is_never_continued() -> None:
    attempt = ForestAttempt()
    attempt.announce("a")
    bare = forest_record("a")
    bare.ClearField("replay")
    attempt.commit(bare)
    assert attempt.announce("b", SECOND).HasField("root")


@pytest.mark.requirement("ADM-2")
def test_an_item_that_cannot_be_read_makes_a_root_that_says_so(attempt: ForestAttempt) -> None:
    verdict = attempt.announce("b", [*SECOND, {"role": "user", "content": "\ud800"}])
    assert verdict.root.reason == capture_admission_pb2.ROOT_REASON_UNREADABLE_ITEM


@pytest.mark.requirement("LED-13")
def test_a_root_that_the_worker_selected_is_taken_with_its_reason(attempt: ForestAttempt) -> None:
    attempt.announce("b", SECOND)
    fresh = forest_record("b", SECOND, "B", fresh="boundary_not_found")
    attempt.commit(fresh)
    assert attempt.view.record_count == 2
    assert attempt.announce("c", THIRD).continuation.prev_token_count == length(fresh) == 4


@pytest.mark.requirement("LED-13")
@pytest.mark.parametrize(
    ("case", "field"),
    [
        ("no decision", "parent_call_id"),
        ("no decision beside a root", "decision"),
        ("no decision beside a continuation", "decision"),
        ("splice without proof", "decision.proof"),
        ("no reason", "parent_call_id"),
        ("spliced root", "parent_call_id"),
        ("root that continues", "parent_call_id"),
        ("other parent", "parent_call_id"),
        ("length", "prev_token_count"),
        ("spliced beside a root", "decision.input"),
        ("root beside a continuation", "decision.input"),
    ],
)
def test_other_coordinates_are_refused_with_a_row(
    attempt: ForestAttempt, case: str, field: str
) -> None:
    root = forest_record("a")
    admitted = FIRST if case.endswith("beside a root") else SECOND
    attempt.announce("b", admitted)
    parent = None if case in {"no decision", "no reason", "spliced root"} else root
    wrong = forest_record("b", SECOND, "B", parent=parent)
    if case == "no decision beside a root":
        wrong = forest_record("b")
        wrong.ClearField("decision")
    elif case == "splice without proof":
        wrong.decision.proof = b""
    elif case.startswith("no decision"):
        wrong.ClearField("decision")
    elif case == "spliced root":
        wrong.decision.CopyFrom(decided(spliced=True))
    elif case == "root that continues":
        wrong.decision.CopyFrom(decided(fresh="boundary_not_found"))
    elif case == "other parent":
        wrong.coords.parent_call_id = "b0"
    elif case == "length":
        wrong.coords.prev_token_count = 5
    elif case == "spliced beside a root":
        wrong = forest_record("b")
        wrong.decision.CopyFrom(decided(spliced=True))
    elif case == "root beside a continuation":
        wrong.decision.CopyFrom(decided())
    decision = commits.commit_record(attempt.view, wrong)
    assert decision.refusal is not None
    assert decision.refusal.reason == er.ERROR_REASON_COORDINATES_MISMATCH
    assert decision.refusal.facts["field"] == field
    [event] = decision.events
    assert event.failure.reason == "invalid_worker_commit_coordinates"


@pytest.mark.requirement("LED-13")
def test_chain_mode_takes_no_root_for_a_continuation() -> None:
    attempt = Attempt()
    attempt.admit("a")
    attempt.commit(record("a"))
    attempt.admit("b", SECOND)
    fresh = record("b", SECOND, "B")
    fresh.decision.CopyFrom(decided(fresh="boundary_not_found"))
    decision = commits.commit_record(attempt.view, fresh)
    assert decision.refusal is not None
    assert decision.refusal.facts["field"] == "parent_call_id"


@pytest.mark.requirement("LED-9")
def test_a_failure_beside_a_record_is_visible_and_unmakes_nothing(attempt: ForestAttempt) -> None:
    failed = failure("a", UNSTAGED)
    decision = commits.commit_failure(attempt.view, failed)
    assert decision.answer.kept_record
    assert decision.answer.revision == attempt.view.revision + 1
    attempt.apply(decision)
    again = commits.commit_failure(attempt.view, failed)
    assert (again.events, again.answer.kept_record) == ((), True)
    shown = attempt.view.attempt(superseded=False)
    assert (shown.record_count, shown.failure_count) == (1, 1)
    assert attempt.log[-1].failure == failed
    assert not commits.commit_record(attempt.view, forest_record("a")).events, "a repeat"
    assert attempt.announce("b", SECOND).continuation.parent_call_id == "a"
    found = core.get_call(attempt.view, KEY, "a")
    assert (found.record, list(found.failures)) == (numbered(forest_record("a"), 1), [failed])
    assert facts(attempt.replayed()) == facts(attempt.view)
    attempt.seal()
    assert commits.commit_failure(attempt.view, failed).answer.kept_record
    with pytest.raises(Refusal) as caught:
        commits.commit_failure(attempt.view, failure("a", "another"))
    assert caught.value.reason == er.ERROR_REASON_ATTEMPT_SEALED


@pytest.mark.requirement("LED-9")
def test_failures_beside_a_record_have_a_limit(attempt: ForestAttempt) -> None:
    for number in range(commits.FAILURES_MAX):
        attempt.fail(failure("a", f"reason_{number}"))
    with pytest.raises(Refusal) as caught:
        commits.commit_failure(attempt.view, failure("a", "one_more"))
    assert caught.value.reason == er.ERROR_REASON_CALL_MISMATCH


def test_a_record_that_is_explained_otherwise_is_the_same(attempt: ForestAttempt) -> None:
    told = forest_record("a")
    told.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    told.difference.CopyFrom(call_record_pb2.HistoryDifference(against_call_id="z", detail="tools"))
    assert commits.commit_record(attempt.view, told).events == ()
    told.output.atom_count = 7
    with pytest.raises(Refusal) as caught:
        commits.commit_record(attempt.view, told)
    assert caught.value.facts["field"] == "output.atom_count"


def test_all_of_a_call_is_shown(attempt: ForestAttempt) -> None:
    attempt.announce("b", SECOND)
    pending = core.get_call(attempt.view, KEY, "b")
    assert pending.verdict.continuation.parent_call_id == "a"
    assert not pending.HasField("record")
    attempt.fail(failure("b", detail="why"))
    assert list(core.get_call(attempt.view, KEY, "b").failures) == [failure("b", detail="why")]
    for view, call_id, reason in (
        (attempt.view, "z", er.ERROR_REASON_CALL_NOT_FOUND),
        (None, "a", er.ERROR_REASON_ATTEMPT_NOT_FOUND),
    ):
        with pytest.raises(Refusal) as caught:
            core.get_call(view, KEY, call_id)
        assert caught.value.reason == reason


@pytest.mark.requirement("ADM-7")
def test_what_is_stored_a_call_does_not_grow_with_the_calls_before_it() -> None:
    attempt = ForestAttempt()
    items: list[object] = []
    parent = None
    sizes: list[int] = []
    for number in range(200):
        items.append(user("u"))
        before = len(attempt.log)
        attempt.announce(f"c{number:03}", items)
        parent = forest_record(f"c{number:03}", items, "a", parent=parent)
        attempt.commit(parent)
        items.append(said("a"))
        sizes.append(sum(event.ByteSize() for event in attempt.log[before:]))
    assert max(sizes[100:]) - min(sizes[100:]) < 16, "but for the digits of its counts"


@pytest.mark.requirement("LED-10")
@pytest.mark.parametrize("harm", ["kind", "mode", "items"])
def test_a_log_of_another_release_is_refused_and_says_so(attempt: ForestAttempt, harm: str) -> None:
    events = [
        ledger_event_pb2.LedgerEvent.FromString(one.SerializeToString()) for one in attempt.log
    ]
    if harm == "kind":
        events.append(ledger_event_pb2.LedgerEvent.FromString(b"\xfa\x01\x02hi"))
    elif harm == "mode":
        events[0].attempt_opened.mode = 9  # type: ignore[assignment]  # another release's
    else:
        items = b"\xa2\x06\x05items"  # field 100 of the summary, as an early form kept them
        events[-1].record.replay.MergeFromString(items)
    with pytest.raises(UnknownLogError):
        AttemptView.replay(events)
    log, key = MemoryLog(), AttemptKey(TENANT, KEY)
    log.append(key, 0, events)
    with pytest.raises(Refusal) as caught:
        AttemptViews(AttemptView, 10).load(log, key)
    assert caught.value.reason == er.ERROR_REASON_STORE_CORRUPT
    assert "another release" in caught.value.message
    assert "migrates nothing" in caught.value.message
