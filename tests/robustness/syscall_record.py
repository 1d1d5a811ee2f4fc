"""What a process asked of one file, in order, as strace saw it.

The writes to the file, the syncs, and the lines that the process printed. One log a thread, merged
by the time of entry: the file's writer is one thread, and what it tells another thread cannot be
seen there before it was done.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACED = "openat,close,lseek,pwrite64,pwritev,writev,write,fsync,fdatasync,msync,ftruncate"
CALL = re.compile(r"^(\d+\.\d+) (\w+)\((.*)\) += (-?\d+)")
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
STDOUT = 1


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that were written to the file.

    Attributes:
        offset: where.
        content: which.
        synced: whether the call itself returned only when they were on the disk.
    """

    offset: int
    content: bytes
    synced: bool


@dataclass(frozen=True, slots=True)
class Sync:
    """The end of a sync of the file."""


@dataclass(frozen=True, slots=True)
class EntrySync:
    """The end of a sync of a directory: of the file's own, or of the one above."""

    path: str


@dataclass(frozen=True, slots=True)
class Said:
    """A line that the process printed."""

    line: str


Event = Write | Sync | EntrySync | Said


def strace(log: Path, command: Sequence[str]) -> list[str]:
    """Give the command that runs another and records what it asks, one file a thread."""
    options = ["-ff", "-ttt", "-xx", "-s", "8000000", "--seccomp-bpf", "-e", f"trace={TRACED}"]
    return ["strace", *options, "-e", "signal=none", "-o", str(log), *command]


def read_record(log: Path, file: Path, named_in: Iterable[Path]) -> list[Event]:
    """Read what strace recorded of a file, and of the directories whose entries lead to it."""
    matches = [
        match
        for thread in log.parent.glob(f"{log.name}.*")
        for match in map(CALL.match, thread.read_text().splitlines())
        if match
    ]
    calls = [(match[1], match[2], match[3], int(match[4])) for match in matches]
    calls.sort(key=lambda call: float(call[0]))
    return list(_Reader(file, named_in).events(call for call in calls if call[3] >= 0))


class _Reader:
    """Follows the descriptors of a file and of the directories that name it."""

    def __init__(self, file: Path, named_in: Iterable[Path]) -> None:
        self._file = str(file)
        self._directories = {str(path) for path in named_in}
        self._synced: dict[int, bool] = {}
        self._open_directories: dict[int, str] = {}
        self._positions: dict[int, int] = {}

    def events(self, calls: Iterable[tuple[str, str, str, int]]) -> Iterator[Event]:
        for _, name, arguments, result in calls:
            if name == "openat":
                self._opened(arguments, result)
                continue
            descriptor = int(arguments.split(",", 1)[0])
            if name == "write" and descriptor == STDOUT:
                for line in text_of(arguments).decode().splitlines():
                    yield Said(line)
            elif name in ("fsync", "fdatasync") and descriptor in self._open_directories:
                yield EntrySync(self._open_directories[descriptor])
            elif name == "close":
                self._synced.pop(descriptor, None)
                self._open_directories.pop(descriptor, None)
            elif descriptor in self._synced:
                yield from self._of_file(name, arguments, result, descriptor)

    def _opened(self, arguments: str, descriptor: int) -> None:
        path = text_of(arguments).decode()
        self._synced.pop(descriptor, None)
        self._open_directories.pop(descriptor, None)
        if path == self._file:
            self._synced[descriptor] = "O_DSYNC" in arguments or "O_SYNC" in arguments
            self._positions[descriptor] = 0
        elif path in self._directories:
            self._open_directories[descriptor] = path

    def _of_file(self, name: str, arguments: str, result: int, descriptor: int) -> Iterator[Event]:
        if name == "lseek":
            self._positions[descriptor] = result
        elif name in ("fsync", "fdatasync"):
            yield Sync()
        elif name in ("pwrite64", "pwritev"):
            offset = int(arguments.rsplit(",", 1)[1])
            yield self._written(arguments, result, descriptor, offset)
        elif name in ("write", "writev"):
            offset = self._positions[descriptor]
            self._positions[descriptor] = offset + result
            yield self._written(arguments, result, descriptor, offset)
        else:
            # Nothing of it is modelled, so a record that holds it would prove nothing.
            raise AssertionError(f"{name}({arguments[:80]}) on the store's file")

    def _written(self, arguments: str, result: int, descriptor: int, offset: int) -> Write:
        content = text_of(arguments)[:result]
        assert len(content) == result, "strace cut a write short"
        return Write(offset, content, self._synced[descriptor])


def text_of(arguments: str) -> bytes:
    """Join the strings of a call's arguments."""
    return b"".join(bytes.fromhex(part.replace("\\x", "")) for part in TEXT.findall(arguments))
