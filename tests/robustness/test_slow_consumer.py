"""A trainer that stops reading: the finalizer's memory does not grow with what waits for it."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from callforest_client.channel import connect
from callforest_client.finalizer import FinalizerClient
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import load
from callforest_mesh.supervisor import Supervisor
from tests.integration.finalizer_mesh import Player
from tests.integration.running_mesh import settings
from tests.robustness.fault_proxy import FaultProxy

DEPTH = int(os.environ.get("DEPTH", "1"))
TOKENS = 160_000
"""Of one group: about a megabyte."""
GROUPS = 40 * DEPTH
WARM = 6
MIB = 1 << 20
GROWTH_MIB_MOST = 16
"""The transport's window of 4 MiB, and one group while it is read, checked, framed and sent."""
NAMES = ("staging", "ledger", "admission", "finalizer")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@asynccontextmanager
async def stores(folder: Path) -> AsyncIterator[tuple[Clients, Supervisor, FaultProxy]]:
    """Run the services behind delivery; the trainer's way to the finalizer leads over a proxy."""
    chosen = settings(folder, "log.level=error", f"services=[{', '.join(NAMES)}]")
    configuration = load(environment={}, settings=chosen)
    arguments = [word for one in chosen for word in ("--set", one)]
    async with AsyncExitStack() as stack:
        supervisor = Supervisor(configuration, arguments)
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        proxy = FaultProxy(configuration.addresses.of("finalizer"))
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        yield Clients(configuration, addressed(configuration), stack), supervisor, proxy


def memory_mib(pid: int) -> float:
    """Give the memory of a process that no file backs."""
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


async def publish(clients: SimpleNamespace, first: int, count: int) -> None:
    for number in range(first, first + count):
        player = Player(clients, f"r{number}", seed=number)
        await player.chain(1, tokens=TOKENS)
        receipt = await player.finish(f"g{number}", 0)
        assert not receipt.masked, receipt
        await clients.finalizer.finalize_group(f"g{number}", 1)


async def peak(pid: int, over: asyncio.Event) -> float:
    highest = 0.0
    while not over.is_set():
        highest = max(highest, memory_mib(pid))
        await asyncio.sleep(0.05)
    return highest


@pytest.mark.timeout(240 * DEPTH)
@pytest.mark.requirement("API-3")
async def test_a_trainer_that_stops_reading_costs_no_memory(folder: Path) -> None:
    """P8 bounded, row 12: with credit for all of it, more waits than the producer may hold."""
    async with stores(folder) as (clients, supervisor, proxy):
        services = SimpleNamespace(
            admission=clients.admission(),
            ledger=clients.ledger(),
            staging=clients.staging(),
            finalizer=clients.finalizer(),
        )
        pid = supervisor.pid("finalizer")
        async with connect(proxy.address) as channel:
            subscription = FinalizerClient(channel).subscribe("trainer")
            groups = aiter(subscription)
            await subscription.credit(WARM + GROUPS)
            await publish(services, 0, WARM)
            seen = [(await anext(groups)).cursor for _ in range(WARM)]
            before = memory_mib(pid)
            proxy.hold("answers")
            over = asyncio.Event()
            watching = asyncio.ensure_future(peak(pid, over))
            await publish(services, WARM, GROUPS)
            await proxy.holding("answers")
            over.set()
            growth = await watching - before
            proxy.release("answers")
            batches = [await anext(groups) for _ in range(GROUPS)]
            seen += [batch.cursor for batch in batches]
            await subscription.commit(seen[-1])
            await subscription.close()
    waiting = sum(batch.ByteSize() for batch in batches) / MIB
    figures = {"waiting_mib": round(waiting), "growth_mib": round(growth, 1), "groups": len(seen)}
    print("RESULT " + json.dumps(figures))
    assert seen == list(range(1, WARM + GROUPS + 1)), "all come, in order, once it reads again"
    assert growth <= GROWTH_MIB_MOST < waiting / 1.5
