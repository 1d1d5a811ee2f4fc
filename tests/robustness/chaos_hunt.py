"""The hunt of one service: life after life, ended at its failpoints or by a kill at random."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from callforest_mesh.supervisor import SupervisionError
from tests.robustness.armed_victim import arming, next_arming
from tests.robustness.chaos_points import LEARNER, Target, read_hits, times
from tests.robustness.killer import RECOVER_S, Victims, runs, strike, until

RANDOM_SHARE = 0.2
"""Part of a service's lives that no point ends."""


class ArmedVictims(Victims):
    """Keeps services that a file can arm for their next life."""

    MODULE = "tests.robustness.armed_victim"


@dataclass(frozen=True, slots=True)
class Death:
    """One kill -9.

    Attributes:
        service: whose process it was.
        pid: the process.
        target: the point at which it killed itself; None when the killer did.
        in_flight: calls that it had in work, as it counted itself.
        recovery_s: from its death until its successor served.
        proven: whether it was alive and at work: a point is passed at work alone; else its own
            counts say so.
    """

    service: str
    pid: int
    target: Target | None
    in_flight: int
    recovery_s: float
    proven: bool


@dataclass(slots=True)
class Hunter:
    """Ends the lives of one service until each of its points was hit often enough.

    Attributes:
        directory: of the armings, the diary and the gauges.
        service: which one.
        wanted: how often each point is to be hit.
        chance: draws the order and the passings.
        life_s: how long a life may take to come to its point before it is killed where it is.
        lives_most: most lives; a point that is never reached must not hold the run for ever.
        random_kills: how many lives are to end at no point.
        victims: has the service, once the mesh runs.
        deaths: what was done.
    """

    directory: Path
    service: str
    wanted: Counter[Target]
    chance: random.Random
    life_s: float = 30.0
    lives_most: int = 1000
    random_kills: int = 0
    victims: Victims | None = None
    deaths: list[Death] = field(default_factory=list)

    def arm_next(self, pid: int | None = None) -> None:
        """Choose how the life behind that of `pid` is to end, unless that is chosen already.

        Args:
            pid: the present life; None before the first one.
        """
        file = next_arming(self.directory, self.service)
        missing = self.missing()
        if pid is not None and (armed := self._armed(pid)) is not None:
            missing -= Counter([armed])
        spare = self.random_kills - self._at_random()
        if file.exists() or not missing or (spare > 0 and self.chance.random() < RANDOM_SHARE):
            return
        target = self.chance.choice(sorted(missing))
        nth = self.chance.randint(1, target.nth_most)
        unfinished = file.with_suffix(".new")
        unfinished.write_text(f"{target.point}=exit@{nth}")
        unfinished.rename(file)

    def missing(self) -> Counter[Target]:
        """Say which points are still to be hit, and how often."""
        return self.wanted - times(read_hits(self.directory))

    async def hunt(self) -> None:
        """Do all of it; the last life is an unarmed one."""
        assert self.victims is not None, "the mesh runs"
        while self._unfinished() and len(self.deaths) < self.lives_most:
            await self.victims.wait_ready(self.service, RECOVER_S)
            try:
                pid = self.victims.pid(self.service)
            except SupervisionError:
                continue  # it has just died by itself; the next life counts
            self.arm_next(pid)
            if self._armed(pid) is not None:
                self.deaths.append(await self._end_armed(pid, self.life_s))
            elif self._at_random() < self.random_kills:
                self.deaths.append(await self._end_at_random())
            else:
                self.deaths.append(await self._end_armed(pid, 0.0))
        next_arming(self.directory, self.service).unlink(missing_ok=True)
        pid = self.victims.present(self.service)
        if pid is not None and self._armed(pid) is not None:
            self.deaths.append(await self._end_armed(pid, 0.0))

    def _unfinished(self) -> bool:
        return bool(self.missing()) or self._at_random() < self.random_kills

    def _at_random(self) -> int:
        return sum(one.target is None and one.proven for one in self.deaths)

    async def _end_at_random(self) -> Death:
        kill = await strike(self.victims, self.service, finished=1)
        return Death(
            self.service, kill.pid, None, kill.in_flight, kill.recovery_s, proven=kill.proven
        )

    async def _end_armed(self, pid: int, life_s: float) -> Death:
        """Wait until a process kills itself; kill it when it does not come to its point in time."""
        restarts = self.victims.restarts(self.service)
        began = time.monotonic()

        learners = self._learners_dead()

        def gone() -> bool | None:
            if not runs(pid):
                return True
            # An armed learner died: the trainer's next one would die at the same point.
            if self._learners_dead() > learners or time.monotonic() - began > life_s:
                os.kill(pid, signal.SIGKILL)
            return None

        await until(gone, life_s + RECOVER_S, f"{self.service} ends")
        died = time.monotonic()
        await self.victims.wait_ready(self.service, RECOVER_S, restarts=restarts + 1)
        recovery_s = time.monotonic() - died
        target = read_hits(self.directory).get(pid)
        if self._learners_dead() > learners:
            target = self._armed(pid)
        left = self.victims.work(self.service, pid)
        worked = left.in_flight > 0 and left.finished > 0
        return Death(
            self.service,
            pid,
            target,
            left.in_flight,
            recovery_s,
            proven=target is not None or worked,
        )

    def _armed(self, pid: int) -> Target | None:
        """Give the point at which a process is to end; None for none."""
        file = arming(self.directory, self.service, pid)
        if not file.exists():
            return None
        return Target(self.service, file.read_text().partition("=")[0])

    def _learners_dead(self) -> int:
        """Count the learners that ended themselves so far."""
        if self.service != "trainer":
            return 0
        return sum(one.point in LEARNER for one in read_hits(self.directory).values())
