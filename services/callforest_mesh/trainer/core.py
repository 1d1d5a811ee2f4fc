"""Advantages: one number a logical rollout, computed over its whole prompt group.

Pure numpy in float64. Formulae: GRPO with a leave-one-out baseline as NeMo RL computes it; a
rollout votes once, however many rows it was cut into (TRN-3, `masked_reward_policy`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Float64s: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

STD_EPSILON = 1e-6
"""Added to the standard deviation before it divides."""


class AdvantageRefusedError(Exception):
    """The group cannot be scored as given.

    Attributes:
        group_id: the group at fault, "" when the fault is not one group's.
        rollout_id: the rollout at fault, "" when the fault is the whole group's.
    """

    def __init__(self, message: str, *, group_id: str = "", rollout_id: str = "") -> None:
        super().__init__(message)
        self.group_id = group_id
        self.rollout_id = rollout_id


class Baseline(enum.Enum):
    """What a reward is compared with."""

    LEAVE_ONE_OUT = "leave_one_out"
    """The mean (and spread) of the other voters of the group."""
    MEAN = "mean"
    """The mean (and spread) of all voters of the group, the rollout itself included."""


class MaskedRewardPolicy(enum.Enum):
    """Whether the reward of a masked rollout enters the statistics of its group."""

    EXCLUDE = "exclude"
    INCLUDE = "include"


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """How rewards become advantages.

    Attributes:
        baseline: what a reward is compared with.
        normalise: divide by the spread, where there is one.
        masked_reward_policy: whether masked rollouts vote.
        overlong_filtering: exclude every row of a rollout of which a generation was cut at its
            limit of tokens (FOR-6); it then votes like a masked one.
        clip_low: lower bound after normalisation, None for none.
        clip_high: upper bound after normalisation, None for none.
    """

    baseline: Baseline = Baseline.LEAVE_ONE_OUT
    normalise: bool = True
    masked_reward_policy: MaskedRewardPolicy = MaskedRewardPolicy.EXCLUDE
    overlong_filtering: bool = False
    clip_low: float | None = None
    clip_high: float | None = None

    def __post_init__(self) -> None:
        """Refuse an interval that is empty or not a number.

        Raises:
            ValueError: a bound is NaN, or the low one lies above the high one.
        """
        low = -np.inf if self.clip_low is None else self.clip_low
        high = np.inf if self.clip_high is None else self.clip_high
        if not low <= high:
            raise ValueError(f"empty advantage interval [{self.clip_low}, {self.clip_high}]")


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """What one logical rollout earned.

    Attributes:
        rollout_id: the logical owner.
        reward: its one reward, whatever the number of its rows.
        valid: False for a masked owner: it trains nothing and its advantage is 0.
    """

    rollout_id: str
    reward: float
    valid: bool = True


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """A whole prompt group.

    Attributes:
        group_id: names the group.
        rollout_count: how many logical rollouts the group has; all must be here.
        rollouts: each logical rollout once.
    """

    group_id: str
    rollout_count: int
    rollouts: tuple[RolloutOutcome, ...]


def group_advantages(
    rewards: Float64s, valid: Flags, options: AdvantageOptions | None = None
) -> Float64s:
    """Compute one advantage a rollout of one group.

    With v the voters, b_i the mean of the other voters (leave-one-out) or of all, and s_i their
    unbiased standard deviation: A_i = (r_i - b_i) / (s_i + 1e-6), undivided where s_i is 0 or
    undefined. One voter or none: every advantage is 0. Masked rollouts get 0, after any clip.
    The spread of equal rewards is exactly 0 here, not a rounding residue that would scale the
    odd one out by a million.

    Args:
        rewards: shape [rollouts], finite wherever the rollout votes.
        valid: shape [rollouts].
        options: baseline, normalisation, who votes, clip.

    Returns:
        Shape [rollouts].

    Raises:
        AdvantageRefusedError: shapes differ, or a voter's reward is not finite.
    """
    chosen = options or AdvantageOptions()
    if rewards.shape != valid.shape or rewards.ndim != 1:
        raise AdvantageRefusedError(f"{rewards.shape} rewards for {valid.shape} masks")
    include = chosen.masked_reward_policy is MaskedRewardPolicy.INCLUDE
    votes = np.ones_like(valid) if include else valid
    if not np.isfinite(rewards[votes]).all():
        raise AdvantageRefusedError("a voting reward is not finite")
    advantages = np.zeros(rewards.shape, dtype=np.float64)
    if int(votes.sum()) <= 1:
        return advantages
    for index in np.flatnonzero(valid):
        peers = votes.copy()
        if chosen.baseline is Baseline.LEAVE_ONE_OUT:
            peers[index] = False
        baseline, spread = _mean_and_spread(rewards[peers])
        advantage = rewards[index] - baseline
        if chosen.normalise and spread > 0:
            advantage /= spread + STD_EPSILON
        advantages[index] = advantage
    clipped = np.clip(advantages, chosen.clip_low, chosen.clip_high)
    return np.where(valid, clipped, 0.0)


def _mean_and_spread(rewards: Float64s) -> tuple[float, float]:
    """Mean and unbiased standard deviation; the latter 0 for one value or equal values."""
    if rewards.min() == rewards.max():
        return float(rewards[0]), 0.0
    return float(rewards.mean()), float(rewards.std(ddof=1))


def advantages_by_rollout(
    groups: Iterable[GroupOutcome], options: AdvantageOptions | None = None
) -> dict[str, float]:
    """Compute the advantage of every logical rollout of whole prompt groups.

    Raises:
        AdvantageRefusedError: a group is not whole, a rollout comes twice, or a voting reward
            is not finite.
    """
    advantages: dict[str, float] = {}
    for group in groups:
        if len(group.rollouts) != group.rollout_count:
            raise AdvantageRefusedError(
                f"group {group.group_id} has {len(group.rollouts)} of {group.rollout_count}"
                " rollouts; advantages need the whole group",
                group_id=group.group_id,
            )
        rewards = np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
        valid = np.array([rollout.valid for rollout in group.rollouts], dtype=np.bool_)
        try:
            scored = group_advantages(rewards, valid, options)
        except AdvantageRefusedError as refusal:
            raise AdvantageRefusedError(
                f"group {group.group_id}: {refusal}", group_id=group.group_id
            ) from refusal
        for rollout, advantage in zip(group.rollouts, scored, strict=True):
            if rollout.rollout_id in advantages:
                raise AdvantageRefusedError(
                    f"rollout {rollout.rollout_id} is scored twice",
                    group_id=group.group_id,
                    rollout_id=rollout.rollout_id,
                )
            advantages[rollout.rollout_id] = float(advantage)
    return advantages
