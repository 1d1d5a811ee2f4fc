"""What a store says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts since the store was opened, and its present size.

    Attributes:
        commits: durable transactions.
        records: records that they wrote, as the callers counted them.
        queue_depth: writes that wait.
        used_bytes: pages in use; deleted ones are used again.
        quota_bytes: from which used_bytes on writes are refused.
        file_bytes: length of the file, which never shrinks.
        stale_readers: readers of dead processes whose slots were freed.
        oldest_reader_s: for how long at least the oldest snapshot that keeps pages is read.
        disk_free_bytes: what its file system has left.
        disk_kept_bytes: blocks that the file has ahead of its end, for ending old work.
        room_bytes: what new work may still take of quota and disk.
    """

    commits: int
    records: int
    queue_depth: int
    used_bytes: int
    quota_bytes: int
    file_bytes: int
    stale_readers: int
    oldest_reader_s: float
    disk_free_bytes: int
    disk_kept_bytes: int
    room_bytes: int
