"""What the finalizer decides: the receipt of a rollout, the log record of a group. Pure.

Every doubt masks the rollout and says why; nothing is guessed (P7 verified or masked).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from callforest.capture.v1 import attempt_pb2, group_batch_pb2, receipt_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.custody.call import CallRecord, Receipt, StagedCall
from callforest_core.custody.digests import DigestInputError, digest_opening
from callforest_core.custody.extras import extras_digest
from callforest_core.custody.row import LinearizedRow
from callforest_core.custody.tokens import encode_floats, encode_ids
from callforest_core.custody.verification import VerificationError, verify_paths
from callforest_core.forest.layout import Contribution, RowPurpose, Segment, lay_out_group
from callforest_core.forest.sampling import sampling_fault
from callforest_core.lineage.items import Dialect, ItemsError, response_items
from callforest_core.lineage.terminal import Terminal, TerminalStage, attribute_terminal
from callforest_core.refusal import Refusal
from callforest_mesh.finalizer.receipts import receipt_digest

GROUP_BYTES_MAX = 60 << 20
"""Largest batch that is published; a larger one could never be delivered."""
_SEGMENT_OVERHEAD_BYTES = 8
"""Most bytes that a batch needs around one segment."""
_LENGTH = "length"
_ROW_KINDS = {
    RowPurpose.TRAINING: group_batch_pb2.ROW_KIND_TRAINING,
    RowPurpose.PLACEHOLDER: group_batch_pb2.ROW_KIND_PLACEHOLDER,
    RowPurpose.PADDING: group_batch_pb2.ROW_KIND_PADDING,
}


@dataclass(frozen=True, slots=True)
class Mask:
    """Why a rollout must not train."""

    reason: str
    detail: str = ""


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
        return Mask("pending_call", ", ".join(attempt.pending_call_ids[:8]))
    if evidence.failures:
        first = evidence.failures[0]
        return Mask("capture_poisoned", f"{first.call_id}: {first.reason} {first.detail}".strip())
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


def make_receipt(
    request: pb.FinalizeRolloutRequest,
    evidence: Evidence,
    terminal: Terminal | None,
    row: LinearizedRow | None,
    mask: Mask | None,
) -> receipt_pb2.Receipt:
    """Write the receipt of a rollout. Exactly one of `row` and `mask` is given."""
    attempt = evidence.attempt
    receipt = receipt_pb2.Receipt(
        group_id=request.group_id,
        rollout_id=request.rollout_id,
        slot=request.slot,
        reward=request.reward,
        masked=mask is not None,
    )
    if attempt is not None:
        receipt.capture_key = attempt.capture_key
        receipt.epoch = attempt.epoch
        receipt.revision = attempt.revision
    if mask is not None:
        receipt.mask_reason = mask.reason
        receipt.mask_detail = mask.detail[:1024]
    if evidence.failures:
        first = evidence.failures[0]
        receipt.mask_cause = "/".join(filter(None, (first.reason, first.worker_reason)))
    if terminal is not None:
        receipt.terminal_selection = terminal.stage.value
        receipt.terminal_trail = terminal.trail
        if terminal.call_id is not None:
            receipt.terminal_call_id = terminal.call_id
    selected = set(row.call_ids) if row is not None else set[str]()
    for record in evidence.records:
        chosen = record.call_id in selected
        receipt.calls.add(call_id=record.call_id, digest=record.digest, selected=chosen)
        receipt.truncated |= chosen and record.finish_reason == _LENGTH
    if row is not None:
        receipt.generated_token_count = sum(link.generation_len for link in row.links)
        receipt.total_token_count = len(row.token_ids)
    receipt.digest = receipt_digest(receipt)
    return receipt


def differing_field(
    stored: row_log_pb2.FinalizedRollout, request: pb.FinalizeRolloutRequest, sha256: bytes
) -> str | None:
    """Name the first field in which a repeat differs from what was finalized, or None."""
    receipt = stored.receipt
    pairs: dict[str, tuple[object, object]] = {
        "group_id": (receipt.group_id, request.group_id),
        "slot": (receipt.slot, request.slot),
        "capture_key": (receipt.capture_key, request.capture_key),
        "epoch": (receipt.epoch, request.epoch),
        "revision": (receipt.revision, request.revision),
        "reward": (receipt.reward, request.reward),
        "declared_response_id": (stored.declared_response_id, request.declared_response_id),
        "scored_response": (stored.scored_response_sha256, sha256),
    }
    return next((name for name, (old, new) in pairs.items() if old != new), None)


def log_group(
    group_id: str,
    rollouts: Sequence[row_log_pb2.FinalizedRollout],
    *,
    row_multiple: int,
    abandon_reason: str,
) -> row_log_pb2.LoggedGroup:
    """Lay a group out as a log record, its cursor still unset (FIN-2, FIN-4)."""
    logged = row_log_pb2.LoggedGroup(group_id=group_id, row_multiple=row_multiple)
    logged.rollout_ids.extend(one.receipt.rollout_id for one in rollouts)
    logged.heuristic_fraction = _heuristic_fraction(rollouts)
    if abandon_reason:
        return dropped(logged, abandon_reason)
    layout = lay_out_group(group_id, [_contribution(one) for one in rollouts], row_multiple)
    if not layout.rows:
        return dropped(logged, "no_valid_layout")
    for part in layout.segments:
        logged.segments.add(capture_key=part.capture_key, call_id=part.call_id, digest=part.digest)
    for row in layout.rows:
        stored = logged.rows.add(row_id=row.row_id, kind=_ROW_KINDS[row.purpose])
        if row.slot is not None:
            stored.slot = row.slot
        for span in row.spans:
            stored.spans.add(segment_index=span.segment, owns_loss=span.owns_loss)
    if _batch_bytes(logged, rollouts) > GROUP_BYTES_MAX:
        return dropped(logged, "group_too_large")
    return logged


def make_batch(
    logged: row_log_pb2.LoggedGroup,
    receipts: Sequence[receipt_pb2.Receipt],
    segments: Sequence[staged_call_pb2.StagedCall],
) -> group_batch_pb2.GroupBatch:
    """Put a delivered group together: the same bytes each time.

    The receipts of a dropped group that is too large even so lose their lists of calls: a position
    that cannot be delivered would stop the log for ever.
    """
    batch = group_batch_pb2.GroupBatch(
        cursor=logged.cursor,
        group_id=logged.group_id,
        receipts=receipts,
        segments=segments,
        rows=logged.rows,
        drop_reason=logged.drop_reason,
        row_multiple=logged.row_multiple,
        heuristic_fraction=logged.heuristic_fraction,
        traceparent=logged.traceparent,
    )
    if logged.drop_reason and batch.ByteSize() > GROUP_BYTES_MAX:
        for receipt in batch.receipts:
            receipt.ClearField("calls")
    return batch


def altered_call(
    logged: row_log_pb2.LoggedGroup, calls: Sequence[StagedCall]
) -> row_log_pb2.SegmentReference | None:
    """Name the first call that is no longer what was verified, or None (FOR-4).

    Args:
        logged: refers to the calls.
        calls: as they were read again, one a reference.
    """
    for reference, call in zip(logged.segments, calls, strict=True):
        identity = call.identity
        named = (identity.capture_key, identity.call_id, call.digest)
        if named != (reference.capture_key, reference.call_id, reference.digest):
            return reference
        encoded = encode_ids(call.token_ids)
        opening = digest_opening(identity.capture_key)
        try:
            digest = call.recompute_digest(opening, encoded, encode_floats(call.logprobs))
        except DigestInputError:
            return reference
        if digest != reference.digest or extras_digest(call.extras) != call.extras_digest:
            return reference
    return None


def dropped(logged: row_log_pb2.LoggedGroup, reason: str) -> row_log_pb2.LoggedGroup:
    """Turn a group into a dropped one at its position: nothing of it trains."""
    return row_log_pb2.LoggedGroup(
        cursor=logged.cursor,
        group_id=logged.group_id,
        rollout_ids=logged.rollout_ids,
        row_multiple=logged.row_multiple,
        drop_reason=reason,
        heuristic_fraction=logged.heuristic_fraction,
        traceparent=logged.traceparent,
    )


def attempts_before(rollout_id: str, attempt_number: int) -> list[str]:
    """Name the abandoned attempts of a rollout, whose staged calls are swept (FIN-1)."""
    return [rollout_id if n == 0 else f"{rollout_id}-a{n}" for n in range(attempt_number)]


def _contribution(rollout: row_log_pb2.FinalizedRollout) -> Contribution:
    receipt = rollout.receipt
    digests: Mapping[str, bytes] = {call.call_id: call.digest for call in receipt.calls}
    path = tuple(
        Segment(receipt.capture_key, call_id, digests[call_id]) for call_id in rollout.path_call_ids
    )
    return Contribution(receipt.slot, (path,) if path else ())


def _batch_bytes(
    logged: row_log_pb2.LoggedGroup, rollouts: Sequence[row_log_pb2.FinalizedRollout]
) -> int:
    """Bound the size of a group's batch."""
    receipts = make_batch(logged, [one.receipt for one in rollouts], ()).ByteSize()
    segments = sum(one.path_bytes for one in rollouts)
    return receipts + segments + _SEGMENT_OVERHEAD_BYTES * len(logged.segments)


def _heuristic_fraction(rollouts: Sequence[row_log_pb2.FinalizedRollout]) -> float:
    if not rollouts:
        return 0.0
    stage = TerminalStage.HEURISTIC.value
    return sum(one.receipt.terminal_selection == stage for one in rollouts) / len(rollouts)
