"""What a log may say of restored calls, and what a record may not."""

from __future__ import annotations

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_event_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import LogError, UnknownLogError
from tests.unit.ledger.calls import KEY, SECOND, THIRD, record
from tests.unit.ledger.forest_calls import ForestAttempt, forest_record
from tests.unit.ledger.restored_calls import SECOND_KEY, chain_of_three, restored


@pytest.mark.requirement("ADM-9")
@pytest.mark.parametrize(
    "harm",
    [
        *("missing", "behind others", "too many", "twice", "of no earlier attempt"),
        *("of another attempt", "without its parent", "parent elsewhere"),
    ],
)
def test_restored_events_out_of_place_are_no_log(harm: str) -> None:
    second = restored(chain_of_three(), ["b"])
    log = [ledger_event_pb2.LedgerEvent.FromString(e.SerializeToString()) for e in second.log]
    closed = ledger_event_pb2.LedgerEvent(admissions_closed=ledger_event_pb2.AdmissionsClosed())
    if harm == "missing":
        del log[-1]
    elif harm == "behind others":
        log.insert(2, closed)
    elif harm == "too many":
        log[0].attempt_opened.restored_count = 1
    elif harm == "twice":
        log[2].CopyFrom(log[1])
    elif harm == "of no earlier attempt":
        log[1].restored.source_capture_key = SECOND_KEY
    elif harm == "of another attempt":
        log[1].restored.coords.capture_key = KEY
    elif harm == "without its parent":
        log[1], log[2] = log[2], log[1]
    else:
        log[2].restored.coords.parent_capture_key = ""
    with pytest.raises(LogError):
        AttemptView.replay(log)


@pytest.mark.requirement("ADM-9")
@pytest.mark.parametrize("field", ["source_capture_key", "parent_capture_key", "root"])
def test_a_record_that_says_what_only_restored_ones_say_is_refused(field: str) -> None:
    attempt = chain_of_three()
    attempt.admit("n", THIRD)
    made = record("n", THIRD, "N", parent=record("b", SECOND, parent=record("a")))
    if field == "source_capture_key":
        made.source_capture_key = "r0"
    elif field == "parent_capture_key":
        made.coords.parent_capture_key = SECOND_KEY
    else:
        made = record("n", THIRD, "N")
        made.coords.parent_capture_key = "r0"
    with pytest.raises(Refusal) as caught:
        commits.commit_record(attempt.view, made)
    assert caught.value.reason == er.ERROR_REASON_INVALID_MESSAGE


@pytest.mark.requirement("LED-10")
def test_a_record_that_keeps_replay_items_is_refused_before_it_is_kept() -> None:
    """It would make the whole log unreadable the next time that it is folded."""
    attempt = ForestAttempt()
    attempt.announce("a")
    early = forest_record("a")
    early.replay.MergeFromString(b"\xfa\x3e\x02{}")  # field 1007, as early ledgers had items
    with pytest.raises(Refusal) as caught:
        commits.commit_record(attempt.view, early)
    assert caught.value.reason == er.ERROR_REASON_INVALID_MESSAGE
    assert [field for field, _ in caught.value.violations] == ["record.replay"]
    assert attempt.view.pending_call_ids() == ["a"]
    attempt.log.append(ledger_event_pb2.LedgerEvent(record=early))
    with pytest.raises(UnknownLogError):
        attempt.replayed()
