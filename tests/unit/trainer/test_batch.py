from typing import Any

import numpy as np
import pytest

from callforest_mesh.trainer.batch import (
    BatchMode,
    BatchOptions,
    BatchPlan,
    BatchRefusal,
    BatchRefusedError,
    Microbatch,
    TrainingRow,
    check_plan,
    lay_out,
    plan_step,
)


def make_row(name: str, prompt: int, generated: int, **changes: Any) -> TrainingRow:
    count = prompt + generated
    mask = np.arange(count) >= prompt
    columns: dict[str, Any] = {
        "row_id": name,
        "rollout_id": f"owner-of-{name}",
        "token_ids": np.arange(10, 10 + count, dtype=np.uint32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -np.arange(count, dtype=np.float32) / 8, 0).astype(np.float32),
        "advantage": 0.5,
    }
    return TrainingRow(**(columns | changes))


def indices(plan: BatchPlan) -> list[list[list[int]]]:
    return [[list(each.row_indices) for each in rank] for rank in plan.microbatches_by_rank]


ROWS = [make_row(f"row-{n}", 2, n) for n in (5, 1, 3, 2, 4)]


@pytest.mark.requirement("TRN-1")
def test_fixed_batches_keep_the_order_of_rows() -> None:
    plan = plan_step(ROWS, BatchOptions(BatchMode.FIXED, train_microbatch_size=2))
    assert indices(plan) == [[[0, 1], [2, 3], [4]]]
    assert plan.retained_token_count == 15


@pytest.mark.requirement("TRN-1")
def test_packed_bins_hold_every_row_within_the_budget() -> None:
    plan = plan_step(ROWS, BatchOptions(BatchMode.PACKED, train_microbatch_tokens=10))
    (bins,) = indices(plan)
    assert sorted(i for each in bins for i in each) == [0, 1, 2, 3, 4]
    assert all(sum(len(ROWS[i].token_ids) for i in each) <= 10 for each in bins)


@pytest.mark.requirement("TRN-1")
@pytest.mark.parametrize("mode", list(BatchMode))
def test_every_rank_runs_the_same_number_of_microbatches(mode: BatchMode) -> None:
    options = BatchOptions(mode, 2, train_microbatch_tokens=10, rank_count=2)
    plan = plan_step(ROWS, options)
    assert len({len(rank) for rank in plan.microbatches_by_rank}) == 1
    check_plan(ROWS, plan)
    lonely = plan_step(ROWS[:1], options)
    assert indices(lonely) == [[[0]], [[]]]
    assert lay_out(ROWS[:1], lonely.microbatches_by_rank[1][0], mode) is None


@pytest.mark.requirement("TRN-1")
def test_dynamic_batching_is_refused_with_the_reason() -> None:
    with pytest.raises(BatchRefusedError, match="fixed batches or packed") as refusal:
        BatchMode.parse("dynamic")
    assert refusal.value.refusal is BatchRefusal.DYNAMIC_BATCHING
    with pytest.raises(BatchRefusedError) as refusal:
        BatchMode.parse("automatic")
    assert refusal.value.refusal is BatchRefusal.UNKNOWN_MODE
    assert BatchMode.parse("packed") is BatchMode.PACKED


@pytest.mark.requirement("TRN-6")
@pytest.mark.parametrize(
    "sizes",
    [{"train_microbatch_size": 0}, {"train_microbatch_tokens": -1}, {"rank_count": 0}],
)
def test_sizes_that_are_not_positive_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(BatchRefusedError) as refusal:
        BatchOptions(**sizes)  # type: ignore[arg-type]  # one size at a time
    assert refusal.value.refusal is BatchRefusal.NON_POSITIVE_SIZE


@pytest.mark.requirement("TRN-5")
def test_a_masked_row_leaves_the_denominator_and_stays_in_the_batch() -> None:
    rows = [*ROWS[:2], make_row("masked", 2, 7, valid=False)]
    plan = plan_step(rows, BatchOptions())
    assert plan.retained_token_count == 6
    assert indices(plan) == [[[0, 1, 2]]]
    columns = lay_out(rows, Microbatch((2,)), BatchMode.FIXED)
    assert columns is not None
    assert not columns.retained.any()
    assert not columns.advantages.any()
    assert not columns.logprobs.any()


def test_labels_masks_and_logprobs_move_to_the_token_that_predicts_them() -> None:
    rows = [make_row("a", 2, 2), make_row("b", 1, 1)]
    padded = lay_out(rows, Microbatch((0, 1)), BatchMode.FIXED)
    assert padded is not None
    assert padded.input_ids.tolist() == [[10, 11, 12, 13], [10, 11, 0, 0]]
    assert padded.label_ids.tolist() == [[11, 12, 13, 0], [11, 0, 0, 0]]
    assert padded.retained.tolist() == [[False, True, True, False], [True, False, False, False]]
    assert padded.logprobs.tolist() == [[0, -0.25, -0.375, 0], [-0.125, 0, 0, 0]]
    assert padded.advantages.tolist() == [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0]]
    assert padded.row_offsets is None

    packed = lay_out(rows, Microbatch((0, 1)), BatchMode.PACKED)
    assert packed is not None
    assert packed.input_ids.tolist() == [[10, 11, 12, 13, 10, 11]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.label_ids.tolist() == [[11, 12, 13, 0, 11, 0]]
    assert packed.retained.tolist() == [[False, True, True, False, True, False]]
    assert packed.row_offsets is not None
    assert packed.row_offsets.tolist() == [0, 4, 6]


NAN = np.array([0, 0, np.nan, -1], np.float32)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"loss_mask": np.array([1, 0, 0, 1], bool)}, BatchRefusal.UNPREDICTED_LOSS),
        ({"loss_mask": np.array([0, 0, 1], bool)}, BatchRefusal.MALFORMED_ROW),
        ({"loss_mask": np.array([0, 0, 1, 1])}, BatchRefusal.MALFORMED_ROW),
        ({"token_ids": np.zeros(4, np.int64)}, BatchRefusal.MALFORMED_ROW),
        ({"logprobs": NAN}, BatchRefusal.LOGPROB_OUT_OF_RANGE),
        ({"logprobs": np.full(4, 0.5, np.float32)}, BatchRefusal.LOGPROB_OUT_OF_RANGE),
        ({"logprobs": np.full(4, -np.inf, np.float32)}, BatchRefusal.LOGPROB_OUT_OF_RANGE),
        ({"advantage": float("nan")}, BatchRefusal.ADVANTAGE_NOT_FINITE),
        ({"advantage": -1e39}, BatchRefusal.ADVANTAGE_NOT_FINITE),
        ({"row_id": "fine"}, BatchRefusal.DUPLICATE_ROW),
    ],
)
def test_rows_without_a_defined_loss_are_refused(
    changes: dict[str, Any], refusal: BatchRefusal
) -> None:
    rows = [make_row("fine", 2, 2), make_row("odd", 2, 2, **changes)]
    with pytest.raises(BatchRefusedError) as refused:
        plan_step(rows, BatchOptions())
    assert refused.value.refusal is refusal
    assert refused.value.row_id == rows[1].row_id


def test_what_a_row_does_not_train_may_be_anything() -> None:
    odd = make_row("odd", 2, 2, logprobs=NAN, loss_mask=np.array([0, 0, 0, 1], bool))
    masked = make_row("masked", 2, 2, logprobs=NAN, advantage=float("nan"), valid=False)
    assert plan_step([odd, masked], BatchOptions()).retained_token_count == 1


def test_a_step_without_loss_tokens_is_refused() -> None:
    for rows in ([], [make_row("masked", 2, 2, valid=False)]):
        with pytest.raises(BatchRefusedError) as refusal:
            plan_step(rows, BatchOptions())
        assert refusal.value.refusal is BatchRefusal.NO_LOSS_TOKENS


def test_a_row_beyond_the_token_budget_is_refused_by_name() -> None:
    with pytest.raises(BatchRefusedError) as refusal:
        plan_step(ROWS, BatchOptions(BatchMode.PACKED, train_microbatch_tokens=6))
    assert (refusal.value.refusal, refusal.value.row_id) == (BatchRefusal.ROW_TOO_LONG, "row-5")


@pytest.mark.requirement("TRN-5")
@pytest.mark.parametrize(
    "plan",
    [
        BatchPlan(BatchMode.FIXED, ((Microbatch((0,)),),), 6),
        BatchPlan(BatchMode.FIXED, ((Microbatch((0, 1, 1)),),), 6),
        BatchPlan(BatchMode.FIXED, ((Microbatch((0, 1, 2)),),), 6),
        BatchPlan(BatchMode.FIXED, ((Microbatch((0,)), Microbatch((1,))), ()), 6),
        BatchPlan(BatchMode.FIXED, ((Microbatch((0, 1)),),), 7),
    ],
)
def test_a_plan_of_other_rows_is_refused(plan: BatchPlan) -> None:
    with pytest.raises(BatchRefusedError) as refusal:
        check_plan(ROWS[:2], plan)
    assert refusal.value.refusal is BatchRefusal.PLAN_MISMATCH
