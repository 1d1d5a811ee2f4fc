"""A functional run that shows nothing fails, and says by which figure."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from callforest.trainer.v1 import trainer_service_pb2
from callforest_mesh.demo import run
from callforest_mesh.demo.loop import StepReport
from callforest_mesh.demo.policy import TINY, compacting
from callforest_mesh.demo.run import DemoOptions, DemoSummary, main

pytestmark = pytest.mark.requirement("TRN-9")

STEPS = 10
METRICS = {"rollout_count": 8, "row_count": 16, "token_mult_prob_error": 1.0, "gen_kl_error": 0.0}
REPORT = {
    "reward_mean": 0.5,
    "overhead_ms_p50": 1.0,
    "masked": {},
    "example": "r",
    "context_boundaries": 8,
    "finalized_groups": 2,
    "completed": 8,
    "dropped_prompt_groups": 0,
}


def summary(steps: int = STEPS, **changed: object) -> DemoSummary:
    """Give what a run comes to whose steps are all alike, but for what is named."""
    metrics = {name: changed.get(name, value) for name, value in METRICS.items()}
    fields = {name: changed.get(name, value) for name, value in REPORT.items()}
    report = StepReport(metrics=trainer_service_pb2.StepMetrics(**metrics), **fields)
    return DemoSummary((report,) * steps, 1.0, 1.0)


@pytest.fixture
def options(tmp_path: Path) -> DemoOptions:
    return DemoOptions(policy=compacting(TINY), out=tmp_path)


def ran(monkeypatch: pytest.MonkeyPatch, options: DemoOptions, made: DemoSummary) -> int:
    async def run_demo(_: DemoOptions) -> DemoSummary:
        await asyncio.sleep(0)
        return made

    monkeypatch.setattr(run, "run_demo", run_demo)
    return main(options)


def test_a_run_that_reaches_its_bars_ends_well(
    monkeypatch: pytest.MonkeyPatch, options: DemoOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(monkeypatch, options, summary()) == 0
    assert "MISSED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"context_boundaries": 0}, ["context_boundaries is 0"]),
        ({"row_count": 8}, ["max_rows is 8"]),
        ({"reward_mean": 0.0}, ["max_reward is 0.0"]),
        ({"gen_kl_error": 0.05}, ["max_gen_kl_error is 0.05"]),
        ({"gen_kl_error": math.nan}, ["max_gen_kl_error is nan"]),
        ({"token_mult_prob_error": 1.05}, ["max_tmpe is 1.05"]),
        ({"masked": {"r": "pending_call"}}, ["masked is {'pending_call': 10}"]),
        ({"finalized_groups": 1}, ["finalized_groups is 10"]),
        ({"rollout_count": 7}, ["rollouts is 70"]),
        ({"steps": 9}, ["steps is 9", "rollouts is 72", "finalized_groups is 18"]),
        (
            {"context_boundaries": 0, "row_count": 8},
            ["context_boundaries is 0", "max_rows is 8"],
        ),
    ],
    ids=str,
)
def test_every_bar_that_is_missed_is_named_and_fails_the_run(
    changed: dict[str, object],
    missed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    options: DemoOptions,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ran(monkeypatch, options, summary(**changed)) == 1
    lines = capsys.readouterr().out.splitlines()
    said = [line.removeprefix("MISSED ") for line in lines if line.startswith("MISSED ")]
    assert [one.partition(", must")[0] for one in said] == missed
    assert lines[-1].startswith("RESULT ")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_that_is_no_number_is_not_passed_over(
    place: int, monkeypatch: pytest.MonkeyPatch, options: DemoOptions
) -> None:
    reports = list(summary().reports)
    (odd,) = summary(1, token_mult_prob_error=math.nan).reports
    reports[place] = odd
    made = DemoSummary(tuple(reports), 1.0, 1.0)
    assert math.isnan(float(str(made.result()["max_tmpe"])))
    assert ran(monkeypatch, options, made) == 1


def test_a_run_of_the_harness_that_shows_everything_has_no_bars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = DemoOptions(policy=TINY, out=tmp_path)
    assert ran(monkeypatch, options, summary(context_boundaries=0, row_count=8)) == 0
