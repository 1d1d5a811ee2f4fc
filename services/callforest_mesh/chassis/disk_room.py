"""What the file of a store may still grow by, and the blocks that it keeps for ending old work.

Free space of a file system is anybody's: another program may take the last byte of it between a
look and a commit, and a commit that finds no block ends the process. So a store has blocks given to
its file ahead of its end, where no other program can take them, and of a batch it lets in what
those and the free space are sure to hold. A file system that gives no blocks ahead, or copies what
is overwritten, leaves the look.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from callforest_mesh.chassis import lmdb_environment

_LOG = logging.getLogger("callforest")

KEPT_BYTES: Final = 8 * 2**20
"""Blocks kept ahead of a file's end: enough for deletes, seals and rows until someone looks."""
FLOOR_BYTES: Final = 4 * 2**20
"""Free space that is not counted on: others write to the same file system."""
_BASE_BYTES: Final = 2**18
"""What a commit copies beside its leaves: the tops of its trees, and the list of free pages."""
_CHANGE_BYTES: Final = 2 * 4096
"""What one change copies at most on the average: its leaf, and its part of a split or a branch."""
_DELETES_BYTES: Final = 2**20
"""What a commit that stores something leaves to those that only remove."""
_SHARES: Final = (1, 2, 4, 8)
"""When the disk has no room for all that is to be kept, a part of it is asked for."""
_KEEP_SIZE: Final = 1
"""FALLOC_FL_KEEP_SIZE of linux/falloc.h: the length of the file stays."""
_ABSENT: Final = (errno.EOPNOTSUPP, errno.ENOSYS)


class DiskRoom:
    """What one file may grow by. Used by its writer thread alone.

    A store that was filled and emptied has pages that were never written: they have blocks from
    the opening on, so that whatever is used again is there.

    Args:
        path: the store's directory.
        environment: the store's.
        limit_bytes: the most that its file can grow to.
        free_bytes: asks what the file system has left for anybody.
    """

    def __init__(
        self,
        path: Path,
        environment: lmdb_environment.Environment,
        limit_bytes: int,
        free_bytes: Callable[[], int],
    ) -> None:
        self._environment = environment
        self._limit = limit_bytes
        self._free_bytes = free_bytes
        # A descriptor of its own: LMDB locks another file, so that closing this one frees no lock.
        self._fd = os.open(path / lmdb_environment.CONTENT_FILE, os.O_RDWR | os.O_CLOEXEC)
        self._can = True
        self._kept_to = 0
        self._end = lmdb_environment.allocated_bytes(environment)
        self._keep()

    @property
    def kept_bytes(self) -> int:
        """Blocks that are the file's own, ahead of its last page."""
        return max(0, self._kept_to - self._end)

    def grown(self) -> None:
        """Have the blocks ahead given anew, when half of them are used and there is room."""
        self._end = lmdb_environment.allocated_bytes(self._environment)
        if self.kept_bytes < self._wanted() // 2 and self._free_bytes() > 2 * FLOOR_BYTES:
            self._keep()

    def holds(self, put_bytes: int, changes: int, free_bytes: int) -> bool:
        """Say whether a commit of old work is sure to find its blocks.

        Args:
            put_bytes: keys and values that it stores; 0 if it only removes.
            changes: how many it stores and removes.
            free_bytes: what the file system has left.
        """
        needed = _BASE_BYTES + changes * _CHANGE_BYTES
        if put_bytes:
            needed += _DELETES_BYTES + 2 * put_bytes
        return needed <= self.kept_bytes + max(0, free_bytes - FLOOR_BYTES)

    def close(self) -> None:
        """Let go of the file; what was kept stays kept for the next that opens it."""
        os.close(self._fd)

    def _wanted(self) -> int:
        return min(KEPT_BYTES, max(0, self._limit - self._end))

    def _keep(self) -> None:
        for share in _SHARES if self._can else ():
            upto = self._end + self._wanted() // share
            if upto <= self._kept_to:
                return
            try:
                allocate(self._fd, self._kept_to, upto - self._kept_to)
            except OSError as error:
                self._can = error.errno not in _ABSENT
                if not self._can:
                    _LOG.info("no blocks can be kept for a store: %s", error)
                    return
            else:
                self._kept_to = upto
                return


def allocate(fd: int, offset: int, size: int) -> None:
    """Give blocks to a part of a file, which gets no longer; those that it has stay as they are.

    Raises:
        OSError: ENOSPC among others; EOPNOTSUPP or ENOSYS where that is not known.
    """
    # os.posix_fallocate makes the file longer, and writes it full where this call is not known.
    if _FALLOCATE is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _FALLOCATE(fd, _KEEP_SIZE, offset, size) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _system_call() -> Callable[[int, int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    found.restype = ctypes.c_int
    return cast("Callable[[int, int, int, int], int]", found)


_FALLOCATE: Final = _system_call()
