"""Who has a store's directory open: everybody together, or one that replaces its file, alone.

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
