"""From published groups to the rows of one optimizer step.

Rows refer to segments; here they become whole sequences, with the loss where a row owns it, and
with the one advantage of their owner (FOR-5). What is not trained weighs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from callforest.capture.v1 import group_batch_pb2, receipt_pb2, staged_call_pb2
from callforest_core.custody.attempts import is_earlier_attempt
from callforest_core.forest.sampling import sampling_fault
from callforest_mesh.trainer.batch import TrainingRow
from callforest_mesh.trainer.core import (
    AdvantageOptions,
    GroupOutcome,
    MaskedRewardPolicy,
    RolloutOutcome,
    advantages_by_rollout,
)

_ID_BYTES = np.dtype("<u4")
_LOGPROB_BYTES = np.dtype("<f4")
_PADDING_OWNER = ""


class GroupDefectError(Exception):
    """A published group contradicts itself. Nothing of it may train; a person must look.

    Attributes:
        group_id: the group.
    """

    def __init__(self, group_id: str, detail: str) -> None:
        super().__init__(f"group {group_id}: {detail}")
        self.group_id = group_id


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one optimizer step trains on, and what to say of it.

    Attributes:
        rows: every row, the masked ones and padding with weight 0.
        cursor: the last group's position.
        rollout_count: logical rollouts, masked ones included.
        masked_count: masked rollouts.
        mask_reasons: masked rollouts by reason, with the first cause behind a colon.
        reward_mean: over the rollouts of trained groups that vote; 0.0 when none does.
        heuristic_fraction: rollouts whose scored call the heuristic chose.
        dropped_group_count: groups without a layout.
    """

    rows: tuple[TrainingRow, ...]
    cursor: int
    rollout_count: int
    masked_count: int
    mask_reasons: dict[str, int]
    reward_mean: float
    heuristic_fraction: float
    dropped_group_count: int


class SamplingMismatchError(Exception):
    """A call was not sampled from the distribution that the learner scores.

    Attributes:
        group_id: the group.
        call_id: the call.
    """

    def __init__(self, group_id: str, call_id: str, fault: str) -> None:
        super().__init__(
            f"group {group_id}: call {call_id} was sampled with other parameters than the learner"
            f" scores ({fault}); sample for training at temperature 1, untruncated"
        )
        self.group_id = group_id
        self.call_id = call_id


def gather_step(
    batches: Sequence[group_batch_pb2.GroupBatch], options: AdvantageOptions
) -> StepInput:
    """Make the rows of one step from its groups, dropped ones included.

    Raises:
        GroupDefectError: a group contradicts itself.
        SamplingMismatchError: a call that trains was sampled from another distribution.
        AdvantageRefusedError: a group cannot be scored.
    """
    trained = [batch for batch in batches if not batch.drop_reason]
    advantages = advantages_by_rollout([_outcome(batch, options) for batch in trained], options)
    rows = [row for batch in trained for row in _rows(batch, advantages, options)]
    receipts = [receipt for batch in batches for receipt in batch.receipts]
    masked = [receipt for receipt in receipts if receipt.masked]
    masked_vote = options.masked_reward_policy is MaskedRewardPolicy.INCLUDE
    voters = [
        receipt.reward
        for batch in trained
        for receipt in batch.receipts
        if masked_vote or _trains(receipt, options)
    ]
    heuristic = sum(batch.heuristic_fraction * len(batch.receipts) for batch in batches)
    return StepInput(
        rows=tuple(rows),
        cursor=batches[-1].cursor,
        rollout_count=len(receipts),
        masked_count=len(masked),
        mask_reasons=dict(Counter(_reason(receipt) for receipt in masked)),
        reward_mean=float(np.mean(voters)) if voters else 0.0,
        heuristic_fraction=heuristic / len(receipts) if receipts else 0.0,
        dropped_group_count=len(batches) - len(trained),
    )


def _reason(receipt: receipt_pb2.Receipt) -> str:
    if receipt.mask_cause:
        return f"{receipt.mask_reason}:{receipt.mask_cause}"
    return receipt.mask_reason


def _trains(receipt: receipt_pb2.Receipt, options: AdvantageOptions) -> bool:
    """Say whether a rollout has loss: all its rows or none (FOR-6)."""
    return not receipt.masked and not (options.overlong_filtering and receipt.truncated)


def _outcome(batch: group_batch_pb2.GroupBatch, options: AdvantageOptions) -> GroupOutcome:
    slots = [receipt.slot for receipt in batch.receipts]
    if slots != list(range(len(slots))):
        raise GroupDefectError(batch.group_id, f"its slots are {slots}")
    return GroupOutcome(
        batch.group_id,
        len(slots),
        tuple(
            RolloutOutcome(receipt.rollout_id, receipt.reward, valid=_trains(receipt, options))
            for receipt in batch.receipts
        ),
    )


def _rows(
    batch: group_batch_pb2.GroupBatch, advantages: dict[str, float], options: AdvantageOptions
) -> list[TrainingRow]:
    """Make a group's rows, after checking that its owners are complete (FOR-5)."""
    owned: set[int] = set()
    rows = []
    for row in batch.rows:
        owner = _owner(batch, row)
        trains = row.kind == group_batch_pb2.ROW_KIND_TRAINING
        for span in row.spans:
            if span.owns_loss and (not trains or span.segment_index in owned):
                raise GroupDefectError(batch.group_id, f"row {row.row_id} owns loss it may not")
            if span.owns_loss:
                owned.add(span.segment_index)
        advantage = advantages[owner.rollout_id] if trains and owner is not None else 0.0
        made = _whole_row(batch, row, owner, advantage, valid=trains)
        excluded = trains and owner is not None and not _trains(owner, options)
        rows.append(replace(made, valid=False) if excluded else made)
    if owned != set(range(len(batch.segments))):
        raise GroupDefectError(batch.group_id, "a segment's loss has no owner")
    _check_names(batch)
    _check_owned(batch)
    return rows


def _check_names(batch: group_batch_pb2.GroupBatch) -> None:
    """Hold the rows' ids against what they must be: every slot, segment and padding once."""
    segments: Counter[int] = Counter()
    paddings = 0
    for row in batch.rows:
        if row.HasField("slot"):
            expected = f"{batch.group_id}_g{row.slot}_s{segments[row.slot]}"
            segments[row.slot] += 1
        else:
            expected = f"{batch.group_id}_pad{paddings}"
            paddings += 1
        if row.row_id != expected:
            raise GroupDefectError(batch.group_id, f"row {row.row_id} stands where {expected} does")
    if set(segments) != set(range(len(batch.receipts))):
        raise GroupDefectError(batch.group_id, "a rollout has no row")


def _check_owned(batch: group_batch_pb2.GroupBatch) -> None:
    """Refuse rollouts whose rows do not own every selected call, and no other (FOR-3, FOR-5)."""
    owned: dict[int, list[str]] = {}
    for row in batch.rows:
        for span in row.spans:
            if span.owns_loss:
                call = batch.segments[span.segment_index]
                owned.setdefault(row.slot, []).append(call.call_id)
    for receipt in batch.receipts:
        selected = [call.call_id for call in receipt.calls if call.selected]
        if sorted(owned.get(receipt.slot, [])) != sorted(selected):
            raise GroupDefectError(
                batch.group_id, f"the rows of {receipt.rollout_id} do not own what it selects"
            )


def _owner(
    batch: group_batch_pb2.GroupBatch, row: group_batch_pb2.Row
) -> receipt_pb2.Receipt | None:
    """Give a row's rollout, which must be of the row's kind; None for padding."""
    if row.HasField("slot") and row.slot >= len(batch.receipts):
        raise GroupDefectError(batch.group_id, f"row {row.row_id} has slot {row.slot}")
    owner = batch.receipts[row.slot] if row.HasField("slot") else None
    if row.kind == group_batch_pb2.ROW_KIND_PADDING:
        fits = owner is None
    elif row.kind == group_batch_pb2.ROW_KIND_PLACEHOLDER:
        fits = owner is not None and owner.masked
    elif row.kind == group_batch_pb2.ROW_KIND_TRAINING:
        fits = owner is not None and not owner.masked
    else:
        raise GroupDefectError(batch.group_id, f"row {row.row_id} has kind {row.kind}")
    if not fits:
        raise GroupDefectError(batch.group_id, f"row {row.row_id} has no owner of its kind")
    return owner


def _whole_row(
    batch: group_batch_pb2.GroupBatch,
    row: group_batch_pb2.Row,
    owner: receipt_pb2.Receipt | None,
    advantage: float,
    *,
    valid: bool,
) -> TrainingRow:
    ids, masks, logprobs = [], [], []
    path = _path(batch, row)
    if valid and owner is not None:
        _check_selected(batch, row, owner, path)
    for segment, span in zip(path, row.spans, strict=True):
        columns = segment.canonical
        delta = np.frombuffer(columns.token_ids, _ID_BYTES)
        generated = np.frombuffer(columns.logprobs, _LOGPROB_BYTES)
        carry = len(delta) - len(generated)
        mask = np.zeros(len(delta), np.bool_)
        mask[carry:] = span.owns_loss
        aligned = np.zeros(len(delta), np.float32)
        aligned[carry:] = generated
        ids.append(delta)
        masks.append(mask)
        logprobs.append(aligned)
    return TrainingRow(
        row_id=row.row_id,
        rollout_id=owner.rollout_id if owner is not None else _PADDING_OWNER,
        token_ids=np.concatenate(ids).astype(np.uint32, copy=False),
        loss_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs),
        advantage=advantage,
        valid=valid,
    )


def _path(
    batch: group_batch_pb2.GroupBatch, row: group_batch_pb2.Row
) -> list[staged_call_pb2.StagedCall]:
    """Give a row's calls, each of which must continue the one before it."""
    path = [_segment(batch, row, span.segment_index) for span in row.spans]
    if not path:
        raise GroupDefectError(batch.group_id, f"row {row.row_id} has no calls")
    length, before = 0, None
    for call in path:
        if not _continues(call, before):
            parent = "nothing" if before is None else before.call_id
            raise GroupDefectError(
                batch.group_id, f"row {row.row_id}: call {call.call_id} does not continue {parent}"
            )
        if call.prev_token_count != length:
            raise GroupDefectError(
                batch.group_id,
                f"row {row.row_id}: call {call.call_id} continues"
                f" {call.prev_token_count} tokens, {length} came before it",
            )
        columns = call.canonical
        generation_bytes = len(columns.logprobs)
        if len(columns.token_ids) != 4 * columns.carry_token_count + generation_bytes:
            raise GroupDefectError(
                batch.group_id, f"row {row.row_id}: the columns of {call.call_id} do not agree"
            )
        length, before = length + len(columns.token_ids) // 4, call
    return path


def _continues(call: staged_call_pb2.StagedCall, before: staged_call_pb2.StagedCall | None) -> bool:
    """Say whether a call continues the one before, which an earlier attempt may have made."""
    if before is None:
        return not (call.parent_call_id or call.parent_capture_key)
    owner = call.parent_capture_key or call.capture_key
    if (owner, call.parent_call_id) != (before.capture_key, before.call_id):
        return False
    return owner == call.capture_key or is_earlier_attempt(owner, call.capture_key)


def _check_selected(
    batch: group_batch_pb2.GroupBatch,
    row: group_batch_pb2.Row,
    owner: receipt_pb2.Receipt,
    path: Sequence[staged_call_pb2.StagedCall],
) -> None:
    """Hold a training row's calls against the receipt of its owner, restored ones included."""
    selected = {
        call.call_id: (call.source_capture_key or owner.capture_key, call.digest)
        for call in owner.calls
        if call.selected
    }
    for call in path:
        key = call.capture_key
        is_its_own = key == owner.capture_key or is_earlier_attempt(key, owner.capture_key)
        if not is_its_own or selected.get(call.call_id) != (key, call.digest):
            raise GroupDefectError(
                batch.group_id,
                f"row {row.row_id}: the receipt of {owner.rollout_id} does not select"
                f" call {call.call_id} as it is",
            )
        if fault := sampling_fault(call.extras):
            raise SamplingMismatchError(batch.group_id, call.call_id, fault)


def _segment(
    batch: group_batch_pb2.GroupBatch, row: group_batch_pb2.Row, index: int
) -> staged_call_pb2.StagedCall:
    if index >= len(batch.segments):
        raise GroupDefectError(batch.group_id, f"row {row.row_id} names segment {index}")
    return batch.segments[index]
