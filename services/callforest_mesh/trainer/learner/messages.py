"""Rows and plans as they cross to the learner's process and back. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from callforest.trainer.v1 import learner_service_pb2 as pb
from callforest_mesh.trainer.batch import (
    BatchMode,
    BatchPlan,
    BatchRefusal,
    BatchRefusedError,
    Microbatch,
    TrainingRow,
)

FRAME_BYTES = 1024 * 1024
"""A message of rows is closed when it has reached this size."""


def step_to_messages(rows: Sequence[TrainingRow], plan: BatchPlan) -> Iterator[pb.TrainStepRequest]:
    """Write a step: the plan of the only rank first, then the rows in their order.

    A row of a masked owner crosses without loss, which is what it weighs.
    """
    yield pb.TrainStepRequest(plan=plan_to_message(plan))
    frame, size = pb.TrainingRows(), 0
    for row in rows:
        message = row_to_message(row)
        frame.rows.append(message)
        size += message.ByteSize()
        if size >= FRAME_BYTES:
            yield pb.TrainStepRequest(rows=frame)
            frame, size = pb.TrainingRows(), 0
    if frame.rows:
        yield pb.TrainStepRequest(rows=frame)


def plan_to_message(plan: BatchPlan) -> pb.StepPlan:
    """Write the plan of the only rank.

    Raises:
        BatchRefusedError: it is a plan for several ranks.
    """
    if len(plan.microbatches_by_rank) != 1:
        raise BatchRefusedError(BatchRefusal.PLAN_MISMATCH, "a process runs one rank's plan")
    return pb.StepPlan(
        microbatches=[
            pb.Microbatch(row_indexes=each.row_indices) for each in plan.microbatches_by_rank[0]
        ],
        packed=plan.mode is BatchMode.PACKED,
    )


def plan_from_message(message: pb.StepPlan, rows: Sequence[TrainingRow]) -> BatchPlan:
    """Read a plan of these rows."""
    return BatchPlan(
        mode=BatchMode.PACKED if message.packed else BatchMode.FIXED,
        microbatches_by_rank=(
            tuple(Microbatch(tuple(each.row_indexes)) for each in message.microbatches),
        ),
        retained_token_count=sum(int(row.retained_mask.sum()) for row in rows),
    )


def row_to_message(row: TrainingRow) -> pb.TrainingRow:
    """Write a row; what has no loss crosses as zeros."""
    retained = row.retained_mask
    return pb.TrainingRow(
        row_id=row.row_id,
        token_ids=row.token_ids.astype("<u4", copy=False).tobytes(),
        loss_mask=retained.astype(np.uint8).tobytes(),
        logprobs=np.where(retained, row.logprobs, 0).astype("<f4").tobytes(),
        advantage=row.advantage if row.valid else 0.0,
    )


def row_from_message(message: pb.TrainingRow) -> TrainingRow:
    """Read a row; its columns are views of the message's bytes.

    Raises:
        BatchRefusedError: a column is not whole words, or the mask has other bytes than 0 and 1.
    """
    marks = np.frombuffer(message.loss_mask, np.uint8)
    if len(message.token_ids) % 4 or len(message.logprobs) % 4 or (marks > 1).any():
        raise BatchRefusedError(
            BatchRefusal.MALFORMED_ROW, f"row {message.row_id}", row_id=message.row_id
        )
    return TrainingRow(
        row_id=message.row_id,
        rollout_id="",  # The learner knows rows alone.
        token_ids=np.frombuffer(message.token_ids, "<u4").astype(np.uint32, copy=False),
        loss_mask=marks.view(np.bool_),
        logprobs=np.frombuffer(message.logprobs, "<f4").astype(np.float32, copy=False),
        advantage=message.advantage,
    )
