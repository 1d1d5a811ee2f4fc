"""From published groups to the rows of a step."""

from collections.abc import Callable

import numpy as np
import pytest

from callforest.capture.v1 import group_batch_pb2
from callforest_core.custody.extras import encode_extras
from callforest_mesh.trainer.batch import BatchOptions, plan_step
from callforest_mesh.trainer.core import (
    AdvantageOptions,
    AdvantageRefusedError,
    MaskedRewardPolicy,
)
from callforest_mesh.trainer.rows import GroupDefectError, SamplingMismatchError, gather_step
from tests.unit.trainer.batches import (
    PADDING,
    PLACEHOLDER,
    TRAINING,
    Rollout,
    dropped,
    fork,
    linear,
    make_batch,
)

RAW = AdvantageOptions(normalise=False)


def test_rows_are_whole_sequences_with_loss_where_they_own_it() -> None:
    step = gather_step([make_batch(3, fork("r0", 1.0), linear("r1", 0.0))], RAW)
    first, second, third = step.rows
    assert [row.row_id for row in step.rows] == ["g3_g0_s0", "g3_g0_s1", "g3_g1_s0"]
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert first.loss_mask.tolist() == [False, True, True, False, True, True, True]
    np.testing.assert_array_equal(
        first.logprobs, np.float32([0, -0.02, -0.03, 0, -0.05, -0.06, -0.07])
    )
    assert second.token_ids.tolist() == [1, 2, 3, 8, 9]
    assert second.loss_mask.tolist() == [False, False, False, False, True]
    assert third.token_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert third.loss_mask.tolist() == [False, False, True, True, False, True]
    assert [row.rollout_id for row in step.rows] == ["r0", "r0", "r1"]
    assert all(row.valid for row in step.rows)
    assert (first.token_ids.dtype, first.logprobs.dtype) == (np.uint32, np.float32)


@pytest.mark.bugcase("B19")
@pytest.mark.requirement("TRN-3")
def test_advantages_are_over_rollouts_and_not_over_rows() -> None:
    step = gather_step([make_batch(1, fork("r0", 1.0), linear("r1", 0.0))], RAW)
    assert [row.advantage for row in step.rows] == [1.0, 1.0, -1.0]
    assert step.reward_mean == 0.5


def test_a_masked_rollout_neither_votes_nor_trains() -> None:
    masked = Rollout("r2", 9.0, mask="capture_poisoned", cause="worker_capture_failed/late")
    step = gather_step([make_batch(1, linear("r0", 1.0), linear("r1", 0.0), masked)], RAW)
    assert [row.advantage for row in step.rows] == [1.0, -1.0, 0.0]
    assert [row.valid for row in step.rows] == [True, True, False]
    placeholder = step.rows[2]
    assert (placeholder.rollout_id, placeholder.loss_mask.any()) == ("r2", False)
    assert (step.rollout_count, step.masked_count, step.reward_mean) == (3, 1, 0.5)
    assert step.mask_reasons == {"capture_poisoned:worker_capture_failed/late": 1}


def test_a_masked_rollout_votes_where_that_is_asked_for() -> None:
    include = AdvantageOptions(normalise=False, masked_reward_policy=MaskedRewardPolicy.INCLUDE)
    masked = Rollout("r2", 9.0, mask="pending_call")
    step = gather_step([make_batch(1, linear("r0", 1.0), linear("r1", 0.0), masked)], include)
    assert [row.advantage for row in step.rows] == [-3.5, -5.0, 0.0]
    assert step.reward_mean == pytest.approx(10 / 3)
    assert step.mask_reasons == {"pending_call": 1}


@pytest.mark.bugcase("B19")
@pytest.mark.requirement("TRN-5")
def test_the_ancestor_of_a_fanned_out_rollout_is_in_the_denominator_once() -> None:
    rows = gather_step([make_batch(1, fork("r0", 1.0), linear("r1", 0.0))], RAW).rows
    # The root samples 2 tokens, its children 3 and 1; the linear rollout 3.
    assert plan_step(rows, BatchOptions()).retained_token_count == 2 + 3 + 1 + 3


@pytest.mark.requirement("TRN-3")
def test_padding_has_no_owner_no_vote_and_no_loss() -> None:
    step = gather_step([make_batch(1, linear("r0", 1.0), linear("r1", 0.0), padding=2)], RAW)
    assert [(row.rollout_id, row.valid, row.advantage) for row in step.rows[2:]] == [
        ("", False, 0.0)
    ] * 2
    assert not any(row.loss_mask.any() for row in step.rows[2:])


def test_a_dropped_group_moves_the_cursor_and_votes_nowhere() -> None:
    lost = dropped(5, "no_valid_layout", Rollout("x", 7.0), Rollout("y", 7.0, mask="pending_call"))
    step = gather_step([lost, make_batch(6, linear("r0", 1.0), linear("r1", 0.0))], RAW)
    assert (step.cursor, step.dropped_group_count, len(step.rows)) == (6, 1, 2)
    assert (step.rollout_count, step.masked_count, step.reward_mean) == (4, 1, 0.5)
    last = gather_step([make_batch(6, linear("r0", 1.0)), dropped(7, "lost")], RAW)
    assert last.cursor == 7


def test_the_heuristic_fraction_is_weighed_by_rollouts() -> None:
    large = make_batch(1, *(linear(f"r{n}", 1.0) for n in range(3)), heuristic=1.0)
    small = make_batch(2, linear("s0", 1.0), heuristic=0.0)
    assert gather_step([large, small], RAW).heuristic_fraction == 0.75


def test_groups_are_scored_apart() -> None:
    one = make_batch(1, linear("a0", 1.0), linear("a1", 0.0))
    two = make_batch(2, linear("b0", 9.0), linear("b1", 5.0))
    step = gather_step([one, two], RAW)
    assert [row.advantage for row in step.rows] == [1.0, -1.0, 4.0, -4.0]


Damage = Callable[[group_batch_pb2.GroupBatch], None]


def _slots(batch: group_batch_pb2.GroupBatch) -> None:
    batch.receipts[1].slot = 0


def _no_row(batch: group_batch_pb2.GroupBatch) -> None:
    del batch.rows[2]


def _no_loss_owner(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[0].spans[1].owns_loss = False


def _two_owners(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[1].spans[0].owns_loss = True


def _padding_owns(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[3].spans[0].owns_loss = True


def _padding_with_slot(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[3].slot = 0


def _owner_masked(batch: group_batch_pb2.GroupBatch) -> None:
    batch.receipts[0].masked = True


def _placeholder_of_a_valid_one(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[2].kind = PLACEHOLDER
    for span in batch.rows[2].spans:
        span.owns_loss = False


def _no_slot(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[0].ClearField("slot")


def _slot_beyond(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[0].slot = 2


def _unknown_kind(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[3].kind = group_batch_pb2.ROW_KIND_UNSPECIFIED


def _segment_beyond(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[3].spans[0].segment_index = 99


def _empty_row(batch: group_batch_pb2.GroupBatch) -> None:
    del batch.rows[3].spans[:]


def _length(batch: group_batch_pb2.GroupBatch) -> None:
    batch.segments[1].prev_token_count = 4


def _parent(batch: group_batch_pb2.GroupBatch) -> None:
    batch.segments[1].parent_call_id = "z"


def _foreign_key(batch: group_batch_pb2.GroupBatch) -> None:
    batch.segments[1].capture_key = "r0-a1"


def _unselected(batch: group_batch_pb2.GroupBatch) -> None:
    batch.receipts[0].calls[0].selected = False


def _other_digest(batch: group_batch_pb2.GroupBatch) -> None:
    batch.segments[0].digest = bytes(32)


def _foreign_path(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[2].slot = 0
    batch.rows[0].slot = 1


def _columns(batch: group_batch_pb2.GroupBatch) -> None:
    batch.segments[2].canonical.carry_token_count = 0


DEFECTS: dict[Damage, str] = {
    _slots: "slots",
    _no_row: "no owner",
    _no_loss_owner: "no owner",
    _two_owners: "owns loss",
    _padding_owns: "owns loss",
    _padding_with_slot: "no owner of its kind",
    _owner_masked: "no owner of its kind",
    _placeholder_of_a_valid_one: "no owner of its kind",
    _no_slot: "no owner of its kind",
    _slot_beyond: "slot 2",
    _unknown_kind: "kind 0",
    _segment_beyond: "segment 99",
    _empty_row: "no calls",
    _length: "continues 4 tokens, 3 came",
    _parent: "does not continue a",
    _foreign_key: "does not continue a",
    _unselected: "does not select",
    _other_digest: "does not select",
    _foreign_path: "does not select",
    _columns: "columns of c",
}


@pytest.mark.parametrize("damage", DEFECTS, ids=lambda each: each.__name__.strip("_"))
def test_a_group_that_contradicts_itself_is_refused_whole(damage: Damage) -> None:
    batch = make_batch(1, fork("r0", 1.0), linear("r1", 0.0), padding=1)
    assert [row.kind for row in batch.rows] == [TRAINING] * 3 + [PADDING]
    gather_step([batch], RAW)
    damage(batch)
    with pytest.raises(GroupDefectError, match=DEFECTS[damage]) as refused:
        gather_step([batch], RAW)
    assert refused.value.group_id == "g1"


def test_a_rollout_without_a_row_is_refused() -> None:
    batch = make_batch(1, linear("r0", 1.0), Rollout("r1", 0.0, mask="pending_call"))
    del batch.rows[1]
    with pytest.raises(GroupDefectError, match="has no row"):
        gather_step([batch], RAW)


def test_a_rollout_in_two_groups_is_refused() -> None:
    with pytest.raises(AdvantageRefusedError, match="r0"):
        gather_step([make_batch(1, linear("r0", 1.0)), make_batch(2, linear("r0", 1.0))], RAW)


def test_a_call_sampled_otherwise_stops_training_and_is_named() -> None:
    batch = make_batch(1, linear("r0", 1.0), linear("r1", 0.0))
    sampled = {"sampling": {"temperature": 0.7}, "logprobs_mode": "raw_logprobs"}
    batch.segments[0].extras = encode_extras(sampled)
    with pytest.raises(SamplingMismatchError, match=r"temperature is 0\.7") as caught:
        gather_step([batch], RAW)
    assert caught.value.call_id == batch.segments[0].call_id
