"""Which groups make a step: kept ones, and with a floor also those that were dropped (FIN-7)."""

from __future__ import annotations

import enum

from callforest.capture.v1 import group_batch_pb2
from callforest_core.forest.step_floor import step_floor


class StepRefusal(enum.Enum):
    """Why no step can be made of the groups that came."""

    BELOW_FLOOR = "below_step_floor"
    NO_GROUP_LEFT = "no_group_left"


class StepRefusedError(Exception):
    """Too many groups of a step were dropped; training must not go on with the rest.

    Attributes:
        refusal: why.
    """

    def __init__(self, refusal: StepRefusal, detail: str) -> None:
        super().__init__(f"{refusal.value}: {detail}")
        self.refusal = refusal


class StepGroups:
    """The groups of one step, as they come.

    Without a floor a dropped group fills no step: its owner publishes others. With one it takes
    the place of a group, unless another follows in its stead.

    Args:
        group_count: groups of a whole step.
        min_fraction: the part of them that must be kept, or None.
    """

    def __init__(self, group_count: int, min_fraction: float | None) -> None:
        self._group_count = group_count
        self._floor = None if min_fraction is None else step_floor(group_count, min_fraction)
        self._kept = 0
        self._lost: list[str] = []
        self.batches: list[group_batch_pb2.GroupBatch] = []

    @property
    def is_full(self) -> bool:
        """Whether the step can be made."""
        return self._kept + len(self._lost) >= self._group_count

    def add(self, batch: group_batch_pb2.GroupBatch) -> None:
        """Take a group, kept or dropped.

        Raises:
            StepRefusedError: what can still come does not reach the floor.
        """
        self.batches.append(batch)
        if not batch.drop_reason:
            self._kept += 1
        elif self._floor is not None and not batch.replacement_follows:
            self._lost.append(f"{batch.group_id}: {batch.drop_reason}")
            self._check(self._floor)

    def _check(self, floor: int) -> None:
        left = self._group_count - len(self._lost)
        if left >= floor:
            return
        refusal = StepRefusal.BELOW_FLOOR if left else StepRefusal.NO_GROUP_LEFT
        raise StepRefusedError(
            refusal,
            f"a step of {self._group_count} groups must keep {floor}; dropped are"
            f" {', '.join(self._lost)}",
        )
