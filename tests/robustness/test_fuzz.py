"""Bad input on every RPC and every HTTP route: typed errors only, and the mesh stays whole.

`DEPTH=100 pytest tests/robustness/test_fuzz.py` sends a hundred times as many, SEED others.
"""

import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from callforest_client.channel import MESSAGE_BYTES_MAX
from tests.robustness.fuzz_http import HttpFuzz, routes
from tests.robustness.fuzz_mesh import CONTROL_TOKEN
from tests.robustness.fuzz_rpc import STRANGE_PATHS, RpcFuzz, Tally, fault_of_path, methods
from tests.robustness.fuzz_seeds import Seeds
from tests.robustness.fuzz_world import FuzzedMesh, finish_kept, fuzzed_mesh, unsound
from tests.robustness.mutation import LARGE, unknown_field

DEPTH = int(os.environ.get("DEPTH", "1"))
SEED = int(os.environ.get("SEED", "0"))
MESSAGES = 10_000 * DEPTH
WARM_UP = 8_000 * DEPTH
AT_ONCE = 16
AN_ATTEMPT = 500
LEARNER = "learner"


@pytest.fixture
def directory() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
async def mesh(directory: Path) -> AsyncIterator[FuzzedMesh]:
    """A mesh with rollouts in every state."""
    async with fuzzed_mesh(directory) as running:
        yield running


class Fuzz:
    """Sends to every method and route in turn."""

    def __init__(self, mesh: FuzzedMesh, seed: int) -> None:
        chance = random.Random(seed)
        self.tally = Tally()
        self._mesh = mesh
        seeds = Seeds(chance, mesh.facts, mesh.whole)
        doomed = Seeds(chance, mesh.doomed, mesh.whole)
        self.rpc = RpcFuzz(mesh.channels, chance, seeds, doomed, self.tally)
        self.http = HttpFuzz(mesh.address, chance, mesh.open_keys, CONTROL_TOKEN, self.tally)
        self.requests = {route: self.http.requests(route) for route in routes()}
        self.methods = [method for method in methods() if method.server != LEARNER]
        self._sending = self._calls()

    def everything(self) -> set[str]:
        """Name every method and route."""
        ways = {f"{route.method} {route.path}" for route in self.requests}
        return ways | {method.path for method in self.methods}

    async def send(self, count: int) -> None:
        """Send so many messages more, several calls at once."""
        goal = self.tally.messages + count
        while self.tally.messages < goal:
            await self._mesh.renew()
            until = min(goal, self.tally.messages + AN_ATTEMPT)
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._work(until))

    async def _work(self, until: int) -> None:
        while self.tally.messages < until:
            await next(self._sending)

    def _calls(self):
        served = cycle([one for one in routes() for _ in range(4 if one.method == "POST" else 1)])
        for method in cycle(self.methods):
            yield self.rpc.send(method, self.rpc.messages(method))
            route = next(served)
            yield self.http.send(route, next(self.requests[route]))


async def strange_paths(fuzz: Fuzz, mesh: FuzzedMesh) -> None:
    """Ask every server for methods that nobody has."""
    for name, channel in mesh.channels.items():
        for path in STRANGE_PATHS:
            fuzz.tally.count(name, "PATH", await fault_of_path(channel, path))


async def oversize(fuzz: Fuzz) -> None:
    """Send messages that are larger than a server takes, and some large ones.

    The latter come now and then later on; what memory they take at most is taken before it is
    measured.
    """
    for method in fuzz.methods[:: len(fuzz.methods) // 3]:
        await fuzz.rpc.send(method, [bytes(MESSAGE_BYTES_MAX + 1)])
    for method in fuzz.methods:
        large = [message + unknown_field(LARGE) for message in fuzz.rpc.messages(method)]
        await fuzz.rpc.send(method, large[:1])


async def measured(fuzz: Fuzz, mesh: FuzzedMesh, count: int) -> list[dict[str, int]]:
    """Send so many messages; measure ten times on the way."""
    measures = []
    for _ in range(10):
        await fuzz.send(count // 10)
        measures.append(await mesh.measure())
    return measures


def unexplained(log: str) -> list[str]:
    """Give the log's entries with a trace."""
    entries = re.split(r"\n(?=(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):)", log)
    return [entry for entry in entries if "Traceback" in entry or "never retrieved" in entry]


@pytest.mark.timeout(300 * DEPTH)
@pytest.mark.requirement("API-6")
async def test_bad_input_gets_typed_errors_and_harms_nothing(mesh: FuzzedMesh) -> None:
    """10,000 broken messages: no crash, no untyped error, no growth; the mesh is whole after."""
    fuzz = Fuzz(mesh, SEED)
    await strange_paths(fuzz, mesh)
    await oversize(fuzz)
    warm = await measured(fuzz, mesh, WARM_UP)
    begun = time.monotonic()
    curve = await measured(fuzz, mesh, MESSAGES)
    seconds = time.monotonic() - begun
    before, after = warm[-1], curve[-1]
    crashed = not mesh.alive
    faults = [*await unsound(mesh), *await finish_kept(mesh)]
    status = await mesh.stop()
    log = mesh.log.read_text()
    growth = after["rss"] / before["rss"] - 1
    result = {
        "messages": fuzz.tally.messages,
        "crashes": int(crashed),
        "untyped": len(fuzz.tally.faults),
        "rss_growth": round(growth, 5),
        "rss_kib": [one["rss"] for one in (before, *curve)],
        "stores_kib": [before["stores"], after["stores"]],
        "messages_per_s": round(MESSAGES / seconds),
        "answers": dict(fuzz.tally.answers.most_common()),
    }
    print("RESULT " + json.dumps(result))
    assert fuzz.tally.faults == []
    assert fuzz.everything() - fuzz.tally.served == set()
    assert (crashed, status, faults) == (False, 0, [])
    assert unexplained(log) == []
    assert growth <= 0.01, result
