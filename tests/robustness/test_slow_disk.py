"""A disk that takes two seconds for a sync now and then: only what must wait for it waits."""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from callforest.capture.v1 import staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.channel import connect
from callforest_client.errors import RefusedError
from callforest_client.staging import StagingClient
from tests.robustness.gauge import Work, read_gauge
from tests.robustness.killer import until
from tests.robustness.slow_staging import QUEUE_LIMIT, STALL_S
from tests.unit.staging.calls import Chain

DEPTH = int(os.environ.get("DEPTH", "1"))
STALLS = 3 * DEPTH
WRITERS = 3 * QUEUE_LIMIT
WAIT_S = 60.0
READ_EVERY_S = 0.02


@dataclass
class Load:
    """What the callers saw.

    Attributes:
        acks: calls that were acknowledged.
        early: acknowledgements of calls that came within a stall, before that stall was over.
        waited: calls that came within a stall, so that the rule above was tried.
        refused: how often callers were pushed back.
        reads: latencies of reads in seconds: (whether within a stall, latency).
    """

    folder: Path
    acks: int = 0
    early: int = 0
    waited: int = 0
    refused: int = 0
    reads: list[tuple[bool, float]] = field(default_factory=list)

    def stalls_told(self) -> bool:
        """Say whether enough stalls are over, and showed what they are for."""
        work = self.now()
        enough = work.in_flight == 0 and work.finished >= STALLS
        return enough and self.waited > 0 and self.refused > 0

    def now(self) -> Work:
        """Say whether the disk stalls, and how often it has."""
        return read_gauge(self.folder, "staging", 0)

    def latencies(self, *, stalled: bool) -> list[float]:
        return [latency for within, latency in self.reads if within == stalled]


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    """Run the slow process in a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        words = [str(folder / "store"), f"unix:{folder}/s.sock", str(folder / "staging.0")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.robustness.slow_staging", *words
        )
        yield folder
        process.terminate()
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def write(load: Load, client: StagingClient, name: str, over: asyncio.Event) -> None:
    chain = Chain(name)
    while not over.is_set():
        call = chain.add()
        before = load.now()
        while (pushed_back := await stage(client, call)) is not None:
            load.refused += 1
            await asyncio.sleep(pushed_back / 1000)
        load.acks += 1
        if before.in_flight:
            load.waited += 1
            load.early += load.now() == before


async def stage(client: StagingClient, call: staged_call_pb2.StagedCall) -> int | None:
    """Stage a call; give the delay in milliseconds if it was pushed back."""
    try:
        await client.stage(call, timeout_s=WAIT_S)
    except RefusedError as error:
        if error.reason != er.ERROR_REASON_OVERLOADED:
            raise
        limit = (error.metadata["limit"], error.metadata["limit_value"])
        if limit != ("store_queue", str(QUEUE_LIMIT)):
            raise
        return error.retry_after_ms
    return None


async def read(load: Load, client: StagingClient, channel, over: asyncio.Event) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="staging")
    while not over.is_set():
        stalled, began = load.now().in_flight > 0, time.monotonic()
        (found,) = await client.fetch("first", ["call-00000"])
        assert found.call_id == "call-00000"
        status = (await health.Check(request, timeout=WAIT_S)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
        load.reads.append((stalled, time.monotonic() - began))
        await asyncio.sleep(READ_EVERY_S)


@pytest.mark.timeout(300 * DEPTH)
@pytest.mark.requirement("CAP-6")
async def test_a_slow_sync_holds_up_only_what_must_wait_for_it(folder: Path) -> None:
    """P1, P8: reads and health go on, writers are pushed back, nobody is told too early."""
    load, over = Load(folder), asyncio.Event()
    async with connect(f"unix:{folder}/s.sock") as channel:
        client = StagingClient(channel, timeout_s=WAIT_S)
        await client.stage(Chain("first").add())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read(load, client, channel, over))
            for number in range(WRITERS):
                tasks.create_task(write(load, client, f"writer-{number}", over))
            # Stalls go on until some acknowledgement could have come too early, and some push-back.
            await until(
                lambda: load.stalls_told() or None, WAIT_S * DEPTH, "the stalls told something"
            )
            over.set()
        await client.close()
    stalled, idle = load.latencies(stalled=True), load.latencies(stalled=False)
    figures = {
        "stalls": STALLS,
        "acks": load.acks,
        "acks_before_durable": load.early,
        "acks_tried": load.waited,
        "pushed_back": load.refused,
        "reads_in_stalls": len(stalled),
        "read_ms_p50_idle": round(1000 * statistics.median(idle), 1),
        "read_ms_p50_stalled": round(1000 * statistics.median(stalled), 1),
        "read_ms_max_stalled": round(1000 * max(stalled), 1),
    }
    print("RESULT " + json.dumps(figures))
    assert load.early == 0
    assert load.waited > 0
    assert load.refused > 0
    assert len(stalled) >= 10 * STALLS, "reads went on while the disk stalled"
    assert max(stalled) < STALL_S / 2, "no read waited for the disk"
