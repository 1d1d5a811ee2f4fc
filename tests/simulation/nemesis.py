"""What goes wrong in a run, and how often: drawn anew for each seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.simulation.consumer import Consumer
from tests.simulation.loop import Life
from tests.simulation.mesh import CALLS, SERVICES, STORES, Mesh
from tests.simulation.network import Weather

HOUR_NS = 3_600_000_000_000


@dataclass(slots=True)
class Nemesis:
    """Does harm until it is told to heal.

    Attributes:
        chance: draws what and when.
        pause_s: mean time between two faults.
        weights: how often each kind comes, relative to the others.
    """

    mesh: Mesh
    consumer: Consumer
    chance: random.Random
    pause_s: float = 0.0
    weights: dict[str, float] = field(default_factory=dict)
    _life: Life = field(default_factory=lambda: Life("nemesis"))
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _healing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Draw what this run suffers from, so that runs differ in kind."""
        chance, network = self.chance, self.mesh.network
        network.weather = Weather(
            latency_s=chance.choice((0.0005, 0.002, 0.01)),
            lost=chance.choice((0.0, 0.0, 0.01, 0.05)),
            doubled=chance.choice((0.0, 0.02, 0.2)),
            overtaken=chance.choice((0.0, 0.02, 0.2)),
        )
        self.pause_s = chance.choice((0.3, 1.0, 3.0, 8.0))
        self.weights = {kind: chance.choice((0, 1, 1, 4)) for kind in self._kinds()}
        for disk in self.mesh.disks.values():
            disk.rerun = chance.choice((0.0, 0.0, 0.1))
            disk.queue_limit = chance.choice((8, 64, 8192))

    def _kinds(self) -> dict[str, Callable[[], Awaitable[bool]]]:
        return {
            "kill -9": self._kill,
            "kill -9 in a commit": self._kill_in_commit,
            "SIGTERM": self._drain,
            "pause": self._pause,
            "cut": self._cut,
            "one-way partition": self._one_way,
            "partition": self._partition,
            "slow disk": self._slow,
            "clock jump": self._jump,
            "new weights": self._push,
            "consumer killed": self._kill_consumer,
        }

    async def run(self) -> None:
        """Do harm, again and again."""
        kinds = self._kinds()
        names, shares = list(kinds), [self.weights[kind] or 0.01 for kind in kinds]
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / self.pause_s))
            (kind,) = self.chance.choices(names, shares)
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(self._life.start(self._do(kind, kinds[kind])))

    async def _do(self, kind: str, harm: Callable[[], Awaitable[bool]]) -> None:
        network = self.mesh.network
        network.note("fault", kind)
        if await harm():
            network.faults[kind] += 1

    async def heal(self) -> None:
        """Undo all harm; return when every process runs."""
        self._healing.set()
        mesh = self.mesh
        mesh.network.heal()
        for disk in mesh.disks.values():
            disk.slow_until, disk.rerun = 0.0, 0.0
            disk.queue_limit = 8192
        for process in list(mesh.processes.values()):
            if process.life.paused:
                mesh.network.loop.resume(process.life)
        await asyncio.gather(*self._tasks)
        for name in SERVICES:
            await mesh.start(name)
        self.consumer.start()
        mesh.network.heal()

    async def _away(self, longest_s: float) -> None:
        """Wait while something is broken; not once it must be healed."""
        end = self.mesh.network.loop.now + self.chance.uniform(0.02, longest_s)
        left_s = end - self.mesh.network.loop.now
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._healing.wait()

    async def _kill(self) -> bool:
        return await self._kill_one(self.chance.choice(SERVICES))

    async def _kill_one(self, name: str) -> bool:
        hit = self.mesh.kill(name)
        if hit:
            await self._away(3.0)
            await self.mesh.start(name)
        return hit

    async def _kill_in_commit(self) -> bool:
        """Kill a store's service while a commit is under way, if there is one soon."""
        name = self.chance.choice(STORES)
        for _ in range(2000):
            if self.mesh.disks[name].under_way or self._healing.is_set():
                break
            await asyncio.sleep(0.0005)
        return self.mesh.disks[name].under_way and await self._kill_one(name)

    async def _drain(self) -> bool:
        name = self.chance.choice(SERVICES)
        hit = await self.mesh.drain(name)
        if hit:
            await self._away(0.5)
            await self.mesh.start(name)
        return hit

    async def _pause(self) -> bool:
        process = self.mesh.processes.get(self.chance.choice(SERVICES))
        if process is None or process.life.paused or process.drain.begun:
            return False
        process.life.paused = True
        await self._away(15.0)
        if process.life.alive and process.life.paused:
            self.mesh.network.loop.resume(process.life)
        return True

    async def _cut(self) -> bool:
        return self.mesh.network.cut(*self.chance.choice(CALLS)) > 0

    async def _one_way(self) -> bool:
        pair = self.chance.choice(CALLS)
        source, target = pair if self.chance.random() < 0.5 else reversed(pair)
        self._block(source, target)
        return True

    async def _partition(self) -> bool:
        one, other = self.chance.choice(CALLS)
        self._block(one, other)
        self._block(other, one)
        return True

    def _block(self, source: str, target: str) -> None:
        network = self.mesh.network
        network.block(source, target, network.loop.now + self.chance.uniform(0.1, 15.0))

    async def _slow(self) -> bool:
        disk = self.mesh.disks[self.chance.choice(STORES)]
        disk.slow_until = self.mesh.network.loop.now + self.chance.uniform(1, 8)
        return True

    async def _jump(self) -> bool:
        self.mesh.clock_offset_ns = self.chance.choice((-HOUR_NS, 0, HOUR_NS))
        return True

    async def _push(self) -> bool:
        engine = self.mesh.engine
        if engine is None or not engine._running:
            return False
        self.mesh.weight_version += 1
        await engine.update_weights("", self.mesh.weight_version)
        return True

    async def _kill_consumer(self) -> bool:
        hit = self.consumer.kill()
        await self._away(1.0)
        self.consumer.start()
        return hit
