"""Which groups make a step when some were dropped (FIN-7)."""

from __future__ import annotations

import pytest

from callforest_mesh.trainer.step_groups import StepGroups, StepRefusal, StepRefusedError
from tests.unit.trainer.batches import dropped, linear, make_batch

pytestmark = pytest.mark.requirement("FIN-7")


def kept(cursor: int):
    return make_batch(cursor, linear(f"r{cursor}", 1.0))


def test_without_a_floor_a_dropped_group_fills_no_step() -> None:
    step = StepGroups(2, None)
    for batch in (dropped(1, "lost"), kept(2), dropped(3, "lost")):
        step.add(batch)
        assert not step.is_full
    step.add(kept(4))
    assert step.is_full
    assert [batch.cursor for batch in step.batches] == [1, 2, 3, 4]


def test_with_a_floor_a_dropped_group_takes_a_place() -> None:
    step = StepGroups(3, 0.6)
    step.add(dropped(1, "rollout_timeout"))
    step.add(kept(2))
    assert not step.is_full
    step.add(kept(3))
    assert step.is_full


def test_a_group_that_is_replaced_takes_none() -> None:
    step = StepGroups(2, 1.0)
    replaced = dropped(1, "below_min_valid_fraction")
    replaced.replacement_follows = True
    for batch in (replaced, kept(2)):
        step.add(batch)
        assert not step.is_full
    step.add(kept(3))
    assert step.is_full
    step = StepGroups(2, 0.5)
    for batch in (replaced, dropped(2, "replacement_budget_spent"), kept(3)):
        step.add(batch)
    assert step.is_full, "what stands for the other counts once"


@pytest.mark.parametrize(
    ("fraction", "count", "refusal"),
    [
        (1.0, 1, StepRefusal.BELOW_FLOOR),
        (0.5, 3, StepRefusal.BELOW_FLOOR),
        (0.01, 4, StepRefusal.NO_GROUP_LEFT),
    ],
)
def test_below_the_floor_no_step_is_made(fraction: float, count: int, refusal: StepRefusal) -> None:
    step = StepGroups(4, fraction)
    for cursor in range(1, count):
        step.add(dropped(cursor, "lost"))
    with pytest.raises(StepRefusedError) as caught:
        step.add(dropped(count, "rollout_timeout"))
    assert caught.value.refusal is refusal
    assert f"g{count}: rollout_timeout" in str(caught.value)
