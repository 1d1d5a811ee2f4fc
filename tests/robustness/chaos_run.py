"""Kill -9 at every failpoint and at random, under a live load; then look for all that was promised.

Real processes under the supervisor, real sockets, stores that sync; the engine is scripted. A
hunter a service ends life after life, each at the point with which it was armed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from callforest_client.rollout import RolloutOwner
from callforest_mesh.chassis.configuration import SERVICES
from tests.robustness.chaos_consumer import Consumer, Pusher
from tests.robustness.chaos_hunt import ArmedVictims, Death, Hunter
from tests.robustness.chaos_judge import Verdict, check_parents, check_records, check_samples
from tests.robustness.chaos_load import ChaosLoad
from tests.robustness.chaos_points import Target, read_hits, targets, times
from tests.robustness.forest_judge import (
    check_forest_parents,
    check_requests,
    check_rows,
    check_selections,
    texts_of,
)
from tests.robustness.forest_load import ForestLoad
from tests.robustness.history import check_bytes, check_calls, check_groups, check_receipts
from tests.robustness.kill_run import KillRun, check_training, train_to, watch_metrics
from tests.robustness.killer import Victims, restart
from tests.robustness.rollout_load import LoadOptions
from tests.robustness.victim import CALL_DIARY
from tests.robustness.victim_mesh import GAUGES, VictimMesh, running_mesh

HUNTED = tuple(name for name in SERVICES if name != "trainer")
STORES = ("staging", "ledger", "finalizer")
QUICK = ("gateway.keep_alive_s=0.15", "worker.scripted.latency_s=[0.05, 0.25]")
"""Settings of a load that comes by every point often."""
FOREST = (
    "token_capture.forest_training=true",
    "gateway.history_cache_calls=16",
    "gateway.repeat_grace_s=2",
    "worker.scripted.latency_s=[0.03, 0.17]",
)
"""Settings of forest mode, whose rollouts have half as many calls again. So few histories are kept
that deltas miss theirs without a kill too; what became of a delta that was given up is settled
before its rollout ends."""


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Who is struck, where and how often.

    Attributes:
        wanted: how often each point is to be hit.
        random_kills: how many lives of each service end at no point.
        load: how much is played at once: `groups` of them at a time.
        seed: of order and passings.
        forest: whether attempts are of forest mode, else of chain mode.
        flaw: a fault that the victims are given.
        run_s: how long the hunt may last.
        settle_s: how long a rollout's calls may take to settle before it is sealed.
        end_s: how long the consumer and the cleanup may take once nobody strikes any more; what is
            not done by then is lost.
        with_trainer: whether a trainer takes the rows though it has no point to be hit at.
    """

    wanted: Counter[Target]
    random_kills: int = 1
    load: LoadOptions = field(
        default_factory=lambda: LoadOptions(groups=4, group_size=6, at_once=18, attempts_most=500)
    )
    seed: int = 1
    forest: bool = False
    flaw: str = ""
    run_s: float = 3600.0
    settle_s: float = 10.0
    end_s: float = 240.0
    with_trainer: bool = False

    @property
    def trains(self) -> bool:
        """Whether a trainer takes the rows; else a plain consumer does."""
        return self.with_trainer or "trainer" in self.hunted

    @property
    def hunted(self) -> tuple[str, ...]:
        """Whoever has a point to be hit at."""
        return tuple(sorted({target.service for target in self.wanted}))

    @property
    def changed(self) -> tuple[str, ...]:
        """The settings that are not those of every mesh of victims."""
        return (*QUICK, *FOREST) if self.forest else QUICK

    @property
    def running(self) -> tuple[str, ...]:
        """The services of the mesh."""
        return SERVICES if self.trains else HUNTED


@dataclass(slots=True)
class ChaosRun:
    """What became of a run.

    Attributes:
        wanted: how often each point was to be hit.
        deaths: every kill.
        load: the rollouts, and what was acknowledged.
        consumer: what was delivered.
        pusher: which weights were acknowledged.
        hits: how often each point was hit.
        verdict: what is wrong.
        staged_left: staged calls that no cleanup removed.
        steps: optimizer steps that survived, of a run that trains.
        steps_undone: those that a death undid.
        wall_s: from the first rollout to the last check.
    """

    wanted: Counter[Target]
    load: ChaosLoad
    consumer: Consumer
    pusher: Pusher
    deaths: list[Death] = field(default_factory=list)
    hits: Counter[Target] = field(default_factory=Counter)
    verdict: Verdict = field(default_factory=Verdict)
    staged_left: int = 0
    steps: int = 0
    steps_undone: int = 0
    wall_s: float = 0.0

    @property
    def proven(self) -> list[Death]:
        """The kills that hit a process at work."""
        return [death for death in self.deaths if death.proven]

    @property
    def kills(self) -> int:
        """How many kills hit a process at work: at a point, or proven by its own counts."""
        return self._by_service.total()

    @property
    def _by_service(self) -> Counter[str]:
        at_random = Counter(one.service for one in self.proven if one.target is None)
        for target, n in self.hits.items():
            at_random[target.service] += n
        return at_random

    def result(self) -> dict[str, object]:
        """Give the figures of the RESULT line."""
        proven, faults = self.proven, self.verdict.faults
        receipts = self.load.history.receipts.values()
        return {
            "mode": "forest" if isinstance(self.load, ForestLoad) else "chain",
            "kills": self.kills,
            "kills_by_service": dict(self._by_service),
            "kills_at_random": sum(one.target is None for one in proven),
            "kills_that_hit_nothing": len(self.deaths) - len(proven),
            "kills_with_counted_calls": sum(one.in_flight > 0 for one in proven),
            "lost": len(faults.lost),
            "duplicated": len(faults.duplicated),
            "changed": len(faults.changed),
            "wrong_parents": len(self.verdict.wrong_parents),
            "resampled_after_staging": len(self.verdict.resampled),
            "failpoints_hit": len(self.hits.keys() & self.wanted.keys()),
            "failpoints": len(self.wanted),
            "recovery_s_max": round(max((one.recovery_s for one in proven), default=0.0), 2),
            "rollouts": len(receipts),
            "masked_rollouts": sum(one.masked for one in receipts),
            "masked": dict(Counter(one.mask_reason for one in receipts if one.masked)),
            "attempts": len(self.load.attempts),
            "served": len(self.load.history.served),
            "repeats": self.load.repeats,
            "groups_consumed": self.consumer.committed,
            "weights_acknowledged": self.pusher.acknowledged,
            "harnesses": dict(self.load.counts),
            "steps": self.steps,
            "steps_undone": self.steps_undone,
            "staged_left": self.staged_left,
            "wall_s": round(self.wall_s, 1),
        }


Strike: TypeAlias = Callable[[VictimMesh, ChaosRun], Awaitable[None]]
"""Does something to a mesh while it is at work."""


def every_point(hits: int, services: Sequence[str] = HUNTED) -> Counter[Target]:
    """Want every point of some services hit so often."""
    return Counter(dict.fromkeys(targets(services), hits))


def some_points(count: int, seed: int) -> Counter[Target]:
    """Want a part of the points, another one for another seed, hit once each."""
    return Counter(random.Random(seed).sample(targets(HUNTED), count))


async def run_chaos(directory: Path, options: ChaosOptions) -> ChaosRun:
    """Play and kill; then look for everything that was acknowledged.

    Args:
        directory: short enough for a socket.
        options: who is struck.

    Raises:
        TimeoutError: the run does not come to its end.
    """
    hunters = hunters_of(directory / GAUGES, options)

    async def hunt(mesh: VictimMesh, run: ChaosRun) -> None:
        await _hunt(mesh, run, hunters, options)

    return await run_struck(directory, options, hunt, kind=ArmedVictims)


async def run_struck(
    directory: Path, options: ChaosOptions, strike: Strike, *, kind: type[Victims] = Victims
) -> ChaosRun:
    """Play while something is done to the mesh; then look for everything that was acknowledged.

    Args:
        directory: short enough for a socket.
        options: what is played, and who runs.
        strike: does it; when it returns, the load ends what it has begun.
        kind: keeps the processes.

    Raises:
        TimeoutError: the run does not come to its end.
    """
    async with running_mesh(
        directory, options.running, flaw=options.flaw, changed=options.changed, kind=kind
    ) as mesh:
        run = _prepared(mesh, directory, options)
        began = time.monotonic()
        helpers = _helpers(mesh, run, options)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.load.run())
                tasks.create_task(_struck(mesh, run, strike))
            await _settle(mesh, run, options)
        finally:
            for one in helpers:
                one.cancel()
            ended = await asyncio.gather(*helpers, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one
        run.hits = times(read_hits(mesh.gauges))
        await _judge(mesh, run)
        if options.trains:
            await _judge_training(mesh, run)
        else:
            _judge_consumer(run, (await mesh.finalizer.row_log()).committed_cursor)
        run.wall_s = time.monotonic() - began
        return run


async def _struck(mesh: VictimMesh, run: ChaosRun, strike: Strike) -> None:
    try:
        await strike(mesh, run)
    finally:
        run.load.stop.set()


def _prepared(mesh: VictimMesh, directory: Path, options: ChaosOptions) -> ChaosRun:
    owner = RolloutOwner(
        mesh.admission,
        mesh.ledger,
        mesh.finalizer,
        mesh.url,
        settle_wait_s=options.settle_s,
    )
    load = (ForestLoad if options.forest else ChaosLoad)(
        options.load,
        owner,
        mesh.ledger,
        mesh.staging,
        mesh.gateway_serves,
        gateway=mesh.gateway,
    )
    pusher = Pusher(mesh.worker, directory / "weights")
    return ChaosRun(options.wanted, load, Consumer(mesh.finalizer), pusher)


def hunters_of(directory: Path, options: ChaosOptions) -> list[Hunter]:
    """Make a hunter for each hunted service, and arm the services' first lives.

    Args:
        directory: of the gauges; made here.
        options: who is struck.
    """
    directory.mkdir()
    hunters = [
        Hunter(
            directory,
            service,
            Counter({one: n for one, n in options.wanted.items() if one.service == service}),
            random.Random(f"{options.seed} {service}"),
            random_kills=options.random_kills,
        )
        for service in options.hunted
    ]
    for hunter in hunters:
        hunter.arm_next()
    return hunters


async def _hunt(
    mesh: VictimMesh, run: ChaosRun, hunters: Sequence[Hunter], options: ChaosOptions
) -> None:
    """Strike every service at its points, all of them at the same time."""
    try:
        with suppress(TimeoutError):  # what was not hit by then shows in the figures
            async with asyncio.timeout(options.run_s), asyncio.TaskGroup() as tasks:
                for hunter in hunters:
                    hunter.victims = mesh.victims
                    tasks.create_task(hunter.hunt())
    finally:
        run.deaths = [death for hunter in hunters for death in hunter.deaths]


def _helpers(mesh: VictimMesh, run: ChaosRun, options: ChaosOptions) -> list[asyncio.Future[None]]:
    """Have someone consume rows and push weights: the trainer does both by itself."""
    if options.trains:
        return [asyncio.ensure_future(watch_metrics(mesh, run.load))]
    return [asyncio.ensure_future(one.run()) for one in (run.consumer, run.pusher)]


async def _settle(mesh: VictimMesh, run: ChaosRun, options: ChaosOptions) -> None:
    """Let the consumer come to the end of the log, and the cleanup behind it."""
    with suppress(TimeoutError):  # what is not done by then is missed by the judges
        async with asyncio.timeout(options.end_s):
            if options.trains:
                await train_to(mesh, len(run.load.history.groups))
                await mesh.trainer.checkpoint()
            else:
                await run.consumer.reach(len(run.load.history.groups))
            await _cleaned(mesh)
    run.staged_left = (await mesh.staging.stat()).call_count


async def _cleaned(mesh: VictimMesh) -> None:
    """Wait until no staged call is left; the caller bounds the wait."""
    while True:
        if not (await mesh.staging.stat()).call_count:
            return
        await asyncio.sleep(0.2)


async def _judge(mesh: VictimMesh, run: ChaosRun) -> None:
    """Ask again for all that was acknowledged, of stores that have just read their disks."""
    for name in STORES:
        await restart(mesh.victims, name)
    load, history, faults = run.load, run.load.history, run.verdict.faults
    manifests = await load.manifests()
    faults.extend(check_calls(history, manifests))
    faults.extend(check_bytes(history))
    faults.extend(check_receipts(history, load.rollout_ids(), await load.repeated_receipts()))
    row_log = await mesh.finalizer.row_log()
    faults.extend(check_groups(history, await load.repeated_groups(), row_log.head_cursor))
    faults.extend(load.faults)
    if isinstance(load, ForestLoad):
        faults.extend(check_requests(load.accounts, manifests))
        faults.extend(check_selections(load.chosen, history.receipts, manifests))
        run.verdict.wrong_parents = check_forest_parents(load.accounts, manifests)
    else:
        faults.extend(check_records(manifests))
        run.verdict.wrong_parents = check_parents(load.orders, manifests)
    run.verdict.resampled = check_samples((mesh.gauges / CALL_DIARY).read_text().splitlines())


def _judge_consumer(run: ChaosRun, committed: int) -> None:
    """Hold what the consumer and the pusher saw against what they were told."""
    faults, groups = run.verdict.faults, run.load.history.groups
    faults.extend(run.consumer.faults)
    faults.extend(run.pusher.faults)
    if committed < run.consumer.committed:
        faults.lost.append(f"the commit of position {run.consumer.committed}")
    if len(run.consumer.delivered) != len(groups):
        faults.lost.append(f"{len(groups)} groups, {len(run.consumer.delivered)} delivered")
    if isinstance(run.load, ForestLoad):
        texts = texts_of(run.load.accounts.values())
        faults.extend(check_rows(run.consumer.batches, run.load.history.receipts, texts))


async def _judge_training(mesh: VictimMesh, run: ChaosRun) -> None:
    """Follow what was trained over all lives of the trainer."""
    trained = KillRun([], run.load)
    await check_training(mesh, trained)
    run.verdict.faults.extend(trained.faults)
    run.steps, run.steps_undone = len(trained.lineage.steps), trained.lineage.undone
