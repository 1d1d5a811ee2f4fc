"""Stores for the tests, and what the tests do with them."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import LmdbStore, ReadTxn, WriteTxn

MAP_BYTES = 16 << 20


Opener = Callable[..., AbstractAsyncContextManager[LmdbStore]]


def no_fault(error: Exception) -> None:
    raise AssertionError(f"a fatal error that the test does not expect: {error!r}")


def make(path: Path, kind: type[LmdbStore] = LmdbStore, **options: object) -> LmdbStore:
    settings = {
        "map_size_bytes": MAP_BYTES,
        "databases": ["calls", "names"],
        "quota_bytes": MAP_BYTES // 2,
        "on_fatal": no_fault,
        "name": "test",
        **options,
    }
    return kind(path, **settings)


def putting(key: bytes, value: bytes, db: str = "calls") -> Callable[[WriteTxn], None]:
    return lambda txn: txn.put(db, key, value)


def getting(key: bytes, db: str = "calls") -> Callable[[ReadTxn], bytes | None]:
    return lambda txn: txn.get(db, key)


class HeldStore(LmdbStore):
    """Waits before each commit until it is let go."""

    def __init__(self, path: Path, **options: object) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        super().__init__(path, **options)

    def _commit(self, raw) -> None:
        self.reached.set()
        assert self.gate.wait(20)
        super()._commit(raw)


async def reach(store: HeldStore) -> None:
    assert await asyncio.to_thread(store.reached.wait, 20)


async def in_one_batch(store: HeldStore, *writes: Callable[[WriteTxn], object]) -> list[object]:
    """Run writes in one batch; give what each returned or raised."""
    store.gate.clear()
    store.reached.clear()
    first = asyncio.ensure_future(store.write(putting(b"first", b"x")))
    await reach(store)
    tasks = [asyncio.ensure_future(store.write(write)) for write in writes]
    await asyncio.sleep(0)
    store.gate.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def refusal() -> Refusal:
    return Refusal(er.ERROR_REASON_CALL_MISMATCH, "no")
