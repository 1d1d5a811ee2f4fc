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

from callforest.capture.v1 import attempt_pb2, receipt_pb2
from callforest.trainer.v1 import trainer_service_pb2
from callforest_client.rollout import Outcome, RolloutOwner
from callforest_client.trainer import TrainerClient
from callforest_mesh.demo.harness import CountingHarness, Harness, Played

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
        harness: plays a rollout.
        mode: of the attempts.
        step_timeout_s: how long a step may take, from its last group to its metrics.
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
    """

    metrics: trainer_service_pb2.StepMetrics
    reward_mean: float
    overhead_ms_p50: float
    masked: dict[str, str]
    example: str
    context_boundaries: int
    finalized_groups: int


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
            groups = await self._play_step(step)
            try:
                async with asyncio.timeout(self._options.step_timeout_s):
                    metrics = await anext(watch)
            except TimeoutError:
                status = await self._trainer.status()
                raise DemoFailedError(
                    f"step {step} did not end in {self._options.step_timeout_s:.0f} s; the trainer"
                    f" says: {status.failure or 'nothing'} ({status.waiting_group_count} groups)"
                ) from None
            yield _report(metrics, groups)

    async def _play_step(self, step: int) -> list[_Group]:
        return await asyncio.gather(
            *(self._play_group(step, number) for number in range(self._options.groups_per_step))
        )

    async def _play_group(self, step: int, number: int) -> _Group:
        group_id = f"{self._options.run}-s{step}-g{number}"
        opening = self._options.openings[number % len(self._options.openings)]
        slots = range(self._options.rollouts_per_group)
        finished = await asyncio.gather(
            *(self._play_rollout(group_id, slot, opening) for slot in slots)
        )
        published = await self._owner.publish(group_id, len(finished))
        if published.drop_reason:
            _LOG.warning("group %s was dropped: %s", group_id, published.drop_reason)
        return _Group(tuple(finished), published.drop_reason)

    async def _play_rollout(self, group_id: str, slot: int, opening: str) -> _Finished:
        """Play until an attempt goes through; a harness that fails leaves a masked rollout."""
        rollout_id = f"{group_id}-r{slot}"
        for _ in range(self._options.attempts):
            rollout = await self._owner.open(rollout_id, mode=self._options.mode)
            played: Played | None = None
            try:
                client = self._openai.with_options(base_url=rollout.base_url)
                played = await self._options.harness.play(client, self._options.model, opening)
            except openai.OpenAIError as error:
                _LOG.warning("rollout %s: the harness failed: %s", rollout.capture_key, error)
                continue
            break
        outcome = Outcome(
            reward=played.reward if played else 0.0,
            declared_response_id=played.response_id or None if played else None,
            result=played.result if played else b"",
            mask_refused_selection=True,  # one odd rollout must not stop the others
        )
        receipt = await self._owner.finish(rollout, outcome, group_id=group_id, slot=slot)
        return _Finished(receipt, outcome.reward, played)


@dataclass(frozen=True, slots=True)
class _Finished:
    receipt: receipt_pb2.Receipt
    reward: float
    played: Played | None


@dataclass(frozen=True, slots=True)
class _Group:
    finished: tuple[_Finished, ...]
    drop_reason: str


def _report(metrics: trainer_service_pb2.StepMetrics, groups: list[_Group]) -> StepReport:
    finished = [one for group in groups for one in group.finished]
    played = [one.played for one in finished if one.played is not None]
    overheads = sorted(value for one in played for value in one.overhead_ms)
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
        context_boundaries=sum(one.context_boundaries for one in played),
        finalized_groups=sum(not group.drop_reason for group in groups),
    )


def reward_gain(rewards: list[float]) -> float:
    """Give the mean of the last fifth of the steps minus the mean of the first fifth."""
    fifth = max(1, len(rewards) // 5)
    return sum(rewards[-fifth:]) / fifth - sum(rewards[:fifth]) / fifth


def count_masked(reports: list[StepReport]) -> dict[str, int]:
    """Count the masked rollouts of a run by reason."""
    return dict(Counter(reason for report in reports for reason in report.masked.values()))
