"""What the finalizer decides of a group: its log record, its batch, what drops it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from callforest.capture.v1 import group_batch_pb2, receipt_pb2, staged_call_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.frames import PAYLOAD_BYTES
from callforest_core.custody.call import StagedCall
from callforest_core.custody.digests import DigestInputError, digest_opening
from callforest_core.custody.extras import extras_digest
from callforest_core.custody.tokens import encode_floats, encode_ids
from callforest_core.forest.layout import Contribution, RowPurpose, Segment, lay_out_group
from callforest_core.lineage.terminal import TerminalStage
from callforest_mesh.finalizer.core import ENVIRONMENT_MASKED

WHOLE_BYTES_MAX: Final = 60 << 20
"""Largest batch that is delivered as one payload; a larger one comes in parts."""
REFERENCES_BYTES_MAX: Final = 1 << 30
"""Largest log record of a group; a message of protobuf ends at twice as much."""
CALL_BYTES_MAX: Final = PAYLOAD_BYTES - 64
"""Largest call that a part can hold. The fields of the schema alone have 48 MiB at most."""
TOO_LARGE: Final = "group_too_large"
"""Why a group was dropped that cannot be: see the two bounds above."""
BELOW_MIN_VALID_FRACTION = "below_min_valid_fraction"
"""Why a group was dropped of which too few rollouts were verified; another is wanted (FIN-5)."""
_SEGMENT_OVERHEAD_BYTES = 8
"""Most bytes that a batch needs around one segment."""
_LISTS: Final[tuple[Literal["calls", "selected_call_ids"], ...]] = ("calls", "selected_call_ids")
"""What the receipts of a dropped group may lose."""
_ROW_KINDS = {
    RowPurpose.TRAINING: group_batch_pb2.ROW_KIND_TRAINING,
    RowPurpose.PLACEHOLDER: group_batch_pb2.ROW_KIND_PLACEHOLDER,
    RowPurpose.PADDING: group_batch_pb2.ROW_KIND_PADDING,
}


def log_group(
    group_id: str,
    rollouts: Sequence[row_log_pb2.FinalizedRollout],
    *,
    row_multiple: int,
    abandon_reason: str,
    min_valid_fraction: float | None = None,
) -> row_log_pb2.LoggedGroup:
    """Lay a group out as a log record, its cursor still unset (FIN-2, FIN-4).

    Args:
        group_id: names the group.
        rollouts: what was finalized, in slot order.
        row_multiple: the number of rows becomes a multiple of it.
        abandon_reason: drops the group as it is; "" to publish it.
        min_valid_fraction: drops it when a smaller part of its rollouts was verified; each
            counts once, however many rows it has (FIN-5).
    """
    logged = row_log_pb2.LoggedGroup(group_id=group_id, row_multiple=row_multiple)
    logged.rollout_ids.extend(one.receipt.rollout_id for one in rollouts)
    logged.heuristic_fraction = _heuristic_fraction(rollouts)
    if abandon_reason:
        return dropped(logged, abandon_reason)
    if min_valid_fraction is not None and _valid_fraction(rollouts) < min_valid_fraction:
        logged.replacement_follows = True
        return dropped(logged, BELOW_MIN_VALID_FRACTION)
    layout = lay_out_group(group_id, [_contribution(one) for one in rollouts], row_multiple)
    if not layout.rows:
        return dropped(logged, "no_valid_layout")
    sizes = _call_sizes(rollouts)
    for part in layout.segments:
        logged.segments.add(
            capture_key=part.capture_key,
            call_id=part.call_id,
            digest=part.digest,
            size_bytes=sizes.get((part.capture_key, part.call_id), 0),
        )
    for row in layout.rows:
        stored = logged.rows.add(row_id=row.row_id, kind=_ROW_KINDS[row.purpose])
        if row.slot is not None:
            stored.slot = row.slot
        for span in row.spans:
            stored.spans.add(segment_index=span.segment, owns_loss=span.owns_loss)
    logged.size_bytes = _batch_bytes(logged, rollouts)
    return dropped(logged, TOO_LARGE) if _cannot_be(logged) else logged


def comes_in_parts(logged: row_log_pb2.LoggedGroup) -> bool:
    """Say whether a group is delivered in parts, since no payload holds it."""
    return logged.size_bytes > WHOLE_BYTES_MAX


def make_batch(
    logged: row_log_pb2.LoggedGroup,
    receipts: Sequence[receipt_pb2.Receipt],
    segments: Sequence[staged_call_pb2.StagedCall],
) -> group_batch_pb2.GroupBatch:
    """Put a delivered group together: the same bytes each time.

    A dropped group is one payload for every reader. Receipts that do not fit into it lose their
    lists of calls, and then of selected calls: a position that cannot be delivered would stop the
    log for ever.
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
        replacement_follows=logged.replacement_follows,
    )
    for field in _LISTS if logged.drop_reason else ():
        if batch.ByteSize() > WHOLE_BYTES_MAX:
            for receipt in batch.receipts:
                receipt.ClearField(field)
    return batch


def altered_call(
    references: Sequence[row_log_pb2.SegmentReference], calls: Sequence[StagedCall]
) -> row_log_pb2.SegmentReference | None:
    """Name the first call that is no longer what was verified, or None (FOR-4).

    Args:
        references: what a published group refers to.
        calls: as they were read again, one a reference.
    """
    for reference, call in zip(references, calls, strict=True):
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
        replacement_follows=logged.replacement_follows,
    )


def _contribution(rollout: row_log_pb2.FinalizedRollout) -> Contribution:
    receipt = rollout.receipt
    segments: Mapping[str, Segment] = {
        call.call_id: Segment(
            call.source_capture_key or receipt.capture_key, call.call_id, call.digest
        )
        for call in receipt.calls
    }
    paths = [path.call_ids for path in rollout.paths]
    if rollout.path_call_ids:
        paths.append(rollout.path_call_ids)
    return Contribution(
        receipt.slot,
        tuple(tuple(segments[call_id] for call_id in path) for path in paths),
    )


def _valid_fraction(rollouts: Sequence[row_log_pb2.FinalizedRollout]) -> float:
    """Give the part of logical rollouts that were verified.

    One that its environment masks was, if its generations were counted: whatever is verified has
    sampled something.
    """
    verified = [
        not one.receipt.masked
        or (one.receipt.mask_reason == ENVIRONMENT_MASKED and one.receipt.generated_token_count > 0)
        for one in rollouts
    ]
    return sum(verified) / len(verified) if verified else 0.0


def _call_sizes(
    rollouts: Sequence[row_log_pb2.FinalizedRollout],
) -> dict[tuple[str, str], int]:
    """Give the sizes of calls in a batch, as far as they were kept, by owner and call."""
    return {
        (call.source_capture_key or one.receipt.capture_key, call.call_id): size
        for one in rollouts
        for call, size in zip(one.receipt.calls, one.call_bytes, strict=False)
    }


def _cannot_be(logged: row_log_pb2.LoggedGroup) -> bool:
    """Say whether no record holds a group's references, or no payload one of its calls."""
    largest = max((reference.size_bytes for reference in logged.segments), default=0)
    return largest > CALL_BYTES_MAX or logged.ByteSize() > REFERENCES_BYTES_MAX


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
