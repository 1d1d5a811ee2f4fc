"""Training rows, and the plan that cuts one step's rows into microbatches.

Pure numpy. One RL step is one optimizer step over all rows; the loss of every microbatch divides
by the retained loss tokens of the whole step, so the gradient does not depend on the cut (TRN-1,
TRN-5).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from callforest_core.forest.packing import PackingRefusedError, pack_bins

TokenIds: TypeAlias = NDArray[np.uint32]
Float32s: TypeAlias = NDArray[np.float32]
Int64s: TypeAlias = NDArray[np.int64]
Int32s: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]

LOGPROB_CEILING = 1e-4
"""Engines round: a log-probability this little above 0 is still one."""


class BatchRefusal(enum.Enum):
    """Why rows or a way of cutting them were refused."""

    DYNAMIC_BATCHING = "dynamic batching is not supported"
    UNKNOWN_MODE = "unknown batch mode"
    NON_POSITIVE_SIZE = "sizes must be positive"
    ROW_TOO_LONG = "a row exceeds the token budget"
    MALFORMED_ROW = "the columns of a row do not agree"
    UNPREDICTED_LOSS = "the first token of a row has no prediction and cannot carry loss"
    LOGPROB_OUT_OF_RANGE = "a loss token has no finite log-probability at or below zero"
    ADVANTAGE_NOT_FINITE = "an advantage is not finite in single precision"
    DUPLICATE_ROW = "a row comes twice"
    OUT_OF_VOCABULARY = "a row has a token that the model does not know"
    PLAN_MISMATCH = "the plan is not one of these rows"
    NO_LOSS_TOKENS = "no valid row has a loss token: there is nothing to train"


class BatchRefusedError(Exception):
    """The rows cannot be trained as given or as configured.

    Attributes:
        refusal: why.
        row_id: the row at fault, "" when the fault is not one row's.
    """

    def __init__(self, refusal: BatchRefusal, fact: str = "", *, row_id: str = "") -> None:
        super().__init__(f"{refusal.value}: {fact}" if fact else refusal.value)
        self.refusal = refusal
        self.row_id = row_id


class BatchMode(enum.Enum):
    """How rows are cut into microbatches."""

    FIXED = "fixed"
    """`train_microbatch_size` rows each, padded to the longest of them."""
    PACKED = "packed"
    """Token-budget bins of whole rows, without padding."""

    @classmethod
    def parse(cls, name: str) -> BatchMode:
        """Read a mode from configuration.

        Raises:
            BatchRefusedError: `dynamic`, or an unknown name.
        """
        if name == "dynamic":
            raise BatchRefusedError(
                BatchRefusal.DYNAMIC_BATCHING, "use fixed batches or packed token-budget bins"
            )
        try:
            return cls(name)
        except ValueError as error:
            raise BatchRefusedError(BatchRefusal.UNKNOWN_MODE, name) from error


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How to cut.

    Attributes:
        mode: fixed or packed.
        train_microbatch_size: rows of a fixed microbatch.
        train_microbatch_tokens: capacity of a packed bin; also the longest row allowed.
        rank_count: data-parallel ranks; all run the same number of microbatches.
    """

    mode: BatchMode = BatchMode.FIXED
    train_microbatch_size: int = 4
    train_microbatch_tokens: int = 4096
    rank_count: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive.

        Raises:
            BatchRefusedError: with NON_POSITIVE_SIZE.
        """
        for name in ("train_microbatch_size", "train_microbatch_tokens", "rank_count"):
            size: int = getattr(self, name)
            if size <= 0:
                raise BatchRefusedError(BatchRefusal.NON_POSITIVE_SIZE, f"{name} is {size}")


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One path, root to endpoint, as training data.

    Attributes:
        row_id: names the row.
        rollout_id: its logical owner.
        token_ids: shape [tokens].
        loss_mask: shape [tokens]; set on the tokens whose own loss this row owns. A shared
            ancestor is masked in every row but the one that owns it.
        logprobs: shape [tokens], aligned to the token itself: what the engine gave it when it
            sampled it; ignored where the mask is not set.
        advantage: the owner's.
        valid: False for rows of masked owners and for padding: they weigh 0 and do not count.
    """

    row_id: str
    rollout_id: str
    token_ids: TokenIds
    loss_mask: Flags
    logprobs: Float32s
    advantage: float
    valid: bool = True

    @property
    def retained_mask(self) -> Flags:
        """The loss mask where the row is valid, else all False; shape [tokens]."""
        return self.loss_mask if self.valid else np.zeros_like(self.loss_mask)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows that share one forward and backward pass; none means a pass that weighs 0."""

    row_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one step runs.

    Attributes:
        mode: fixed or packed.
        microbatches_by_rank: the same number for every rank; each row in exactly one.
        retained_token_count: loss tokens of valid rows, the denominator of the loss.
    """

    mode: BatchMode
    microbatches_by_rank: tuple[tuple[Microbatch, ...], ...]
    retained_token_count: int


def plan_step(rows: Sequence[TrainingRow], options: BatchOptions) -> BatchPlan:
    """Check the rows of one optimizer step and cut them into microbatches.

    Raises:
        BatchRefusedError: a row is malformed or too long, comes twice, or none has loss.
    """
    check_rows(rows)
    retained = sum(int(row.retained_mask.sum()) for row in rows)
    if retained == 0:
        raise BatchRefusedError(BatchRefusal.NO_LOSS_TOKENS)
    lengths = [len(row.token_ids) for row in rows]
    if options.mode is BatchMode.PACKED:
        cut = _cut_packed(rows, lengths, options)
    else:
        size = options.train_microbatch_size
        cut = [
            list(range(start, min(start + size, len(rows)))) for start in range(0, len(rows), size)
        ]
    ranks = options.rank_count
    cut.extend([] for _ in range(-len(cut) % ranks))
    dealt = tuple(
        tuple(Microbatch(tuple(indices)) for indices in cut[rank::ranks]) for rank in range(ranks)
    )
    return BatchPlan(options.mode, dealt, retained)


def _cut_packed(
    rows: Sequence[TrainingRow], lengths: Sequence[int], options: BatchOptions
) -> list[list[int]]:
    """Pack into bins, as many as the ranks divide when there are rows enough for that."""
    ranks = options.rank_count
    try:
        bins = pack_bins(lengths, options.train_microbatch_tokens)
        rounded = -(-len(bins) // ranks) * ranks
        if rounded <= len(rows):
            return pack_bins(lengths, options.train_microbatch_tokens, rounded, ranks)
    except PackingRefusedError as refusal:
        if refusal.sequence is None:
            raise
        row_id = rows[refusal.sequence].row_id
        raise BatchRefusedError(
            BatchRefusal.ROW_TOO_LONG, f"row {row_id}: {refusal}", row_id=row_id
        ) from refusal
    return bins


def check_rows(rows: Sequence[TrainingRow]) -> None:
    """Refuse rows whose columns disagree or whose loss is not defined.

    Raises:
        BatchRefusedError: naming the first row at fault.
    """
    seen: set[str] = set()
    for row in rows:
        if row.row_id in seen:
            raise BatchRefusedError(BatchRefusal.DUPLICATE_ROW, row.row_id, row_id=row.row_id)
        seen.add(row.row_id)
        refusal = _fault(row)
        if refusal is not None:
            raise BatchRefusedError(refusal, f"row {row.row_id}", row_id=row.row_id)


def check_plan(rows: Sequence[TrainingRow], plan: BatchPlan) -> None:
    """Refuse a plan that does not run every row exactly once or divides by another count.

    Raises:
        BatchRefusedError: with PLAN_MISMATCH.
    """
    ranks = plan.microbatches_by_rank
    planned = sorted(i for rank in ranks for each in rank for i in each.row_indices)
    retained = sum(int(row.retained_mask.sum()) for row in rows)
    if planned != list(range(len(rows))) or len({len(rank) for rank in ranks}) != 1:
        raise BatchRefusedError(BatchRefusal.PLAN_MISMATCH, "rows or microbatches are missing")
    if plan.retained_token_count != retained:
        raise BatchRefusedError(
            BatchRefusal.PLAN_MISMATCH, f"{plan.retained_token_count} loss tokens, not {retained}"
        )


def _fault(row: TrainingRow) -> BatchRefusal | None:
    count = len(row.token_ids)
    columns = ((row.token_ids, np.uint32), (row.loss_mask, np.bool_), (row.logprobs, np.float32))
    if count == 0 or any(
        column.dtype != dtype or column.shape != (count,) for column, dtype in columns
    ):
        return BatchRefusal.MALFORMED_ROW
    if not row.valid:
        return None
    if row.loss_mask[0]:
        return BatchRefusal.UNPREDICTED_LOSS
    sampled = row.logprobs[row.loss_mask]
    if not (np.isfinite(sampled) & (sampled <= LOGPROB_CEILING)).all():
        return BatchRefusal.LOGPROB_OUT_OF_RANGE
    if not abs(row.advantage) <= float(np.finfo(np.float32).max):
        return BatchRefusal.ADVANTAGE_NOT_FINITE
    return None


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchColumns:
    """What one pass needs; position t predicts label t, the token after input t.

    Attributes:
        input_ids: shape [b, s]; packed: [1, sum of row lengths].
        position_ids: as input_ids, from 0 in each row.
        label_ids: as input_ids, 0 where nothing follows.
        retained: as input_ids; set where the label has loss and the row is valid.
        logprobs: as input_ids, the engine's for each label, 0 where not retained.
        advantages: as input_ids, 0 where not retained.
        row_offsets: packed: shape [rows + 1], where each row begins and the last ends; else None.
    """

    input_ids: Int64s
    position_ids: Int64s
    label_ids: Int64s
    retained: Flags
    logprobs: Float32s
    advantages: Float32s
    row_offsets: Int32s | None


def lay_out(
    rows: Sequence[TrainingRow], microbatch: Microbatch, mode: BatchMode
) -> MicrobatchColumns | None:
    """Lay the rows of a microbatch out, padded (fixed) or end to end (packed).

    Padding follows the tokens of its row and causal attention never looks ahead, so its value
    does not matter.

    Returns:
        The columns, None for an empty microbatch.
    """
    chosen = [rows[index] for index in microbatch.row_indices]
    if not chosen:
        return None
    lengths = np.array([len(row.token_ids) for row in chosen], dtype=np.int64)
    packed = mode is BatchMode.PACKED
    width = int(lengths.sum() if packed else lengths.max())
    shape = (1 if packed else len(chosen), width)
    columns = MicrobatchColumns(
        input_ids=np.zeros(shape, dtype=np.int64),
        position_ids=np.zeros(shape, dtype=np.int64),
        label_ids=np.zeros(shape, dtype=np.int64),
        retained=np.zeros(shape, dtype=np.bool_),
        logprobs=np.zeros(shape, dtype=np.float32),
        advantages=np.zeros(shape, dtype=np.float32),
        row_offsets=np.concatenate([[0], lengths.cumsum()]).astype(np.int32) if packed else None,
    )
    start = 0
    for position, row in enumerate(chosen):
        line = 0 if packed else position
        _place(columns, line, start, row)
        start += len(row.token_ids) if packed else 0
    return columns


def _place(columns: MicrobatchColumns, line: int, start: int, row: TrainingRow) -> None:
    """Write one row, its labels, mask and logprobs moved one to the left."""
    count = len(row.token_ids)
    here, before = slice(start, start + count), slice(start, start + count - 1)
    retained = row.retained_mask[1:]
    columns.input_ids[line, here] = row.token_ids
    columns.position_ids[line, here] = np.arange(count)
    columns.label_ids[line, before] = row.token_ids[1:]
    columns.retained[line, before] = retained
    columns.logprobs[line, before] = np.where(retained, row.logprobs[1:], 0)
    columns.advantages[line, before] = np.where(retained, row.advantage, 0)
