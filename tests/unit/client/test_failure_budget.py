"""What a run may lose, and with which reason and first error it stops (FIN-7)."""

from __future__ import annotations

import pytest

from callforest.capture.v1 import receipt_pb2
from callforest_client.failure_budget import (
    BudgetOptions,
    FailureBudget,
    Loss,
    RunStoppedError,
    StopReason,
)
from callforest_client.group_runner import RunnerOptions
from callforest_core.forest.step_floor import step_floor
from tests.unit.ledger.forest_calls import FOREST

GENEROUS = BudgetOptions(
    max_consecutive_dropped_groups=9, min_step_batch_fraction=0.01, max_masked_fraction=None
)


def receipts(group: str, *reasons: str, cause: str = "") -> list[receipt_pb2.Receipt]:
    """Receipts of a group by mask reason, "" for one that trains."""
    return [
        receipt_pb2.Receipt(
            group_id=group,
            rollout_id=f"{group}-r{slot}",
            masked=bool(reason),
            mask_reason=reason,
            mask_cause=cause if reason else "",
            mask_detail=f"detail {slot}" if reason else "",
        )
        for slot, reason in enumerate(reasons)
    ]


def lost(group: str, cause: str = "transport_failure: gone") -> Loss:
    return Loss(group, f"{group}-r0", cause)


@pytest.mark.requirement("FIN-7")
@pytest.mark.parametrize(
    ("groups", "fraction", "floor"),
    [(1, 1.0, 1), (4, 1.0, 4), (9, 0.9, 9), (10, 0.9, 9), (10, 0.7, 7), (4, 0.5, 2), (3, 0.01, 1)],
)
def test_the_floor_is_the_fraction_rounded_up(groups: int, fraction: float, floor: int) -> None:
    assert step_floor(groups, fraction) == floor


@pytest.mark.requirement("FIN-7")
def test_by_default_no_group_may_be_lost() -> None:
    step = FailureBudget().begin_step(4)
    step.kept(receipts("g0", "", ""))
    with pytest.raises(RunStoppedError) as caught:
        step.dropped(lost("g1"))
    assert caught.value.reason is StopReason.BELOW_STEP_FLOOR
    assert str(caught.value) == (
        "below_step_floor: a step of 4 groups must keep 4, 3 are left;"
        " the first to fail was g1-r0: transport_failure: gone"
    )


@pytest.mark.requirement("FIN-7")
def test_a_step_without_a_group_stops_whatever_the_floor() -> None:
    step = FailureBudget(GENEROUS).begin_step(2)
    step.dropped(lost("g0", "the first"))
    with pytest.raises(RunStoppedError) as caught:
        step.dropped(lost("g1", "the second"))
    assert caught.value.reason is StopReason.NO_GROUP_LEFT
    assert caught.value.first == lost("g0", "the first")


@pytest.mark.requirement("FIN-7")
def test_a_kept_group_ends_a_row_of_dropped_ones_and_not_the_run_s_count() -> None:
    options = BudgetOptions(
        max_consecutive_dropped_groups=1, max_dropped_groups=3, min_step_batch_fraction=0.25
    )
    budget = FailureBudget(options)
    for number in range(3):
        step = budget.begin_step(2)
        step.dropped(lost(f"a{number}"))
        step.kept(receipts(f"b{number}", ""))
        assert step.dropped_prompt_groups == 1
    assert budget.dropped_groups == 3
    with pytest.raises(RunStoppedError) as caught:
        budget.begin_step(2).dropped(lost("a4"))
    assert caught.value.reason is StopReason.DROP_BUDGET_SPENT
    assert "4 groups were dropped, 3 may" in str(caught.value)
    row = FailureBudget(options).begin_step(4)
    row.dropped(lost("a0"))
    with pytest.raises(RunStoppedError, match="2 groups were dropped in a row, 1 may be"):
        row.dropped(lost("a1"))


@pytest.mark.requirement("FIN-7")
@pytest.mark.bugcase("B23")
def test_a_group_of_masked_rollouts_stops_the_run_with_the_first_underlying_error() -> None:
    step = FailureBudget().begin_step(4)
    cause = "worker_capture_failed/stage_timeout"
    with pytest.raises(RunStoppedError) as caught:
        step.kept(receipts("g0", "", *["capture_poisoned"] * 3, cause=cause))
    assert caught.value.reason is StopReason.TOO_MANY_MASKED
    assert str(caught.value) == (
        "too_many_masked: 3 of the last 4 rollouts are masked, 50% may be; the first to fail was"
        " g0-r1: capture_poisoned/worker_capture_failed/stage_timeout (detail 1)"
    )


@pytest.mark.bugcase("B23")
def test_masks_are_measured_over_the_last_groups_and_the_environment_s_do_not_count() -> None:
    budget = FailureBudget(BudgetOptions(max_masked_fraction=0.5, masked_window_groups=2))
    step = budget.begin_step(9)
    step.kept(receipts("g0", "", ""))
    step.kept(receipts("g1", "pending_call", "pending_call"))
    with pytest.raises(RunStoppedError, match="3 of the last 4"):
        step.kept(receipts("g2", "pending_call", ""))
    flagged = FailureBudget().begin_step(1)
    flagged.kept(receipts("g0", *["environment_masked"] * 4))
    anything = FailureBudget(GENEROUS).begin_step(1)
    anything.kept(receipts("g0", *["capture_poisoned"] * 4))


@pytest.mark.bugcase("B23")
def test_the_first_error_is_forgotten_once_all_is_well() -> None:
    options = BudgetOptions(masked_window_groups=1, min_step_batch_fraction=1.0)
    step = FailureBudget(options).begin_step(5)
    step.kept(receipts("g0", "pending_call", ""))
    step.kept(receipts("g1", "", ""))
    with pytest.raises(RunStoppedError) as caught:
        step.dropped(lost("g2"))
    assert caught.value.first == lost("g2")


@pytest.mark.requirement("FIN-7")
@pytest.mark.parametrize(
    "wrong",
    [
        {"min_step_batch_fraction": 0},
        {"min_step_batch_fraction": 1.1},
        {"max_masked_fraction": -0.1},
        {"max_consecutive_dropped_groups": -1},
        {"max_dropped_groups": -1},
        {"masked_window_groups": 0},
    ],
)
def test_a_budget_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "drop" not in str(wrong) else "drop"):
        BudgetOptions(**wrong)


@pytest.mark.requirement("FIN-7")
def test_forest_mode_never_runs_a_failed_rollout_again() -> None:
    with pytest.raises(ValueError, match="attempts must be 1 in forest mode"):
        RunnerOptions(4, mode=FOREST, attempts=2)
