"""Puts services together: one in a process of its own, or all in one process; the same code.

A service is built from its options, a Drain, and typed clients of its peers. Where a client's
channel leads (an address, or a service of the same process) is all that differs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, TypeAlias

import grpc.aio

from callforest_client.admission import AdmissionClient
from callforest_client.channel import connect
from callforest_client.finalizer import FinalizerClient
from callforest_client.group_assembly import GROUP_BYTES_MAX
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_client.trainer import TrainerClient
from callforest_client.worker import WorkerClient
from callforest_mesh import mesh_options
from callforest_mesh.chassis.call_limits import CallLimits
from callforest_mesh.chassis.configuration import SERVICES, MeshConfiguration
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer, ServerOptions, end_on_signals, run
from callforest_mesh.chassis.service import MeshService
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry, Telemetry, open_telemetry

if TYPE_CHECKING:
    from callforest_mesh.worker.engine import Engine

_LOG = logging.getLogger("callforest")
ChannelTo: TypeAlias = Callable[[str], grpc.aio.Channel]
"""(short name of a service) -> a new channel to it."""
_Builder: TypeAlias = Callable[[MeshConfiguration, Drain, "Clients", ServiceTelemetry], MeshService]


class Clients:
    """Typed clients of the services, each with a channel of its own.

    Args:
        configuration: says the tenant.
        channel_to: opens channels.
        closers: closes clients and channels, last opened first.
    """

    def __init__(
        self, configuration: MeshConfiguration, channel_to: ChannelTo, closers: AsyncExitStack
    ) -> None:
        self._tenant = configuration.tenant
        self._channel_to = channel_to
        self._closers = closers

    def staging(self) -> StagingClient:
        """Make a client of Staging."""
        client = StagingClient(self._channel("staging"), tenant=self._tenant)
        self._closers.push_async_callback(client.close)
        return client

    def ledger(self) -> LedgerClient:
        """Make a client of the Ledger."""
        client = LedgerClient(self._channel("ledger"), tenant=self._tenant)
        self._closers.push_async_callback(client.close)
        return client

    def admission(self) -> AdmissionClient:
        """Make a client of Admission."""
        client = AdmissionClient(self._channel("admission"), tenant=self._tenant)
        self._closers.push_async_callback(client.close)
        return client

    def worker(self) -> WorkerClient:
        """Make a client of the worker."""
        client = WorkerClient(self._channel("worker"), tenant=self._tenant)
        self._closers.push_async_callback(client.close)
        return client

    def finalizer(self, *, group_bytes_max: int = GROUP_BYTES_MAX) -> FinalizerClient:
        """Make a client of the Finalizer, which puts groups up to a size together."""
        return FinalizerClient(
            self._channel("finalizer"), tenant=self._tenant, group_bytes_max=group_bytes_max
        )

    def trainer(self) -> TrainerClient:
        """Make a client of the Trainer."""
        return TrainerClient(self._channel("trainer"))

    def _channel(self, name: str) -> grpc.aio.Channel:
        channel = self._channel_to(name)
        self._closers.push_async_callback(channel.close)
        return channel


def build(
    name: str,
    configuration: MeshConfiguration,
    drain: Drain,
    clients: Clients,
    engine: Engine | None = None,
    *,
    telemetry: ServiceTelemetry = SILENT,
) -> MeshService:
    """Build a service, not started.

    Args:
        name: its short name.
        configuration: has its section.
        drain: ends its work.
        clients: its peers.
        engine: the worker's, instead of the configured one.
        telemetry: what it says of its work.

    Raises:
        ConfigurationError: the section is wrong.
    """
    limits = server_options(configuration).limits
    telemetry.metrics.limit("concurrent_calls", limits.calls)
    telemetry.metrics.limit("concurrent_waits", limits.waits)
    if name == "worker":
        return _build_worker(configuration, drain, clients, engine, telemetry)
    return _BUILDERS[name](configuration, drain, clients, telemetry)


def serve(name: str, configuration: MeshConfiguration, *, supervised: bool = False) -> int:
    """Run one service as this process until it is told to end; give the exit status.

    Args:
        name: its short name.
        configuration: has its section, and the addresses of all.
        supervised: the end of standard input ends the process like SIGTERM.

    Raises:
        ConfigurationError: the section is wrong.
        ServerStartError: the address is taken.
    """
    telemetry = open_telemetry(configuration.telemetry)

    def factory(drain: Drain, closers: AsyncExitStack) -> MeshService:
        clients = Clients(configuration, addressed(configuration), closers)
        said = telemetry.service(name)
        return build(name, configuration, drain, clients, telemetry=said)

    address = configuration.addresses.of(name)
    try:
        return run(factory, address, server_options(configuration), supervised=supervised)
    finally:
        telemetry.shutdown()


def addressed(configuration: MeshConfiguration) -> ChannelTo:
    """Give what opens channels to the configured addresses."""
    return lambda name: connect(configuration.addresses.of(name))


def server_options(configuration: MeshConfiguration) -> ServerOptions:
    """Give the limits and the grace of every server."""
    section = configuration.server
    return ServerOptions(CallLimits(section.calls, section.waits), section.grace_s)


class EmbeddedMesh:
    """All configured services in this process, joined without sockets.

    Args:
        configuration: says which services, and their options.
        listen: whether they listen on their addresses besides, for clients of other processes.
        engine: the worker's, instead of the configured one.
        telemetry: instead of what the configuration says; shut down with the mesh.

    Attributes:
        gateway_url: where harnesses reach the gateway, once started; "" without a gateway.
    """

    def __init__(
        self,
        configuration: MeshConfiguration,
        *,
        listen: bool = True,
        engine: Engine | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._configuration = configuration
        self._telemetry = telemetry
        self._listen = listen
        self._engine = engine
        self._servers: dict[str, MeshServer] = {}
        self._stack = AsyncExitStack()
        self.gateway_url = ""

    async def start(self) -> None:
        """Start the services, each behind those that it calls; on a fault none is left."""
        telemetry = self._telemetry or open_telemetry(self._configuration.telemetry)
        self._stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        try:
            for name in SERVICES:
                if name in self._configuration.services:
                    await self._start(name, telemetry.service(name))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Drain and stop the services, each before those that it calls. Idempotent."""
        await self._stack.aclose()

    def channel_to(self, name: str) -> grpc.aio.Channel:
        """Open a channel: within the process if the service is here, else to its address."""
        server = self._servers.get(name)
        return server.local_channel() if server else addressed(self._configuration)(name)

    def clients(self) -> Clients:
        """Make clients of the services; they end with the mesh."""
        return Clients(self._configuration, self.channel_to, self._stack)

    async def __aenter__(self) -> EmbeddedMesh:  # noqa: PYI034 - subclasses are not foreseen
        await self.start()
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self.stop()

    async def _start(self, name: str, telemetry: ServiceTelemetry) -> None:
        drain = Drain()
        clients = Clients(self._configuration, self.channel_to, self._stack)
        service = build(
            name, self._configuration, drain, clients, self._engine, telemetry=telemetry
        )
        address = self._configuration.addresses.of(name) if self._listen else ""
        server = MeshServer(service, address, drain, server_options(self._configuration))
        self._servers[name] = server
        self._stack.push_async_callback(server.stop)
        await server.start()
        self.gateway_url = getattr(service, "url", self.gateway_url)


def up(configuration: MeshConfiguration) -> int:
    """Run all configured services in this process until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: a section is wrong.
        ServerStartError: an address is taken.
    """
    mesh_options.check_all(configuration)
    return asyncio.run(_up(configuration))


async def _up(configuration: MeshConfiguration) -> int:
    asked = asyncio.Event()
    end_on_signals(asked)
    mesh = EmbeddedMesh(configuration)
    starting = asyncio.ensure_future(mesh.start())
    ending = asyncio.ensure_future(asked.wait())
    await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
        _LOG.info("the mesh is up; harnesses find it at %s", mesh.gateway_url or "no gateway")
        await ending
    else:
        starting.cancel()
        await asyncio.wait({starting})
    await mesh.stop()
    return 0


def _build_staging(
    configuration: MeshConfiguration, drain: Drain, clients: Clients, telemetry: ServiceTelemetry
) -> MeshService:
    del clients  # it calls nobody
    from callforest_mesh.staging.service import StagingService

    return StagingService(mesh_options.staging_options(configuration), drain, telemetry=telemetry)


def _build_ledger(
    configuration: MeshConfiguration, drain: Drain, clients: Clients, telemetry: ServiceTelemetry
) -> MeshService:
    del clients  # it calls nobody
    from callforest_mesh.ledger.service import LedgerService

    return LedgerService(mesh_options.ledger_options(configuration), drain, telemetry=telemetry)


def _build_admission(
    configuration: MeshConfiguration, drain: Drain, clients: Clients, telemetry: ServiceTelemetry
) -> MeshService:
    from callforest_mesh.admission.service import AdmissionService

    options = mesh_options.admission_options(configuration)
    return AdmissionService(options, drain, clients.ledger(), telemetry=telemetry)


def _build_worker(
    configuration: MeshConfiguration,
    drain: Drain,
    clients: Clients,
    engine: Engine | None,
    telemetry: ServiceTelemetry,
) -> MeshService:
    from callforest_mesh.worker.service import WorkerService

    options = mesh_options.worker_options(configuration)
    hosted = engine or mesh_options.build_engine(configuration)
    return WorkerService(options, drain, hosted, clients.staging(), telemetry=telemetry)


def _build_finalizer(
    configuration: MeshConfiguration, drain: Drain, clients: Clients, telemetry: ServiceTelemetry
) -> MeshService:
    from callforest_mesh.finalizer.service import FinalizerService

    return FinalizerService(
        mesh_options.finalizer_options(configuration),
        drain,
        clients.ledger(),
        clients.staging(),
        telemetry=telemetry,
    )


def _build_trainer(
    configuration: MeshConfiguration, drain: Drain, clients: Clients, telemetry: ServiceTelemetry
) -> MeshService:
    from callforest_mesh.trainer.service import TrainerService

    options = mesh_options.trainer_options(configuration)
    finalizer = clients.finalizer(group_bytes_max=options.group_bytes_max)
    return TrainerService(options, drain, finalizer, [clients.worker()], telemetry=telemetry)


def _build_gateway(
    configuration: MeshConfiguration, drain: Drain, clients: Clients, telemetry: ServiceTelemetry
) -> MeshService:
    from callforest_mesh.gateway.service import GatewayService

    return GatewayService(
        mesh_options.gateway_options(configuration),
        drain,
        clients.admission(),
        clients.ledger(),
        clients.worker(),
        clients.staging(),
        telemetry=telemetry,
    )


_BUILDERS: Final[dict[str, _Builder]] = {
    "staging": _build_staging,
    "ledger": _build_ledger,
    "admission": _build_admission,
    "finalizer": _build_finalizer,
    "trainer": _build_trainer,
    "gateway": _build_gateway,
}
