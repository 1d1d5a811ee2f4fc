"""Staging under a bound of its memory, and a load that does not fit into it, while rollouts play.

The hog stages many large calls at once, each again and again, until Staging dies of it or has
refused some; then it stops, as a caller would that was told. Everything that was acknowledged, to
the hog and to the rollouts, is looked for at the end.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.channel import CLIENT_OPTIONS
from callforest_client.errors import CallforestError, RefusedError, reason_name
from callforest_client.staging import StagingClient
from tests.robustness.capped_victim import CAPPED
from tests.robustness.chaos_run import HUNTED, ChaosOptions, ChaosRun, run_struck
from tests.robustness.killer import RECOVER_S, Victims, until
from tests.robustness.memory_cap import VARIABLE, memory_cap
from tests.robustness.rollout_load import LoadOptions
from tests.robustness.victim_mesh import VictimMesh
from tests.unit.staging.calls import Chain

VICTIM = "staging"
HOG = "hog"
CALL_TOKENS = 500_000
"""Of one of the hog's calls: about 3 MiB."""
CONNECTIONS = 16
"""Of the hog: what one connection can have on the way is bounded by its window."""
HUNGRY = 48
"""Calls of the hog that are in work at once, in the end: each that is acknowledged adds one."""
REFUSED_ENOUGH = 8
LOAD = LoadOptions(groups=2, group_size=4, at_once=8, attempts_most=6, away_s=60.0)


class CappedVictims(Victims):
    """Keeps services of which one has little memory."""

    MODULE = "tests.robustness.capped_victim"


@dataclass(slots=True)
class MemoryRun:
    """What became of a run.

    Attributes:
        kind: of the bound.
        deaths: how the processes of Staging ended, by exit status.
        refused: what the hog was told, by reason; not of calls that were repeated later.
        acknowledged: the hog's calls that were.
        lost: those that were gone or changed afterwards.
        harmed: other services that had to be started again.
        run: the rollouts.
    """

    kind: str
    deaths: Counter[int] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    harmed: list[str] = field(default_factory=list)
    run: ChaosRun | None = None

    @property
    def masked(self) -> Counter[str]:
        """Count the rollouts without all of their calls, by reason."""
        receipts = self.run.load.history.receipts.values()
        return Counter(one.mask_reason for one in receipts if one.masked)

    def result(self) -> dict[str, object]:
        """Give the figures of the RESULT line."""
        faults = self.run.verdict.faults
        return {
            "cap": self.kind,
            "deaths": dict(self.deaths),
            "refused": dict(self.refused),
            "acknowledged": self.acknowledged,
            "lost": len(faults.lost) + len(self.lost),
            "duplicated": len(faults.duplicated),
            "changed": len(faults.changed),
            "other_services_harmed": self.harmed,
            "rollouts": len(self.run.load.history.receipts),
            "masked": dict(self.masked),
            "repeats": self.run.load.repeats,
            "wall_s": round(self.run.wall_s, 1),
        }


async def run_short_of_memory(
    directory: Path, kind: str, size: int, *, rounds: int = 1, flaw: str = ""
) -> MemoryRun:
    """Play while Staging runs out of memory; then look for all that was acknowledged.

    Args:
        directory: short enough for a socket.
        kind: of the bound.
        size: the bound, in bytes.
        rounds: how often it runs out.
        flaw: a fault that the victims are given.
    """
    made = MemoryRun(kind)

    async def starve(mesh: VictimMesh, run: ChaosRun) -> None:
        for number in range(rounds):
            await _eat(mesh, made, number)
            await mesh.victims.wait_ready(VICTIM, RECOVER_S)
        await until(lambda: run.load.history.groups or None, RECOVER_S, "a group is published")
        made.harmed = [name for name in HUNTED if name != VICTIM and mesh.victims.restarts(name)]

    with memory_cap(kind, size) as cap, _environment({VARIABLE: cap, CAPPED: VICTIM}):
        options = ChaosOptions(Counter(), load=LOAD, flaw=flaw)
        if flaw:  # nobody waits long for what is lost
            options = replace(options, settle_s=1.0, end_s=1.0)
        made.run = await run_struck(directory, options, starve, kind=CappedVictims)
    return made


async def _eat(mesh: VictimMesh, made: MemoryRun, number: int) -> None:
    """Stage until Staging dies of it or refuses; then look for what was acknowledged."""
    restarts, refused = mesh.victims.restarts(VICTIM), sum(made.refused.values())
    acknowledged: dict[str, bytes] = {}
    hungry: list[asyncio.Future[None]] = []

    async def hunger(place: int) -> None:
        staging = mouths[place % CONNECTIONS]
        call = Chain(f"hog-{number}-{place}", seed=place).add("c", tokens=CALL_TOKENS)
        while True:  # the same call again: it takes memory, and no more of the store
            try:
                await staging.stage(call, timeout_s=20.0)
            except CallforestError as error:
                made.refused[f"{error.code.name} {reason_name(error.reason)}"] += 1
            else:
                acknowledged[call.capture_key] = call.digest
                if len(hungry) < HUNGRY:
                    hungry.append(asyncio.ensure_future(hunger(len(hungry))))

    def told() -> bool | None:
        died = mesh.victims.restarts(VICTIM) > restarts
        return True if died or sum(made.refused.values()) >= refused + REFUSED_ENOUGH else None

    async with _mouths(mesh.addresses.of(VICTIM)) as mouths:
        hungry.append(asyncio.ensure_future(hunger(0)))
        try:
            await until(told, RECOVER_S, "Staging has no memory left")
        finally:
            for one in hungry:
                one.cancel()
            await asyncio.gather(*hungry, return_exceptions=True)
    if mesh.victims.restarts(VICTIM) > restarts:
        await mesh.victims.wait_ready(VICTIM, RECOVER_S, restarts=restarts + 1)
        made.deaths[mesh.victims.exit_status(VICTIM) or 0] += 1
    made.acknowledged += len(acknowledged)
    staging = mesh.staging.for_tenant(HOG)
    for key, digest in acknowledged.items():
        if await _digest(staging, key) != digest:
            made.lost.append(key)
        await staging.drop_partition(key)


@asynccontextmanager
async def _mouths(address: str) -> AsyncIterator[list[StagingClient]]:
    """Give clients of Staging, each with a connection of its own."""
    own = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        mouths = []
        for _ in range(CONNECTIONS):
            channel = grpc.aio.insecure_channel(address, options=own)
            client = StagingClient(await stack.enter_async_context(channel), tenant=HOG)
            stack.push_async_callback(client.close)
            mouths.append(client)
        yield mouths


async def _digest(staging: StagingClient, key: str) -> bytes:
    """Give the digest of a staged call of the hog; b"" if it is gone."""
    try:
        (call,) = await staging.fetch(key, ["c"])
    except RefusedError as error:
        if error.reason != er.ERROR_REASON_CALL_NOT_FOUND:
            raise
        return b""
    return call.digest


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
