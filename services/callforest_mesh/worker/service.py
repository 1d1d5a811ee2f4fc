"""The worker as a service of a process."""

from __future__ import annotations

from typing import Final, cast

import grpc.aio

from callforest.worker.v1 import worker_service_pb2 as pb
from callforest.worker.v1 import worker_service_pb2_grpc as rpc
from callforest_client.staging import StagingClient
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.service import ServerLike
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.worker.calls import Calls
from callforest_mesh.worker.engine import Engine
from callforest_mesh.worker.options import WorkerOptions
from callforest_mesh.worker.servicer import WorkerServicer
from callforest_mesh.worker.weights import Weights

__all__ = ["WorkerOptions", "WorkerService"]

GATHER_S: Final = 0.05
"""How long a captured call waits at most for those being generated, to be staged with them.

The engine parts callers who came together, and each step from there on costs less if they go on
together. Fewer than 64 calls at work wait for less, in proportion, and a few never.
"""
_FULL_NAME: Final = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name


class WorkerService:
    """Hosts an engine, captures what it generates, and stages it.

    Args:
        options: bounds and the state's directory.
        drain: when begun, no more calls are taken.
        engine: generates; started and stopped with the service.
        staging: keeps the tokens.
        telemetry: what it says of its work.
    """

    def __init__(
        self,
        options: WorkerOptions,
        drain: Drain,
        engine: Engine,
        staging: StagingClient,
        *,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        telemetry.metrics.limit("running_calls", options.running_max)
        self._engine = engine
        self._calls = Calls(engine, staging, options, telemetry)
        staging.expect(lambda: self._calls.generating, GATHER_S)
        self._weights = Weights(engine, options.state_path, options.name)
        self._servicer = WorkerServicer(
            engine,
            self._calls,
            self._weights,
            drain,
            engine_name=options.name,
            telemetry=telemetry,
        )

    @property
    def name(self) -> str:
        """The service's short name."""
        return "worker"

    @property
    def full_names(self) -> frozenset[str]:
        """The full names of its gRPC services."""
        return frozenset({_FULL_NAME})

    def attach(self, server: ServerLike) -> None:
        """Add the service's handlers to a server."""
        rpc.add_WorkerServiceServicer_to_server(self._servicer, cast("grpc.aio.Server", server))

    async def start(self) -> None:
        """Start the engine, and load the weights that were pushed last.

        Raises:
            EngineUnavailableError: the engine did not start, or could not load them.
            ValueError: the record of the last update is damaged.
        """
        await self._engine.start()
        await self._weights.restore()

    async def stop(self) -> None:
        """Finish what is being staged, then end the engine. Idempotent."""
        await self._calls.settle()
        await self._weights.settle()
        await self._engine.stop()
