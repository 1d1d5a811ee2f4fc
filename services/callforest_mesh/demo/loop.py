"""The demo's loop: groups of rollouts, then the optimizer step they make, again and again.

It is a rollout owner like any other: it speaks to the mesh through the typed clients, and to the
model through the harness alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import openai

from callforest.capture.v1 import attempt_pb2
from callforest.trainer.v1 import trainer_service_pb2
from callforest_client.failure_budget import BudgetOptions, FailureBudget
from callforest_client.group_runner import GroupRunner, RolloutLostError, RunnerOptions, StepEnd
from callforest_client.rollout import OpenRollout, Outcome, RolloutOwner
from callforest_client.trainer import TrainerClient
from callforest_mesh.demo.harness import CountingHarness, Harness, Played

_LOG = logging.getLogger("callforest")
_NO_RESPONSE = "harness-failed"
_BROKEN = (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError)
"""What keeps a harness from its result without saying anything of the rollout."""


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How much the demo plays.

    Attributes:
        run: names this run; begins every id.
        model: the served model's name.
        steps: optimizer steps.
        groups_per_step: groups of one step.
        rollouts_per_group: logical rollouts of one group.
        attempts: tries at a rollout that is lost on the way, in chain mode.
        openings: first user messages; each group of a step takes the next one.
        harness: plays a rollout.
        mode: of the attempts.
        step_timeout_s: how long a step may take, from its last group to its metrics.
        rollout_timeout_s: how long the rollouts of a group may be played.
        budget: what a run may lose; by default half of a step's groups, not two in a row.
    """

    run: str
    model: str
    steps: int = 10
    groups_per_step: int = 4
    rollouts_per_group: int = 8
    attempts: int = 3
    openings: tuple[str, ...] = ("Start at one.", "Begin: 1 2 3", "Your number?", "Go 0 1 2")
    harness: Harness = field(default_factory=CountingHarness)
    mode: attempt_pb2.CaptureMode.ValueType = attempt_pb2.CAPTURE_MODE_CHAIN
    step_timeout_s: float = 120.0
    rollout_timeout_s: float = 600.0
    budget: BudgetOptions = field(
        default_factory=lambda: BudgetOptions(
            max_consecutive_dropped_groups=1, min_step_batch_fraction=0.5
        )
    )

    @property
    def runner(self) -> RunnerOptions:
        """How its groups are run."""
        in_forest = self.mode == attempt_pb2.CAPTURE_MODE_FOREST
        return RunnerOptions(
            self.rollouts_per_group,
            mode=self.mode,
            attempts=1 if in_forest else self.attempts,
            rollout_timeout_s=self.rollout_timeout_s,
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step shows.

    Attributes:
        metrics: the trainer's.
        reward_mean: over all rollouts of the step, masked ones too: what the harness saw.
        overhead_ms_p50: the median of what capture added to a call.
        masked: reasons of masked rollouts, with the rollout's id.
        example: the capture key of one rollout of the step.
        context_boundaries: how often its harnesses rewrote their context.
        finalized_groups: its groups that were published, not dropped.
        completed: its rollouts that train.
        dropped_prompt_groups: its groups in whose place nothing trains.
    """

    metrics: trainer_service_pb2.StepMetrics
    reward_mean: float
    overhead_ms_p50: float
    masked: dict[str, str]
    example: str
    context_boundaries: int
    finalized_groups: int
    completed: int
    dropped_prompt_groups: int


class DemoFailedError(Exception):
    """The loop cannot go on; the message says why and what to look at."""


class DemoLoop:
    """Plays and trains.

    Args:
        options: how much.
        owner: opens and finishes rollouts.
        trainer: says when a step is done.
    """

    def __init__(self, options: LoopOptions, owner: RolloutOwner, trainer: TrainerClient) -> None:
        self._options = options
        self._runner = GroupRunner(owner, FailureBudget(options.budget), options.runner)
        self._trainer = trainer
        self._played: dict[str, Played] = {}
        # One client, so that all rollouts share its connections; the URL names the rollout.
        self._openai = openai.AsyncOpenAI(api_key="none", base_url="http://unused.invalid")

    async def run(self) -> AsyncIterator[StepReport]:
        """Give a report after each step.

        Raises:
            DemoFailedError: training stopped, or a step did not come in time.
            RunStoppedError: more was lost than the budget allows.
        """
        async with self._openai:
            async for report in self._run():
                yield report

    async def _run(self) -> AsyncIterator[StepReport]:
        watch = self._trainer.watch_metrics()
        for step in range(1, self._options.steps + 1):
            self._played.clear()
            end = await self._runner.run_step(self._names(step), self._play)
            try:
                async with asyncio.timeout(self._options.step_timeout_s):
                    metrics = await anext(watch)
            except TimeoutError:
                status = await self._trainer.status()
                raise DemoFailedError(
                    f"step {step} did not end in {self._options.step_timeout_s:.0f} s; the trainer"
                    f" says: {status.failure or 'nothing'} ({status.waiting_group_count} groups)"
                ) from None
            yield _report(metrics, end, list(self._played.values()))

    def _names(self, step: int) -> list[str]:
        return [
            f"{self._options.run}-s{step}-g{number}"
            for number in range(self._options.groups_per_step)
        ]

    async def _play(self, group_id: str, rollout: OpenRollout) -> Outcome:
        """Play one rollout; one whose harness was refused is masked, one that broke is lost."""
        number = int(group_id.partition("~")[0].rpartition("-g")[2])
        opening = self._options.openings[number % len(self._options.openings)]
        client = self._openai.with_options(base_url=rollout.base_url)
        try:
            played = await self._options.harness.play(client, self._options.model, opening)
        except _BROKEN as error:
            raise RolloutLostError(f"{type(error).__name__}: {error}") from error
        except openai.OpenAIError as error:
            _LOG.warning("rollout %s: the harness failed: %s", rollout.capture_key, error)
            # A declared id that names no call masks in both modes; nothing is guessed.
            return Outcome(
                reward=0.0, declared_response_id=_NO_RESPONSE, mask_refused_selection=True
            )
        self._played[rollout.rollout_id] = played
        return Outcome(
            reward=played.reward,
            declared_response_id=played.response_id or None,
            result=played.result,
            mask_refused_selection=True,  # one odd rollout must not stop the others
        )


def _report(
    metrics: trainer_service_pb2.StepMetrics, end: StepEnd, played: list[Played]
) -> StepReport:
    receipts = [receipt for group in end.groups for receipt in group.receipts]
    overheads = sorted(value for one in played for value in one.overhead_ms)
    masked = {
        one.rollout_id: "/".join(filter(None, (one.mask_reason, one.mask_cause)))
        for one in receipts
        if one.masked
    }
    return StepReport(
        metrics=metrics,
        reward_mean=sum(one.reward for one in receipts) / len(receipts),
        overhead_ms_p50=overheads[len(overheads) // 2] if overheads else float("nan"),
        masked=masked,
        example=receipts[0].capture_key,
        context_boundaries=sum(one.context_boundaries for one in played),
        finalized_groups=sum(not group.drop_reason for group in end.groups),
        completed=end.completed_count,
        dropped_prompt_groups=end.dropped_prompt_groups,
    )


def reward_gain(rewards: list[float]) -> float:
    """Give the mean of the last fifth of the steps minus the mean of the first fifth."""
    fifth = max(1, len(rewards) // 5)
    return sum(rewards[-fifth:]) / fifth - sum(rewards[:fifth]) / fifth


def count_masked(reports: list[StepReport]) -> dict[str, int]:
    """Count the masked rollouts of a run by reason."""
    return dict(Counter(reason for report in reports for reason in report.masked.values()))
