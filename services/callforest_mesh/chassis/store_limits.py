"""What a store lets in: by its quota, its disk, and the snapshots that are held of it."""

from __future__ import annotations

from collections.abc import Callable

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.disk_room import DiskRoom
from callforest_mesh.chassis.reader_watch import RETRY_AFTER_MS, ReaderWatch
from callforest_mesh.chassis.transaction import Batch


class StoreLimits:
    """Refuses what does not fit. Used by the store's writer thread alone.

    Args:
        name: the store's, for refusals.
        quota_bytes: used bytes from which writes without reserve are refused.
        disk_reserve_bytes: free bytes of the file system that such writes leave alone.
        disk: what the file may grow by, whoever writes.
        readers: may push back what begins.
        free_bytes: asks what the file system has left.
    """

    def __init__(
        self,
        name: str,
        *,
        quota_bytes: int,
        disk_reserve_bytes: int,
        disk: DiskRoom,
        readers: ReaderWatch,
        free_bytes: Callable[[], int],
    ) -> None:
        self._name = name
        self._quota = quota_bytes
        self._reserve = disk_reserve_bytes
        self._disk = disk
        self._readers = readers
        self._free_bytes = free_bytes

    def batch(self, used_bytes: int) -> Batch:
        """Begin a commit's batch, which asks before it puts anything."""
        free = self._free_bytes()

        def require_space(more: int) -> None:
            if used_bytes + more > self._quota:
                raise self.full(used_bytes, self._quota)
            if more > free - self._reserve:
                raise self._disk_full(used_bytes, "almost full")
            self._readers.require_room(used_bytes)

        def require_blocks(more: int, changes: int) -> None:
            if not self._disk.holds(more, changes, free):
                raise self._disk_full(used_bytes, "full")

        return Batch(space=require_space, blocks=require_blocks)

    def full(
        self, used_bytes: int, limit_bytes: int, why: str = "free space or raise its quota"
    ) -> Refusal:
        """Make the refusal at a limit."""
        return Refusal(
            er.ERROR_REASON_STORE_FULL,
            f"the {self._name} store is full: {why}",
            retry_after_ms=RETRY_AFTER_MS,
            store=self._name,
            used_bytes=used_bytes,
            quota_bytes=limit_bytes,
            free_bytes=self._free_bytes(),
        )

    def _disk_full(self, used_bytes: int, how: str) -> Refusal:
        return self.full(used_bytes, self._quota, f"its disk is {how}; free space there")
