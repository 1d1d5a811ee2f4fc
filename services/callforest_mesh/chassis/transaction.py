"""What a store hands to the functions that read and write: checked records by database and key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar, cast

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.errors import overloaded
from callforest_mesh.chassis.record_frame import CHECKSUM_BYTES, seal, unseal

KEY_BYTES_MAX: Final = 511
"""LMDB's longest key."""
READ_S: Final = 30.0
"""How long a service may read one snapshot, which keeps its pages from being used again."""
FORMAT_DATABASE: Final = "callforest"
FORMAT_KEY: Final = b"store-1"
"""Where the name of a store stands in it."""


class CursorLike(Protocol):
    """A cursor of LMDB, over one database."""

    def first(self) -> bool:
        """Go to the first key."""
        ...

    def set_range(self, key: bytes) -> bool:
        """Go to the first key that is not smaller."""
        ...

    def next(self) -> bool:
        """Go on by one."""
        ...

    def prev(self) -> bool:
        """Go back by one."""
        ...

    def last(self) -> bool:
        """Go to the last key."""
        ...

    def key(self) -> memoryview:
        """Give the key where it stands."""
        ...

    def value(self) -> memoryview:
        """Give the value where it stands."""
        ...


class TransactionLike(Protocol):
    """A transaction of LMDB that gives buffers."""

    def get(self, key: bytes, *, db: object) -> memoryview | None:
        """Give a value."""
        ...

    def put(self, key: bytes, value: bytes, *, db: object) -> bool:
        """Store a value."""
        ...

    def delete(self, key: bytes, *, db: object) -> bool:
        """Remove a value."""
        ...

    def cursor(self, db: object) -> CursorLike:
        """Give a cursor."""
        ...


class Collector(Protocol):
    """What the writes of one commit build together, for instance one segment of many calls."""

    def finish(self, txn: WriteTxn) -> None:
        """Write what was collected. Runs once, after the last write of the commit."""
        ...


CollectorT = TypeVar("CollectorT", bound=Collector)


@dataclass(slots=True)
class Batch:
    """What the writes of one commit share.

    Attributes:
        space: refuses when this much more cannot be stored.
        blocks: refuses when the disk has no blocks for so many bytes and changes, whatever they
            are: a commit that finds none ends the process.
        collectors: by the function that makes them.
        put_bytes: what was put so far; not yet in the store's used bytes.
        changes: how many records were put or removed so far.
    """

    space: Callable[[int], None] = lambda _more: None
    blocks: Callable[[int, int], None] = lambda _more, _changes: None
    collectors: dict[object, Collector] = field(default_factory=dict)
    put_bytes: int = 0
    changes: int = 0


class ReadTxn:
    """One snapshot of a store. Everything it gives is a copy; use it only inside the function.

    Args:
        store: names the store in refusals.
        txn: LMDB's transaction.
        databases: LMDB's handles by name.
        until: `time.monotonic()` from which on nothing is read any more; None for no such bound.
    """

    def __init__(
        self,
        store: str,
        txn: TransactionLike,
        databases: Mapping[str, object],
        *,
        until: float | None = None,
    ) -> None:
        self._until = until
        self._store = store
        self._txn: TransactionLike | None = txn
        self._databases = databases
        self._thread = threading.get_ident()

    def get(self, db: str, key: bytes) -> bytes | None:
        """Give the value of a key, or None.

        Raises:
            Refusal: STORE_CORRUPT when it does not have its checksum.
        """
        stored = self._of(key).get(key, db=self._databases[db])
        return None if stored is None else self._unsealed(db, key, stored)

    def piece(self, db: str, key: bytes, offset: int, size: int) -> bytes | None:
        """Give `size` bytes of a value from `offset` on, unchecked; None when they are not there.

        For values made of parts that each have a checksum of their own, which the caller checks:
        checking a whole segment to read one call of it would cost the square of its calls.
        """
        stored = self._of(key).get(key, db=self._databases[db])
        start = CHECKSUM_BYTES + offset
        if stored is None or offset < 0 or len(stored) < start + size:
            return None
        return bytes(stored[start : start + size])

    def scan(
        self, db: str, prefix: bytes, start: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Give the keys that begin with a prefix, with their values, in order.

        Args:
            db: the database.
            prefix: what the keys begin with.
            start: the first key to give, or the one behind it.
            limit: most pairs to give.

        Raises:
            Refusal: STORE_CORRUPT at the first value without its checksum.
        """
        cursor = self._of(prefix).cursor(self._databases[db])
        found = cursor.set_range(max(prefix, start or b""))
        left = limit
        while found and (left is None or left > 0):
            key = bytes(cursor.key())
            if not key.startswith(prefix):
                return
            yield key, self._unsealed(db, key, cursor.value())
            self._of(key)
            left = None if left is None else left - 1
            found = cursor.next()

    def last(self, db: str, prefix: bytes) -> tuple[bytes, bytes] | None:
        """Give the last key that begins with a prefix, with its value."""
        found = self._last(db, prefix)
        if found is None:
            return None
        key, cursor = found
        return key, self._unsealed(db, key, cursor.value())

    def last_key(self, db: str, prefix: bytes) -> bytes | None:
        """Give the last key that begins with a prefix; its value is not looked at."""
        found = self._last(db, prefix)
        return None if found is None else found[0]

    def _last(self, db: str, prefix: bytes) -> tuple[bytes, CursorLike] | None:
        cursor = self._of(prefix).cursor(self._databases[db])
        behind = _behind(prefix)
        passed = behind is not None and cursor.set_range(behind)
        found = cursor.prev() if passed else cursor.last()
        key = bytes(cursor.key()) if found else b""
        return (key, cursor) if found and key.startswith(prefix) else None

    def end(self) -> None:
        """Refuse any further use, and let go of LMDB's transaction, whoever holds this one."""
        self._txn = None

    def _of(self, key: bytes) -> TransactionLike:
        """Give LMDB's transaction, if it may be used here and for this key."""
        if self._txn is None:
            raise RuntimeError("the transaction has ended")
        if self._thread != threading.get_ident():
            raise RuntimeError("a transaction belongs to the thread that began it")
        if self._until is not None and time.monotonic() > self._until:
            raise overloaded("store_read_s", round(READ_S))
        if len(key) > KEY_BYTES_MAX:
            raise ValueError(f"a key of {len(key)} bytes; at most {KEY_BYTES_MAX}")
        return self._txn

    def _unsealed(self, db: str, key: bytes, stored: memoryview) -> bytes:
        payload = unseal(db, key, stored)
        if payload is None:
            raise corrupt(self._store, f"{db}/{key.hex()}")
        return payload


class WriteTxn(ReadTxn):
    """One function's part of a shared write transaction.

    Args:
        store: names the store in refusals.
        txn: LMDB's transaction.
        databases: LMDB's handles by name.
        batch: what it shares with the others of the commit.
        reserve: whether it may write beyond the quota and into the disk's last bytes (deletes and
            what settles old work).
    """

    def __init__(
        self,
        store: str,
        txn: TransactionLike,
        databases: Mapping[str, object],
        batch: Batch,
        *,
        reserve: bool,
    ) -> None:
        super().__init__(store, txn, databases)
        self._batch = batch
        self._reserve = reserve
        self._wrote = False

    @property
    def wrote(self) -> bool:
        """Whether the function changed anything yet."""
        return self._wrote

    def require_space(self, size: int = 0) -> None:
        """Refuse when `size` bytes more do not fit; every function's first put asks too.

        Raises:
            Refusal: STORE_FULL.
        """
        if not self._reserve:
            self._batch.space(self._batch.put_bytes + size)
        self._batch.blocks(self._batch.put_bytes + size, self._batch.changes + 1)

    def put(self, db: str, key: bytes, value: bytes) -> None:
        """Store a value.

        Raises:
            Refusal: STORE_FULL, at the function's first change only: what begins also ends.
        """
        if not key:
            raise ValueError("a key must not be empty")
        txn = self._of(key)
        self._begin_change(len(value))
        self._batch.put_bytes += len(key) + len(value)
        self._batch.changes += 1
        txn.put(key, seal(db, key, value), db=self._databases[db])

    def delete(self, db: str, key: bytes) -> bool:
        """Remove a value; say whether it was there.

        Raises:
            Refusal: STORE_FULL, at the function's first change only: LMDB frees a page by writing
                others, and the disk has no blocks for them.
        """
        txn = self._of(key)
        if not self._wrote:
            self._batch.blocks(self._batch.put_bytes, self._batch.changes + 1)
            self._wrote = True
        self._batch.changes += 1
        return txn.delete(key, db=self._databases[db])

    def shared(self, factory: Callable[[], CollectorT], size: int = 0) -> CollectorT:
        """Give the commit's one collector of a kind; the first that asks has it made.

        What a function adds to it, `size` bytes, counts as a change of the function.

        Raises:
            Refusal: STORE_FULL, as by put.
        """
        self._begin_change(size)
        self._batch.put_bytes += size
        collector = self.collected(factory)
        if collector is None:
            collector = self._batch.collectors[factory] = factory()
        return collector

    def collected(self, factory: Callable[[], CollectorT]) -> CollectorT | None:
        """Give the commit's collector of a kind if it was made; looking is no change."""
        return cast("CollectorT | None", self._batch.collectors.get(factory))

    def _begin_change(self, size: int) -> None:
        if not self._wrote:
            self.require_space(size)
            self._wrote = True


def corrupt(store: str, key: str) -> Refusal:
    """Make the refusal of a record that is not what was stored."""
    return Refusal(
        er.ERROR_REASON_STORE_CORRUPT,
        f"a record of the {store} store does not have its checksum; verify the store",
        store=store,
        key=key,
    )


def _behind(prefix: bytes) -> bytes | None:
    """Give the smallest key behind all that begin with a prefix; None when there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
