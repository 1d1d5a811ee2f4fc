"""The gateway as a service of a process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final, cast

import grpc.aio
from aiohttp import web

from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest.gateway.v1 import gateway_service_pb2_grpc as rpc
from callforest_client.admission import AdmissionClient
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_client.worker import WorkerClient
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.service import ServerLike
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.conversations import Conversations
from callforest_mesh.gateway.edge import Edge
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
from callforest_mesh.gateway.forest_reading import ForestReader
from callforest_mesh.gateway.histories import Histories
from callforest_mesh.gateway.http_server import EdgeRunner
from callforest_mesh.gateway.lives import WAITERS_MAX
from callforest_mesh.gateway.measuring import Measuring
from callforest_mesh.gateway.options import GatewayOptions
from callforest_mesh.gateway.reading import ChainReader, RequestReader
from callforest_mesh.gateway.servicer import GatewayServicer
from callforest_mesh.gateway.work import Work

__all__ = ["GatewayOptions", "GatewayService"]

_FULL_NAME: Final = pb.DESCRIPTOR.services_by_name["GatewayService"].full_name


class GatewayService:
    """Serves harnesses over HTTP and over gRPC.

    Args:
        options: where to listen, whose attempts, bounds.
        drain: when begun, no more requests are taken.
        admission: judges calls.
        ledger: keeps their rows.
        worker: generates and captures.
        staging: keeps what was generated, for repeats.
        new_id: names calls.
        now_ns: the wall clock, nanoseconds since the epoch.
        telemetry: what it says of its work.
    """

    def __init__(
        self,
        options: GatewayOptions,
        drain: Drain,
        admission: AdmissionClient,
        ledger: LedgerClient,
        worker: WorkerClient,
        staging: StagingClient,
        *,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
        now_ns: Callable[[], int] = time.time_ns,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        for name, value in (
            ("calls_in_work", options.calls_max),
            ("measured_calls", options.measures_max),
            ("waiters_of_a_call", WAITERS_MAX),
        ):
            telemetry.metrics.limit(name, value)
        self._options = options
        ledger = ledger.for_tenant(options.tenant)
        worker = worker.for_tenant(options.tenant)
        admission = admission.for_tenant(options.tenant)
        configuration = EngineConfiguration(worker, required=options.forest)
        self._calls = Calls(
            admission,
            ledger,
            worker,
            staging.for_tenant(options.tenant),
            configuration,
            options,
            new_id=new_id,
            now_ns=now_ns,
            telemetry=telemetry,
        )
        measuring = Measuring(
            admission, worker, configuration, options, new_id=new_id, now_ns=now_ns
        )
        work = Work(_reader(options), self._calls, measuring)
        self._edge = Edge(options, drain, work, ledger, worker, telemetry)
        self._servicer = GatewayServicer(options.tenant, work, worker, drain, telemetry)
        self._runner: web.AppRunner | None = None
        self._url = ""

    @property
    def name(self) -> str:
        """The service's short name."""
        return "gateway"

    @property
    def full_names(self) -> frozenset[str]:
        """The full names of its gRPC services."""
        return frozenset({_FULL_NAME})

    @property
    def url(self) -> str:
        """Where it listens for HTTP, without a path; "" until it is started."""
        return self._url

    def attach(self, server: ServerLike) -> None:
        """Add the gRPC edge to a server."""
        rpc.add_GatewayServiceServicer_to_server(self._servicer, cast("grpc.aio.Server", server))

    async def start(self) -> None:
        """Listen for HTTP.

        Raises:
            OSError: the address is taken.
        """
        runner = EdgeRunner(
            self._edge.application(),
            head_timeout_s=self._options.body_timeout_s,
            shutdown_timeout_s=self._options.grace_s,
        )
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, self._options.host, self._options.port)
        await site.start()
        port = runner.addresses[0][1]
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        self._url = f"http://{host}:{port}"

    async def stop(self) -> None:
        """Finish the calls in work within the grace, then listen no more. Idempotent.

        Until then new calls and health checks are told that the gateway drains: a connection that
        is refused says nothing.
        """
        await self._calls.finish(self._options.grace_s)
        # Answers that are on their way, and requests that are no calls, have the grace as well.
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        await self._calls.settle(self._options.grace_s)


def _reader(options: GatewayOptions) -> RequestReader:
    if not options.forest:
        return ChainReader(Conversations())
    return ForestReader(Histories(options.history_cache_bytes, options.history_cache_calls))
