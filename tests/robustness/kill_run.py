"""A whole run of rollouts and training while every service is killed again and again.

Real processes, real sockets, stores that sync, a learner that trains; only the engine is scripted.
At the end everything that was acknowledged is looked for.

Usage: python -m tests.robustness.kill_run [--depth 1] [--seed 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest_client.errors import UnavailableError
from callforest_client.rollout import RolloutOwner
from callforest_mesh.chassis.configuration import SERVICES
from tests.robustness.history import (
    Faults,
    check_bytes,
    check_calls,
    check_groups,
    check_metrics,
    check_receipts,
)
from tests.robustness.killer import Kill, restart, strike, until, works_again
from tests.robustness.rollout_load import LoadOptions, RolloutLoad
from tests.robustness.training_diary import Lineage, read_diary, training_faults
from tests.robustness.victim import DIARY
from tests.robustness.victim_mesh import ANSWER_S, VictimMesh, running_mesh

TRAIN_S = 240.0
"""How long the run may take to come to its next kill, or the trainer to the end of the log."""
UNPROVEN_MOST = 10
"""Most kills in a row that may turn out to have hit nothing."""
STORES = ("staging", "ledger", "finalizer")
STEPS_BEFORE = (1, 3, 2)
"""How many steps a trainer makes in its life before it is killed: before its first checkpoint,
behind one, and upon one."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is played and who is killed.

    Attributes:
        load: how much is played.
        kills: by service, the trainer apart; their order is drawn, round by round.
        trainer_kills: after how many steps of its life each life of the trainer ends.
        services: the ones that run.
        seed: of the order.
        flaw: a fault that the victims are given.
    """

    load: LoadOptions
    kills: Mapping[str, int]
    trainer_kills: tuple[int, ...] = ()
    services: tuple[str, ...] = SERVICES
    seed: int = 1
    flaw: str = ""


def whole_run(depth: int, seed: int = 1) -> RunOptions:
    """Kill each service `3 * depth` times during `200 * depth` rollouts."""
    victims = [name for name in SERVICES if name != "trainer"]
    return RunOptions(
        load=LoadOptions(groups=25 * depth),
        kills=dict.fromkeys(victims, 3 * depth),
        trainer_kills=STEPS_BEFORE * depth,
        seed=seed,
    )


@dataclass(slots=True)
class KillRun:
    """What became of a run.

    Attributes:
        kills: all of them, the unproven ones too.
        load: the rollouts and what was acknowledged.
        faults: what is lost, doubled or changed.
        lineage: the training that survived.
        head_cursor: the last position of the row log.
        committed_cursor: the last consumed one.
        staged_left: staged calls that the cleanup left behind.
        wall_s: from the first rollout to the last check.
    """

    kills: list[Kill]
    load: RolloutLoad
    faults: Faults = field(default_factory=Faults)
    lineage: Lineage = field(default_factory=Lineage)
    head_cursor: int = 0
    committed_cursor: int = 0
    staged_left: int = 0
    wall_s: float = 0.0

    def result(self) -> dict[str, object]:
        """Give the figures of the RESULT line."""
        proven = [kill for kill in self.kills if kill.proven]
        receipts = self.load.history.receipts.values()
        return {
            "kills": len(proven),
            "kills_by_service": dict(Counter(kill.name for kill in proven)),
            "kills_that_hit_nothing": len(self.kills) - len(proven),
            "victims_in_flight_min": min(kill.in_flight for kill in proven),
            "lost": len(self.faults.lost),
            "duplicated": len(self.faults.duplicated),
            "changed": len(self.faults.changed),
            "rollouts": len(receipts),
            "masked": dict(Counter(one.mask_reason for one in receipts if one.masked)),
            "attempts": len(self.load.attempts),
            "served": len(self.load.history.served),
            "steps": len(self.lineage.steps),
            "steps_undone": self.lineage.undone,
            "recovery_s_max": round(max(kill.recovery_s for kill in proven), 2),
            "wall_s": round(self.wall_s, 1),
        }


async def run_under_kills(directory: Path, options: RunOptions) -> KillRun:
    """Play, train and kill; then look for everything that was acknowledged.

    Args:
        directory: short enough for a socket.
        options: what is played and who is killed.

    Raises:
        TimeoutError: the run does not come to its end.
    """
    async with running_mesh(directory, options.services, flaw=options.flaw) as mesh:
        owner = RolloutOwner(
            mesh.admission, mesh.ledger, mesh.finalizer, mesh.url, settle_wait_s=30.0
        )
        load = RolloutLoad(options.load, owner, mesh.ledger, mesh.staging, mesh.gateway_serves)
        run = KillRun([], load)
        began = time.monotonic()
        watch = asyncio.ensure_future(watch_metrics(mesh, load))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load.run())
                tasks.create_task(kill_callers(mesh, run, options))
                tasks.create_task(kill_trainers(mesh, run, options))
            if "trainer" in options.services:
                await train_to(mesh, len(load.history.groups))
                await mesh.trainer.checkpoint()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        for name in STORES:
            await restart(mesh.victims, name)
        await check_calls_and_rows(mesh, run)
        if "trainer" in options.services:
            await check_training(mesh, run)
        run.wall_s = time.monotonic() - began
        return run


async def kill_callers(mesh: VictimMesh, run: KillRun, options: RunOptions) -> None:
    """Kill every service but the trainer, spread over the run by the calls that were served."""
    chance = random.Random(options.seed)
    order: list[str] = []
    for number in range(max(options.kills.values())):
        due_now = sorted(name for name, count in options.kills.items() if count > number)
        order += chance.sample(due_now, len(due_now))
    served = run.load.history.served
    for number, name in enumerate(order, start=1):
        # The last part of the run is for those who must try again.
        due = options.load.calls * number // (len(order) + 3)
        await until(lambda due=due: len(served) >= due or None, TRAIN_S, f"{due} calls are served")
        run.kills += await kill_at_work(mesh, name, finished=1)
        await works_again(mesh.victims, name)


async def kill_trainers(mesh: VictimMesh, run: KillRun, options: RunOptions) -> None:
    """Kill the trainer at different distances from its checkpoints."""
    for steps in options.trainer_kills:
        run.kills += await kill_at_work(mesh, "trainer", finished=steps)


async def kill_at_work(mesh: VictimMesh, name: str, *, finished: int) -> list[Kill]:
    """Kill until a kill is proven: what the victim had in work may have ended just before."""
    kills = [await strike(mesh.victims, name, finished=finished)]
    while not kills[-1].proven:
        assert len(kills) < UNPROVEN_MOST, f"{name} never dies at work: {kills}"
        kills.append(await strike(mesh.victims, name, finished=finished))
    return kills


async def watch_metrics(mesh: VictimMesh, load: RolloutLoad) -> None:
    """Write down each step that the trainer announces, in each of its lives."""
    while True:
        try:
            async for metrics in mesh.trainer.watch_metrics():
                load.history.metrics.append(metrics)
        except UnavailableError:
            await asyncio.sleep(0.05)  # it was killed, or there is none: watch the next one


async def train_to(mesh: VictimMesh, head: int) -> None:
    """Wait until the trainer has trained on the whole log.

    Raises:
        TimeoutError: it does not come there.
    """
    async with asyncio.timeout(TRAIN_S):
        while True:
            status = await mesh.trainer.status()
            assert status.phase != pb.TRAINER_PHASE_FAILED, status.failure
            if status.trained_cursor >= head:
                return
            await asyncio.sleep(0.1)


async def check_calls_and_rows(mesh: VictimMesh, run: KillRun) -> None:
    """Ask again for all that was acknowledged, of stores that have just read their disks."""
    load, history = run.load, run.load.history
    manifests = {capture_key: await load.rows(capture_key) for capture_key in load.attempts}
    run.faults.extend(check_calls(history, manifests))
    run.faults.extend(check_bytes(history))
    receipts = await load.repeat_receipts()
    run.faults.extend(check_receipts(history, load.rollout_ids(), receipts))
    row_log = await mesh.finalizer.row_log()
    run.head_cursor, run.committed_cursor = row_log.head_cursor, row_log.committed_cursor
    run.faults.extend(check_groups(history, await load.repeat_groups(), run.head_cursor))


async def check_training(mesh: VictimMesh, run: KillRun) -> None:
    """Follow what was trained over all lives; wait for the cleanup of what was consumed."""
    history = run.load.history
    run.lineage = read_diary((mesh.gauges / DIARY).read_text().splitlines())
    run.faults.extend(check_metrics(history.metrics, run.lineage.versions))
    published = [row_id for one in history.groups.values() for row_id in one.row_ids]
    run.faults.extend(training_faults(run.lineage, published))
    deadline = time.monotonic() + ANSWER_S
    while True:
        run.staged_left = (await mesh.staging.stat()).call_count
        if run.staged_left == 0 or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=int(os.environ.get("DEPTH", "1")))
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    options = whole_run(chosen.depth, chosen.seed)
    with tempfile.TemporaryDirectory() as directory:
        run = asyncio.run(run_under_kills(Path(directory), options))
    for kill in run.kills:
        print(kill)
    for fault in run.faults.all():
        print(fault)
    print("RESULT " + json.dumps(run.result()))
    sys.exit(bool(run.faults.all()))


if __name__ == "__main__":
    main()
