"""Kills services with SIGKILL while they have calls in work, and proves that they had.

A kill counts only if the victim was alive (the kernel says that our signal ended it), had answered
calls before, and died with calls in work (its gauge says so after its death).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from callforest_mesh.chassis.configuration import MeshConfiguration
from callforest_mesh.supervisor import SupervisionError, Supervisor, SupervisorOptions
from tests.robustness.gauge import Work, read_gauge
from tests.robustness.victim import FLAW_VARIABLE

ROOT = Path(__file__).parents[2]
LOOK_S = 0.02
"""Longest pause between two looks; each is drawn, so that no moment of a call is left out."""
CATCH_S = 180.0
"""How long a victim may take to have calls in work."""
RECOVER_S = 120.0
"""How long a killed service may take to serve again, a learner loaded included."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL.

    Attributes:
        name: the service.
        pid: its process then.
        next_pid: the process that took its place.
        in_flight: calls in work when it died.
        finished: calls that this process had answered.
        recovery_s: from the signal until its successor served.
        proven: whether it was alive, had worked, and had calls in work.
    """

    name: str
    pid: int
    next_pid: int
    in_flight: int
    finished: int
    recovery_s: float
    proven: bool


async def until(met: Callable[[], T | None], within_s: float, what: str) -> T:
    """Look again and again until a condition gives something; it is another process's.

    Raises:
        TimeoutError: it did not within `within_s`.
    """
    deadline = time.monotonic() + within_s
    while True:
        if (found := met()) is not None:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"within {within_s:.0f} s: {what}")
        await asyncio.sleep(random.uniform(0, LOOK_S))


class Victims(Supervisor):
    """Keeps services that show what they have in work.

    Args:
        configuration: says which services, and where they are.
        arguments: what their command lines say of it.
        gauges: directory of their gauges and of the trainer's diary.
        scratch: where their temporary files go: who is killed removes none.
        flaw: a fault that the victims are given; see `victim.FLAWS`.
    """

    MODULE = "tests.robustness.victim"

    def __init__(
        self,
        configuration: MeshConfiguration,
        arguments: Sequence[str],
        gauges: Path,
        scratch: Path,
        *,
        flaw: str = "",
    ) -> None:
        variables = (
            f"PYTHONPATH={os.pathsep.join((str(ROOT), os.environ.get('PYTHONPATH', '')))}",
            "OMP_NUM_THREADS=1",
            f"TMPDIR={scratch}",
            f"{FLAW_VARIABLE}={flaw}",
        )
        module = (sys.executable, "-m", self.MODULE, str(gauges))
        options = SupervisorOptions(command=("env", *variables, *module))
        super().__init__(configuration, arguments, options)
        self._gauges = gauges

    def work(self, name: str, pid: int) -> Work:
        """Say what one process of a service had in work last."""
        return read_gauge(self._gauges, name, pid)

    def present(self, name: str) -> int | None:
        """Give the id of a service's process if it has one."""
        try:
            return self.pid(name)
        except SupervisionError:
            return None


async def strike(victims: Victims, name: str, *, finished: int = 1) -> Kill:
    """Catch a service at work, kill it, and wait until its successor serves.

    Args:
        victims: has the service.
        name: which one.
        finished: how much it must have done in its life before.

    Raises:
        TimeoutError: it never had calls in work, or did not come back.
    """
    await victims.wait_ready(name, RECOVER_S)

    def caught() -> int | None:
        pid = victims.present(name)
        if pid is None:
            return None
        work = victims.work(name, pid)
        if work.in_flight < 1 or work.finished < finished or not runs(pid):
            return None
        os.kill(pid, signal.SIGKILL)  # here, so that nothing can end between look and signal
        return pid

    restarts = victims.restarts(name)
    pid = await until(caught, CATCH_S, f"{name} has calls in work")
    began = time.monotonic()
    await victims.wait_ready(name, RECOVER_S, restarts=restarts + 1)
    left = victims.work(name, pid)
    return Kill(
        name=name,
        pid=pid,
        next_pid=victims.pid(name),
        in_flight=left.in_flight,
        finished=left.finished,
        recovery_s=time.monotonic() - began,
        proven=victims.exit_status(name) == -signal.SIGKILL
        and left.in_flight > 0
        and left.finished >= finished,
    )


async def restart(victims: Victims, name: str) -> None:
    """Kill a service as it is, so that its successor knows only what is on the disk."""
    await victims.wait_ready(name, RECOVER_S)
    restarts = victims.restarts(name)
    os.kill(victims.pid(name), signal.SIGKILL)
    await victims.wait_ready(name, RECOVER_S, restarts=restarts + 1)


async def works_again(victims: Victims, name: str) -> None:
    """Wait until the present process of a service has answered something."""

    def answered() -> bool | None:
        pid = victims.present(name)
        return True if pid is not None and victims.work(name, pid).finished > 0 else None

    await until(answered, RECOVER_S, f"{name} answers again")


def runs(pid: int) -> bool:
    """Ask the kernel whether a process runs: neither gone nor dead and unreaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
