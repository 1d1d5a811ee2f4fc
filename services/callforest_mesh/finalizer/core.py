"""What the finalizer decides: the receipt of a rollout, the log record of a group. Pure.

Every doubt masks the rollout and says why; nothing is guessed (P7 verified or masked).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from callforest.capture.v1 import attempt_pb2, group_batch_pb2, receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.custody.call import CallRecord, Receipt, StagedCall
from callforest_core.custody.row import LinearizedRow
from callforest_core.custody.verification import VerificationError, verify_and_linearize
from callforest_core.forest.layout import Contribution, RowPurpose, Segment, lay_out_group
from callforest_core.lineage.terminal import Terminal, TerminalStage, attribute_terminal
from callforest_core.refusal import Refusal
from callforest_mesh.finalizer.receipts import receipt_digest

GROUP_BYTES_MAX = 60 << 20
"""Largest batch that is published; a larger one could never be delivered."""
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
    """Give the reason to mask that the ledger alone shows (LED-7, LED-12)."""
    attempt = evidence.attempt
    if attempt is None or not (evidence.records or evidence.failures):
        return Mask("attempt_not_captured")
    if attempt.pending_call_ids:
        return Mask("pending_call", ", ".join(attempt.pending_call_ids[:8]))
    if evidence.failures:
        first = evidence.failures[0]
        return Mask("capture_poisoned", f"{first.call_id}: {first.reason} {first.detail}".strip())
    return None


def attribute(request: pb.FinalizeRolloutRequest, records: Sequence[CallRecord]) -> Terminal:
    """Say which call is scored (SEL-1). Evidence that is not JSON is no witness."""
    try:
        response: object = json.loads(request.scored_response or b"null")
    except (ValueError, RecursionError):
        response = None
    declared = request.declared_response_id if request.HasField("declared_response_id") else None
    return attribute_terminal(records, response, declared)


def verify(
    capture_key: str,
    records: tuple[CallRecord, ...],
    terminal: Terminal,
    calls: Sequence[StagedCall],
) -> LinearizedRow | Mask:
    """Verify every staged call of the attempt and join the scored path (FOR-4)."""
    receipt = Receipt(
        capture_key=capture_key,
        manifest=records,
        terminal_call_id=terminal.call_id,
        terminal_selection=terminal.stage.value,
    )
    try:
        return verify_and_linearize(receipt, calls)
    except VerificationError as error:
        return Mask(error.code, str(error))


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
    size = sum(one.path_bytes for one in rollouts)
    if abandon_reason:
        logged.drop_reason = abandon_reason
        return logged
    if size > GROUP_BYTES_MAX:
        logged.drop_reason = "group_too_large"
        return logged
    contributions = [_contribution(one) for one in rollouts]
    layout = lay_out_group(group_id, contributions, row_multiple)
    if not layout.rows:
        logged.drop_reason = "no_valid_layout"
        return logged
    for part in layout.segments:
        logged.segments.add(capture_key=part.capture_key, call_id=part.call_id, digest=part.digest)
    for row in layout.rows:
        stored = logged.rows.add(row_id=row.row_id, kind=_ROW_KINDS[row.purpose])
        if row.slot is not None:
            stored.slot = row.slot
        for span in row.spans:
            stored.spans.add(segment_index=span.segment, owns_loss=span.owns_loss)
    return logged


def dropped(logged: row_log_pb2.LoggedGroup, reason: str) -> row_log_pb2.LoggedGroup:
    """Turn a published group that cannot be read any more into a dropped one at its position."""
    return row_log_pb2.LoggedGroup(
        cursor=logged.cursor,
        group_id=logged.group_id,
        rollout_ids=logged.rollout_ids,
        row_multiple=logged.row_multiple,
        drop_reason=reason,
        heuristic_fraction=logged.heuristic_fraction,
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


def _heuristic_fraction(rollouts: Sequence[row_log_pb2.FinalizedRollout]) -> float:
    if not rollouts:
        return 0.0
    stage = TerminalStage.HEURISTIC.value
    return sum(one.receipt.terminal_selection == stage for one in rollouts) / len(rollouts)
