"""A bound on the memory of a process: by a control group where one can be made, else by a limit.

A control group kills the process, as a container does. A limit lets its allocations fail, which a
process may notice or die of; it needs no rights.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

VARIABLE: Final = "MEMORY_CAP"
GROUP: Final = "group"
LIMIT: Final = "limit"
_FIRST: Final = Path("/sys/fs/cgroup/memory")
_SECOND: Final = Path("/sys/fs/cgroup")


@contextmanager
def memory_cap(kind: str, size: int) -> Iterator[str]:
    """Make a bound; give what a process needs to put itself under it.

    Args:
        kind: GROUP or LIMIT.
        size: bytes.

    Raises:
        OSError: no control group can be made here.
    """
    if kind == LIMIT:
        yield f"{LIMIT}:{size}"
        return
    folder = _make_group(size)
    try:
        yield f"{GROUP}:{folder}"
    finally:
        folder.rmdir()


def kinds() -> tuple[str, ...]:
    """Say which bounds there are here."""
    try:
        with memory_cap(GROUP, 1 << 30):
            return (GROUP, LIMIT)
    except OSError:
        return (LIMIT,)


def enter(cap: str) -> None:
    """Put this process under a bound."""
    kind, _, value = cap.partition(":")
    if kind == GROUP:
        (Path(value) / "cgroup.procs").write_text(str(os.getpid()))
    else:
        # Of what it may write alone: a map of a file takes no memory of its own.
        resource.setrlimit(resource.RLIMIT_DATA, (int(value), int(value)))


def _make_group(size: int) -> Path:
    if (_FIRST / "memory.limit_in_bytes").exists():
        folder, files = _FIRST, {"memory.limit_in_bytes": size}
    elif "memory" in (_SECOND / "cgroup.controllers").read_text().split():
        folder, files = _SECOND, {"memory.max": size, "memory.swap.max": 0}
    else:
        raise FileNotFoundError("no control group of memory")
    made = folder / f"callforest-{os.getpid()}"
    made.mkdir()
    try:
        for name, value in files.items():
            (made / name).write_text(str(value))
    except OSError:
        made.rmdir()
        raise
    return made
