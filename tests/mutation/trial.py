"""Runs the tests of a module against a mutant of it, in a process that forgets everything.

The parent imports what no mutant touches; a fork of it then has its project afresh, with the
mutant in the place of one module, in a fraction of a second.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import resource
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).parents[2]
CPU_S: Final = 120
"""A mutant that computes longer runs for ever; a busy machine makes no difference."""
LIMIT_S: Final = 600.0
"""One that takes longer waits for ever."""
MEMORY_BYTES: Final = 6 << 30
SURVIVED: Final = 0
"""What pytest gives when every test has passed."""
FAILED: Final = (1, 2, 3, 4)
"""When one has failed, or it or its fixtures could not be imported."""
_WARM: Final = (
    *("numpy", "pytest", "hypothesis", "hypothesis.strategies", "hypothesis.extra.numpy"),
    *("google.protobuf.json_format", "google.rpc.error_details_pb2", "grpc.aio", "protovalidate"),
)


class TrialError(Exception):
    """The tests could not be run at all."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of tests.

    Attributes:
        name: says what is tried.
        module: the mutated module's name; "" to change nothing.
        file: the module's file.
        source: gives the mutant.
        tests: files in rounds, the likeliest to fail first; a round is read when those before it
            have passed.
    """

    name: str
    module: str
    file: Path
    source: Callable[[], str]
    tests: Sequence[Sequence[Path]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended.

    Attributes:
        trial: which.
        survived: whether every test passed.
        took_s: how long it took.
    """

    trial: Trial
    survived: bool
    took_s: float


def run_trials(
    trials: Iterable[Trial], *, jobs: int, told: Callable[[Outcome], None] = lambda _one: None
) -> list[Outcome]:
    """Run trials, some at a time.

    Args:
        trials: what to run.
        jobs: how many at a time.
        told: is told each outcome as it comes.

    Raises:
        TrialError: pytest did not run the tests of one.
    """
    warm_up()
    waiting, outcomes = deque(trials), []
    with selectors.DefaultSelector() as selector:
        running: dict[int, tuple[Trial, int, float]] = {}
        while waiting or running:
            while waiting and len(running) < jobs:
                trial = waiting.popleft()
                pid, pipe = _fork(trial)
                running[pipe] = (trial, pid, time.monotonic())
                selector.register(pipe, selectors.EVENT_READ)
            deadline = min(began for _, _, began in running.values()) + LIMIT_S
            ready = [key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
            late = [one for one in running if time.monotonic() - running[one][2] >= LIMIT_S]
            for pipe in {*ready, *late}:
                trial, pid, began = running.pop(pipe)
                selector.unregister(pipe)
                survived = _end(trial, pid, pipe, late=pipe not in ready)
                outcome = Outcome(trial, survived, time.monotonic() - began)
                outcomes.append(outcome)
                told(outcome)
    return outcomes


def warm_up() -> None:
    """Import what every trial needs and none changes."""
    for name in _WARM:
        importlib.import_module(name)
    generated = ROOT / "generated" / "python" / "callforest"
    for folder in sorted(generated.glob("*/v1")):
        for found in pkgutil.iter_modules([str(folder)]):
            importlib.import_module(f"callforest.{folder.parent.name}.v1.{found.name}")
    loaded = [name for name in sys.modules if name.partition(".")[0] == "callforest_core"]
    if loaded:
        raise TrialError(f"loaded before their mutants: {loaded}")


def _fork(trial: Trial) -> tuple[int, int]:
    """Begin a trial; give the process and the pipe that tells its end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    status = 70
    try:
        os.close(ours)
        status = _run(trial)
    finally:
        os.write(theirs, bytes([status]))
        os._exit(0)


def _end(trial: Trial, pid: int, pipe: int, *, late: bool) -> bool:
    """Take a trial's status; one that died, or runs for ever, has noticed its mutant."""
    if late:
        os.kill(pid, signal.SIGKILL)
    told = b"" if late else os.read(pipe, 1)
    os.close(pipe)
    os.waitpid(pid, 0)
    status = told[0] if told else FAILED[0]
    if status != SURVIVED and status not in FAILED:
        raise TrialError(f"{trial.name}: pytest ended with {status}")
    return status == SURVIVED


def _run(trial: Trial) -> int:
    """Run a trial's tests in this process; give pytest's status."""
    import hypothesis
    import pytest

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    hypothesis.settings.register_profile(
        "trial", max_examples=40, derandomize=True, database=None, deadline=None
    )
    hypothesis.settings.load_profile("trial")
    if trial.module:
        sys.meta_path.insert(0, _InItsPlace(trial.module, trial.file, trial.source()))
    sys.dont_write_bytecode = True
    words = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:warnings")
    for files in trial.tests:
        status = int(pytest.main([*words, *map(str, files)]))
        if status != SURVIVED:
            return status
    return SURVIVED


class _InItsPlace(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a mutant where its module is asked for."""

    def __init__(self, module: str, file: Path, source: str) -> None:
        self._module = module
        self._file = file
        self._code = compile(source, str(file), "exec")

    def find_spec(
        self,
        fullname: str,
        path: object,  # noqa: ARG002 - as importlib calls it
        target: object = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._file, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        del spec  # an ordinary module will do
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)  # the mutant is the module
