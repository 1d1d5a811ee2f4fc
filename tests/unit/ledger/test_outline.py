"""An outline says of an attempt what the whole view says, and takes no log that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest.capture.v1 import attempt_pb2
from callforest.ledger.v1 import ledger_event_pb2 as event_pb
from callforest_mesh.ledger import core
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import CHAIN, FOREST, AttemptOutline, LogError
from tests.unit.ledger.calls import (
    KEY,
    REQUEST_ID,
    TENANT,
    digest,
    failure,
    record,
    withdrawal,
)

pytestmark = pytest.mark.requirement("LED-2")

KINDS = ("intent", "record", "failure", "withdrawal", "closed", "sealed", "nothing")
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("abc")), max_size=10)


def event(kind: str, call_id: str, revision: int) -> event_pb.LedgerEvent:
    match kind:
        case "intent":
            intent = event_pb.IntentRecorded(call_id=call_id, body_digest=digest(call_id))
            intent.verdict.root.SetInParent()
            return event_pb.LedgerEvent(intent=intent)
        case "record":
            return event_pb.LedgerEvent(record=record(call_id))
        case "failure":
            return event_pb.LedgerEvent(failure=failure(call_id))
        case "withdrawal":
            return event_pb.LedgerEvent(withdrawal=withdrawal(call_id))
        case "closed":
            return event_pb.LedgerEvent(admissions_closed=event_pb.AdmissionsClosed())
        case "sealed":
            return event_pb.LedgerEvent(sealed=event_pb.AttemptSealed(revision=revision))
        case _:
            return event_pb.LedgerEvent()


def outcome(
    kind: type[AttemptOutline], log: list[event_pb.LedgerEvent]
) -> tuple[attempt_pb2.Attempt, object, bool, int] | str:
    """Fold a log; give what is said of the attempt, or why there is none."""
    try:
        view = kind.replay(log)
    except LogError as error:
        return str(error)
    assert view is not None
    return view.attempt(superseded=False), view.summary(), view.has_rows, view.call_count


@pytest.mark.parametrize("mode", [CHAIN, FOREST])
@given(chosen=EVENTS)
def test_outline_and_view_agree_on_any_events(
    mode: attempt_pb2.CaptureMode.ValueType, chosen: list[tuple[str, str]]
) -> None:
    log = [core.opened_event(TENANT, "r1", 0, REQUEST_ID, mode)]
    for number, (kind, call_id) in enumerate(chosen, 2):
        log.append(event(kind, call_id, number))
        outline, view = outcome(AttemptOutline, log), outcome(AttemptView, log)
        assert outline == view
        if isinstance(view, str):
            return


def test_every_kind_of_end_is_counted() -> None:
    kinds = [("intent", "a"), ("record", "a"), ("intent", "b"), ("failure", "b"), ("intent", "c")]
    kinds += [("withdrawal", "c"), ("intent", "c"), ("intent", "d")]
    log = [core.opened_event(TENANT, "r1", 0, REQUEST_ID)]
    log += [event(*one, 0) for one in kinds]
    outline = AttemptOutline.replay(log)
    assert outline is not None
    shown = outline.attempt(superseded=False)
    assert shown.capture_key == KEY
    assert (shown.record_count, shown.failure_count) == (1, 1)
    assert list(shown.pending_call_ids) == ["c", "d"]
    assert (outline.has_rows, outline.call_count, outline.summary().revision) == (True, 4, 9)
