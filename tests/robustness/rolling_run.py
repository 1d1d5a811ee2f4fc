"""A rolling restart under load: each service is told to end, and another takes its place.

Harnesses on three edges play without end and repeat what is not answered under its key, a trainer
or a plain consumer takes the rows, weights are pushed. At the end everything that was acknowledged
is looked for, as behind kills.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from callforest_mesh.chassis.configuration import SERVICES
from tests.robustness.chaos_run import ChaosOptions, ChaosRun, run_struck
from tests.robustness.killer import CATCH_S, RECOVER_S, runs, until, works_again
from tests.robustness.rollout_load import LoadOptions
from tests.robustness.victim_mesh import VictimMesh

GRACE_S = 10.0
"""The grace of every service, as configured by default."""
LOAD = LoadOptions(groups=2, group_size=4, at_once=8, attempts_most=6, away_s=45.0)
"""A load that leaves the machine to a trainer; no repeat may take longer than `away_s`."""


@dataclass(frozen=True, slots=True)
class Restart:
    """One service that was told to end.

    Attributes:
        name: the service.
        in_flight: calls that it had in work when it was told.
        exit_status: its process's; 0 for an orderly end.
        exit_s: from the signal to the end of the process.
        away_s: from the signal until its successor served.
    """

    name: str
    in_flight: int
    exit_status: int | None
    exit_s: float
    away_s: float


@dataclass(frozen=True, slots=True)
class RollingOptions:
    """Who is restarted.

    Attributes:
        order: services, in the order in which they are told to end.
        rounds: how often each is.
        flaw: a fault that the victims are given.
    """

    order: Sequence[str] = SERVICES
    rounds: int = 1
    flaw: str = ""


@dataclass(slots=True)
class RollingRun:
    """What became of a rolling restart.

    Attributes:
        run: the load, what was acknowledged, and what is wrong with it.
        restarts: in their order.
    """

    run: ChaosRun
    restarts: list[Restart] = field(default_factory=list)

    @property
    def visible_errors(self) -> int:
        """Attempts that harnesses gave up since an error outlasted their repeats.

        One attempt of each group is given up on purpose.
        """
        load = self.run.load
        rollouts = load.rollout_ids()
        meant = len(rollouts) // load.options.group_size
        return len(load.attempts) - len(rollouts) - meant

    @property
    def masked(self) -> dict[str, int]:
        """Count the rollouts without all of their calls, by reason."""
        receipts = self.run.load.history.receipts.values()
        return dict(Counter(one.mask_reason for one in receipts if one.masked))

    def result(self) -> dict[str, object]:
        """Give the figures of the RESULT line."""
        run, faults = self.run, self.run.verdict.faults
        return {
            "restarts": len(self.restarts),
            "visible_errors": self.visible_errors,
            "repeats": run.load.repeats,
            "masked": self.masked,
            "lost": len(faults.lost),
            "duplicated": len(faults.duplicated),
            "changed": len(faults.changed),
            "wrong_parents": len(run.verdict.wrong_parents),
            "resampled_after_staging": len(run.verdict.resampled),
            "rollouts": len(run.load.history.receipts),
            "served": len(run.load.history.served),
            "steps": run.steps,
            "in_flight_min": min(one.in_flight for one in self.restarts),
            "exit_s_max": round(max(one.exit_s for one in self.restarts), 2),
            "away_s": {one.name: round(one.away_s, 2) for one in self.restarts},
            "staged_left": run.staged_left,
            "wall_s": round(run.wall_s, 1),
        }


async def run_rolling(directory: Path, options: RollingOptions) -> RollingRun:
    """Play while one service after the other is restarted; then look for all of it.

    Args:
        directory: short enough for a socket.
        options: who is restarted.

    Raises:
        TimeoutError: the run does not come to its end.
    """
    restarts: list[Restart] = []

    async def roll(mesh: VictimMesh, run: ChaosRun) -> None:
        for _ in range(options.rounds):
            for name in options.order:
                restarts.append(await _told_to_end(mesh, name))
                await works_again(mesh.victims, name)

    chosen = ChaosOptions(
        Counter(), load=LOAD, flaw=options.flaw, with_trainer="trainer" in options.order
    )
    if options.flaw:  # nobody waits long for what is lost
        chosen = replace(chosen, settle_s=1.0, end_s=1.0)
    return RollingRun(await run_struck(directory, chosen, roll), restarts)


async def _told_to_end(mesh: VictimMesh, name: str) -> Restart:
    """Catch a service at work, tell it to end, and wait until its successor serves."""
    victims = mesh.victims
    await victims.wait_ready(name, RECOVER_S)

    def told() -> tuple[int, int] | None:
        pid = victims.present(name)
        if pid is None:
            return None
        work = victims.work(name, pid)
        if work.in_flight < 1 or work.finished < 1:
            return None
        os.kill(pid, signal.SIGTERM)  # here, so that nothing can end between look and signal
        return pid, work.in_flight

    restarts = victims.restarts(name)
    pid, in_flight = await until(told, CATCH_S, f"{name} has calls in work")
    began = time.monotonic()
    await until(lambda: None if runs(pid) else True, RECOVER_S, f"{name} ends")
    ended = time.monotonic()
    await victims.wait_ready(name, RECOVER_S, restarts=restarts + 1)
    served = time.monotonic()
    return Restart(name, in_flight, victims.exit_status(name), ended - began, served - began)
