"""From published groups to the rows of one optimizer step.

Rows refer to segments; here they become whole sequences, with the loss where a row owns it, and
with the one advantage of their owner (FOR-5). What is not trained weighs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from callforest.capture.v1 import group_batch_pb2, receipt_pb2, staged_call_pb2
from callforest_mesh.trainer.batch import TrainingRow
from callforest_mesh.trainer.core import (
    AdvantageOptions,
    GroupOutcome,
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
        reward_mean: over the rollouts that vote; 0.0 when none does.
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


def gather_step(
    batches: Sequence[group_batch_pb2.GroupBatch], options: AdvantageOptions
) -> StepInput:
    """Make the rows of one step from its groups, dropped ones included.

    Raises:
        GroupDefectError: a group contradicts itself.
        AdvantageRefusedError: a group cannot be scored.
    """
    trained = [batch for batch in batches if not batch.drop_reason]
    advantages = advantages_by_rollout([_outcome(batch) for batch in trained], options)
    rows = [row for batch in trained for row in _rows(batch, advantages)]
    receipts = [receipt for batch in batches for receipt in batch.receipts]
    masked = [receipt for receipt in receipts if receipt.masked]
    voters = [receipt.reward for receipt in receipts if not receipt.masked]
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


def _outcome(batch: group_batch_pb2.GroupBatch) -> GroupOutcome:
    slots = [receipt.slot for receipt in batch.receipts]
    if slots != list(range(len(slots))):
        raise GroupDefectError(batch.group_id, f"its slots are {slots}")
    return GroupOutcome(
        batch.group_id,
        len(slots),
        tuple(
            RolloutOutcome(receipt.rollout_id, receipt.reward, valid=not receipt.masked)
            for receipt in batch.receipts
        ),
    )


def _rows(batch: group_batch_pb2.GroupBatch, advantages: dict[str, float]) -> list[TrainingRow]:
    owned: set[int] = set()
    rows = []
    for row in batch.rows:
        trains = row.kind == group_batch_pb2.ROW_KIND_TRAINING
        owner = _owner(batch, row) if row.HasField("slot") else None
        if trains and (owner is None or owner.masked):
            raise GroupDefectError(batch.group_id, f"row {row.row_id} has no valid owner")
        for span in row.spans:
            if span.owns_loss and (not trains or span.segment_index in owned):
                raise GroupDefectError(batch.group_id, f"row {row.row_id} owns loss it may not")
            if span.owns_loss:
                owned.add(span.segment_index)
        rollout_id = owner.rollout_id if owner is not None else _PADDING_OWNER
        advantage = advantages[rollout_id] if trains else 0.0
        rows.append(_whole_row(batch, row, rollout_id, advantage, valid=trains))
    if owned != set(range(len(batch.segments))):
        raise GroupDefectError(batch.group_id, "a segment's loss has no owner")
    return rows


def _owner(batch: group_batch_pb2.GroupBatch, row: group_batch_pb2.Row) -> receipt_pb2.Receipt:
    if row.slot >= len(batch.receipts):
        raise GroupDefectError(batch.group_id, f"row {row.row_id} has slot {row.slot}")
    return batch.receipts[row.slot]


def _whole_row(
    batch: group_batch_pb2.GroupBatch,
    row: group_batch_pb2.Row,
    rollout_id: str,
    advantage: float,
    *,
    valid: bool,
) -> TrainingRow:
    ids, masks, logprobs = [], [], []
    length = 0
    for span in row.spans:
        segment = _segment(batch, row, span.segment_index)
        if segment.prev_token_count != length:
            raise GroupDefectError(
                batch.group_id,
                f"row {row.row_id}: call {segment.call_id} continues"
                f" {segment.prev_token_count} tokens, {length} came before it",
            )
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
        length += len(delta)
    return TrainingRow(
        row_id=row.row_id,
        rollout_id=rollout_id,
        token_ids=np.concatenate(ids).astype(np.uint32, copy=False),
        loss_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs),
        advantage=advantage,
        valid=valid,
    )


def _segment(
    batch: group_batch_pb2.GroupBatch, row: group_batch_pb2.Row, index: int
) -> staged_call_pb2.StagedCall:
    if index >= len(batch.segments):
        raise GroupDefectError(batch.group_id, f"row {row.row_id} names segment {index}")
    return batch.segments[index]
