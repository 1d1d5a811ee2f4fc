"""What a disk may hold after the power went: the synced writes, and any part of the others."""

import random
from collections.abc import Iterable
from pathlib import Path

from tests.robustness.syscall_record import EntrySync, Event, Sync, Write

SECTOR = 512


class Disk:
    """One file on a disk with a write cache that the power cut empties as it likes.

    Args:
        named_in: directories that must be synced, for their entries lead to the file.
    """

    def __init__(self, named_in: Iterable[Path]) -> None:
        self._names = {str(path) for path in named_in}
        self._content = bytearray()
        self._cached: list[Write] = []

    def apply(self, events: Iterable[Event]) -> None:
        """Do what a process asked."""
        for event in events:
            if isinstance(event, Write):
                if event.synced:
                    self._put(event.offset, event.content)
                else:
                    self._cached.append(event)
            elif isinstance(event, Sync):
                for write in self._cached:
                    self._put(write.offset, write.content)
                self._cached.clear()
            elif isinstance(event, EntrySync):
                self._names.discard(event.path)

    def after_power_cut(self, chance: random.Random) -> bytes | None:
        """Give the file as a power cut may leave it; None when no synced directory names it."""
        keep = chance.choice((0.0, 0.3, 0.7, 1.0))
        for write in self._cached:
            drawn = chance.random()
            if drawn < keep:
                self._put(write.offset, write.content)
            elif drawn < keep + 0.2 and len(write.content) > SECTOR:
                sectors = chance.randrange(1, len(write.content) // SECTOR)
                self._put(write.offset, write.content[: SECTOR * sectors])
        return None if self._names else bytes(self._content)

    def _put(self, offset: int, content: bytes) -> None:
        missing = offset + len(content) - len(self._content)
        if missing > 0:
            self._content.extend(bytes(missing))
        self._content[offset : offset + len(content)] = content
