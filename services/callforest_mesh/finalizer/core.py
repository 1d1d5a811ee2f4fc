"""What the finalizer decides: the receipt of a rollout, the log record of a group. Pure.

Every doubt masks the rollout and says why; nothing is guessed (P7 verified or masked).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from callforest.capture.v1 import attempt_pb2, receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.custody.call import CallRecord, Receipt, StagedCall
from callforest_core.custody.row import LinearizedRow
from callforest_core.custody.verification import VerificationError, verify_paths
from callforest_core.forest.receipts import receipt_digest
from callforest_core.forest.sampling import sampling_fault
from callforest_core.lineage.items import Dialect, ItemsError, response_items
from callforest_core.lineage.terminal import Terminal, attribute_terminal
from callforest_core.refusal import Refusal

ENVIRONMENT_MASKED = "environment_masked"
"""The mask reason of a verified rollout that its environment keeps from training."""
PENDING_CALL = "pending_call"
CAPTURE_POISONED = "capture_poisoned"
"""The mask reasons of an attempt that was not captured whole."""
_LENGTH = "length"
_NOTHING_SHA256 = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class Mask:
    """Why a rollout must not train."""

    reason: str
    detail: str = ""
    cause: str = ""
    """What stands in the receipt as its cause, instead of the first failure row's reason."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a rollout when it is finalized.

    Attributes:
        attempt: the sealed attempt; None when the rollout never opened one.
        records: the committed calls in manifest order.
        failures: the failure rows in manifest order.
    """

    attempt: attempt_pb2.Attempt | None
    records: tuple[CallRecord, ...]
    failures: tuple[attempt_pb2.CallFailure, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """Digests of what a request brings, by which a repeat is known; SHA-256, 32 bytes each."""

    scored_response_sha256: bytes
    result_sha256: bytes

    @classmethod
    def of(cls, request: pb.FinalizeRolloutRequest) -> Asked:
        """Digest a request's parts."""
        scored = hashlib.sha256(request.scored_response).digest()
        return cls(scored, hashlib.sha256(request.result).digest())


def check_attempt(request: pb.FinalizeRolloutRequest, attempt: attempt_pb2.Attempt) -> None:
    """Hold the attempt against what the request names.

    Raises:
        Refusal: it is not sealed, not the rollout's last, or another epoch or revision.
    """
    key = attempt.capture_key
    if attempt.rollout_id != request.rollout_id or attempt.superseded:
        raise Refusal(
            er.ERROR_REASON_GROUP_MISMATCH,
            f"{key} is not the last attempt of rollout {request.rollout_id}",
            group_id=request.group_id,
            rollout_id=request.rollout_id,
            field="capture_key",
        )
    if attempt.state != attempt_pb2.ATTEMPT_STATE_SEALED:
        raise Refusal(
            er.ERROR_REASON_ATTEMPT_NOT_SEALED,
            f"attempt {key} must be sealed before it is finalized",
            capture_key=key,
            state=attempt_pb2.AttemptState.Name(attempt.state),
        )
    named = (request.epoch, request.revision)
    sealed = (attempt.epoch, attempt.revision)
    if named != sealed:
        raise Refusal(
            er.ERROR_REASON_STALE_MANIFEST,
            f"attempt {key} was sealed at another epoch or revision; read the manifest again",
            capture_key=key,
            expected=f"{sealed[0]}.{sealed[1]}",
            actual=f"{named[0]}.{named[1]}",
        )


def mask_before_tokens(evidence: Evidence) -> Mask | None:
    """Give the reason to mask that the ledger alone shows (LED-7, LED-12).

    An attempt without any call has nothing to train; one whose only calls are pending or failed
    says which, for that is what its owner must look at.
    """
    attempt = evidence.attempt
    if attempt is None:
        return Mask("attempt_not_captured", "no attempt was opened")
    if attempt.pending_call_ids:
        return Mask(PENDING_CALL, ", ".join(attempt.pending_call_ids[:8]))
    if evidence.failures:
        first = evidence.failures[0]
        return Mask(CAPTURE_POISONED, f"{first.call_id}: {first.reason} {first.detail}".strip())
    if not evidence.records:
        return Mask("attempt_not_captured", "the attempt made no call")
    return None


def attribute(request: pb.FinalizeRolloutRequest, records: Sequence[CallRecord]) -> Terminal:
    """Say which call is scored (SEL-1). Evidence that is not JSON is no witness."""
    try:
        response: object = json.loads(request.scored_response or b"null")
    except (ValueError, RecursionError):
        response = None
    declared = request.declared_response_id if request.HasField("declared_response_id") else None
    return attribute_terminal(records, _in_responses_shape(response), declared)


def _in_responses_shape(response: object) -> object:
    """Give a Chat response's id and items as Responses would; its content testifies alike."""
    if not isinstance(response, dict) or "choices" not in response or "output" in response:
        return response
    try:
        items = response_items(response, Dialect.CHAT)
    except ItemsError:
        items = []
    return {"id": response.get("id"), "output": items}


def verify(
    capture_key: str,
    records: tuple[CallRecord, ...],
    terminal: Terminal,
    calls: Sequence[StagedCall],
) -> LinearizedRow | Mask:
    """Verify every staged call of the attempt and join the scored path (FOR-4).

    The chain hash of every call is checked, dead branches included, and the cumulative hash at the
    terminal. A call on the path that was sampled from another distribution than a learner scores
    masks its rollout here: once published, it could only stop the trainer.
    """
    receipt = Receipt(
        capture_key=capture_key,
        manifest=records,
        terminal_call_id=terminal.call_id,
        terminal_selection=terminal.stage.value,
    )
    try:
        (row,) = verify_paths(receipt, calls, [terminal.call_id or ""])
    except VerificationError as error:
        return Mask(error.code, str(error))
    extras = {call.identity.call_id: call.extras for call in calls}
    for call_id in row.call_ids:
        if fault := sampling_fault(extras[call_id]):
            return Mask("sampling_mismatch", f"{call_id}: {fault}")
    return row


def opened_receipt(
    request: pb.FinalizeRolloutRequest, evidence: Evidence, mask: Mask | None
) -> receipt_pb2.Receipt:
    """Begin the receipt of a rollout with what both modes say alike."""
    attempt = evidence.attempt
    receipt = receipt_pb2.Receipt(
        group_id=request.group_id,
        rollout_id=request.rollout_id,
        slot=request.slot,
        reward=request.reward,
        masked=mask is not None,
        environment_masked=request.environment_masked,
    )
    if attempt is not None:
        receipt.capture_key = attempt.capture_key
        receipt.epoch = attempt.epoch
        receipt.revision = attempt.revision
    if mask is not None:
        receipt.mask_reason = mask.reason
        receipt.mask_detail = mask.detail[:1024]
    if mask is not None and mask.cause:
        receipt.mask_cause = mask.cause
    elif evidence.failures:
        first = evidence.failures[0]
        receipt.mask_cause = "/".join(filter(None, (first.reason, first.worker_reason)))
    return receipt


def make_receipt(
    request: pb.FinalizeRolloutRequest,
    evidence: Evidence,
    terminal: Terminal | None,
    row: LinearizedRow | None,
    mask: Mask | None,
) -> receipt_pb2.Receipt:
    """Write the receipt of a rollout of chain mode.

    Without a row there is a mask. With both, the environment keeps a verified rollout from
    training, and what it generated still counts (FIN-9).
    """
    receipt = opened_receipt(request, evidence, mask)
    if terminal is not None:
        receipt.terminal_selection = terminal.stage.value
        receipt.terminal_trail = terminal.trail
        if terminal.call_id is not None:
            receipt.terminal_call_id = terminal.call_id
    selected = set(row.call_ids) if row is not None and mask is None else set[str]()
    for record in evidence.records:
        chosen = record.call_id in selected
        receipt.calls.add(
            call_id=record.call_id,
            digest=record.digest,
            selected=chosen,
            source_capture_key=record.source_capture_key,
        )
        receipt.truncated |= chosen and record.finish_reason == _LENGTH
    if row is not None:
        generations = [link.generation_len for link in row.links]
        receipt.generated_token_count = sum(generations)
        receipt.longest_generation_token_count = max(generations)
        receipt.total_token_count = len(row.token_ids)
    receipt.digest = receipt_digest(receipt)
    return receipt


def differing_field(
    stored: row_log_pb2.FinalizedRollout, request: pb.FinalizeRolloutRequest, asked: Asked
) -> str | None:
    """Name the first field in which a repeat differs from what was finalized, or None.

    What was stored before forest mode has no digest of a result: it had none.
    """
    receipt = stored.receipt
    pairs: dict[str, tuple[object, object]] = {
        "group_id": (receipt.group_id, request.group_id),
        "slot": (receipt.slot, request.slot),
        "capture_key": (receipt.capture_key, request.capture_key),
        "epoch": (receipt.epoch, request.epoch),
        "revision": (receipt.revision, request.revision),
        "reward": (receipt.reward, request.reward),
        "declared_response_id": (stored.declared_response_id, request.declared_response_id),
        "scored_response": (stored.scored_response_sha256, asked.scored_response_sha256),
        "result": (stored.result_sha256 or _NOTHING_SHA256, asked.result_sha256),
        "selection": (stored.selection, request.selection),
        "environment_masked": (receipt.environment_masked, request.environment_masked),
        "mask_refused_selection": (stored.mask_refused_selection, request.mask_refused_selection),
    }
    return next((name for name, (old, new) in pairs.items() if old != new), None)
