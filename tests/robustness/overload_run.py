"""Calls that come faster than the mesh can make them: what is taken, what is pushed back.

The capacity is measured first, with as many callers as find a place. Then calls come at a fixed
rate, whether or not earlier ones were answered, each with a deadline. Nobody repeats: a call is
answered in time, pushed back with a reason and a delay, or it is a breach.

Usage: python -m tests.robustness.overload_run [--seconds 60] [--places 8] [--rounds 1]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.channel import connect
from callforest_client.errors import CallforestError
from callforest_client.gateway import GatewayClient
from callforest_client.ledger import LedgerClient
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import load
from callforest_mesh.supervisor import Supervisor, SupervisorOptions
from tests.integration.running_mesh import settings
from tests.robustness.crowded_worker import PLACES, TAKES_ALL

ROOT = Path(__file__).parents[2]
LATENCY_S = 0.2
DEADLINE_S = 2.0
"""Ten times what a call takes when nobody waits."""
ATTEMPTS = 16
SERVICES = ("staging", "ledger", "admission", "worker", "gateway")
CAPACITY_S = 2.0
RAMP_S = 1.5
"""Of each phase, what is not counted: the queue fills, and the mesh learns its pace."""
GOODPUT_LEAST = 0.9
BREACHES_MOST = 0.01


@dataclass(slots=True)
class Phase:
    """What became of the calls of one phase.

    Attributes:
        began: when its counted part began, on the monotonic clock.
        ended: when it ended.
        good: when each call was answered that was answered in time.
        outcomes: of every call, counted: good, breach, pushed_back, or another error by its name.
        delays_ms: of those that were pushed back.
        answers: call ids that were acknowledged.
    """

    began: float
    ended: float
    good: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    delays_ms: list[int] = field(default_factory=list)
    answers: list[tuple[str, str]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Good calls a second, of the counted part."""
        return self._rate(self.began, self.ended)

    @property
    def best_rate(self) -> float:
        """The higher rate of both halves: who is held up by others has no smaller capacity."""
        middle = (self.began + self.ended) / 2
        return max(self._rate(self.began, middle), self._rate(middle, self.ended))

    def _rate(self, began: float, ended: float) -> float:
        return sum(began <= moment < ended for moment in self.good) / (ended - began)

    @property
    def breach_share(self) -> float:
        """Part of the admitted calls that were not answered in time."""
        admitted = self.outcomes.total() - self.outcomes["pushed_back"]
        return (admitted - self.outcomes["good"]) / max(1, admitted)


@dataclass(slots=True)
class Crowd:
    """Callers of one mesh.

    Attributes:
        gateway: what they call.
        ledger: what is asked in the end.
        keys: their attempts.
    """

    gateway: GatewayClient
    ledger: LedgerClient
    keys: list[str]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def closed(self, callers: int, seconds: float) -> Phase:
        """Let so many callers ask one call after the other."""
        phase = self._phase(seconds)

        async def ask_on() -> None:
            while time.monotonic() < phase.ended:
                await self._ask(phase)

        await asyncio.gather(*(ask_on() for _ in range(callers)))
        return phase

    async def open(self, rate: float, seconds: float) -> Phase:
        """Let calls come at a rate, evenly, whatever became of those before."""
        phase = self._phase(seconds)
        begun = phase.began - RAMP_S
        async with asyncio.TaskGroup() as tasks:
            for number in range(math.ceil(rate * (phase.ended - begun))):
                await asyncio.sleep(max(0.0, begun + number / rate - time.monotonic()))
                tasks.create_task(self._ask(phase))
        return phase

    def _phase(self, seconds: float) -> Phase:
        now = time.monotonic()
        return Phase(now + RAMP_S, now + RAMP_S + seconds)

    async def _ask(self, phase: Phase) -> None:
        number = next(self._numbers)
        key = self.keys[number % len(self.keys)]
        messages = [{"role": "user", "content": f"call {number}"}]
        body = json.dumps({"model": "scripted", "messages": messages, "seed": number}).encode()
        begun = time.monotonic()
        try:
            served = await self.gateway.complete(key, body, timeout_s=DEADLINE_S)
        except CallforestError as error:
            phase.outcomes[self._outcome(error, phase)] += 1
            return
        ended = time.monotonic()
        phase.answers.append((key, served.call_id))
        in_time = ended - begun <= DEADLINE_S
        phase.outcomes["good" if in_time else "breach"] += 1
        if in_time:
            phase.good.append(ended)

    @staticmethod
    def _outcome(error: CallforestError, phase: Phase) -> str:
        if error.reason == er.ERROR_REASON_ITEM_DEADLINE:
            return "breach"
        if error.reason == er.ERROR_REASON_OVERLOADED and error.retry_after_ms:
            phase.delays_ms.append(error.retry_after_ms)
            return "pushed_back"
        return str(error)

    async def lost(self, phases: list[Phase]) -> tuple[int, int]:
        """Count the acknowledged calls without a record, and the failure rows."""
        manifests = [await self.ledger.manifest(key) for key in self.keys]
        kept = {
            (key, record.coords.call_id)
            for key, manifest in zip(self.keys, manifests, strict=True)
            for record in manifest.records
        }
        answers = {one for phase in phases for one in phase.answers}
        return len(answers - kept), sum(len(manifest.failures) for manifest in manifests)


@dataclass(slots=True)
class Overload:
    """What a run found.

    Attributes:
        capacity: calls a second with as many callers as find a place, twice over.
        once: a phase at the capacity for each round.
        twice: one at twice the capacity for each round.
        lost: acknowledged calls without a record.
        failures: failure rows.
    """

    capacity: float
    once: list[Phase] = field(default_factory=list)
    twice: list[Phase] = field(default_factory=list)
    lost: int = 0
    failures: int = 0

    @property
    def goodput_ratio(self) -> float:
        """Goodput at twice the capacity to that at the capacity, of all rounds together."""
        return sum(one.rate for one in self.twice) / sum(one.rate for one in self.once)

    @property
    def breach_share(self) -> float:
        """Part of the admitted calls of the overload that were not answered in time."""
        return max(one.breach_share for one in self.twice)

    @property
    def outcomes(self) -> Counter[str]:
        """What became of the calls of the overload."""
        return sum((one.outcomes for one in self.twice), Counter())

    def result(self) -> dict[str, object]:
        """Give the figures of the RESULT line."""
        delays = [delay for one in self.twice for delay in one.delays_ms]
        return {
            "goodput_ratio": round(self.goodput_ratio, 3),
            "breach_share": round(self.breach_share, 4),
            "breach_share_at_1x": round(max(one.breach_share for one in self.once), 4),
            "pushed_back": self.outcomes["pushed_back"],
            "outcomes": dict(self.outcomes),
            "delay_ms": [min(delays), max(delays)] if delays else [],
            "capacity_per_s": round(self.capacity, 1),
            "goodput_per_s": [round(one.rate, 1) for one in (*self.once, *self.twice)],
            "lost": self.lost,
            "failure_rows": self.failures,
        }


async def run_overload(
    folder: Path, *, seconds: float, rounds: int = 1, places: int = 8, takes_all: bool = False
) -> Overload:
    """Measure the capacity, then let calls come once and twice as fast.

    Args:
        folder: short enough for a socket.
        seconds: counted part of each overload; the phase at the capacity takes half of it.
        rounds: how often both phases are played.
        places: generations that the engine makes at once; 0 for as many as come.
        takes_all: whether the gateway is given the flaw of taking every call.
    """
    async with crowd(folder, places=places, takes_all=takes_all) as callers:
        measured = await callers.closed(2 * places or 64, CAPACITY_S)
        overload, phases = Overload(measured.best_rate), [measured]
        for _ in range(rounds):
            overload.once.append(await callers.open(overload.capacity, seconds / 2))
            overload.twice.append(await callers.open(2 * overload.capacity, seconds))
        phases += overload.once + overload.twice
        overload.lost, overload.failures = await callers.lost(phases)
        return overload


@asynccontextmanager
async def crowd(folder: Path, *, places: int, takes_all: bool) -> AsyncIterator[Crowd]:
    """Run the services behind a harness's calls, with attempts that are open."""
    latency_s = LATENCY_S if places else 0.0
    chosen = settings(
        folder,
        "log.level=error",
        f"services=[{', '.join(SERVICES)}]",
        f"worker.scripted.latency_s=[{latency_s}, {latency_s}]",
    )
    configuration = load(environment={}, settings=chosen)
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    flaw = (f"{TAKES_ALL}=1",) if takes_all else ()
    variables = (f"PYTHONPATH={path}", f"{PLACES}={places}", *flaw)
    command = ("env", *variables, sys.executable, "-m", "tests.robustness.crowded_worker")
    arguments = [word for one in chosen for word in ("--set", one)]
    supervisor = Supervisor(configuration, arguments, SupervisorOptions(command=command))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        clients = Clients(configuration, addressed(configuration), stack)
        admission, ledger = clients.admission(), clients.ledger()
        keys = [
            (await admission.open_attempt(f"r{n}", request_id=str(uuid.UUID(int=n)))).capture_key
            for n in range(ATTEMPTS)
        ]
        channel = await stack.enter_async_context(connect(configuration.addresses.of("gateway")))
        gateway = GatewayClient(channel, tenant=configuration.tenant)
        stack.push_async_callback(gateway.close)
        yield Crowd(gateway, ledger, keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--takes-all", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        overload = asyncio.run(
            run_overload(
                Path(directory),
                seconds=chosen.seconds,
                rounds=chosen.rounds,
                places=chosen.places,
                takes_all=chosen.takes_all,
            )
        )
    print("RESULT " + json.dumps(overload.result()))
    well = overload.goodput_ratio >= GOODPUT_LEAST and overload.breach_share <= BREACHES_MOST
    sys.exit(not (well and overload.lost == 0))


if __name__ == "__main__":
    main()
