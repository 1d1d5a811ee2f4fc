import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_mesh.trainer.core import (
    AdvantageOptions,
    AdvantageRefusedError,
    Baseline,
    GroupOutcome,
    MaskedRewardPolicy,
    RolloutOutcome,
    advantages_by_rollout,
    group_advantages,
)

MEAN = AdvantageOptions(baseline=Baseline.MEAN)
RAW = AdvantageOptions(normalise=False)
HALF_ROOT = math.sqrt(1 / 3)


def score(
    rewards: list[float], options: AdvantageOptions | None = None, valid: list[bool] | None = None
) -> list[float]:
    flags = np.ones(len(rewards), bool) if valid is None else np.array(valid)
    return list(map(float, group_advantages(np.array(rewards, np.float64), flags, options)))


@pytest.mark.requirement("TRN-3")
def test_the_lone_winner_sees_no_spread_and_is_not_divided() -> None:
    loser = -(1 / 3) / (HALF_ROOT + 1e-6)
    assert score([1, 0, 0, 0]) == pytest.approx([1.0, loser, loser, loser], abs=1e-12)
    assert loser == pytest.approx(-0.57735, abs=1e-5)


def test_the_mean_variant_counts_the_rollout_itself() -> None:
    assert score([1, 0, 0, 0], MEAN) == pytest.approx(
        [0.75 / (0.5 + 1e-6)] + [-0.25 / (0.5 + 1e-6)] * 3, abs=1e-12
    )


def test_two_rollouts_are_compared_without_scaling() -> None:
    assert score([1, 0]) == [1.0, -1.0]


def test_two_winners_of_four() -> None:
    assert score([1, 1, 0, 0]) == pytest.approx([1.1547, 1.1547, -1.1547, -1.1547], abs=1e-4)
    assert score([1, 1, 0, 0], MEAN) == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-4)


@pytest.mark.requirement("TRN-3", "TRN-4")
def test_a_masked_rollout_does_not_vote() -> None:
    excluded = score([1, 1, 0, 0], valid=[True, True, True, False])
    assert excluded == pytest.approx([0.7071, 0.7071, -1.0, 0.0], abs=1e-4)


@pytest.mark.requirement("TRN-4")
def test_a_masked_rollout_votes_once_when_included_and_still_trains_nothing() -> None:
    include = AdvantageOptions(masked_reward_policy=MaskedRewardPolicy.INCLUDE)
    included = score([1, 1, 0, 0], include, [True, True, True, False])
    assert included == pytest.approx([1.1547, 1.1547, -1.1547, 0.0], abs=1e-4)


def test_one_voter_has_nothing_to_compare_with() -> None:
    assert score([5.0]) == [0.0]
    assert score([5.0, 3.0], valid=[True, False]) == [0.0, 0.0]
    assert score([5.0, 3.0], valid=[False, False]) == [0.0, 0.0]


def test_equal_rewards_have_no_spread_whatever_their_rounding() -> None:
    # A residue of 1e-17 in the spread would divide 0.4 by 1e-6.
    winner, *losers = score([0.5] + [0.1] * 7)
    assert winner == pytest.approx(0.4)
    assert all(abs(loser) < 1 for loser in losers)
    assert score([0.1] * 8) == [0.0] * 8


@pytest.mark.requirement("TRN-3")
def test_the_clip_never_moves_a_masked_rollout() -> None:
    clipped = AdvantageOptions(clip_low=0.25, clip_high=0.5)
    assert score([1, 0, 0, 0], clipped, [True, True, True, False]) == [0.5, 0.25, 0.25, 0.0]


def test_an_empty_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="interval"):
        AdvantageOptions(clip_low=1.0, clip_high=0.0)
    with pytest.raises(ValueError, match="interval"):
        AdvantageOptions(clip_low=math.nan)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_unless_it_does_not_vote(reward: float) -> None:
    with pytest.raises(AdvantageRefusedError):
        score([reward, 0.0, 1.0])
    assert score([reward, 0.0, 1.0], valid=[False, True, True]) == [0.0, -1.0, 1.0]


@given(
    st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=3, max_size=16),
    st.sampled_from(Baseline),
)
def test_agrees_with_the_published_formula(rewards: list[float], baseline: Baseline) -> None:
    values = np.round(np.array(rewards), 3)
    options = AdvantageOptions(baseline=baseline)
    scored = group_advantages(values, np.ones(len(values), bool), options)
    for i, reward in enumerate(values):
        leaves_out = baseline is Baseline.LEAVE_ONE_OUT
        voters = np.delete(values, i) if leaves_out else values
        count = len(values) - 1 if leaves_out else len(values)
        mean = voters.sum() / count
        variance = ((voters**2).sum() / count - mean**2) * count / (count - 1)
        spread = math.sqrt(variance) if variance > 1e-9 else 0.0
        expected = (reward - mean) / (spread + 1e-6) if spread else reward - mean
        assert scored[i] == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_leave_one_out_compares_with_the_others_and_the_mean_with_all() -> None:
    group = GroupOutcome("g", 2, (RolloutOutcome("r0", 1.0), RolloutOutcome("r1", 0.0)))
    assert advantages_by_rollout([group], RAW) == {"r0": 1.0, "r1": -1.0}
    mean = advantages_by_rollout([group], AdvantageOptions(Baseline.MEAN, normalise=False))
    assert mean == {"r0": 0.5, "r1": -0.5}


def test_groups_do_not_mix() -> None:
    groups = [
        GroupOutcome("a", 2, (RolloutOutcome("a0", 1.0), RolloutOutcome("a1", 0.0))),
        GroupOutcome("b", 2, (RolloutOutcome("b0", 9.0), RolloutOutcome("b1", 9.0))),
    ]
    assert advantages_by_rollout(groups) == {"a0": 1.0, "a1": -1.0, "b0": 0.0, "b1": 0.0}


def test_a_group_must_be_whole_and_a_rollout_come_once() -> None:
    with pytest.raises(AdvantageRefusedError) as refusal:
        advantages_by_rollout([GroupOutcome("g", 3, (RolloutOutcome("r", 1.0),) * 2)])
    assert refusal.value.group_id == "g"
    with pytest.raises(AdvantageRefusedError) as refusal:
        advantages_by_rollout([GroupOutcome("g", 2, (RolloutOutcome("r", 1.0),) * 2)])
    assert refusal.value.rollout_id == "r"
