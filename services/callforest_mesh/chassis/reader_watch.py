"""Who reads a store for how long: a snapshot that is held keeps pages from being used again.

A reader of this process is bounded by the store, one that died is removed; but a tool that hangs
while it reads keeps every page that is freed meanwhile, and the file grows with each commit. Nobody
may end another process for that. So it is said in the log and measured, and once the file has grown
by half, new work is pushed back until the reader is gone; what ends old work goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from callforest_mesh.chassis import lmdb_environment
from callforest_mesh.chassis.errors import overloaded
from callforest_mesh.chassis.transaction import READ_S

_LOG = logging.getLogger("callforest")

LOOK_EVERY_S: Final = 15.0
GROWTH_MOST: Final = 1.5
"""Of the pages in use, what the file may have while a snapshot is held; deletes need the rest."""
ROOM_BYTES: Final = 64 * 2**20
"""What a file may have in any case."""
RETRY_AFTER_MS: Final = 5000


class Snapshot(NamedTuple):
    """A snapshot that someone reads: the process, its thread, and the last commit that it sees."""

    pid: int
    thread: str
    commit: int


class ReaderWatch:
    """Looks at the readers of one store from time to time, on its writer thread.

    Args:
        environment: the store's.
        name: names the store in the log.
        clock: seconds that never go back.
        room_bytes: what the file may have in any case.
        stale: readers that were found dead already.
    """

    def __init__(
        self,
        environment: lmdb_environment.Environment,
        name: str,
        *,
        clock: Callable[[], float],
        room_bytes: int = ROOM_BYTES,
        stale: int = 0,
    ) -> None:
        self._environment = environment
        self._name = name
        self._clock = clock
        self._room = room_bytes
        self._page = lmdb_environment.page_bytes(environment)
        self._next = clock() + LOOK_EVERY_S
        self._since: dict[Snapshot, float] = {}
        self._told: set[Snapshot] = set()
        self.stale = stale
        self.oldest_s = 0.0

    @property
    def due_s(self) -> float:
        """How long until the next look."""
        return max(0.0, self._next - self._clock())

    def look(self) -> None:
        """Remove dead readers and see how old the living ones are, if it is time."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LOOK_EVERY_S
        # The slot of a reader that died pins every page freed since, for ever.
        self.stale += self._environment.reader_check()
        last = int(self._environment.info()["last_txnid"])
        # Whoever begins to read sees the last commit: one that sees an older one has held it since.
        held = {one for one in snapshots(self._environment.readers()) if one.commit < last}
        self._since = {one: self._since.get(one, now) for one in held}
        self._told &= held
        self.oldest_s = max((now - since for since in self._since.values()), default=0.0)
        for one, since in self._since.items():
            if now - since > READ_S and one not in self._told:
                self._told.add(one)
                _LOG.error(
                    "process %d has read one snapshot of the %s store for %.0f s: its pages are "
                    "kept, and the file grows; end that process",
                    *(one.pid, self._name, now - since),
                )

    def require_room(self, used_bytes: int) -> None:
        """Push new work back while a held snapshot lets the file grow.

        Args:
            used_bytes: pages in use, with what is to be written.

        Raises:
            Refusal: OVERLOADED.
        """
        if self.oldest_s <= READ_S:
            return
        file_bytes = (int(self._environment.info()["last_pgno"]) + 1) * self._page
        if file_bytes > max(self._room, GROWTH_MOST * used_bytes):
            raise overloaded("store_snapshot_s", round(READ_S), retry_after_ms=RETRY_AFTER_MS)


def snapshots(table: str) -> Iterator[Snapshot]:
    """Read LMDB's table of readers: a line each, of which those without a commit read nothing."""
    for line in table.splitlines():
        words = line.split()
        if len(words) == 3 and words[0].isdecimal() and words[2].isdecimal():
            yield Snapshot(int(words[0]), words[1], int(words[2]))
