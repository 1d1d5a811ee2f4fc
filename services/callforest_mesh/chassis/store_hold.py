"""Who has a store's directory open: everybody together, or one that replaces its file, alone.

Of those who have it together only one writes: two services on one store would each keep views that
the other makes wrong.

A replaced file and readers of the old one must never meet: LMDB keeps the number of the last
transaction beside the file, and takes it for the new one's. The hold is a lock of the kernel on the
directory; it goes with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self


class StoreInUseError(OSError):
    """The store's directory is held by another process."""


class StoreHold:
    """A hold on a store's directory, until it is released.

    Args:
        path: the directory, which exists.
        alone: whether nobody else may hold it.

    Raises:
        StoreInUseError: another process has the store, or is replacing its file.
    """

    def __init__(self, path: Path, *, alone: bool = False) -> None:
        self._handle: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        try:
            fcntl.flock(self._handle, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            does = (
                "has it open; stop it first"
                if alone
                else "is compacting or verifying it; try again later"
            )
            raise StoreInUseError(
                f"the store in {path} is in use: another process {does}"
            ) from error

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        """Give the hold."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Let go."""
        self.release()


class WriterHold:
    """The one writer's hold on a store's file, until it is released.

    Args:
        file: the store's file, which exists.

    Raises:
        StoreInUseError: another process writes the store.
    """

    def __init__(self, file: Path) -> None:
        self._handle = os.open(file, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise StoreInUseError(
                f"the store in {file.parent} is in use: another service writes it; stop that, or"
                " give this mesh a state_dir of its own"
            ) from error

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
