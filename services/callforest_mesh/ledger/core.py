"""What the ledger decides: from an attempt's view and a request to events and an answer.

Nothing here changes anything. A decision is applied by appending its events to the log and to the
view in one transaction; a Refusal that is raised appends nothing.

Sources: seed 2 "The ledger" and "Admission is a pure function"; capture contract 3.8, 4.4, 4.5;
docs/protocol.md, sections "Parties and life of a call" and "Chain-mode lineage".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, TypeVar

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.ledger.v1 import ledger_event_pb2, ledger_service_pb2
from callforest_client.capture_mode import mode_name
from callforest_core.custody.attempts import AttemptName
from callforest_core.lineage.forest_view import CANDIDATES_SHOWN
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import refusals
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import CHAIN, FOREST, OPEN, SEALED, AttemptOutline
from callforest_mesh.ledger.verdicts import UNRESOLVED_PARENT, judge

AnswerT = TypeVar("AnswerT")
ViewT = TypeVar("ViewT", bound=AttemptOutline)

CALLS_MAX: Final = 16_384
"""Most calls of one attempt."""
PENDING_MAX: Final = 4096
"""Most pending calls of one attempt: whatever lists their ids stays far below 1 MiB."""
FIRST_EPOCH: Final = 1


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
        capture_key=AttemptName(rollout_id, attempt_number).capture_key,
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

    A repeat gets the verdict of its call, and how far that is, whatever the attempt takes
    (CAP-13). A withdrawn call never was: it is announced anew.

    Raises:
        Refusal: CALL_MISMATCH, the call was announced with another body, or restored; OVERLOADED,
            too many calls of the attempt are pending; INVALID_MESSAGE, a call of forest mode
            without a configuration.
    """
    if view is None:
        return Decision(refusals.refused_call(refusals.attempt_not_found(intent.capture_key)))
    call = view.call(intent.call_id)
    if call is not None and call.is_restored:
        raise refusals.restored_call(intent.capture_key, intent.call_id)
    is_same = call is None or call.body_digest == intent.body_digest
    repeated = _repeated(view, intent) if is_same else None
    if repeated is not None:
        return Decision(repeated)
    if view.state != OPEN:
        return Decision(_closed(view))
    if not is_same:
        raise refusals.call_mismatch(intent.capture_key, intent.call_id, "body_digest")
    if view.intent_count >= CALLS_MAX:
        return Decision(_closed(view))
    if view.pending_count >= PENDING_MAX:
        raise refusals.pending_limit(PENDING_MAX)
    verdict = judge(view, intent)
    if verdict.WhichOneof("verdict") == "refused":
        return Decision(verdict)
    announced = _announced(view, intent, verdict)
    if verdict.WhichOneof("verdict") != "uncaptured":
        return Decision(verdict, (announced,))
    detail = verdict.uncaptured.detail
    failed = failure_event(intent.capture_key, intent.call_id, UNRESOLVED_PARENT, detail)
    return Decision(verdict, (announced, failed))


def _announced(
    view: AttemptView, intent: attempt_pb2.CallIntent, verdict: capture_admission_pb2.Verdict
) -> ledger_event_pb2.LedgerEvent:
    event = ledger_event_pb2.LedgerEvent()
    recorded = event.intent
    recorded.call_id = intent.call_id
    recorded.body_digest = intent.body_digest
    recorded.admit_time.CopyFrom(intent.admit_time)
    recorded.verdict.CopyFrom(verdict)
    recorded.is_keyed = intent.is_keyed
    if not view.configuration_digest:
        recorded.configuration_digest = intent.configuration_digest
    return event


def find_predecessor(
    view: AttemptView | None, request: ledger_service_pb2.FindPredecessorRequest
) -> capture_admission_pb2.Verdict:
    """Give the verdict that record_intent would give now.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND.
    """
    known = require(view, request.capture_key)
    is_taking = known.state == OPEN and known.intent_count < CALLS_MAX
    return judge(known, request) if is_taking else _closed(known)


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
        verdict=None if call.is_restored else call.read_verdict(),
        record=call.read_record(),
        failures=call.read_failures(),
        withdrawal=call.read_withdrawal(),
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


def require(view: ViewT | None, capture_key: str) -> ViewT:
    """Give the view of an attempt that must have been opened.

    Raises:
        Refusal: ATTEMPT_NOT_FOUND.
    """
    if view is None:
        raise refusals.attempt_not_found(capture_key)
    return view


def _repeated(
    view: AttemptView, intent: attempt_pb2.CallIntent
) -> capture_admission_pb2.Verdict | None:
    """Give the verdict of the call that an intent repeats; None when it is a new one.

    A key or a known id names the call. A marked repeat without a key is the one call that has
    its body, if there is one.
    """
    call_id, call = intent.call_id, view.call(intent.call_id)
    if call is None and intent.is_retry and not intent.is_keyed:
        alike = view.unkeyed_call_ids(intent.body_digest)
        if len(alike) > 1:
            shown = tuple(islice(alike, CANDIDATES_SHOWN))
            refusal = refusals.ambiguous_retry(intent.capture_key, shown, len(alike))
            return refusals.refused_call(refusal)
        for call_id in alike:
            call = view.call(call_id)
    if call is None or call.withdrawal is not None:
        return None
    verdict = call.read_verdict()
    verdict.earlier.CopyFrom(call.earlier(call_id))
    return verdict


def _closed(view: AttemptView) -> capture_admission_pb2.Verdict:
    state = attempt_pb2.AttemptState.Name(view.state).removeprefix("ATTEMPT_STATE_").lower()
    full = CALLS_MAX if view.state == OPEN else None
    return refusals.refused_call(
        refusals.attempt_closed(view.opened.capture_key, state=state, calls_max=full)
    )


def failure_event(
    capture_key: str, call_id: str, reason: str, detail: str
) -> ledger_event_pb2.LedgerEvent:
    """Make a failure row of the ledger's own."""
    failure = attempt_pb2.CallFailure(
        capture_key=capture_key,
        call_id=call_id,
        reason=reason,
        detail=detail[: refusals.DETAIL_MAX],
    )
    return ledger_event_pb2.LedgerEvent(failure=failure)
