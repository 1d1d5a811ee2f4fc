"""What watchers of the trainer see: its phase, the metrics of each step, each weight version."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.errors import draining

METRICS_KEPT = 4096


class Announcements:
    """The trainer's present state, and the news of it. Used on one event loop."""

    def __init__(self) -> None:
        self.status = pb.GetStatusResponse(phase=pb.TRAINER_PHASE_LOADING)
        self._metrics: deque[pb.StepMetrics] = deque(maxlen=METRICS_KEPT)
        self._weights: pb.WatchWeightsResponse | None = None
        self._news = asyncio.Condition()
        self._draining = False

    async def drain(self) -> None:
        """End every watch."""
        self._draining = True
        await self._tell()

    async def enter(self, phase: pb.TrainerPhase.ValueType) -> None:
        """Enter a phase."""
        self.status.phase = phase
        await self._tell()

    async def fail(self, failure: str) -> None:
        """Stop for good, with the reason."""
        self.status.failure = failure
        await self.enter(pb.TRAINER_PHASE_FAILED)

    async def weights_serve(self, version: int, step: int) -> None:
        """A version serves on every worker."""
        self.status.weight_version = version
        self._weights = pb.WatchWeightsResponse(weight_version=version, step=step)
        await self._tell()

    async def step_done(self, metrics: pb.StepMetrics, cursor: int) -> None:
        """A step is done and its weights serve."""
        self.status.step = metrics.step
        self.status.trained_cursor = cursor
        self._metrics.append(metrics)
        await self._tell()

    def last_metrics(self) -> pb.StepMetrics | None:
        """Give the metrics of the last step, if one was made."""
        return self._metrics[-1] if self._metrics else None

    def go_back(self, step: int, cursor: int) -> None:
        """Training goes on behind an earlier step; what came after it is made once more."""
        self.status.step = step
        self.status.trained_cursor = cursor
        self.status.waiting_group_count = 0
        while self._newest > step:
            self._metrics.pop()

    async def metrics(self, after_step: int) -> AsyncIterator[pb.WatchMetricsResponse]:
        """Give the metrics of each step behind `after_step`, then of each new one, in order.

        A step that is made once more after a lost learner is not sent to whoever has it.

        Raises:
            Refusal: LEARNER_FAILED once the trainer has stopped for good.
        """
        last = after_step
        while True:
            while (due := next((m for m in self._metrics if m.step > last), None)) is not None:
                last = due.step
                yield pb.WatchMetricsResponse(metrics=due)
            async with self._news:
                while not self._ended and self._newest <= last:
                    await self._news.wait()
            self._raise_failure(after=self._newest <= last)

    async def weights(self) -> AsyncIterator[pb.WatchWeightsResponse]:
        """Give the present weight version, then each new one.

        Raises:
            Refusal: LEARNER_FAILED once the trainer has stopped for good.
        """
        last: pb.WatchWeightsResponse | None = None
        while True:
            async with self._news:
                while not self._ended and self._weights is last:
                    await self._news.wait()
            self._raise_failure(after=self._weights is last)
            last = self._weights
            if last is not None:
                yield last

    @property
    def _newest(self) -> int:
        return self._metrics[-1].step if self._metrics else 0

    @property
    def _ended(self) -> bool:
        return self._draining or self.status.phase == pb.TRAINER_PHASE_FAILED

    def _raise_failure(self, *, after: bool) -> None:
        if self._draining:
            raise draining("trainer")
        if self._ended and after:
            raise Refusal(
                er.ERROR_REASON_LEARNER_FAILED,
                self.status.failure,
                step=self.status.step,
                detail=self.status.failure,
            )

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
