"""Runs prompt groups within a budget: the rollout owner's whole side of a step (FIN-7).

A timeout or a transport failure that keeps a rollout from its result drops its whole group: the
others of it are ended, all are finalized masked so that what they staged is cleaned, and the
group's position says that it was dropped. What contradicts the record raises, cancellation
propagates, and a group is never played twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from callforest.capture.v1 import attempt_pb2, receipt_pb2
from callforest_client.errors import UnavailableError
from callforest_client.failure_budget import FailureBudget, Loss, StepBudget, loss_of
from callforest_client.rollout import OpenRollout, Outcome, RolloutOwner

_LOG = logging.getLogger("callforest")
_T = TypeVar("_T")

Play: TypeAlias = Callable[[str, OpenRollout], Awaitable[Outcome]]
"""(group id, rollout) -> how it ended. Raises RolloutLostError when there is no result."""

ROLLOUT_TIMEOUT: Final = "rollout_timeout"
"""Why a group was dropped: its rollouts took too long."""
TRANSPORT_FAILURE: Final = "transport_failure"
"""Why a group was dropped: a rollout has no result since something was not reached."""
REPLACEMENT_BUDGET_SPENT: Final = "replacement_budget_spent"
"""Why a group was dropped: it stands for one that should have been played in another's place."""
_GIVEN_UP: Final = Outcome(reward=0.0, environment_masked=True, mask_refused_selection=True)


class RolloutLostError(Exception):
    """A timeout or a transport failure kept a rollout from its result."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How groups are run.

    Attributes:
        rollouts_per_group: logical rollouts of a group.
        mode: of their attempts.
        attempts: tries at a rollout that is lost, in chain mode; forest mode has one, since what
            selects its calls is gone with its requests.
        rollout_timeout_s: how long the rollouts of a group may be played, all together.
        give_up_settle_s: how long the calls of a dropped group may take to settle.
    """

    rollouts_per_group: int
    mode: attempt_pb2.CaptureMode.ValueType = attempt_pb2.CAPTURE_MODE_UNSPECIFIED
    attempts: int = 1
    rollout_timeout_s: float = 3600.0
    give_up_settle_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: the message names the option.
        """
        if self.rollouts_per_group < 1 or self.attempts < 1:
            raise ValueError("rollouts_per_group and attempts must be at least 1")
        if self.mode == attempt_pb2.CAPTURE_MODE_FOREST and self.attempts != 1:
            raise ValueError("attempts must be 1 in forest mode: a failed group is not run again")
        if self.rollout_timeout_s <= 0 or self.give_up_settle_s < 0:
            raise ValueError("rollout_timeout_s must be above 0, give_up_settle_s not negative")


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How a group ended.

    Attributes:
        group_id: the group; that of the last replacement when it was replaced.
        receipts: of its rollouts in slot order; those of a failed group as far as there are any.
        drop_reason: why nothing of it trains; "" when it was published.
    """

    group_id: str
    receipts: tuple[receipt_pb2.Receipt, ...]
    drop_reason: str = ""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """How the groups of a step ended.

    Attributes:
        groups: in the order in which they were asked for.
        dropped_prompt_groups: those in whose place nothing trains.
    """

    groups: tuple[GroupEnd, ...]
    dropped_prompt_groups: int

    @property
    def completed_count(self) -> int:
        """Rollouts that train: those of a dropped group never do, nor do masked ones."""
        kept = [one for one in self.groups if not one.drop_reason]
        return sum(not receipt.masked for group in kept for receipt in group.receipts)


@dataclass
class _Group:
    """A group that is played.

    Attributes:
        group_id: its name.
        deadline: until when its rollouts may be played, in the loop's time.
        opened: the last attempt of each slot.
        outcomes: how it ended, of each slot that has.
        receipts: of each slot that is finalized.
        lost: the first slot whose rollout was lost.
    """

    group_id: str
    deadline: float
    opened: dict[int, OpenRollout] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    receipts: dict[int, receipt_pb2.Receipt] = field(default_factory=dict)
    lost: int | None = None

    def in_order(self) -> tuple[receipt_pb2.Receipt, ...]:
        """Give the receipts in slot order."""
        return tuple(self.receipts[slot] for slot in sorted(self.receipts))


class GroupRunner:
    """Runs groups.

    Args:
        owner: opens, finishes and publishes; its replacement budget is the runner's.
        budget: what may be lost.
        options: how.
    """

    def __init__(self, owner: RolloutOwner, budget: FailureBudget, options: RunnerOptions) -> None:
        self._owner = owner
        self._budget = budget
        self._options = options

    async def run_step(self, group_ids: Sequence[str], play: Play) -> StepEnd:
        """Run the groups of a step side by side.

        Args:
            group_ids: names of groups that were never used.
            play: plays one rollout.

        Raises:
            RunStoppedError: more was lost than the budget allows.
            RefusedError: the mesh refused: evidence contradicts the record, or worse.
        """
        step = self._budget.begin_step(len(group_ids))
        groups = await _together(self._run(step, group_id, play) for group_id in group_ids)
        return StepEnd(tuple(groups), step.dropped_prompt_groups)

    async def _run(self, step: StepBudget, group_id: str, play: Play) -> GroupEnd:
        """Run a group, and others in its place as long as it is to be replaced."""
        number = 0
        while True:  # each turn but the last spends a replacement
            name = f"{group_id}~{number}" if number else group_id
            end, wanted = await self._attempt(step, name, play)
            if not wanted:
                return end
            number += 1

    async def _attempt(self, step: StepBudget, group_id: str, play: Play) -> tuple[GroupEnd, bool]:
        """Run a group once; say whether another is to be run in its place."""
        now = asyncio.get_running_loop().time()
        group = _Group(group_id, now + self._options.rollout_timeout_s)
        slots = range(self._options.rollouts_per_group)
        try:
            await _together(self._rollout(group, slot, play) for slot in slots)
        except (RolloutLostError, UnavailableError) as error:
            return await self._drop(step, group, error), False
        receipts = group.in_order()
        published = await self._owner.publish(group_id, len(receipts))
        end = GroupEnd(group_id, receipts, published.drop_reason)
        if not published.drop_reason:
            step.kept(receipts)
            return end, False
        if self._owner.may_replace(group_id, published):
            step.replaced(receipts)
            return end, True
        if published.replacement_wanted:
            # Whoever counts the step's groups learns that none follows.
            reason = REPLACEMENT_BUDGET_SPENT
            await self._owner.abandon(f"{group_id}~none", len(receipts), reason=reason)
        masked = next((one for one in receipts if one.masked), None)
        loss = Loss(group_id, "", published.drop_reason) if masked is None else loss_of(masked)
        _LOG.warning("group %s was dropped: %s: %s", group_id, published.drop_reason, loss)
        step.dropped(loss, receipts)
        return end, False

    async def _rollout(self, group: _Group, slot: int, play: Play) -> None:
        """Play a rollout to its receipt."""
        outcome = await self._played(group, slot, play)
        group.outcomes[slot] = outcome
        group.receipts[slot] = await self._owner.finish(
            group.opened[slot], outcome, group_id=group.group_id, slot=slot
        )

    async def _played(self, group: _Group, slot: int, play: Play) -> Outcome:
        """Play a rollout; in chain mode again, as a new attempt, while tries are left.

        Raises:
            RolloutLostError: it has no result.
        """
        loop = asyncio.get_running_loop()
        for attempt in range(1, self._options.attempts + 1):
            rollout_id = f"{group.group_id}-r{slot}"
            rollout = await self._owner.open(rollout_id, mode=self._options.mode)
            group.opened[slot] = rollout
            try:
                async with asyncio.timeout_at(group.deadline):
                    return await play(group.group_id, rollout)
            except (RolloutLostError, UnavailableError, ConnectionError, TimeoutError) as error:
                _LOG.warning("rollout %s was lost: %s", rollout.capture_key, _told(error))
                if attempt == self._options.attempts or loop.time() >= group.deadline:
                    group.lost = slot if group.lost is None else group.lost
                    raise RolloutLostError(_told(error)) from error
        raise AssertionError("the last attempt returns or raises")

    async def _drop(self, step: StepBudget, group: _Group, error: Exception) -> GroupEnd:
        """Drop a group of which a rollout was lost.

        What was played is finalized all the same, with what it came to where that is known: only
        what a receipt names is cleaned.
        """
        timed_out = isinstance(error.__cause__, TimeoutError)
        reason = ROLLOUT_TIMEOUT if timed_out else TRANSPORT_FAILURE
        for slot, rollout in group.opened.items():
            if slot not in group.receipts:
                group.receipts[slot] = await self._owner.finish(
                    rollout,
                    group.outcomes.get(slot, _GIVEN_UP),
                    group_id=group.group_id,
                    slot=slot,
                    settle_wait_s=self._options.give_up_settle_s,
                )
        await self._owner.abandon(group.group_id, self._options.rollouts_per_group, reason=reason)
        rollout_id = "" if group.lost is None else f"{group.group_id}-r{group.lost}"
        loss = Loss(group.group_id, rollout_id, f"{reason}: {error}")
        _LOG.warning("group %s was dropped: %s", group.group_id, loss)
        step.dropped(loss)
        return GroupEnd(group.group_id, group.in_order(), reason)


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _together(coroutines: Iterable[Coroutine[object, object, _T]]) -> list[_T]:
    """Await all; when one fails, end the others first and raise what came first."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
