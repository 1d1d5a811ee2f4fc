"""What a process has in work, kept where its death leaves it: in a page of a file.

The process itself writes; whoever kills it reads, before and after. A page outlives kill -9, so
what it says after the death is what the process had in work when it died.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_COUNTS = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Work:
    """What a process said of itself last.

    Attributes:
        in_flight: calls that it took and did not answer.
        finished: calls that it answered.
    """

    in_flight: int
    finished: int


class Gauge:
    """The writing side; one a process, used on one thread."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(_COUNTS.size))
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), _COUNTS.size)
        self._in_flight = 0
        self._finished = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call while it lasts."""
        self.show(self._in_flight + 1, self._finished)
        try:
            yield
        finally:
            self.show(self._in_flight - 1, self._finished + 1)

    def follow(self, answering: asyncio.Future[object]) -> None:
        """Count a call until its answer is there."""
        self.show(self._in_flight + 1, self._finished)
        answering.add_done_callback(lambda _: self.show(self._in_flight - 1, self._finished + 1))

    def show(self, in_flight: int, finished: int) -> None:
        """Write the counts down."""
        self._in_flight, self._finished = in_flight, finished
        _COUNTS.pack_into(self._page, 0, in_flight, finished)


def gauge_file(directory: Path, name: str, pid: int) -> Path:
    """Name the file of one process of a service."""
    return directory / f"{name}.{pid}"


def read_gauge(directory: Path, name: str, pid: int) -> Work:
    """Read what a process said last; nothing at all if it has not begun to count."""
    file = gauge_file(directory, name, pid)
    content = file.read_bytes() if file.exists() else b""
    if len(content) < _COUNTS.size:
        return Work(0, 0)
    return Work(*_COUNTS.unpack(content))
