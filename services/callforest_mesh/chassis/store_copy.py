"""Copies of a store: a compacted one in its own place, and a backup of one that goes on.

Both are what one snapshot saw, without free pages, and neither takes the place of anything before
it was synced and held, record by record, against what it is a copy of. A process that dies on the
way leaves a directory with UNFINISHED behind its name, which the next one removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis import lmdb_environment
from callforest_mesh.chassis.directory import sync_directory, sync_names
from callforest_mesh.chassis.record_frame import unseal
from callforest_mesh.chassis.store_hold import StoreHold, StoreInUseError
from callforest_mesh.chassis.store_snapshot import StoreSnapshot
from callforest_mesh.chassis.transaction import corrupt

UNFINISHED: Final = ".unfinished"


@dataclass(frozen=True, slots=True)
class StoreCopy:
    """What was copied.

    Attributes:
        records: how many, each held against its checksum and its original.
        bytes_before: length of the original's file.
        bytes_after: length of the copy's.
    """

    records: int
    bytes_before: int
    bytes_after: int


def compact(path: Path) -> StoreCopy:
    """Put a compacted copy in the place of a store's file; the service must not run.

    Raises:
        StoreInUseError: a process has the store open.
        Refusal: STORE_CORRUPT, a record is damaged; STORE_FULL, the disk cannot hold the copy.
            Nothing has changed then.
    """
    with StoreHold(path, alone=True):
        _refuse_strangers(path)
        beside = path.with_name(path.name + UNFINISHED)
        with StoreSnapshot(path, alone=True) as snapshot:
            copied = _copy(snapshot, path, beside)
        # One rename of one file: at every moment the store is the old one or the new one.
        (beside / lmdb_environment.CONTENT_FILE).replace(path / lmdb_environment.CONTENT_FILE)
        # It has the number of the old file's last transaction.
        (path / lmdb_environment.LOCK_FILE).unlink(missing_ok=True)
        sync_directory(path)
        beside.rmdir()
        sync_directory(path.parent)
    return copied


def back_up(snapshot: StoreSnapshot, path: Path, target: Path) -> StoreCopy:
    """Write what a snapshot sees into a new directory; the service may run and write.

    Args:
        snapshot: of the store.
        path: the store's directory.
        target: the backup's, which does not exist yet.

    Raises:
        FileExistsError: it does.
        Refusal: STORE_CORRUPT, a record is damaged; STORE_FULL, the disk cannot hold the copy.
    """
    if target.exists():
        raise FileExistsError(f"{target} is there already: name a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + UNFINISHED)
    copied = _copy(snapshot, path, beside)
    beside.rename(target)
    sync_names(target.parent)
    return copied


def _copy(snapshot: StoreSnapshot, path: Path, beside: Path) -> StoreCopy:
    """Copy into `beside`, sync it, and hold it against the snapshot."""
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir()
    before = (path / lmdb_environment.CONTENT_FILE).stat().st_size
    try:
        _require_room(snapshot, beside, before)
        snapshot.copy_to(beside)
        file = beside / lmdb_environment.CONTENT_FILE
        with file.open("rb") as content:
            os.fsync(content.fileno())
        sync_directory(beside)
        sync_directory(beside.parent)
        with StoreSnapshot(beside) as copy:
            records = _compare(snapshot, copy)
    except BaseException:
        shutil.rmtree(beside)
        raise
    return StoreCopy(records, before, file.stat().st_size)


def _compare(original: StoreSnapshot, copy: StoreSnapshot) -> int:
    """Count the records of two stores, the same and sound in both.

    Raises:
        Refusal: STORE_CORRUPT names the first that is not.
    """
    if (original.name, original.databases) != (copy.name, copy.databases):
        raise corrupt(original.name, lmdb_environment.CONTENT_FILE)
    count = 0
    for database in original.databases:
        copied = copy.stored(database)
        for key, stored in original.stored(database):
            if next(copied, None) != (key, stored) or unseal(database, key, stored) is None:
                raise corrupt(original.name, f"{database}/{key.hex()}")
            count += 1
        if (more := next(copied, None)) is not None:
            raise corrupt(original.name, f"{database}/{more[0].hex()}")
    return count


def _require_room(snapshot: StoreSnapshot, beside: Path, file_bytes: int) -> None:
    found = os.statvfs(beside)
    free_bytes = found.f_bavail * found.f_frsize
    needed = min(snapshot.used_bytes, file_bytes)
    if needed > free_bytes:
        raise Refusal(
            er.ERROR_REASON_STORE_FULL,
            f"{beside.parent} has {free_bytes >> 20} MiB left, the copy needs {needed >> 20}",
            store=snapshot.name,
            used_bytes=needed,
            free_bytes=free_bytes,
        )


def _refuse_strangers(path: Path) -> None:
    """Refuse when a program that knows no holds, for instance mdb_copy, has the store open."""
    try:
        lock = (path / lmdb_environment.LOCK_FILE).open("r+b")
    except FileNotFoundError:
        return
    with lock:
        try:
            # LMDB's own lock: every process that has the environment open shares this byte.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
        except (BlockingIOError, PermissionError) as error:
            text = f"the store in {path} is in use: another program has it open; end that first"
            raise StoreInUseError(text) from error
