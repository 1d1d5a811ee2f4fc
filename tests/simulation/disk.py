"""A store in memory that behaves as the durable one: group commits, snapshots, crashes.

It stands where the services put an LmdbStore and hands out the same transactions, checksums and
all. Commits take virtual time. While one is under way readers see what was durable before; a crash
then keeps all of it or nothing. What is committed survives every crash.
"""

from __future__ import annotations

import asyncio
import bisect
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from callforest_core.refusal import Refusal
from callforest_mesh.chassis.errors import draining, overloaded
from callforest_mesh.chassis.store_statistics import StoreStatistics
from callforest_mesh.chassis.transaction import Batch, ReadTxn, WriteTxn

COMMIT_S = 0.002
"""Mean duration of a commit."""
BATCH_MAX = 1024


class Table:
    """One database: keys in order."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.keys: list[bytes] = []

    def put(self, key: bytes, value: bytes) -> None:
        if key not in self.values:
            bisect.insort(self.keys, key)
        self.values[key] = value

    def delete(self, key: bytes) -> None:
        if self.values.pop(key, None) is not None:
            del self.keys[bisect.bisect_left(self.keys, key)]


Change = tuple[str, bytes, bytes | None]
"""(database, key, stored value or None for a removal)."""
Witness = Callable[[list[Change]], None]


@dataclass(slots=True)
class Disk:
    """What survives crashes.

    Attributes:
        chance: draws durations, and what a crash keeps.
        tables: by name.
        witness: is shown the changes of each commit when it is durable, before anyone is told.
        slow_until: until then commits take up to two seconds.
        rerun: share of commits that are aborted once and run again.
        queue_limit: most writes that wait.
        acks_early: a flaw: writes are acknowledged before they are durable.
        commits: how many there were.
        under_way: whether a commit is under way.
        lost: commits under way that a crash took.
        kept: commits under way that a crash left.
    """

    chance: random.Random
    tables: dict[str, Table] = field(default_factory=dict)
    witness: Witness = lambda _changes: None
    slow_until: float = 0.0
    rerun: float = 0.0
    queue_limit: int = 8192
    acks_early: bool = False
    commits: int = 0
    under_way: bool = False
    lost: int = 0
    kept: int = 0

    def commit_s(self, now: float) -> float:
        """Draw how long the next commit takes."""
        if now < self.slow_until:
            return self.chance.uniform(0.1, 2.0)
        return self.chance.expovariate(1 / COMMIT_S)

    def apply(self, layer: Layer) -> None:
        """Make a transaction durable."""
        changes = list(layer.changes())
        for name, key, value in changes:
            if value is None:
                self.tables[name].delete(key)
            else:
                self.tables[name].put(key, value)
        self.commits += 1
        self.witness(changes)


class Layer:
    """A transaction over the tables, in LMDB's shape: its changes hide what is below."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._changed: dict[str, dict[bytes, bytes | None]] = {name: {} for name in disk.tables}
        self._added: dict[str, list[bytes]] = {name: [] for name in disk.tables}

    def get(self, key: bytes, *, db: str) -> memoryview | None:
        changed = self._changed[db]
        value = changed[key] if key in changed else self._disk.tables[db].values.get(key)
        return None if value is None else memoryview(value)

    def put(self, key: bytes, value: bytes, *, db: str) -> bool:
        if key not in self._changed[db] and key not in self._disk.tables[db].values:
            bisect.insort(self._added[db], key)
        self._changed[db][key] = bytes(value)
        return True

    def delete(self, key: bytes, *, db: str) -> bool:
        there = self.get(key, db=db) is not None
        self._changed[db][key] = None
        return there

    def cursor(self, db: str) -> Cursor:
        return Cursor(self, db)

    def behind(self, db: str, key: bytes, *, itself: bool) -> bytes | None:
        """Give the first key behind another one, or that one itself; None at the end."""
        look = bisect.bisect_left if itself else bisect.bisect_right
        found = []
        for keys in (self._disk.tables[db].keys, self._added[db]):
            place = look(keys, key)
            while place < len(keys) and self.get(keys[place], db=db) is None:
                place += 1
            found += keys[place : place + 1]
        return min(found, default=None)

    def before(self, db: str, key: bytes | None) -> bytes | None:
        """Give the last key before another one, or of all; None when there is none."""
        found = []
        for keys in (self._disk.tables[db].keys, self._added[db]):
            place = (len(keys) if key is None else bisect.bisect_left(keys, key)) - 1
            while place >= 0 and self.get(keys[place], db=db) is None:
                place -= 1
            found += keys[place : place + 1] if place >= 0 else []
        return max(found, default=None)

    def changes(self) -> Iterator[Change]:
        for name, changed in self._changed.items():
            for key, value in changed.items():
                if value is not None or key in self._disk.tables[name].values:
                    yield name, key, value


class Cursor:
    """A cursor over one database of a transaction; it stands on a key, not on a place."""

    def __init__(self, layer: Layer, db: str) -> None:
        self._layer, self._db = layer, db
        self._key: bytes | None = None

    def set_range(self, key: bytes) -> bool:
        return self._stand(self._layer.behind(self._db, key, itself=True))

    def next(self) -> bool:
        assert self._key is not None
        return self._stand(self._layer.behind(self._db, self._key, itself=False))

    def prev(self) -> bool:
        assert self._key is not None
        return self._stand(self._layer.before(self._db, self._key))

    def last(self) -> bool:
        return self._stand(self._layer.before(self._db, None))

    def key(self) -> memoryview:
        return memoryview(self._key or b"")

    def value(self) -> memoryview:
        value = self._layer.get(self._key or b"", db=self._db)
        assert value is not None
        return value

    def _stand(self, key: bytes | None) -> bool:
        if key is not None:
            self._key = key
        return key is not None


@dataclass(slots=True, eq=False)
class _Job:
    fn: Callable[[WriteTxn], Any]
    reserve: bool
    answer_of: Callable[[Any], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class _SpoiledError(Exception):
    def __init__(self, job: _Job, error: Exception) -> None:
        super().__init__()
        self.job, self.error = job, error


class MemoryStore:
    """One process's way to a disk; what an LmdbStore is to the services.

    Args:
        disk: what survives.
        databases: their names.
        name: names the store in refusals.
    """

    def __init__(self, disk: Disk, databases: tuple[str, ...], name: str) -> None:
        self._disk, self._name = disk, name
        self._databases = {database: database for database in databases}
        for database in databases:
            disk.tables.setdefault(database, Table())
        self._queue: deque[_Job] = deque()
        self._under_way: Layer | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closed = False

    async def write(self, fn, *, records=1, reserve=False):
        return await self.submit(fn, lambda result: result, records=records, reserve=reserve)

    def submit(self, fn, answer_of, *, records=1, reserve=False):  # noqa: ARG002 - a count
        if self._closed:
            raise draining(self._name)
        if len(self._queue) >= self._disk.queue_limit:
            raise overloaded("store_queue", self._disk.queue_limit, retry_after_ms=100)
        future = asyncio.get_running_loop().create_future()
        self._queue.append(_Job(fn, reserve, answer_of, future))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write())
        return future

    def read(self, fn):
        if self._closed:
            raise draining(self._name)
        view = ReadTxn(self._name, Layer(self._disk), self._databases)
        try:
            return fn(view)
        finally:
            view.end()

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(self._disk.commits, 0, len(self._queue), 0, 1, 0, 0, 0.0, 0, 0, 1)

    async def close(self) -> None:
        self._closed = True
        if self._writer is not None:
            await asyncio.wait({self._writer})

    def crash(self) -> None:
        """End as kill -9 or a power cut does: a commit under way is there whole, or not at all."""
        layer, self._under_way, self._closed = self._under_way, None, True
        self._disk.under_way = False
        if layer is None:
            return
        if not self._disk.acks_early and self._disk.chance.random() < 0.5:
            self._disk.kept += 1
            self._disk.apply(layer)
        else:
            self._disk.lost += 1

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_MAX))]
            if self._disk.chance.random() < self._disk.rerun:
                self._run(list(batch))  # aborted: nothing of it stays, and it runs again
            layer, answered = self._run(batch)
            self._under_way, self._disk.under_way = layer, True
            if self._disk.acks_early:
                _tell(answered)
            await asyncio.sleep(self._disk.commit_s(loop.time()))
            self._under_way, self._disk.under_way = None, False
            self._disk.apply(layer)
            _tell(answered)

    def _run(self, jobs: list[_Job]) -> tuple[Layer, list[_Job]]:
        """Run writes in a transaction of their own; again without each one that spoils it."""
        left = list(jobs)
        while True:
            layer = Layer(self._disk)
            try:
                self._fill(layer, left)
            except _SpoiledError as spoiled:
                spoiled.job.error = spoiled.error
                left.remove(spoiled.job)
                continue
            return layer, jobs

    def _fill(self, layer: Layer, jobs: list[_Job]) -> None:
        batch = Batch(space=lambda _more: None)
        for job in jobs:
            txn = WriteTxn(self._name, layer, self._databases, batch, reserve=job.reserve)
            job.error = None
            try:
                job.result = job.fn(txn)
            except Exception as error:
                if txn.wrote or not isinstance(error, Refusal):
                    raise _SpoiledError(job, error) from error
                job.error = error
            finally:
                txn.end()
        last = WriteTxn(self._name, layer, self._databases, batch, reserve=True)
        for collector in batch.collectors.values():
            collector.finish(last)
        last.end()


def _tell(jobs: list[_Job]) -> None:
    for job in jobs:
        error, answer = job.error, None
        if error is None:
            try:
                answer = job.answer_of(job.result)
            except Exception as raised:  # noqa: BLE001 - the waiter gets it
                error = raised
        if job.future.done():
            continue
        if error is None:
            job.future.set_result(answer)
        else:
            job.future.set_exception(error)
