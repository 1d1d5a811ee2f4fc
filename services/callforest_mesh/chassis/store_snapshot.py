"""One moment of a store, for a process that does not write it: to verify, copy or plan with.

The writer may live and go on. A snapshot keeps the pages that it sees from being used again, so a
long one lets the file grow: hold it for as long as one pass takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis import lmdb_environment
from callforest_mesh.chassis.record_frame import unseal
from callforest_mesh.chassis.store_hold import StoreHold
from callforest_mesh.chassis.transaction import (
    FORMAT_DATABASE,
    FORMAT_KEY,
    CursorLike,
    ReadTxn,
    TransactionLike,
)

_HEAD_PAGES: Final = 8
"""The two meta pages, and the tree of the databases' names."""


class StoreSnapshot:
    """Reads a store as of the moment in which it was made; changes nothing of it.

    Args:
        path: the store's directory.
        alone: whether the caller holds the directory alone, so that nobody can be writing; else the
            snapshot holds it too, and registers with the writer that may live.

    Attributes:
        name: the store's own, for instance `staging`.
        databases: names of the databases with the service's records.

    Raises:
        StoreInUseError: the store is being compacted.
        Refusal: STORE_CORRUPT, the directory holds no store.
    """

    def __init__(self, path: Path, *, alone: bool = False) -> None:
        self._path = path
        self._hold = None if alone else StoreHold(path)
        # Who writes made the lock file first, so without one nobody does (a backup has none).
        lock = not alone and (path / lmdb_environment.LOCK_FILE).exists()
        try:
            self._environment = lmdb_environment.open_read_only(path, lock=lock)
        except lmdb_environment.LmdbError as error:
            self._release()
            raise _no_store(path, str(error)) from error
        try:
            self._txn = self._environment.begin(buffers=True)
            self.read_databases()
        except BaseException:
            self.close()
            raise

    @property
    def is_latest(self) -> bool:
        """Whether the store has no later commit than the snapshot shows, now."""
        # What LMDB's own numbers say is ahead of what readers get while a commit syncs its head.
        with self._environment.begin(buffers=True) as now:
            return now.id() == self._txn.id()

    def renew(self) -> None:
        """Go on to the latest commit; until `read_databases` nothing else may be asked."""
        self._txn.abort()
        self._txn = self._environment.begin(buffers=True)

    def read_databases(self) -> None:
        """Find out what the snapshot holds.

        Raises:
            Refusal: STORE_CORRUPT, no store that can be read.
        """
        path = self._path
        self._handles = self._open_databases(path)
        self.view = ReadTxn(path.name, cast("TransactionLike", self._txn), self._handles)
        self.name = self._read_name(path)
        self.databases = tuple(name for name in self._handles if name != FORMAT_DATABASE)

    @property
    def is_cut(self) -> bool:
        """Whether the file ends within a page, as LMDB never leaves it."""
        missing = lmdb_environment.missing_bytes(self._environment, self._path)
        return bool(missing % lmdb_environment.page_bytes(self._environment))

    @property
    def used_bytes(self) -> int:
        """What a copy without free pages takes, at most."""
        pages = 0
        for stat in map(self._txn.stat, self._handles.values()):
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return (pages + _HEAD_PAGES) * lmdb_environment.page_bytes(self._environment)

    def value(self, database: str, key: bytes) -> bytes | None:
        """Give a value; None when it is not there or damaged."""
        found = next(self.stored(database, key), None)
        return unseal(database, key, found[1]) if found and found[0] == key else None

    def records(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes | None]]:
        """Give the records whose keys begin with a prefix; None for a value that is damaged."""
        for key, stored in self.stored(database, prefix):
            yield key, unseal(database, key, stored)

    def stored(self, database: str, prefix: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Give keys and stored bytes, checksum included, unchecked; valid until the next one."""
        txn = cast("TransactionLike", self._txn)
        cursor: CursorLike = txn.cursor(self._handles[database])
        found = cursor.set_range(prefix) if prefix else cursor.first()
        while found:
            key = bytes(cursor.key())
            if not key.startswith(prefix):
                return
            yield key, cursor.value()
            found = cursor.next()

    def copy_to(self, target: Path) -> None:
        """Write the snapshot into an existing, empty directory, without free pages."""
        lmdb_environment.copy_compacted(self._environment, self._txn, target)

    def close(self) -> None:
        """End the snapshot. Idempotent."""
        self._environment.close()
        self._release()

    def __enter__(self) -> Self:
        """Give the snapshot."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """End the snapshot."""
        self.close()

    def _open_databases(self, path: Path) -> dict[str, Any]:
        try:
            names = [bytes(key) for key, _ in self._txn.cursor()]
            return {
                name.decode(): self._environment.open_db(name, txn=self._txn, create=False)
                for name in names
            }
        except (lmdb_environment.LmdbError, UnicodeDecodeError) as error:
            raise _no_store(path, str(error)) from error

    def _read_name(self, path: Path) -> str:
        mark = None
        if FORMAT_DATABASE in self._handles:
            mark = self.view.get(FORMAT_DATABASE, FORMAT_KEY)
        if mark is None:
            raise _no_store(path, "it has no mark")
        return mark.decode()

    def _release(self) -> None:
        if self._hold is not None:
            self._hold.release()


def _no_store(path: Path, fault: str) -> Refusal:
    return Refusal(
        er.ERROR_REASON_STORE_CORRUPT,
        f"{path} holds no store that can be read: {fault}",
        store=path.name,
        key=lmdb_environment.CONTENT_FILE,
    )
