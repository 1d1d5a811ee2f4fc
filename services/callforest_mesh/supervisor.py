"""Runs each service as a process of its own, and starts it again when it dies.

A child that keeps dying is started ever more slowly, and given up after a bounded number of deaths
without having been ready in between. Children end with their supervisor, whatever ends it: their
standard input is a pipe from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from callforest_client.channel import connect
from callforest_mesh.address_check import examine_address
from callforest_mesh.chassis.configuration import SERVICES, MeshConfiguration

_LOG = logging.getLogger("callforest")
_STOP_GRACES = 4
"""A gateway ends gRPC, its calls, its HTTP answers and the rest, each within the grace."""
_WATCH = "/grpc.health.v1.Health/Watch"
_PROBE_S = 5.0
EXIT_USAGE = 2
"""A child that ends with this was told something wrong; another start would end the same."""


class SupervisionError(Exception):
    """A service cannot be kept running."""


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How children are kept.

    Attributes:
        backoff_s: pause before the first start after a death; it doubles with each death in a row.
        backoff_most_s: longest pause.
        deaths_most: deaths in a row, without having been ready, before a service is given up.
        ready_s: how long a service may take to be ready at first; engines load for minutes.
        stop_s: how long a service may take to end beyond its grace before it is killed.
        command: what a child runs; the words for `callforest serve` are put behind it.
    """

    backoff_s: float = 0.1
    backoff_most_s: float = 5.0
    deaths_most: int = 8
    ready_s: float = 600.0
    stop_s: float = 20.0
    command: tuple[str, ...] = (sys.executable, "-m", "callforest_mesh.cli")


class _Child:
    """One service's process, past and present."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.process: asyncio.subprocess.Process | None = None
        self.keeper: asyncio.Task[None] | None = None
        self.lifeline: int | None = None  # our end of its standard input
        self.serving = False
        self.changed = asyncio.Event()
        self.deaths_in_row = 0
        self.restarts = 0
        self.exit_status: int | None = None

    def cut(self) -> None:
        """Let go of the process: it ends, if it has not."""
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None

    def note_change(self) -> None:
        """Wake who waits for the service."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class Supervisor:
    """Keeps the configured services running.

    Args:
        configuration: says which services, and where they are.
        arguments: what the children's command lines say of the configuration, for instance
            `--config FILE`; they must make it the same one.
        options: how children are kept.
    """

    def __init__(
        self,
        configuration: MeshConfiguration,
        arguments: Sequence[str] = (),
        options: SupervisorOptions | None = None,
    ) -> None:
        self._options = options or SupervisorOptions()
        self._arguments = tuple(arguments)
        self._grace_s = configuration.server.grace_s
        self._children: dict[str, _Child] = {
            name: _Child(name, configuration.addresses.of(name))
            for name in SERVICES
            if name in configuration.services
        }
        self._stopping = False
        self._failure: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start every service; return when all are ready.

        Raises:
            SupervisionError: one could not be started; the others are stopped.
        """
        self._failure = asyncio.get_running_loop().create_future()
        for child in self._children.values():
            child.keeper = asyncio.create_task(self._keep(child), name=f"keep {child.name}")
        try:
            await asyncio.gather(
                *(self.wait_ready(name, self._options.ready_s) for name in self._children)
            )
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop every service, each before those that it calls. Idempotent."""
        self._stopping = True
        for child in reversed(list(self._children.values())):
            await self._end(child)

    async def failed(self) -> None:
        """Wait until a service is given up.

        Raises:
            SupervisionError: always.
        """
        assert self._failure is not None, "start comes first"
        await asyncio.shield(self._failure)

    def pid(self, name: str) -> int:
        """Give the id of a service's present process.

        Raises:
            SupervisionError: it has none now.
        """
        process = self._children[name].process
        if process is None or process.returncode is not None:
            raise SupervisionError(f"{name} has no process now")
        return process.pid

    def restarts(self, name: str) -> int:
        """Count how often a service was started again."""
        return self._children[name].restarts

    def exit_status(self, name: str) -> int | None:
        """Give how a service's last process ended: its status, or minus the signal."""
        return self._children[name].exit_status

    async def wait_ready(self, name: str, timeout_s: float, *, restarts: int = 0) -> None:
        """Wait until a service is SERVING, and was started again at least `restarts` times.

        Raises:
            SupervisionError: it is not within `timeout_s`, or a service was given up.
        """
        child = self._children[name]
        assert self._failure is not None, "start comes first"
        try:
            async with asyncio.timeout(timeout_s):
                while not (child.serving and child.restarts >= restarts):
                    if self._failure.done():
                        self._failure.result()
                    await child.changed.wait()
        except TimeoutError:
            raise SupervisionError(f"{name} is not ready after {timeout_s} s") from None

    async def _keep(self, child: _Child) -> None:
        """Start a service again and again, until it is stopped or given up."""
        # Whoever listens there would answer for the child, and be taken for it.
        place = await asyncio.to_thread(
            examine_address, f"the address of {child.name}", child.address, "addresses"
        )
        if not place.ok:
            self._give_up(f"{place.subject}, {place.text}")
            return
        while not self._ends():
            try:
                child.process = await self._spawn(child)
            except OSError as error:
                self._give_up(f"{child.name} cannot be run: {error}")
                return
            probe = asyncio.create_task(self._note_ready(child))
            try:
                child.exit_status = await child.process.wait()
            finally:
                probe.cancel()
                child.serving = False
                child.cut()
            if self._ends():
                return
            child.deaths_in_row += 1
            _LOG.error("%s ended with status %d", child.name, child.exit_status)
            hopeless = child.exit_status == EXIT_USAGE
            if hopeless or child.deaths_in_row > self._options.deaths_most:
                status = child.exit_status
                self._give_up(f"{child.name} ended with status {status} too often; see its log")
                return
            child.restarts += 1
            pause = self._options.backoff_s * 2.0 ** (child.deaths_in_row - 1)
            await asyncio.sleep(min(pause, self._options.backoff_most_s))

    def _ends(self) -> bool:
        return self._stopping

    async def _spawn(self, child: _Child) -> asyncio.subprocess.Process:
        theirs, ours = os.pipe()
        try:
            # A group of its own: a terminal's Ctrl-C reaches the supervisor alone, which keeps
            # order.
            process = await asyncio.create_subprocess_exec(
                *self._options.command,
                "serve",
                child.name,
                "--supervised",
                *self._arguments,
                stdin=theirs,
                process_group=0,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        child.lifeline = ours
        return process

    async def _note_ready(self, child: _Child) -> None:
        """Ask the service's health until it is SERVING."""
        request = health_pb2.HealthCheckRequest(service=child.name)
        serving = health_pb2.HealthCheckResponse.SERVING
        while not child.serving:
            async with connect(child.address) as channel:
                ask = channel.unary_stream(
                    _WATCH,
                    request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                    response_deserializer=health_pb2.HealthCheckResponse.FromString,
                )
                watch = ask(request, timeout=_PROBE_S, wait_for_ready=True)
                with contextlib.suppress(grpc.aio.AioRpcError):  # asked again
                    async for response in watch:
                        if response.status == serving:
                            child.deaths_in_row = 0
                            child.serving = True
                            child.note_change()
                            break

    def _give_up(self, message: str) -> None:
        assert self._failure is not None, "start comes first"
        if not self._failure.done():
            self._failure.set_exception(SupervisionError(message))
            self._failure.exception()  # nobody may wait for it
        for other in self._children.values():
            other.note_change()

    async def _end(self, child: _Child) -> None:
        process = child.process
        if process is not None and process.returncode is None:
            _signal(process, signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_GRACES * self._grace_s + self._options.stop_s):
                    child.exit_status = await process.wait()
            except TimeoutError:
                _LOG.error("%s does not end; it is killed", child.name)
                _signal(process, signal.SIGKILL)
                child.exit_status = await process.wait()
        keeper, child.keeper = child.keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
            if not keeper.cancelled():
                keeper.result()
        # It may have been started anew just before it was to end.
        late = child.process
        if late is not None and late.returncode is None:
            _signal(late, signal.SIGKILL)
            child.exit_status = await late.wait()


def supervise(configuration: MeshConfiguration, arguments: Sequence[str]) -> int:
    """Run all configured services in processes of their own until SIGTERM or SIGINT.

    Raises:
        SupervisionError: a service cannot be kept running; all are stopped.
    """
    return asyncio.run(_supervise(configuration, arguments))


async def _supervise(configuration: MeshConfiguration, arguments: Sequence[str]) -> int:
    from callforest_mesh.chassis.server import end_on_signals

    asked = asyncio.Event()
    end_on_signals(asked)
    supervisor = Supervisor(configuration, arguments)
    ending = asyncio.create_task(asked.wait())
    running = asyncio.create_task(_run(supervisor))
    try:
        await asyncio.wait({ending, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        ending.cancel()
        running.cancel()
        await asyncio.wait({running})
        await supervisor.stop()
    return 0


async def _run(supervisor: Supervisor) -> None:
    await supervisor.start()
    _LOG.info("the mesh is up")
    await supervisor.failed()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        process.send_signal(number)
