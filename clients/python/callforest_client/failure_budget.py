"""How much may be lost before a run must stop (FIN-7). Pure: no clock, no network.

A prompt group is lost when a timeout or a transport failure keeps one of its rollouts from a
result, or when nothing of it can train. A masked rollout is no lost group, but a run whose
rollouts are masked one after the other trains nothing and must not look healthy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from callforest.capture.v1 import receipt_pb2
from callforest_core.forest.step_floor import check_fraction, step_floor

_ENVIRONMENT_MASKED: Final = "environment_masked"


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """What a run may lose. By default no group, and half of the rollouts to masks.

    Attributes:
        max_consecutive_dropped_groups: groups dropped in a row; a kept one ends the row.
        max_dropped_groups: groups dropped in the whole run; None for no limit of its own.
        min_step_batch_fraction: the part of a step's groups that must be kept.
        max_masked_fraction: the part of rollouts that may be masked, over the last groups; what
            the environment masks does not count. None for no limit.
        masked_window_groups: over how many groups that is measured; fewer at the beginning.
    """

    max_consecutive_dropped_groups: int = 0
    max_dropped_groups: int | None = None
    min_step_batch_fraction: float = 1.0
    max_masked_fraction: float | None = 0.5
    masked_window_groups: int = 4

    def __post_init__(self) -> None:
        """Refuse values out of their range.

        Raises:
            ValueError: the message names the option.
        """
        check_fraction("min_step_batch_fraction", self.min_step_batch_fraction)
        most = self.max_masked_fraction
        if most is not None and not 0 <= most <= 1:
            raise ValueError(f"max_masked_fraction must be 0 to 1, not {most}")
        if self.max_consecutive_dropped_groups < 0 or (self.max_dropped_groups or 0) < 0:
            raise ValueError("drop budgets must not be negative")
        if self.masked_window_groups < 1:
            raise ValueError("masked_window_groups must be at least 1")


class StopReason(StrEnum):
    """Why a run stopped."""

    TOO_MANY_MASKED = "too_many_masked"
    NO_GROUP_LEFT = "no_group_left"
    BELOW_STEP_FLOOR = "below_step_floor"
    DROP_BUDGET_SPENT = "drop_budget_spent"


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss and its cause.

    Attributes:
        group_id: the group.
        rollout_id: the rollout that failed or was masked first; "" when it is not one rollout.
        cause: what happened, the underlying error behind what it led to.
    """

    group_id: str
    rollout_id: str
    cause: str

    def __str__(self) -> str:
        """Give the loss as a person reads it."""
        return f"{self.rollout_id or self.group_id}: {self.cause}"


class RunStoppedError(Exception):
    """More was lost than the budget allows; nothing more is to be played or trained.

    Attributes:
        reason: why.
        first: the first loss since all was well.
    """

    def __init__(self, reason: StopReason, detail: str, first: Loss) -> None:
        super().__init__(f"{reason}: {detail}; the first to fail was {first}")
        self.reason = reason
        self.first = first


class StepBudget:
    """What one step may lose. Made by FailureBudget.

    Args:
        budget: of the run.
        group_count: groups of the step.
    """

    def __init__(self, budget: FailureBudget, group_count: int) -> None:
        self._budget = budget
        self._group_count = group_count
        self.dropped_prompt_groups = 0

    def kept(self, receipts: Sequence[receipt_pb2.Receipt]) -> None:
        """Count a published group.

        Raises:
            RunStoppedError: too many rollouts are masked.
        """
        self._budget.note_kept()
        self._budget.count(receipts)

    def dropped(self, loss: Loss, receipts: Sequence[receipt_pb2.Receipt] = ()) -> None:
        """Count a dropped group in whose place no other is played.

        Args:
            loss: what dropped it.
            receipts: of its rollouts, as far as they were played to their end.

        Raises:
            RunStoppedError: more is lost than the step or the run may lose.
        """
        self.dropped_prompt_groups += 1
        self._budget.note_dropped(loss)
        self._budget.count(receipts)
        left = self._group_count - self.dropped_prompt_groups
        floor = step_floor(self._group_count, self._budget.options.min_step_batch_fraction)
        if left < floor:
            reason = StopReason.BELOW_STEP_FLOOR if left else StopReason.NO_GROUP_LEFT
            detail = f"a step of {self._group_count} groups must keep {floor}, {left} are left"
            raise self._budget.stopped(reason, detail)
        self._budget.check_drops()

    def replaced(self, receipts: Sequence[receipt_pb2.Receipt]) -> None:
        """Count a dropped group in whose place another is played.

        Raises:
            RunStoppedError: too many rollouts are masked.
        """
        self._budget.count(receipts)


class FailureBudget:
    """What one run has lost and may lose.

    Args:
        options: what it may.
    """

    def __init__(self, options: BudgetOptions | None = None) -> None:
        self.options = options or BudgetOptions()
        self.dropped_groups = 0
        self._consecutive = 0
        self._first: Loss | None = None
        self._window: deque[tuple[int, int]] = deque(maxlen=self.options.masked_window_groups)

    def begin_step(self, group_count: int) -> StepBudget:
        """Begin a step of so many groups."""
        return StepBudget(self, group_count)

    def count(self, receipts: Sequence[receipt_pb2.Receipt]) -> None:
        """Count the masked rollouts of a group.

        Raises:
            RunStoppedError: they are too many.
        """
        if not receipts:
            return
        masked = [one for one in receipts if _is_lost(one)]
        if masked:
            self._first = self._first or loss_of(masked[0])
        self._window.append((len(masked), len(receipts)))
        lost, played = (sum(column) for column in zip(*self._window, strict=True))
        most = self.options.max_masked_fraction
        if most is not None and lost > most * played:
            detail = f"{lost} of the last {played} rollouts are masked, {most:.0%} may be"
            raise self.stopped(StopReason.TOO_MANY_MASKED, detail)
        if not lost and not self._consecutive:
            self._first = None  # all is well

    def note_kept(self) -> None:
        """End a row of dropped groups."""
        self._consecutive = 0

    def note_dropped(self, loss: Loss) -> None:
        """Count a dropped group."""
        self._first = self._first or loss
        self.dropped_groups += 1
        self._consecutive += 1

    def check_drops(self) -> None:
        """Refuse to go on when too many groups were dropped.

        Raises:
            RunStoppedError: DROP_BUDGET_SPENT.
        """
        options = self.options
        if self._consecutive > options.max_consecutive_dropped_groups:
            most = options.max_consecutive_dropped_groups
            detail = f"{self._consecutive} groups were dropped in a row, {most} may be"
            raise self.stopped(StopReason.DROP_BUDGET_SPENT, detail)
        if options.max_dropped_groups is not None and (
            self.dropped_groups > options.max_dropped_groups
        ):
            detail = f"{self.dropped_groups} groups were dropped, {options.max_dropped_groups} may"
            raise self.stopped(StopReason.DROP_BUDGET_SPENT, detail)

    def stopped(self, reason: StopReason, detail: str) -> RunStoppedError:
        """Make the error that stops the run."""
        assert self._first is not None, "something was lost"
        return RunStoppedError(reason, detail, self._first)


def loss_of(receipt: receipt_pb2.Receipt) -> Loss:
    """Say why a rollout was masked, down to the first cause."""
    told = "/".join(filter(None, (receipt.mask_reason, receipt.mask_cause)))
    cause = f"{told} ({receipt.mask_detail})" if receipt.mask_detail else told
    return Loss(receipt.group_id, receipt.rollout_id, cause)


def _is_lost(receipt: receipt_pb2.Receipt) -> bool:
    return receipt.masked and receipt.mask_reason != _ENVIRONMENT_MASKED
