"""LMDB as the project opens it, and its errors that mean something: one file imports it.

One process writes a store; others may read it at the same time, each in a snapshot of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import lmdb

CorruptedError = lmdb.CorruptedError
InvalidError = lmdb.InvalidError
LmdbError = lmdb.Error
MapFullError = lmdb.MapFullError
PageNotFoundError = lmdb.PageNotFoundError
ReadersFullError = lmdb.ReadersFullError
Environment: TypeAlias = lmdb.Environment
Database: TypeAlias = "lmdb._Database"  # noqa: SLF001 - what its stubs call it
RawTransaction: TypeAlias = "lmdb.Transaction[memoryview]"

CONTENT_FILE: Final = "data.mdb"
LOCK_FILE: Final = "lock.mdb"
READERS_MAX: Final = 126
_NAMES_MAX: Final = 64


def open_writable(
    path: Path, *, map_size_bytes: int, databases_max: int, durability: Mapping[str, bool]
) -> Environment:
    """Open an environment for the one process that writes it; it is made when missing."""
    return lmdb.open(
        str(path),
        map_size=map_size_bytes,
        max_dbs=databases_max,
        max_readers=READERS_MAX,
        readahead=False,
        **durability,
    )


def open_read_only(path: Path, *, lock: bool) -> Environment:
    """Open an environment that another process may be writing; nothing of its content changes.

    Args:
        path: the directory.
        lock: whether readers are registered, as they must be while a writer lives: without, it
            would use their pages again. False for what nobody can be writing.

    Raises:
        LmdbError: there is none.
    """
    # A map of 0 bytes takes the writer's size: one of the file's size breaks when the file grows.
    return lmdb.open(
        str(path),
        map_size=0,
        max_dbs=_NAMES_MAX,
        readonly=True,
        create=False,
        lock=lock,
        readahead=False,
    )


def copy_compacted(environment: Environment, txn: RawTransaction, target: Path) -> None:
    """Write what a transaction sees into an existing, empty directory, without free pages."""
    environment.copy(str(target), compact=True, txn=txn)


def missing_bytes(environment: Environment, path: Path) -> int:
    """Give how many bytes the file is too short for the pages that were ever allocated.

    Reading a page behind the end of a file ends a process. Whole pages may be missing all the same
    with every record there: LMDB does not write pages that a transaction took and gave back.
    """
    return max(0, allocated_bytes(environment) - (path / CONTENT_FILE).stat().st_size)


def allocated_bytes(environment: Environment) -> int:
    """Give where the pages end that were ever allocated; free ones count."""
    return (int(environment.info()["last_pgno"]) + 1) * page_bytes(environment)


def used_bytes(txn: RawTransaction, databases: Iterable[Database]) -> int:
    """Give the size of the pages that some databases use; free ones of the file do not count."""
    total = 0
    for stat in map(txn.stat, databases):
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        total += pages * stat["psize"]
    return total


def page_bytes(environment: Environment) -> int:
    """Give the size of a page; LMDB writes whole ones only."""
    return int(environment.stat()["psize"])
