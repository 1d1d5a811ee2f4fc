"""What the finalizer decides of a rollout of forest mode. Pure but for a custom policy's own code.

Contract: docs/protocol.md, sections "Selection" and "Finalization and rows". Contradictory evidence
is refused; what is only unfit for training masks the rollout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from callforest.capture.v1 import attempt_pb2, receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_core.custody.call import CallRecord, Receipt, StagedCall
from callforest_core.custody.verification import VerificationError
from callforest_core.forest.answers import CapturedAnswers
from callforest_core.forest.history import Passage, own_response, read_history, read_response
from callforest_core.forest.receipts import receipt_digest
from callforest_core.forest.reconstruction import Forest, reconstruct
from callforest_core.forest.returned import returned_calls
from callforest_core.forest.sampling import sampling_fault
from callforest_core.forest.scoring import ScoredCall, Witnesses, scored_call
from callforest_core.forest.selection import (
    ALL_CAPTURED,
    EXPLICIT,
    LENGTH,
    RETURNED_HISTORY,
    CallReason,
    Selection,
    SelectionFault,
    SelectionRefusedError,
    all_captured,
    check_terminal,
    checked_choice,
    in_intent_order,
    incomplete_call,
    open_call,
    without_failed,
)
from callforest_core.refusal import Refusal
from callforest_mesh.finalizer.core import (
    CAPTURE_POISONED,
    PENDING_CALL,
    Evidence,
    Mask,
    opened_receipt,
)
from callforest_mesh.finalizer.policies import Policy

SELECTION_NOT_CLOSED: Final = "selection_not_closed"
SELECTION_REFUSED: Final = "selection_refused"
"""The mask reason of a rollout whose owner would rather lose it than repair its evidence."""
_WITHOUT_COORDINATES: Final = "request_finished_without_staged_coordinates"
_NAMED_MOST: Final = 8
_DETAIL_MOST: Final = 1024


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection, and who named its scored call.

    Attributes:
        selection: the calls that train.
        scored: the scored call with the witnesses that named it.
    """

    selection: Selection
    scored: ScoredCall


def mask_before_selection(evidence: Evidence) -> Mask | None:
    """Give the reason to mask that the ledger alone shows, whatever is selected (LED-7, LED-9)."""
    attempt = evidence.attempt
    if attempt is None:
        return Mask("attempt_not_captured", "no attempt was opened")
    if attempt.pending_call_ids:
        return Mask(PENDING_CALL, ", ".join(attempt.pending_call_ids[:_NAMED_MOST]))
    recorded = {record.call_id for record in evidence.records}
    for failure in evidence.failures:
        if failure.reason != _WITHOUT_COORDINATES or failure.call_id not in recorded:
            return _poisoned(failure)
    if not evidence.records:
        return Mask("attempt_not_captured", "the attempt made no call")
    return None


def lost_calls(evidence: Evidence) -> frozenset[str]:
    """Name the calls of an attempt that have no record, and may have been answered all the same."""
    pending = [] if evidence.attempt is None else evidence.attempt.pending_call_ids
    failed = [failure.call_id for failure in evidence.failures]
    return frozenset([*failed, *pending]) - {record.call_id for record in evidence.records}


def salvage(
    request: pb.FinalizeRolloutRequest, evidence: Evidence, policy: Policy
) -> Choice | Mask:
    """Select what is verified of an incomplete attempt (FIN-8).

    What the policy selects stays but for calls that failed and all that continues them; the scored
    call must be among what stays.

    Returns:
        What trains, or what keeps it from training: evidence that cannot be taken is no error
        here, since the rollout is masked anyway.
    """
    try:
        choice = choose(request, evidence.records, policy, lost_calls(evidence))
        records = {record.call_id: record for record in evidence.records}
        failed = {failure.call_id for failure in evidence.failures}
        kept = without_failed(records, choice.selection, failed)
        if kept is None:
            return Mask(CAPTURE_POISONED, f"the scored call {choice.scored.call_id} failed")
        return mask_of_selection(evidence, kept) or Choice(kept, choice.scored)
    except SelectionRefusedError as error:
        return mask_of_refusal(error)


def choose(
    request: pb.FinalizeRolloutRequest,
    records: Sequence[CallRecord],
    policy: Policy,
    lost: frozenset[str] = frozenset(),
) -> Choice:
    """Select the calls that train, and the scored one.

    Args:
        request: what was asked.
        records: of the attempt.
        policy: what selects when the request does not.
        lost: calls without a record that may be named or shown all the same; they are left out.

    Raises:
        SelectionRefusedError: the evidence cannot be taken.
    """
    if request.HasField("selection"):
        asked = request.selection
        known = [record.call_id for record in records]
        named = checked_choice([*known, *lost], list(asked.call_ids))
        call_ids = tuple(call_id for call_id in named if call_id not in lost)
        scored = ScoredCall(asked.terminal_call_id, EXPLICIT, "")
        choice = _choice(call_ids, scored, EXPLICIT, CallReason.NOT_CHOSEN)
        _check_declared(request, records, scored)
    elif policy.name == RETURNED_HISTORY:
        choice = _returned(request, records, lost)
    elif policy.name == ALL_CAPTURED:
        given = _given(request)
        witnesses = _witnesses(request, given, own_response(given))
        scored = scored_call(records, witnesses, (), lost)
        call_ids = all_captured(records, scored.call_id)
        choice = _choice(call_ids, scored, ALL_CAPTURED, CallReason.LEAF_NOT_COMPLETED)
    else:
        result = _result(request)
        announced = in_intent_order(records)
        call_ids, terminal = policy.select(announced, {} if result is None else result)
        scored = ScoredCall(terminal, "policy", "")
        choice = _choice(call_ids, scored, policy.name, CallReason.NOT_CHOSEN)
        _check_declared(request, records, scored)
    check_terminal(choice.selection.call_ids, choice.scored.call_id)
    return choice


def mask_of_selection(evidence: Evidence, selection: Selection) -> Mask | None:
    """Give the reason to mask that the selection shows (SEL-5, SEL-8, LED-9).

    Raises:
        SelectionRefusedError: a selected record does not say how its generation ended.
    """
    records = {record.call_id: record for record in evidence.records}
    incomplete = incomplete_call(records, selection.call_ids)
    for failure in evidence.failures:
        if failure.call_id in selection.call_ids:
            return _poisoned(failure)
    if (unrooted := open_call(records, selection.call_ids)) is not None:
        parent = records[unrooted].parent_call_id
        return Mask(SELECTION_NOT_CLOSED, f"{unrooted} continues {parent}, which is not selected")
    if incomplete is not None:
        record = records[incomplete]
        return Mask(
            "selected_call_incomplete", f"{incomplete}: {record.status} {record.finish_reason}"
        )
    return None


def verify(
    capture_key: str,
    records: tuple[CallRecord, ...],
    choice: Choice,
    calls: Sequence[StagedCall],
) -> Forest | Mask:
    """Verify every staged call of the attempt and build the selected rows (FOR-4).

    The cumulative hash is checked at every endpoint, chain hashes along every path, digests of
    dead branches too.
    """
    receipt = Receipt(
        capture_key=capture_key,
        manifest=records,
        terminal_call_id=choice.scored.call_id,
        terminal_selection=choice.scored.stage,
    )
    try:
        forest = reconstruct(receipt, calls, choice.selection.call_ids)
    except VerificationError as error:
        return Mask(error.code, str(error))
    extras = {call.identity.call_id: call.extras for call in calls}
    for call_id in choice.selection.call_ids:
        if fault := sampling_fault(extras[call_id]):
            return Mask("sampling_mismatch", f"{call_id}: {fault}")
    return forest


def make_receipt(
    request: pb.FinalizeRolloutRequest,
    evidence: Evidence,
    choice: Choice | None,
    forest: Forest | None,
    mask: Mask | None,
    salvaged: Mask | None = None,
) -> receipt_pb2.Receipt:
    """Write the receipt of a rollout.

    Args:
        request: what was asked.
        evidence: what the ledger has.
        choice: None when it was masked before anything was selected.
        forest: None when nothing was verified. What was verified counts, masked or not (FIN-9).
        mask: why it must not train, or None.
        salvaged: why it would not, if its verified paths did not train all the same.
    """
    receipt = opened_receipt(request, evidence, mask)
    receipt.mode = attempt_pb2.CAPTURE_MODE_FOREST
    if salvaged is not None:
        receipt.salvaged_from = salvaged.reason
        receipt.mask_detail = salvaged.detail[:_DETAIL_MOST]
    selected: tuple[str, ...] = ()
    if choice is not None:
        selected = choice.selection.call_ids
        receipt.selection_policy = choice.selection.policy
        receipt.selected_call_ids.extend(selected)
        receipt.terminal_call_id = choice.scored.call_id
        receipt.terminal_selection = choice.scored.stage
        receipt.terminal_trail = choice.scored.trail
    trains = frozenset(selected if mask is None else ())
    reasons = _reasons(evidence, choice, masked=mask is not None)
    for record, reason in zip(evidence.records, reasons, strict=True):
        receipt.calls.add(
            call_id=record.call_id,
            digest=record.digest,
            selected=record.call_id in trains,
            reason=reason,
            parent_call_id=record.parent_call_id,
            source_capture_key=record.source_capture_key,
        )
    if forest is not None:
        chosen = frozenset(selected)
        receipt.truncated = any(
            record.finish_reason == LENGTH and record.call_id in chosen
            for record in evidence.records
        )
        receipt.generated_token_count = forest.metrics.gen_tokens_per_sample
        receipt.longest_generation_token_count = forest.metrics.max_gen_tokens_per_turn
        receipt.total_token_count = forest.metrics.total_tokens_per_sample
    receipt.digest = receipt_digest(receipt)
    return receipt


def mask_of_refusal(error: SelectionRefusedError) -> Mask:
    """Turn a fault of a selection into the mask that its owner asked for."""
    named = ", ".join(error.call_ids[:_NAMED_MOST])
    return Mask(SELECTION_REFUSED, f"{error} ({named})" if named else str(error), error.fault)


def refusal(rollout_id: str, error: SelectionRefusedError) -> Refusal:
    """Turn a fault of a selection into what its caller sees."""
    return Refusal(
        er.ERROR_REASON_SELECTION_REFUSED,
        f"the selection of rollout {rollout_id} cannot be taken: {error}",
        rollout_id=rollout_id,
        fault=error.fault,
        call_ids=",".join(error.call_ids[:_NAMED_MOST]),
    )


def _returned(
    request: pb.FinalizeRolloutRequest, records: Sequence[CallRecord], lost: frozenset[str]
) -> Choice:
    result = _result(request)
    history = read_history(result)
    returned = returned_calls(records, history, lost)
    witnesses = _witnesses(request, result, history.responses, returned.last_call_id)
    scored = scored_call(records, witnesses, returned.call_ids, lost)
    return _choice(returned.call_ids, scored, RETURNED_HISTORY, CallReason.NOT_RETURNED)


def _choice(
    call_ids: tuple[str, ...], scored: ScoredCall, policy: str, left_out: CallReason
) -> Choice:
    return Choice(Selection(call_ids, scored.call_id, policy, left_out), scored)


def _witnesses(
    request: pb.FinalizeRolloutRequest,
    result: object,
    responses: tuple[Passage, ...],
    last_call_id: str | None = None,
) -> Witnesses:
    """Gather who testifies of the scored call.

    The request's own witnesses stand before the result's: `scored_response` before its response,
    `declared_response_id` before its `terminal_response_id`.
    """
    returned = result if isinstance(result, dict) else {}
    declared = returned.get("terminal_response_id")
    if request.HasField("declared_response_id"):
        declared = request.declared_response_id
    own = returned.get("response")
    scored = _parsed(request.scored_response)
    if request.scored_response and scored != own:
        responses, last_call_id = read_response(scored), None
    return Witnesses(declared if isinstance(declared, str) else None, responses, last_call_id)


def _check_declared(
    request: pb.FinalizeRolloutRequest, records: Sequence[CallRecord], scored: ScoredCall
) -> None:
    """Refuse a declared id that contradicts whoever chose the scored call."""
    if not request.HasField("declared_response_id"):
        return
    declared = CapturedAnswers(records).called(request.declared_response_id)
    if scored.call_id not in declared:
        detail = f"declared is {request.declared_response_id!r}, chosen {scored.call_id}"
        raise SelectionRefusedError(SelectionFault.TERMINAL_AMBIGUOUS, detail, [scored.call_id])


def _result(request: pb.FinalizeRolloutRequest) -> object:
    """Parse the result; None when none was given.

    Raises:
        SelectionRefusedError: it is not JSON.
    """
    if not request.result:
        return None
    try:
        parsed: object = json.loads(request.result)
    except (ValueError, RecursionError) as error:
        detail = "the result is not JSON"
        raise SelectionRefusedError(SelectionFault.HISTORY_UNREADABLE, detail) from error
    return parsed


def _given(request: pb.FinalizeRolloutRequest) -> object:
    """Parse the result where it is a witness alone: one that is not JSON is none."""
    return _parsed(request.result)


def _parsed(given: bytes) -> object:
    try:
        parsed: object = json.loads(given or b"null")
    except (ValueError, RecursionError):
        return None
    return parsed


def _reasons(evidence: Evidence, choice: Choice | None, *, masked: bool) -> list[str]:
    call_ids = [record.call_id for record in evidence.records]
    if choice is None:
        return [CallReason.MASKED for _ in call_ids]
    return [*choice.selection.reasons_of(call_ids, masked=masked)]


def _poisoned(failure: attempt_pb2.CallFailure) -> Mask:
    named = f"{failure.call_id}: {failure.reason} {failure.detail}"
    return Mask(CAPTURE_POISONED, named.strip())
