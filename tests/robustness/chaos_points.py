"""Which failpoints chaos hits, in which service, and how often each is passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from callforest_mesh.chassis.failpoint import POINTS
from tests.robustness.armed_victim import DIARY, arming

SHARED: Final = {
    "store": ("ledger", "staging", "finalizer"),
    "stream": ("admission", "ledger", "staging", "worker", "gateway"),
}
"""Which services pass a point that is no single service's."""
LEARNER: Final = ("trainer.before_rename", "trainer.after_rename")
"""Points that the trainer's learner passes, a process of its own."""
_OFTEN: Final = 12
_SELDOM: Final = 2
_PER_CALL: Final = (
    *("store.", "stream.", "gateway.", "staging.before_check", "staging.after_check"),
    *("staging.after_put", "staging.before_receipt", "ledger.before_intent", "ledger.before_row"),
    *("ledger.after_append", "ledger.after_durable", "admission.before_intent"),
    *("admission.after_verdict", "worker.before_prefix", "worker.before_engine"),
    *("worker.after_engine", "worker.before_stage", "worker.after_stage"),
)
"""What a call passes begins with one of these; other points are passed once a rollout, or less."""


class Target(NamedTuple):
    """A failpoint in one service."""

    service: str
    point: str

    @property
    def nth_most(self) -> int:
        """At which of its passings a life ends at the latest."""
        often = self.point.startswith(_PER_CALL) and self.service != "finalizer"
        return _OFTEN if often else _SELDOM


def targets(services: Sequence[str]) -> list[Target]:
    """Give every failpoint of some services, those of shared code once a service."""
    return [
        Target(service, point)
        for point in POINTS
        for service in SHARED.get(point.partition(".")[0], (point.partition(".")[0],))
        if service in services
    ]


def read_hits(directory: Path) -> dict[int, Target]:
    """Give the point at which each process that ended itself did so, by its id."""
    diary = directory / DIARY
    hits: dict[int, Target] = {}
    for line in diary.read_text().splitlines() if diary.exists() else ():
        point, pid = line.split()
        hits[int(pid)] = Target(service_of(directory, int(pid), point), point)
    return hits


def service_of(directory: Path, pid: int, point: str) -> str:
    """Give the service whose process passed a point; a learner belongs to the trainer."""
    owner = point.partition(".")[0]
    for service in SHARED.get(owner, ()):
        if arming(directory, service, pid).exists():
            return service
    return owner


def times(hits: dict[int, Target]) -> Counter[Target]:
    """Count how often each point was hit."""
    return Counter(hits.values())
