"""The durable store of a service: one LMDB environment, one writer thread, group commit.

A write resolves when a power cut cannot undo it: LMDB syncs pages and meta page at every commit,
and no setting turns that off. Facts that shape this module: a transaction committed by another
thread than its own makes the next writer hang for ever; after a failed sync the kernel may call
lost pages clean, so nothing may be retried on the same environment; LMDB 0.9 serves damaged values
without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

from callforest_core.refusal import Refusal
from callforest_mesh.chassis import lmdb_environment as environment
from callforest_mesh.chassis.directory import sync_names
from callforest_mesh.chassis.disk_room import DiskRoom
from callforest_mesh.chassis.errors import draining, overloaded
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.reader_watch import ReaderWatch
from callforest_mesh.chassis.store_limits import StoreLimits
from callforest_mesh.chassis.store_opening import foreign, mark_made, open_store
from callforest_mesh.chassis.store_statistics import StoreStatistics
from callforest_mesh.chassis.transaction import (
    FORMAT_DATABASE,
    FORMAT_KEY,
    KEY_BYTES_MAX,
    READ_S,
    Batch,
    Collector,
    ReadTxn,
    TransactionLike,
    WriteTxn,
    corrupt,
)
from callforest_mesh.chassis.write_job import Blame, SpoiledError, WriteJob, answer
from callforest_mesh.chassis.write_queue import WriteQueue

__all__ = ["KEY_BYTES_MAX", "Collector", "LmdbStore", "ReadTxn", "StoreStatistics", "WriteTxn"]

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")
_Raw: TypeAlias = environment.RawTransaction
_LOG = logging.getLogger("callforest")

QUEUE_LIMIT: Final = 8192
DISK_RESERVE_BYTES: Final = 64 * 2**20
"""Space of the file system that only deletes and the like may use."""
CLOSE_S: Final = 60.0


class LmdbStore:
    """Checked records in named databases, written by one thread in group commits.

    Args:
        path: the store's directory; it is made when missing. Not on a network file system.
        map_size_bytes: the most that the file can grow to.
        databases: their names. A later version may add some.
        quota_bytes: used bytes from which writes without reserve are refused. At most nine tenths
            of the map, so that deletes, which need new pages first, always have some.
        on_fatal: called once, by the writer thread, when the environment can be trusted no more.
            The process must log it and end; every waiter has its error by then.
        name: names the store in refusals; another name's store is refused at open.
        queue_limit: most writes that wait.
        disk_reserve_bytes: free bytes of the file system below which writes without reserve are
            refused. Those with reserve are refused when the file is not sure to find its blocks.
        room_bytes: what the file may grow by in any case while a snapshot is held, before writes
            without reserve are refused; None: they end old work and never are. See `ReaderWatch`.
        clock: seconds that never go back.

    Raises:
        Refusal: STORE_CORRUPT when the directory holds another program's or another store's
            environment.
        ValueError: the quota does not leave a reserve.
    """

    def __init__(
        self,
        path: Path,
        *,
        map_size_bytes: int,
        databases: Sequence[str],
        quota_bytes: int,
        on_fatal: Callable[[Exception], None],
        name: str = "store",
        queue_limit: int = QUEUE_LIMIT,
        disk_reserve_bytes: int = DISK_RESERVE_BYTES,
        room_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if quota_bytes > map_size_bytes * 9 // 10:
            raise ValueError("quota_bytes must leave a tenth of map_size_bytes for deletes")
        self._path = path
        self._map_size, self._names = map_size_bytes, tuple(databases)
        self._quota = quota_bytes
        self._on_fatal = on_fatal
        self._name = name
        self._disk_reserve = disk_reserve_bytes
        self._room, self._clock = room_bytes, clock
        self._queue: WriteQueue[WriteJob[Any, Any]] = WriteQueue(name, queue_limit)
        self._pid = os.getpid()
        self._databases: dict[str, Any] = {}
        self._commits = self._records = self._used = 0
        self._failed = self._closed = False
        opened: Future[None] = Future()
        # A daemon: a process that dies for another reason must not wait for it.
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name=f"{name}-writer", daemon=True
        )
        self._thread.start()
        opened.result(timeout=CLOSE_S)

    async def write(
        self, fn: Callable[[WriteTxn], T], *, records: int = 1, reserve: bool = False
    ) -> T:
        """Run a function inside the next commit; return its value once that is durable.

        The function runs on the writer thread, shortly, and may run more than once when another
        one spoils the commit. A cancelled waiter does not cancel the write.

        Args:
            fn: reads and writes. A Refusal or another exception leaves nothing of it behind and
                reaches the caller alone; a Refusal before the first change costs nothing, anything
                later repeats the commit without it.
            records: how many records it writes, for the statistics.
            reserve: whether it may go beyond the quota: deletes, and what settles old work.

        Raises:
            Refusal: OVERLOADED, STORE_FULL (with reserve: the disk is full), STORE_CORRUPT,
                DRAINING (closed, or failed: whether the write took effect is then unknown), or the
                function's own.
        """
        return await self.submit(fn, lambda result: result, records=records, reserve=reserve)

    def submit(
        self,
        fn: Callable[[WriteTxn], T],
        answer_of: Callable[[T], AnswerT],
        *,
        records: int = 1,
        reserve: bool = False,
    ) -> asyncio.Future[AnswerT]:
        """Begin what `write` does; give the future of its answer. Cancelling that undoes nothing.

        `answer_of` makes the answer of what `fn` returned, on the caller's loop, once that is
        durable, even if nobody waits any more; what it raises is the caller's.

        Raises:
            Refusal: OVERLOADED, DRAINING.
        """
        self._own_process()
        if self._failed:
            raise draining(self._name)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[AnswerT] = loop.create_future()
        self._queue.put(WriteJob(fn, records, reserve, answer_of, future, loop), loop)
        return future

    def read(self, fn: Callable[[ReadTxn], T]) -> T:
        """Run a function over one snapshot, on the calling thread; keep it short.

        Raises:
            Refusal: STORE_CORRUPT, OVERLOADED (too many readers), DRAINING, or the function's own.
        """
        self._own_process()
        if self._failed or self._closed:
            raise draining(self._name)
        try:
            with self._env.begin(buffers=True) as txn:
                raw, until = cast("TransactionLike", txn), time.monotonic() + READ_S
                view = ReadTxn(self._name, raw, self._databases, until=until)
                try:
                    return fn(view)
                finally:
                    view.end()
                    del txn, raw  # a refusal keeps this frame, and they the reader's slot
        except environment.ReadersFullError as error:
            raise overloaded(
                "store_readers", environment.READERS_MAX, retry_after_ms=100
            ) from error
        except (environment.CorruptedError, environment.PageNotFoundError) as error:
            raise corrupt(self._name, type(error).__name__) from error

    def statistics(self) -> StoreStatistics:
        """Give the store's counts and sizes."""
        free = self._free_bytes()
        return StoreStatistics(
            commits=self._commits,
            records=self._records,
            queue_depth=len(self._queue),
            used_bytes=self._used,
            quota_bytes=self._quota,
            file_bytes=(self._path / "data.mdb").stat().st_size,
            stale_readers=self._readers.stale,
            oldest_reader_s=self._readers.oldest_s,
            disk_free_bytes=free,
            disk_kept_bytes=self._disk.kept_bytes,
            room_bytes=max(0, min(self._quota - self._used, free - self._disk_reserve)),
        )

    async def close(self) -> None:
        """Commit what waits, then close the environment. Idempotent.

        Raises:
            TimeoutError: the writer thread did not end within a minute.
        """
        self._own_process()
        self._queue.close()
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the writer of the {self._name} store did not end")

    def _durability(self) -> dict[str, bool]:
        """Give LMDB's settings of durability: the only ones there are."""
        return {"sync": True, "metasync": True, "writemap": False, "map_async": False}

    def _run(self, opened: Future[None]) -> None:
        """Be the writer thread: it alone begins and commits."""
        try:
            self._open()
        except Exception as error:  # noqa: BLE001 - the opener raises it
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - fatal: the process ends
            self._fail(error)
        finally:
            self._closed = True
            self._disk.close()
            if not self._failed:
                self._opened.close()

    def _open(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        self._opened = open_store(
            self._path,
            self._name,
            map_size_bytes=self._map_size,
            databases_max=len(self._names) + 1,
            durability=self._durability(),
        )
        self._env, stale = self._opened.environment, self._opened.stale_readers
        self._readers = ReaderWatch(
            self._env, self._name, clock=self._clock, room_bytes=self._room, stale=stale
        )
        try:
            for name in (FORMAT_DATABASE, *self._names):
                self._databases[name] = self._env.open_db(name.encode())
            self._mark()
            mark_made(self._path)
            self._disk = DiskRoom(self._path, self._env, self._map_size, self._free_bytes)
        except BaseException:
            self._opened.close()
            raise
        self._limits = StoreLimits(
            self._name,
            quota_bytes=self._quota,
            disk_reserve_bytes=self._disk_reserve,
            disk=self._disk,
            readers=self._readers,
            free_bytes=self._free_bytes,
        )
        # LMDB syncs its file but never the directories that name it.
        sync_names(self._path)

    def _mark(self) -> None:
        mark = self._name.encode()
        with self._env.begin(write=True, buffers=True) as raw:
            txn = self._write_txn(raw, Batch(), reserve=True)
            found = txn.get(FORMAT_DATABASE, FORMAT_KEY)
            if found is None and environment.used_bytes(raw, self._databases.values()) == 0:
                txn.put(FORMAT_DATABASE, FORMAT_KEY, mark)
            elif found != mark:
                raise foreign(self._name, repr((found or b"").decode(errors="replace")))
            self._used = environment.used_bytes(raw, self._databases.values())

    def _serve(self) -> None:
        while (batch := self._queue.take(self._readers.due_s)) is not None:
            if batch:
                self._process(batch)
            self._readers.look(self._used)

    def _process(self, batch: list[WriteJob[Any, Any]]) -> None:
        """Commit a batch; when it is spoiled, the others once more together, then each alone."""
        try:
            left = self._attempt(batch)
            left = self._attempt(left) if left else left
            for job in left:
                self._attempt([job])
        except Exception as error:
            self._fail(error, [job for job in batch if not job.answered])
            raise
        self._queue.committed(len(batch))

    def _attempt(self, jobs: list[WriteJob[Any, Any]]) -> list[WriteJob[Any, Any]]:
        """Run and commit writes; give those that must run again because one spoiled the commit."""
        raw = self._env.begin(write=True, buffers=True)
        failpoint("store.after_begin")
        try:
            self._fill(raw, jobs)
            used = environment.used_bytes(raw, self._databases.values())
            failpoint("store.before_commit")
            self._commit(raw)
            failpoint("store.after_commit")
        except SpoiledError as spoiled:
            raw.abort()
            culprit = spoiled.by or (jobs[0] if len(jobs) == 1 else None)
            if culprit is not None:
                culprit.error = spoiled.error
                answer([culprit])
            return [job for job in jobs if job is not culprit]
        self._used = used
        self._commits += 1
        self._records += sum(job.records for job in jobs if job.error is None)
        answer(jobs)
        self._disk.grown()
        return []

    def _fill(self, raw: _Raw, jobs: list[WriteJob[Any, Any]]) -> None:
        batch = self._limits.batch(self._used)
        with self._blaming() as blame:
            for job in jobs:
                blame.job = job
                job.error = None
                txn = self._write_txn(raw, batch, reserve=job.reserve)
                try:
                    job.result = job.fn(txn)
                    failpoint("store.after_put")
                except Refusal as refusal:
                    if txn.wrote:
                        raise
                    job.error = refusal
                finally:
                    txn.end()
            blame.job = None
            last = self._write_txn(raw, batch, reserve=True)
            for collector in batch.collectors.values():
                collector.finish(last)
            last.end()

    def _commit(self, raw: _Raw) -> None:
        # A full map shows before any page is written, so it alone is no fatal error.
        with self._blaming((environment.MapFullError,)):
            raw.commit()

    @contextlib.contextmanager
    def _blaming(self, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[Blame]:
        """Turn an exception into a spoiled commit, and a full map into its refusal."""
        blame = Blame()
        try:
            yield blame
        except environment.MapFullError as error:
            full = self._limits.full(self._used, self._map_size)
            raise SpoiledError(blame.job, full) from error
        except (environment.CorruptedError, environment.PageNotFoundError) as error:
            if Exception not in kinds:
                raise
            raise SpoiledError(blame.job, corrupt(self._name, type(error).__name__)) from error
        except kinds as error:
            raise SpoiledError(blame.job, error) from error

    def _write_txn(self, raw: _Raw, batch: Batch, *, reserve: bool) -> WriteTxn:
        txn = cast("TransactionLike", raw)
        return WriteTxn(self._name, txn, self._databases, batch, reserve=reserve)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._path)
        return found.f_bavail * found.f_frsize

    def _fail(self, error: Exception, running: Sequence[WriteJob[Any, Any]] = ()) -> None:
        """Trust the environment no more: every waiter gets an error, and nothing is taken."""
        if self._failed:
            return
        self._failed = True
        _LOG.critical("the %s store failed; the process must end", self._name, exc_info=error)
        waiting = [*running, *self._queue.abandon()]
        for job in waiting:
            job.error = draining(self._name)
        answer(waiting)
        self._on_fatal(error)

    def _own_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a store must not be used after fork; start processes by spawn")
