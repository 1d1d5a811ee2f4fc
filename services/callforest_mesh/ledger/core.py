"""What the ledger decides: from an attempt's view and a request to events and an answer.

Nothing here changes anything. A decision is applied by appending its events to the log and to the
view in one transaction; a Refusal that is raised appends nothing.

Sources: seed 2 "The ledger" and "Admission is a pure function"; capture contract 3.8, 4.4, 4.5;
docs/protocol.md, sections "Parties and life of a call" and "Chain-mode lineage".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from google.protobuf.message import Message

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
)
from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_event_pb2, ledger_service_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import refusals
from callforest_mesh.ledger.attempt import (
    CHAIN,
    FOREST,
    OPEN,
    SEALED,
    AdmittedCall,
    AttemptView,
)
from callforest_mesh.ledger.verdicts import DETAIL_MAX, UNRESOLVED_PARENT, judge, mode_name

AnswerT = TypeVar("AnswerT")

INVALID_COORDINATES: Final = "invalid_worker_commit_coordinates"
"""Failure reason of a call whose coordinates do not fit its admission."""
CALLS_MAX: Final = 16_384
"""Most calls of one attempt."""
PENDING_MAX: Final = 4096
"""Most pending calls of one attempt: whatever lists their ids stays far below 1 MiB."""
FAILURES_MAX: Final = 8
"""Most failure rows of one call; it is poisoned with the first."""
FIRST_EPOCH: Final = 1
ROOT_INPUT: Final = capture_admission_pb2.CAPTURE_INPUT_ROOT
SPLICED_INPUT: Final = capture_admission_pb2.CAPTURE_INPUT_SPLICED
_FOR_PEOPLE: Final = ("traceparent", "difference")


@dataclass(frozen=True, slots=True)
class Decision(Generic[AnswerT]):
    """What follows from a request.

    Attributes:
        answer: for the caller, once the events are durable.
        events: to append, in order.
        refusal: raised instead of answering, once the events are durable.
    """

    answer: AnswerT
    events: tuple[ledger_event_pb2.LedgerEvent, ...] = ()
    refusal: Refusal | None = None


def capture_key_of(rollout_id: str, attempt_number: int) -> str:
    """Name an attempt: the rollout's id, from the second on with its number behind it."""
    return rollout_id if attempt_number == 0 else f"{rollout_id}-a{attempt_number}"


def opened_event(
    tenant: str,
    rollout_id: str,
    attempt_number: int,
    request_id: str,
    mode: attempt_pb2.CaptureMode.ValueType = CHAIN,
) -> ledger_event_pb2.LedgerEvent:
    """Make the first event of an attempt's log."""
    opened = ledger_event_pb2.AttemptOpened(
        tenant=tenant,
        rollout_id=rollout_id,
        attempt_number=attempt_number,
        capture_key=capture_key_of(rollout_id, attempt_number),
        epoch=FIRST_EPOCH,
        request_id=request_id,
        # Chain mode is what a log without a mode is in.
        mode=FOREST if mode == FOREST else attempt_pb2.CAPTURE_MODE_UNSPECIFIED,
    )
    return ledger_event_pb2.LedgerEvent(attempt_opened=opened)


def record_intent(
    view: AttemptView | None, intent: attempt_pb2.CallIntent
) -> Decision[capture_admission_pb2.Verdict]:
    """Announce a call and decide what it continues. An unknown or closed attempt is a verdict.

    Raises:
        Refusal: CALL_MISMATCH, the call was announced with another body; OVERLOADED, too many
            calls of the attempt are pending.
    """
    if view is None:
        not_found = refusals.attempt_not_found(intent.capture_key)
        return Decision(refusals.refused_call(not_found.reason, not_found.message))
    call = view.call(intent.call_id)
    if call is not None and call.body_digest == intent.body_digest:
        return Decision(call.read_verdict())
    if view.state != OPEN:
        return Decision(_closed())
    if call is not None:
        raise refusals.call_mismatch(intent.capture_key, intent.call_id, "body_digest")
    if view.call_count >= CALLS_MAX:
        return Decision(_closed())
    if view.pending_count >= PENDING_MAX:
        raise refusals.pending_limit(PENDING_MAX)
    verdict = judge(view, intent)
    if verdict.WhichOneof("verdict") == "refused":
        return Decision(verdict)
    recorded = ledger_event_pb2.IntentRecorded(
        call_id=intent.call_id,
        body_digest=intent.body_digest,
        admit_time=intent.admit_time,
        verdict=verdict,
        configuration_digest=b"" if view.configuration_digest else intent.configuration_digest,
    )
    announced = ledger_event_pb2.LedgerEvent(intent=recorded)
    if verdict.WhichOneof("verdict") != "uncaptured":
        return Decision(verdict, (announced,))
    detail = verdict.uncaptured.detail
    failed = _failure(intent.capture_key, intent.call_id, UNRESOLVED_PARENT, detail)
    return Decision(verdict, (announced, failed))


def find_predecessor(
    view: AttemptView | None, request: ledger_service_pb2.FindPredecessorRequest
) -> capture_admission_pb2.Verdict:
    """Give the verdict that record_intent would give now.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND.
    """
    known = require(view, request.capture_key)
    is_taking = known.state == OPEN and known.call_count < CALLS_MAX
    return judge(known, request) if is_taking else _closed()


def get_call(
    view: AttemptView | None, capture_key: str, call_id: str
) -> ledger_service_pb2.GetCallResponse:
    """Give all that the log says of a call.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND; CALL_NOT_FOUND.
    """
    call = require(view, capture_key).call(call_id)
    if call is None:
        raise refusals.call_not_found(capture_key, call_id)
    return ledger_service_pb2.GetCallResponse(
        verdict=call.read_verdict(), record=call.read_record(), failures=call.read_failures()
    )


def hold_mode(
    opened: attempt_pb2.Attempt, mode: attempt_pb2.CaptureMode.ValueType
) -> attempt_pb2.Attempt:
    """Give the attempt that a repeated request opened, if it asks for the same mode.

    Raises:
        Refusal: MODE_MISMATCH.
    """
    if opened.mode != mode:
        raise refusals.mode_mismatch(
            opened.capture_key, opened=mode_name(opened.mode), asked=mode_name(mode)
        )
    return opened


def commit_record(
    view: AttemptView | None, record: call_record_pb2.CallRecord
) -> Decision[ledger_service_pb2.CommittedEntry]:
    """Append the record of a staged call.

    The first COORDINATES_MISMATCH is in the decision, because it leaves a failure row; a repeat
    gets it raised.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND; COORDINATES_MISMATCH; ATTEMPT_SEALED; CALL_NOT_ADMITTED;
            CALL_MISMATCH, the call has another record or a failure row.
    """
    coords = record.coords
    known = require(view, coords.capture_key)
    call = known.call(coords.call_id)
    committed = None if call is None else call.read_record()
    if committed is not None and _is_same(committed, record):
        return Decision(_committed(known))
    mismatch = None if call is None else _coordinates_mismatch(known, call, record)
    if call is not None and mismatch and INVALID_COORDINATES in call.failure_reasons:
        raise mismatch
    if known.state == SEALED:
        raise refusals.attempt_sealed(coords.capture_key, coords.call_id)
    if call is None:
        raise refusals.call_not_admitted(coords.capture_key, coords.call_id)
    if committed is not None:
        field = _first_difference(_untold(committed), _untold(record))
        raise refusals.call_mismatch(coords.capture_key, coords.call_id, field)
    if call.failure_reasons:
        raise refusals.call_mismatch(coords.capture_key, coords.call_id, "failure")
    if mismatch is not None:
        failed = _failure(coords.capture_key, coords.call_id, INVALID_COORDINATES, mismatch.message)
        return Decision(_committed(known, 1), (failed,), mismatch)
    return Decision(_committed(known, 1), (ledger_event_pb2.LedgerEvent(record=record),))


def commit_failure(
    view: AttemptView | None, failure: attempt_pb2.CallFailure
) -> Decision[ledger_service_pb2.CommittedEntry]:
    """Append a failure row; a committed record stands.

    In chain mode nothing is wrong with a committed call. In forest mode the row is kept beside
    the record: who selects what trains must know that the call's request went wrong (LED-9).

    Raises:
        Refusal: ATTEMPT_NOT_FOUND; ATTEMPT_SEALED; CALL_NOT_ADMITTED; CALL_MISMATCH, the call has
            FAILURES_MAX failure rows of other reasons.
    """
    known = require(view, failure.capture_key)
    call = known.call(failure.call_id)
    kept = call is not None and call.record is not None
    if kept and known.mode == CHAIN:
        return Decision(_committed(known, kept_record=True))
    if call is not None and failure.reason in call.failure_reasons:
        return Decision(_committed(known, kept_record=kept))
    if known.state == SEALED:
        raise refusals.attempt_sealed(failure.capture_key, failure.call_id)
    if call is None:
        raise refusals.call_not_admitted(failure.capture_key, failure.call_id)
    if len(call.failure_reasons) >= FAILURES_MAX:
        raise refusals.call_mismatch(failure.capture_key, failure.call_id, "reason")
    failed = ledger_event_pb2.LedgerEvent(failure=failure)
    return Decision(_committed(known, 1, kept_record=kept), (failed,))


def close(view: AttemptView | None, capture_key: str) -> Decision[None]:
    """End new calls of an attempt; again, or when it is sealed, is a no-op.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND.
    """
    if require(view, capture_key).state != OPEN:
        return Decision(None)
    closed = ledger_event_pb2.AdmissionsClosed()
    return Decision(None, (ledger_event_pb2.LedgerEvent(admissions_closed=closed),))


def seal(view: AttemptView | None, capture_key: str) -> Decision[None]:
    """Fix an attempt's epoch, revision and pending calls; again is a no-op.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND.
    """
    known = require(view, capture_key)
    if known.state == SEALED:
        return Decision(None)
    sealed = ledger_event_pb2.AttemptSealed(
        epoch=known.opened.epoch,
        revision=known.revision + 1,
        pending_call_ids=known.pending_call_ids(),
    )
    return Decision(None, (ledger_event_pb2.LedgerEvent(sealed=sealed),))


def require(view: AttemptView | None, capture_key: str) -> AttemptView:
    """Give the view of an attempt that must have been opened.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND.
    """
    if view is None:
        raise refusals.attempt_not_found(capture_key)
    return view


def _closed() -> capture_admission_pb2.Verdict:
    return refusals.refused_call(
        er.ERROR_REASON_ATTEMPT_CLOSED, "the attempt takes no new calls; open another attempt"
    )


def _coordinates_mismatch(
    view: AttemptView, call: AdmittedCall, record: call_record_pb2.CallRecord
) -> Refusal | None:
    """Hold coordinates against the root or the predecessor that was admitted, and its length.

    In forest mode the worker may have made a root of a continuation, and says so (LED-13).
    """
    coords, verdict = record.coords, call.read_verdict()
    decided = _decided_input(view, record)
    parent, length = "", 0
    is_fresh = decided == ROOT_INPUT and bool(record.decision.reason)
    if verdict.WhichOneof("verdict") == "continuation" and not is_fresh:
        parent = verdict.continuation.parent_call_id
        length = verdict.continuation.prev_token_count
    fitting = SPLICED_INPUT if parent else ROOT_INPUT
    if coords.parent_call_id != parent:
        field, admitted, stated = "parent_call_id", parent, coords.parent_call_id
    elif coords.prev_token_count != length:
        field, admitted, stated = "prev_token_count", str(length), str(coords.prev_token_count)
    elif decided not in {None, fitting}:
        field, admitted, stated = "decision.input", str(fitting), str(decided)
    else:
        return None
    return refusals.coordinates_mismatch(
        coords.capture_key,
        coords.call_id,
        field,
        admitted=admitted or "no parent",
        stated=stated or "absent",
    )


def _decided_input(
    view: AttemptView, record: call_record_pb2.CallRecord
) -> capture_admission_pb2.CaptureInput.ValueType | None:
    """Give what the worker says that it fed the engine; None in chain mode, and if it is silent."""
    if view.mode == CHAIN or not record.HasField("decision"):
        return None
    return record.decision.input


def _is_same(known: call_record_pb2.CallRecord, sent: call_record_pb2.CallRecord) -> bool:
    """Compare two records; a repeat may come within another trace, or be explained otherwise."""
    return known == sent or _untold(known) == _untold(sent)


def _untold(record: call_record_pb2.CallRecord) -> call_record_pb2.CallRecord:
    """Give a record without what is for people alone."""
    told = call_record_pb2.CallRecord()
    told.CopyFrom(record)
    for name in _FOR_PEOPLE:
        told.ClearField(name)
    return told


def _first_difference(known: Message, sent: Message) -> str:
    """Name the first field, by number, in which two records differ."""
    for field in known.DESCRIPTOR.fields:
        left, right = getattr(known, field.name), getattr(sent, field.name)
        if left != right:
            inner = isinstance(left, Message) and isinstance(right, Message)
            return f"{field.name}.{_first_difference(left, right)}" if inner else field.name
    return "presence"


def _committed(
    view: AttemptView, event_count: int = 0, *, kept_record: bool = False
) -> ledger_service_pb2.CommittedEntry:
    return ledger_service_pb2.CommittedEntry(
        revision=view.revision + event_count, kept_record=kept_record
    )


def _failure(
    capture_key: str, call_id: str, reason: str, detail: str
) -> ledger_event_pb2.LedgerEvent:
    failure = attempt_pb2.CallFailure(
        capture_key=capture_key, call_id=call_id, reason=reason, detail=detail[:DETAIL_MAX]
    )
    return ledger_event_pb2.LedgerEvent(failure=failure)
