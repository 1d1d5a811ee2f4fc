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

from callforest.capture.v1 import receipt_pb2
from callforest.trainer.v1 import trainer_service_pb2
from callforest_client.rollout import Outcome, RolloutOwner
from callforest_client.trainer import TrainerClient
from callforest_mesh.demo.harness import GameOptions, Played, play

_LOG = logging.getLogger("callforest")


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How much the demo plays.

    Attributes:
        run: names this run; begins every id.
        model: the served model's name.
        steps: optimizer steps.
        groups_per_step: groups of one step.
        rollouts_per_group: logical rollouts of one group.
        attempts: tries at a rollout whose harness fails.
        openings: first user messages; each group of a step takes the next one.
        game: how a rollout is played.
        step_timeout_s: how long a step may take, from its last group to its metrics.
    """

    run: str
    model: str
    steps: int = 10
    groups_per_step: int = 4
    rollouts_per_group: int = 8
    attempts: int = 3
    openings: tuple[str, ...] = ("Start at one.", "Begin: 1 2 3", "Your number?", "Go 0 1 2")
    game: GameOptions = field(default_factory=GameOptions)
    step_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step shows.

    Attributes:
        metrics: the trainer's.
        reward_mean: over all rollouts of the step, masked ones too: what the harness saw.
        overhead_ms_p50: the median of what capture added to a call.
        masked: reasons of masked rollouts, with the rollout's id.
        example: the capture key of one rollout of the step.
    """

    metrics: trainer_service_pb2.StepMetrics
    reward_mean: float
    overhead_ms_p50: float
    masked: dict[str, str]
    example: str


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
        self._owner = owner
        self._trainer = trainer
        # One client, so that all rollouts share its connections; the URL names the rollout.
        self._openai = openai.AsyncOpenAI(api_key="none", base_url="http://unused.invalid")

    async def run(self) -> AsyncIterator[StepReport]:
        """Give a report after each step.

        Raises:
            DemoFailedError: training stopped, or a step did not come in time.
        """
        watch = self._trainer.watch_metrics()
        for step in range(1, self._options.steps + 1):
            finished = await self._play_step(step)
            try:
                async with asyncio.timeout(self._options.step_timeout_s):
                    metrics = await anext(watch)
            except TimeoutError:
                status = await self._trainer.status()
                raise DemoFailedError(
                    f"step {step} did not end in {self._options.step_timeout_s:.0f} s; the trainer"
                    f" says: {status.failure or 'nothing'} ({status.waiting_group_count} groups)"
                ) from None
            yield _report(metrics, finished)

    async def _play_step(self, step: int) -> list[_Finished]:
        groups = await asyncio.gather(
            *(self._play_group(step, number) for number in range(self._options.groups_per_step))
        )
        return [finished for group in groups for finished in group]

    async def _play_group(self, step: int, number: int) -> list[_Finished]:
        group_id = f"{self._options.run}-s{step}-g{number}"
        opening = self._options.openings[number % len(self._options.openings)]
        slots = range(self._options.rollouts_per_group)
        finished = await asyncio.gather(
            *(self._play_rollout(group_id, slot, opening) for slot in slots)
        )
        published = await self._owner.publish(group_id, len(finished))
        if published.drop_reason:
            _LOG.warning("group %s was dropped: %s", group_id, published.drop_reason)
        return list(finished)

    async def _play_rollout(self, group_id: str, slot: int, opening: str) -> _Finished:
        """Play until an attempt goes through; a harness that fails leaves a masked rollout."""
        rollout_id = f"{group_id}-r{slot}"
        for _ in range(self._options.attempts):
            rollout = await self._owner.open(rollout_id)
            played: Played | None = None
            try:
                client = self._openai.with_options(base_url=rollout.base_url)
                played = await play(client, self._options.model, opening, self._options.game)
            except openai.OpenAIError as error:
                _LOG.warning("rollout %s: the harness failed: %s", rollout.capture_key, error)
                continue
            break
        outcome = Outcome(
            reward=played.reward if played else 0.0,
            declared_response_id=played.response_id if played else None,
        )
        receipt = await self._owner.finish(rollout, outcome, group_id=group_id, slot=slot)
        return _Finished(receipt, outcome.reward, played.overhead_ms if played else ())


@dataclass(frozen=True, slots=True)
class _Finished:
    receipt: receipt_pb2.Receipt
    reward: float
    overhead_ms: tuple[float, ...]


def _report(metrics: trainer_service_pb2.StepMetrics, finished: list[_Finished]) -> StepReport:
    overheads = sorted(value for one in finished for value in one.overhead_ms)
    masked = {
        one.receipt.rollout_id: "/".join(
            filter(None, (one.receipt.mask_reason, one.receipt.mask_cause))
        )
        for one in finished
        if one.receipt.masked
    }
    return StepReport(
        metrics=metrics,
        reward_mean=sum(one.reward for one in finished) / len(finished),
        overhead_ms_p50=overheads[len(overheads) // 2] if overheads else float("nan"),
        masked=masked,
        example=finished[0].receipt.capture_key,
    )


def reward_gain(rewards: list[float]) -> float:
    """Give the mean of the last fifth of the steps minus the mean of the first fifth."""
    fifth = max(1, len(rewards) // 5)
    return sum(rewards[-fifth:]) / fifth - sum(rewards[:fifth]) / fifth


def count_masked(reports: list[StepReport]) -> dict[str, int]:
    """Count the masked rollouts of a run by reason."""
    return dict(Counter(reason for report in reports for reason in report.masked.values()))
