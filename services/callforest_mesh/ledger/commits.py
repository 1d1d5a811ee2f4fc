"""What the ledger decides of rows: records, failures and withdrawals of announced calls.

Nothing here changes anything; see `core`. Sources: seed 2 "The ledger"; docs/protocol.md, sections
"Chain-mode lineage" and "Forest-mode lineage".
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
)
from callforest.ledger.v1 import ledger_event_pb2, ledger_service_pb2
from callforest_core.custody.attempts import may_own_parent
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import refusals
from callforest_mesh.ledger.admitted_call import AdmittedCall
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.core import Decision, failure_event, require
from callforest_mesh.ledger.outline import CHAIN, FOREST, SEALED, keeps_replay_items

INVALID_COORDINATES: Final = "invalid_worker_commit_coordinates"
"""Failure reason of a call whose coordinates do not fit its admission."""
FAILURES_MAX: Final = 8
"""Most failure rows of one call; it is poisoned with the first."""
PROOF_BYTES: Final = 32
ROOT_INPUT: Final = capture_admission_pb2.CAPTURE_INPUT_ROOT
SPLICED_INPUT: Final = capture_admission_pb2.CAPTURE_INPUT_SPLICED
_NOT_COMPARED: Final = ("traceparent", "difference", "intent_number")
"""What is for people alone, and what only the ledger tells."""


def commit_record(
    view: AttemptView | None, record: call_record_pb2.CallRecord
) -> Decision[ledger_service_pb2.CommittedEntry]:
    """Append the record of a staged call, with the place of its intent in the attempt.

    The first COORDINATES_MISMATCH is in the decision, because it leaves a failure row; a repeat
    gets it raised.

    Raises:
        Refusal: INVALID_MESSAGE, the record says what only a restored one says, or keeps replay
            items; ATTEMPT_NOT_FOUND; COORDINATES_MISMATCH; ATTEMPT_SEALED; CALL_NOT_ADMITTED;
            CALL_MISMATCH, the call has another record or a failure row, or was withdrawn or
            restored.
    """
    coords = record.coords
    _check_form(record)
    known = require(view, coords.capture_key)
    call = _writable(known, coords.call_id)
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
    if call.withdrawal is not None:
        raise refusals.call_mismatch(coords.capture_key, coords.call_id, "withdrawal")
    if call.failure_reasons:
        raise refusals.call_mismatch(coords.capture_key, coords.call_id, "failure")
    if mismatch is not None:
        failed = failure_event(
            coords.capture_key, coords.call_id, INVALID_COORDINATES, mismatch.message
        )
        return Decision(_committed(known, 1), (failed,), mismatch)
    appended = ledger_event_pb2.LedgerEvent()
    appended.record.CopyFrom(record)
    appended.record.intent_number = call.intent_number
    return Decision(_committed(known, 1), (appended,))


def commit_failure(
    view: AttemptView | None, failure: attempt_pb2.CallFailure
) -> Decision[ledger_service_pb2.CommittedEntry]:
    """Append a failure row; a committed record stands.

    In chain mode nothing is wrong with a committed call. In forest mode the row is kept beside
    the record: who selects what trains must know that the call's request went wrong (LED-9).

    Raises:
        Refusal: ATTEMPT_NOT_FOUND; ATTEMPT_SEALED; CALL_NOT_ADMITTED; CALL_MISMATCH, the call has
            FAILURES_MAX failure rows of other reasons, or was withdrawn or restored.
    """
    known = require(view, failure.capture_key)
    call = _writable(known, failure.call_id)
    kept = call is not None and call.record is not None
    if kept and known.mode == CHAIN:
        return Decision(_committed(known, kept_record=True))
    if call is not None and failure.reason in call.failure_reasons:
        return Decision(_committed(known, kept_record=kept))
    if known.state == SEALED:
        raise refusals.attempt_sealed(failure.capture_key, failure.call_id)
    if call is None:
        raise refusals.call_not_admitted(failure.capture_key, failure.call_id)
    if call.withdrawal is not None:
        raise refusals.call_mismatch(failure.capture_key, failure.call_id, "withdrawal")
    if len(call.failure_reasons) >= FAILURES_MAX:
        raise refusals.call_mismatch(failure.capture_key, failure.call_id, "reason")
    failed = ledger_event_pb2.LedgerEvent(failure=failure)
    return Decision(_committed(known, 1, kept_record=kept), (failed,))


def commit_withdrawal(
    view: AttemptView | None, withdrawal: attempt_pb2.CallWithdrawal
) -> Decision[ledger_service_pb2.CommittedEntry]:
    """Settle a pending call that was refused before anything was generated; it masks nothing.

    The same withdrawal again is a no-op, however it is explained.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND; ATTEMPT_SEALED; CALL_NOT_ADMITTED; CALL_MISMATCH, the call has
            a record or a failure row, was withdrawn for another reason, or restored.
    """
    capture_key, call_id = withdrawal.capture_key, withdrawal.call_id
    known = require(view, capture_key)
    call = _writable(known, call_id)
    before = None if call is None else call.read_withdrawal()
    if before is not None and before.reason == withdrawal.reason:
        return Decision(_committed(known))
    if known.state == SEALED:
        raise refusals.attempt_sealed(capture_key, call_id)
    if call is None:
        raise refusals.call_not_admitted(capture_key, call_id)
    if before is not None:
        raise refusals.call_mismatch(capture_key, call_id, "reason")
    if call.record is not None or call.failure_reasons:
        field = "failure" if call.record is None else "record"
        raise refusals.call_mismatch(capture_key, call_id, field)
    return Decision(_committed(known, 1), (ledger_event_pb2.LedgerEvent(withdrawal=withdrawal),))


def _check_form(record: call_record_pb2.CallRecord) -> None:
    """Refuse a record that could not be read back as what it is (LED-10, ADM-9)."""
    coords = record.coords
    if record.source_capture_key:
        raise refusals.record_malformed(
            "source_capture_key", "only the ledger restores calls; a record of a call has none"
        )
    if keeps_replay_items(record):
        raise refusals.record_malformed(
            "replay",
            "it holds more than the summary of capture schema 3, as early ledgers kept replay"
            " items; commit the call from a gateway of this release",
        )
    has_parent = coords.HasField("parent_call_id")
    if not may_own_parent(coords.parent_capture_key, coords.capture_key, has_parent=has_parent):
        raise refusals.record_malformed(
            "coords.parent_capture_key", "it must name an earlier attempt, of a parent"
        )


def _writable(view: AttemptView, call_id: str) -> AdmittedCall | None:
    """Give a call that takes rows, or None.

    Raises:
        Refusal: CALL_MISMATCH, the call was restored.
    """
    call = view.call(call_id)
    if call is not None and call.is_restored:
        raise refusals.restored_call(view.opened.capture_key, call_id)
    return call


def _coordinates_mismatch(
    view: AttemptView, call: AdmittedCall, record: call_record_pb2.CallRecord
) -> Refusal | None:
    """Hold coordinates against the root or the predecessor that was admitted, and its length.

    In forest mode the record must say what went into the engine: a splice with its proof, or a
    root. The worker may have made a root of a continuation, and says so with a reason (LED-13).
    """
    coords, verdict = record.coords, call.read_verdict()
    is_forest = view.mode == FOREST
    decision = record.decision
    is_fresh = is_forest and decision.input == ROOT_INPUT and bool(decision.reason)
    parent, owner, length = "", "", 0
    if verdict.WhichOneof("verdict") == "continuation" and not is_fresh:
        parent = verdict.continuation.parent_call_id
        owner = verdict.continuation.parent_capture_key
        length = verdict.continuation.prev_token_count
    fitting = SPLICED_INPUT if parent else ROOT_INPUT
    if coords.parent_call_id != parent:
        field, admitted, stated = "parent_call_id", parent, coords.parent_call_id
    elif coords.parent_capture_key != owner:
        field, stated = "parent_capture_key", coords.parent_capture_key
        admitted, stated = owner or coords.capture_key, stated or coords.capture_key
    elif coords.prev_token_count != length:
        field, admitted, stated = "prev_token_count", str(length), str(coords.prev_token_count)
    elif is_forest and decision.input != fitting:
        names = capture_admission_pb2.CaptureInput
        field = "decision.input" if record.HasField("decision") else "decision"
        admitted, stated = names.Name(fitting), str(decision.input) if decision.input else ""
    elif is_forest and parent and len(decision.proof) != PROOF_BYTES:
        field, admitted, stated = "decision.proof", "a splice with a proof", ""
    else:
        return None
    return refusals.coordinates_mismatch(
        coords.capture_key,
        coords.call_id,
        field,
        admitted=admitted or "no parent",
        stated=stated or "absent",
    )


def _is_same(known: call_record_pb2.CallRecord, sent: call_record_pb2.CallRecord) -> bool:
    """Compare two records; a repeat may come within another trace, or be explained otherwise."""
    return known == sent or _untold(known) == _untold(sent)


def _untold(record: call_record_pb2.CallRecord) -> call_record_pb2.CallRecord:
    """Give a record without what no repeat is held to."""
    told = call_record_pb2.CallRecord()
    told.CopyFrom(record)
    for name in _NOT_COMPARED:
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
