"""Load on a service whose disk is slow now and then, and what its callers see of that."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError
from tests.robustness.gauge import Work, read_gauge
from tests.robustness.killer import until
from tests.robustness.slow_service import QUEUE_LIMIT, STALL_S

WRITERS = 3 * QUEUE_LIMIT
WAIT_S = 60.0
PAUSE_S = 0.02
"""Between two calls of a caller: some come while the disk stalls and find room in the queue."""

Write = Callable[[], Awaitable[object]]
Read = Callable[[], Awaitable[None]]


@dataclass
class Load:
    """What the callers saw.

    Attributes:
        folder: of the service.
        name: its name.
        stalls: how many must begin and be over under the load before it ends.
        acks: writes that were acknowledged.
        early: acknowledgements of writes that came within a stall, before that stall was over.
        waited: writes that came within a stall, so that the rule above was tried.
        refused: how often callers were pushed back.
        reads: latencies in seconds by kind of read: (whether within a stall, latency).
    """

    folder: Path
    name: str
    stalls: int
    acks: int = 0
    early: int = 0
    waited: int = 0
    refused: int = 0
    reads: dict[str, list[tuple[bool, float]]] = field(default_factory=lambda: defaultdict(list))
    _stalled_before: int = 0

    def stalls_told(self) -> bool:
        """Say whether enough stalls are over, and showed what they are for."""
        work = self.now()
        enough = work.finished - work.in_flight - self._stalled_before >= self.stalls
        return enough and self.waited > 0 and self.refused > 0

    def now(self) -> Work:
        """Say whether the disk stalls, and how often it has."""
        return read_gauge(self.folder, self.name, 0)

    def latencies(self, kind: str, *, stalled: bool) -> list[float]:
        return [latency for within, latency in self.reads[kind] if within == stalled]

    async def run(
        self,
        channel: grpc.aio.Channel,
        writers: list[AsyncIterator[Write]],
        reads: Mapping[str, Read],
    ) -> None:
        """Write and read until the stalls told something, and judge what was seen."""
        over = asyncio.Event()
        self._stalled_before = self.now().finished
        kinds = {**reads, "health": _health(channel, self.name)}
        async with asyncio.TaskGroup() as tasks:
            for kind, read in kinds.items():
                tasks.create_task(self._read(kind, read, over))
            for writes in writers:
                tasks.create_task(self._write(writes, over))
            # Stalls go on until some acknowledgement could have come too early, and some push-back.
            await until(
                lambda: self.stalls_told() or None,
                WAIT_S * self.stalls / 3,
                "the stalls told something",
            )
            over.set()
        self._judge()

    async def _write(self, writes: AsyncIterator[Write], over: asyncio.Event) -> None:
        async for write in writes:
            if over.is_set():
                return
            before = self.now()
            while (pushed_back := await _pushed_back(write)) is not None:
                self.refused += 1
                await asyncio.sleep(pushed_back / 1000)
            self.acks += 1
            if before.in_flight:
                self.waited += 1
                self.early += self.now() == before
            await asyncio.sleep(PAUSE_S)

    async def _read(self, kind: str, read: Read, over: asyncio.Event) -> None:
        while not over.is_set():
            stalled, began = self.now().in_flight > 0, time.monotonic()
            await read()
            self.reads[kind].append((stalled, time.monotonic() - began))
            await asyncio.sleep(PAUSE_S)

    def _judge(self) -> None:
        figures: dict[str, object] = {
            "service": self.name,
            "stalls": self.stalls,
            "acks": self.acks,
            "acks_before_durable": self.early,
            "acks_tried": self.waited,
            "pushed_back": self.refused,
        }
        for kind in self.reads:
            idle, stalled = (self.latencies(kind, stalled=within) for within in (False, True))
            figures[kind] = {
                "in_stalls": len(stalled),
                "ms_p50_idle": round(1000 * statistics.median(idle), 1),
                "ms_p50_stalled": round(1000 * statistics.median(stalled), 1),
                "ms_max_stalled": round(1000 * max(stalled), 1),
            }
        print("RESULT " + json.dumps(figures))
        assert self.early == 0
        assert self.waited > 0
        assert self.refused > 0
        for kind in self.reads:
            stalled = self.latencies(kind, stalled=True)
            assert len(stalled) >= 10 * self.stalls, f"{kind} went on while the disk stalled"
            assert max(stalled) < STALL_S / 2, f"{kind} waited for the disk"


@asynccontextmanager
async def slow_service(folder: Path, name: str, tenant: str) -> AsyncIterator[None]:
    """Run one in a folder whose path is short enough for a socket."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.robustness.slow_service", name, str(folder), tenant
    )
    try:
        yield
    finally:
        process.terminate()
        status = await asyncio.wait_for(process.wait(), WAIT_S)
    assert status == 0


async def _pushed_back(write: Write) -> int | None:
    """Write; give the delay in milliseconds if it was pushed back at the bound of the queue."""
    try:
        await write()
    except RefusedError as error:
        if error.reason != er.ERROR_REASON_OVERLOADED:
            raise
        limit = (error.metadata["limit"], error.metadata["limit_value"])
        if limit != ("store_queue", str(QUEUE_LIMIT)):
            raise
        return error.retry_after_ms
    return None


def _health(channel: grpc.aio.Channel, name: str) -> Read:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=name)

    async def check() -> None:
        status = (await stub.Check(request, timeout=WAIT_S)).status
        assert status == health_pb2.HealthCheckResponse.SERVING

    return check
