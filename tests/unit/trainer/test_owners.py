"""One reward and one advantage a logical rollout, however many rows it has (FOR-3 to FOR-6)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from callforest.capture.v1 import group_batch_pb2
from callforest_mesh.trainer.batch import BatchOptions, TrainingRow, lay_out, plan_step
from callforest_mesh.trainer.core import AdvantageOptions, Baseline, MaskedRewardPolicy
from callforest_mesh.trainer.rows import GroupDefectError, gather_step
from tests.unit.trainer.batches import Call, Rollout, fork, linear, make_batch

MEAN = AdvantageOptions(baseline=Baseline.MEAN, normalise=False)
FILTERED = AdvantageOptions(baseline=Baseline.MEAN, normalise=False, overlong_filtering=True)


def four_tokens() -> Rollout:
    """A linear rollout that sampled 4 tokens."""
    return Rollout("r1", 0.0, [Call("p", [10], [11, 12, 13, 14])])


def trained(rows: tuple[TrainingRow, ...]) -> int:
    return plan_step(rows, BatchOptions()).retained_token_count


@pytest.mark.bugcase("B19")
@pytest.mark.requirement("FOR-5", "TRN-5")
def test_a_shared_ancestor_counts_once_and_its_rollout_votes_once() -> None:
    """Two rows of one rollout: a baseline over 2 rollouts (.5), not over 3 rows (.667)."""
    step = gather_step([make_batch(1, fork("r0", 1.0), four_tokens())], MEAN)
    assert [row.row_id for row in step.rows] == ["g1_g0_s0", "g1_g0_s1", "g1_g1_s0"]
    assert [row.advantage for row in step.rows] == [0.5, 0.5, -0.5]
    assert [int(row.retained_mask.sum()) for row in step.rows] == [5, 1, 4]
    assert trained(step.rows) == 6 + 4
    assert step.reward_mean == 0.5
    without = fork("r0", 1.0)
    pruned = Rollout("r0", 1.0, without.calls[:2], paths=[["a", "b"]])
    step = gather_step([make_batch(1, pruned, four_tokens())], MEAN)
    assert trained(step.rows) == 9
    assert [row.advantage for row in step.rows] == [0.5, -0.5]


@pytest.mark.requirement("FOR-6")
@pytest.mark.parametrize(
    ("policy", "others", "reward_mean"),
    [
        (MaskedRewardPolicy.EXCLUDE, [1.0, -1.0], 1.0),
        (MaskedRewardPolicy.INCLUDE, [1.0, -1.0], 1.0),
    ],
)
def test_overlong_filtering_excludes_every_row_of_a_truncated_rollout(
    policy: MaskedRewardPolicy, others: list[float], reward_mean: float
) -> None:
    batch = make_batch(1, fork("r0", 1.0), linear("r1", 2.0), linear("r2", 0.0, 50))
    batch.receipts[0].truncated = True
    options = AdvantageOptions(
        baseline=Baseline.MEAN,
        normalise=False,
        overlong_filtering=True,
        masked_reward_policy=policy,
    )
    step = gather_step([batch], options)
    assert [row.valid for row in step.rows] == [False, False, True, True]
    assert [row.advantage for row in step.rows] == [0.0, 0.0, *others]
    assert trained(step.rows) == 3 + 3
    assert step.reward_mean == reward_mean
    kept = gather_step([batch], MEAN)
    assert [row.valid for row in kept.rows] == [True] * 4, "without the option it trains"


@pytest.mark.requirement("FOR-6")
def test_a_truncated_rollout_s_reward_is_that_of_a_masked_one() -> None:
    batch = make_batch(1, fork("r0", 9.0), linear("r1", 2.0), linear("r2", 0.0, 50))
    batch.receipts[0].truncated = True
    excluded = gather_step([batch], FILTERED)
    assert [row.advantage for row in excluded.rows] == [0.0, 0.0, 1.0, -1.0]
    assert excluded.reward_mean == 1.0
    include = AdvantageOptions(
        baseline=Baseline.MEAN,
        normalise=False,
        overlong_filtering=True,
        masked_reward_policy=MaskedRewardPolicy.INCLUDE,
    )
    included = gather_step([batch], include)
    mean = (9.0 + 2.0 + 0.0) / 3
    expected = [0.0, 0.0, 2.0 - mean, -mean]
    assert [row.advantage for row in included.rows] == pytest.approx(expected)
    assert included.reward_mean == pytest.approx(mean)


Damage = Callable[[group_batch_pb2.GroupBatch], None]


def _twice(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[1].row_id = "g1_g0_s0"


def _gap(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[1].row_id = "g1_g0_s2"


def _swapped(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[0].row_id, batch.rows[1].row_id = "g1_g0_s1", "g1_g0_s0"


def _other_group(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[2].row_id = "g2_g1_s0"


def _padding_name(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[3].row_id = "g1_pad1"


def _missing_call(batch: group_batch_pb2.GroupBatch) -> None:
    batch.receipts[0].calls.add(call_id="d", digest=bytes(32), selected=True)


def _missing_segment_row(batch: group_batch_pb2.GroupBatch) -> None:
    """The second segment of an owner is gone, with its call: what is left looks whole."""
    del batch.rows[1]
    del batch.segments[2]
    for row in batch.rows[1:]:
        for span in row.spans:
            if span.segment_index > 2:
                span.segment_index -= 1


OWNERS: dict[Damage, str] = {
    _twice: "stands where g1_g0_s1 does",
    _gap: "stands where g1_g0_s1 does",
    _swapped: "stands where g1_g0_s0 does",
    _other_group: "stands where g1_g1_s0 does",
    _padding_name: "stands where g1_pad0 does",
    _missing_call: "do not own what it selects",
    _missing_segment_row: "do not own what it selects",
}


@pytest.mark.requirement("FOR-5")
@pytest.mark.parametrize("damage", OWNERS, ids=lambda each: each.__name__.strip("_"))
def test_an_owner_that_is_not_whole_is_refused(damage: Damage) -> None:
    batch = make_batch(1, fork("r0", 1.0), linear("r1", 0.0), padding=1)
    gather_step([batch], MEAN)
    damage(batch)
    with pytest.raises(GroupDefectError, match=OWNERS[damage]):
        gather_step([batch], MEAN)


def rooted(slot: int, roots: int) -> Rollout:
    """A rollout of as many roots as it has rows; each samples 2 tokens."""
    start = 100 * (slot + 1)
    calls = [
        Call(f"c{n}", [start + 3 * n], [start + 3 * n + 1, start + 3 * n + 2]) for n in range(roots)
    ]
    return Rollout(f"r{slot}", float(slot % 3), calls, paths=[[call.call_id] for call in calls])


def weighed(rows: tuple[TrainingRow, ...], ranks: int) -> tuple[float, int]:
    """The sum of advantages over retained tokens as the ranks see it, over the denominator."""
    plan = plan_step(rows, BatchOptions(train_microbatch_size=1, rank_count=ranks))
    total = 0.0
    for microbatches in plan.microbatches_by_rank:
        for microbatch in microbatches:
            columns = lay_out(rows, microbatch, plan.mode)
            if columns is not None:
                total += float(columns.advantages[columns.retained].sum(dtype=np.float64))
    passes = {len(microbatches) for microbatches in plan.microbatches_by_rank}
    assert len(passes) == 1, "every rank runs the same number of passes"
    return total / plan.retained_token_count, passes.pop()


@pytest.mark.bugcase("B27")
@pytest.mark.requirement("FIN-6")
def test_thirteen_rows_on_four_ranks_weigh_what_they_weigh_on_one() -> None:
    rollouts = [rooted(slot, rows) for slot, rows in enumerate([3, 2, 2, 2, 3, 1])]
    bare = gather_step([make_batch(1, *rollouts)], MEAN)
    padded = gather_step([make_batch(1, *rollouts, padding=3)], MEAN)
    assert (len(bare.rows), len(padded.rows)) == (13, 16)
    assert [row.advantage for row in padded.rows[:13]] == [row.advantage for row in bare.rows]
    assert [(row.valid, row.advantage) for row in padded.rows[13:]] == [(False, 0.0)] * 3
    one, four = weighed(bare.rows, 1), weighed(padded.rows, 4)
    assert one[0] == pytest.approx(four[0], abs=1e-12)
    assert four[1] == 4
    assert padded.reward_mean == bare.reward_mean
