"""Who reads a store for how long: a snapshot that is held keeps pages from being used again.

A reader of this process is bounded by the store, one that died is removed; but a tool that hangs
while it reads keeps every page that is freed meanwhile, and the file grows with each commit. Nobody
may end another process for that. So it is said in the log and measured, and once the file has grown
meanwhile by half of what was in use, new work is pushed back until the reader is gone; what ends
old work goes on. The size of the file alone says nothing: it never shrinks, and what deletes left
of it is used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from callforest_mesh.chassis import lmdb_environment
from callforest_mesh.chassis.errors import overloaded
from callforest_mesh.chassis.transaction import READ_S

_LOG = logging.getLogger("callforest")

LOOK_EVERY_S: Final = 15.0
GROWTH_MOST: Final = 0.5
"""Of the bytes in use, what the file may grow by while a snapshot is held; deletes need some."""
ROOM_BYTES: Final = 64 * 2**20
"""What a file may grow by in any case."""
RETRY_AFTER_MS: Final = 5000


class Snapshot(NamedTuple):
    """A snapshot that someone reads: the process, its thread, and the last commit that it sees."""

    pid: int
    thread: str
    commit: int


@dataclass(slots=True)
class _Hold:
    """How long a snapshot has been held, and what the store was when that became too long.

    Attributes:
        since: when it was first seen, by the watch's clock.
        file_bytes: the file's size when it was first seen over its age; None before.
        used_bytes: what was in use of that.
    """

    since: float
    file_bytes: int | None = None
    used_bytes: int = 0


class ReaderWatch:
    """Looks at the readers of one store from time to time, on its writer thread.

    Args:
        environment: the store's.
        name: names the store in the log.
        clock: seconds that never go back.
        room_bytes: what the file may grow by in any case; None for a store whose writes end old
            work: nobody is pushed back.
        stale: readers that were found dead already.
    """

    def __init__(
        self,
        environment: lmdb_environment.Environment,
        name: str,
        *,
        clock: Callable[[], float],
        room_bytes: int | None = None,
        stale: int = 0,
    ) -> None:
        self._environment = environment
        self._name = name
        self._clock = clock
        self._room = room_bytes
        self._next = clock() + LOOK_EVERY_S
        self._holds: dict[Snapshot, _Hold] = {}
        self.stale = stale
        self.oldest_s = 0.0

    @property
    def due_s(self) -> float:
        """How long until the next look."""
        return max(0.0, self._next - self._clock())

    def look(self, used_bytes: int) -> None:
        """Remove dead readers and see how old the living ones are, if it is time.

        Args:
            used_bytes: pages in use.
        """
        if self._clock() >= self._next:
            self._look(used_bytes)

    def require_room(self, used_bytes: int) -> None:
        """Push new work back while a held snapshot lets the file grow.

        Args:
            used_bytes: pages in use.

        Raises:
            Refusal: OVERLOADED.
        """
        if not self._has_grown():
            return
        self._look(used_bytes)  # the reader may have left since
        if self._has_grown():
            raise overloaded("store_snapshot_s", round(READ_S), retry_after_ms=RETRY_AFTER_MS)

    def _look(self, used_bytes: int) -> None:
        now = self._clock()
        self._next = now + LOOK_EVERY_S
        # The slot of a reader that died pins every page freed since, for ever.
        self.stale += self._environment.reader_check()
        last = int(self._environment.info()["last_txnid"])
        # Whoever begins to read sees the last commit: one that sees an older one has held it since.
        held = {one for one in snapshots(self._environment.readers()) if one.commit < last}
        self._holds = {one: self._holds.get(one) or _Hold(now) for one in held}
        self.oldest_s = max((now - hold.since for hold in self._holds.values()), default=0.0)
        for one, hold in self._holds.items():
            if now - hold.since > READ_S and hold.file_bytes is None:
                hold.file_bytes, hold.used_bytes = self._file_bytes(), used_bytes
                _LOG.error(
                    "process %d has read one snapshot of the %s store for %.0f s: its pages are "
                    "kept, and the file grows; end that process",
                    *(one.pid, self._name, now - hold.since),
                )

    def _has_grown(self) -> bool:
        """Say whether the file has grown too much while one snapshot was held for too long."""
        if self._room is None or self.oldest_s <= READ_S:
            return False
        file_bytes = self._file_bytes()
        return any(
            file_bytes - hold.file_bytes > max(self._room, GROWTH_MOST * hold.used_bytes)
            for hold in self._holds.values()
            if hold.file_bytes is not None
        )

    def _file_bytes(self) -> int:
        return lmdb_environment.allocated_bytes(self._environment)


def snapshots(table: str) -> Iterator[Snapshot]:
    """Read LMDB's table of readers: a line each, of which those without a commit read nothing."""
    for line in table.splitlines():
        words = line.split()
        if len(words) == 3 and words[0].isdecimal() and words[2].isdecimal():
            yield Snapshot(int(words[0]), words[1], int(words[2]))
