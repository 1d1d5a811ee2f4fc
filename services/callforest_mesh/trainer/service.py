"""The Trainer as a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import grpc.aio

from callforest.trainer.v1 import trainer_service_pb2_grpc as rpc
from callforest_client.finalizer import FinalizerClient
from callforest_client.worker import WorkerClient
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.service import ServerLike
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.trainer.announcements import Announcements
from callforest_mesh.trainer.learner.process import LearnerProcess
from callforest_mesh.trainer.measures import measure_training
from callforest_mesh.trainer.options import TrainerOptions
from callforest_mesh.trainer.servicer import TrainerServicer
from callforest_mesh.trainer.training import Training

__all__ = ["TrainerOptions", "TrainerService"]

_FULL_NAME = "callforest.trainer.v1.TrainerService"


class TrainerService:
    """Trains on published groups in a child process, and says how it goes.

    Args:
        options: how to train.
        drain: when begun, watches end with the service.
        finalizer: where groups come from.
        workers: where weights go to.
        learner_factory: makes a learner process; each runs once.
        telemetry: what it says of its work.
    """

    name = "trainer"
    full_names = frozenset({_FULL_NAME})

    def __init__(
        self,
        options: TrainerOptions,
        drain: Drain,
        finalizer: FinalizerClient,
        workers: Sequence[WorkerClient],
        *,
        learner_factory: Callable[[], LearnerProcess] = LearnerProcess,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._drain = drain
        announcements = Announcements()
        self._training = Training(
            options,
            finalizer,
            workers,
            announcements,
            learner_factory=learner_factory,
            tracer=telemetry.tracer,
        )
        measure_training(telemetry.metrics, announcements)
        self._servicer = TrainerServicer(self._training, announcements)
        self._announcements = announcements
        self._tasks: list[asyncio.Task[None]] = []

    def attach(self, server: ServerLike) -> None:
        """Add the RPCs to a server."""
        rpc.add_TrainerServiceServicer_to_server(
            self._servicer,
            cast("grpc.aio.Server", server),  # takes handlers as a server does
        )

    async def start(self) -> None:
        """Begin to train; the learner loads while the service already answers."""
        self._tasks = [
            asyncio.ensure_future(self._training.run()),
            asyncio.ensure_future(self._end_watches()),
        ]

    async def stop(self) -> None:
        """End the learner; what no checkpoint holds is trained again. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end_watches(self) -> None:
        await self._drain.wait()
        await self._announcements.drain()
