"""One service as a process shows it: server, health, reflection, limits, and an orderly end.

The end, on SIGTERM: health says NOT_SERVING, new calls are refused as DRAINING, calls under way
are finished within the grace, the service flushes and stops. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from callforest_client.channel import SERVER_OPTIONS
from callforest_mesh.chassis.call_limits import CallCounter, CallLimits
from callforest_mesh.chassis.interceptors import EdgeInterceptor
from callforest_mesh.chassis.interpreter import fastest_loop, tune
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.lifeline import end_with_parent
from callforest_mesh.chassis.local_channel import LocalChannel, LocalRegistry
from callforest_mesh.chassis.service import MeshService

_LOG = logging.getLogger("callforest")
_LAST_WORDS_S = 1.0
"""How long answers that are written may take to leave, and cancelled handlers to end."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Factory: TypeAlias = Callable[[Drain, AsyncExitStack], MeshService]
"""Builds a service; what it puts on the stack (clients, channels) is closed after the service."""


class ServerStartError(Exception):
    """The process cannot listen where it was told to."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a service is served.

    Attributes:
        limits: the most calls at once.
        grace_s: how long calls under way may take once the service drains.
    """

    limits: CallLimits = field(default_factory=CallLimits)
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse a grace that is none.

        Raises:
            ValueError: the grace is negative.
        """
        if self.grace_s < 0:
            raise ValueError(f"grace_s must not be negative, not {self.grace_s}")


class MeshServer:
    """Serves one service: on an address, within the process, or both.

    Args:
        service: the service, not started.
        address: `host:port`, `unix:/path`, or "" to listen nowhere.
        drain: the one that the service was built with.
        options: limits and grace.
    """

    def __init__(
        self,
        service: MeshService,
        address: str,
        drain: Drain,
        options: ServerOptions | None = None,
    ) -> None:
        self._service = service
        self._address = address
        self._drain = drain
        self._options = options or ServerOptions()
        own = service.full_names
        self._counter = CallCounter(self._options.limits, own=own)
        interceptors = (EdgeInterceptor(service.name, drain, own=own), self._counter)
        self._registry = LocalRegistry(interceptors)
        service.attach(self._registry)
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        if address:
            self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
            service.attach(self._server)
        self._stopped = False

    @property
    def name(self) -> str:
        """The service's short name."""
        return self._service.name

    @property
    def in_flight(self) -> int:
        """How many calls are being served."""
        return self._counter.in_flight

    async def idle(self) -> None:
        """Wait until no call is being served."""
        await self._counter.idle()

    def local_channel(self) -> LocalChannel:
        """Open a channel to the service within this process."""
        return LocalChannel(self._registry)

    async def start(self) -> str:
        """Start the service, then serve it; give the address, with the port that was bound.

        Raises:
            ServerStartError: the address is taken or cannot be used.
        """
        bound = await self._bind() if self._server is not None else ""
        try:
            await self._service.start()
        except BaseException:
            if self._server is not None:
                await self._server.stop(0)
            await self._service.stop()
            raise
        if self._server is not None:
            await self._server.start()
            for name in (*sorted(self._service.full_names), self._service.name, ""):
                await self._health.set(name, SERVING)
        where = f"on {bound}" if bound else "within the process"
        url: str = getattr(self._service, "url", "")
        _LOG.info("%s serves %s%s", self.name, where, f" and at {url}" if url else "")
        return bound

    async def stop(self) -> None:
        """Drain and stop; calls that outlast the grace are cancelled. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        _LOG.info("%s drains, with %d calls under way", self.name, self._counter.in_flight)
        await self._health.enter_graceful_shutdown()
        self._drain.begin()
        if not await self._idle_within(self._options.grace_s):
            _LOG.warning("%s cancels %d calls", self.name, self._counter.in_flight)
        if self._server is not None:
            await self._server.stop(_LAST_WORDS_S)
        await self._registry.close()
        if not await self._idle_within(_LAST_WORDS_S):
            _LOG.error("%s leaves %d calls behind", self.name, self._counter.in_flight)
        await self._service.stop()
        _LOG.info("%s stopped", self.name)

    async def _bind(self) -> str:
        assert self._server is not None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for name in (*sorted(self._service.full_names), self._service.name, ""):
            await self._health.set(name, NOT_SERVING)
        names = (*sorted(self._service.full_names), health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        if (path := self._address.removeprefix("unix:")) != self._address:
            _refuse_taken_socket(path)
        try:
            port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            raise ServerStartError(f"cannot listen on {self._address}: {error}") from error
        if self._address.startswith("unix:"):
            return self._address
        return f"{self._address.rpartition(':')[0]}:{port}"

    async def _idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._counter.idle()
        except TimeoutError:
            return False
        return True


def run(
    factory: Factory,
    address: str,
    options: ServerOptions | None = None,
    *,
    supervised: bool = False,
) -> int:
    """Run one service as this process until SIGTERM or SIGINT; give the exit status.

    Args:
        factory: builds the service.
        address: where it listens.
        options: limits and grace.
        supervised: the end of standard input ends the process like SIGTERM, so that it does not
            outlive its supervisor.

    Returns:
        0 after an orderly end. A second signal ends the process at once with 128 and its number.

    Raises:
        ServerStartError: the address is taken or cannot be used.
    """
    with asyncio.Runner(loop_factory=fastest_loop()) as runner:
        return runner.run(_run(factory, address, options, supervised=supervised))


async def _run(
    factory: Factory, address: str, options: ServerOptions | None, *, supervised: bool
) -> int:
    asked = asyncio.Event()
    end_on_signals(asked)
    if supervised:
        end_with_parent(asked)
    async with AsyncExitStack() as closers:
        drain = Drain()
        server = MeshServer(factory(drain, closers), address, drain, options)
        starting = asyncio.ensure_future(server.start())
        ending = asyncio.ensure_future(asked.wait())
        try:
            await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
                return 0
            starting.result()
            tune()
            await ending
            await server.stop()
        finally:
            ending.cancel()
    return 0


def end_on_signals(asked: asyncio.Event) -> None:
    """Set the event on the first SIGTERM or SIGINT; end the process at once on the second."""

    def on_signal(number: signal.Signals) -> None:
        if asked.is_set():
            _LOG.error("%s again: ending at once", number.name)
            os._exit(128 + number)
        _LOG.info("%s: ending", number.name)
        asked.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _refuse_taken_socket(path: str) -> None:
    """Refuse a socket that someone listens on: gRPC would take it away from them.

    Raises:
        ServerStartError: a process listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return  # nobody listens; gRPC says what else may be wrong with the path
    raise ServerStartError(f"cannot listen on unix:{path}: another process does")
