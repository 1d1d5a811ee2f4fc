"""A ledger whose commits wait until they are let go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from callforest.capture.v1 import attempt_pb2
from callforest_mesh.ledger.ledger import Ledger
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.ledger.settlement import SettlementWatch
from callforest_mesh.ledger.store import DATABASES, LmdbLedgerStore
from tests.unit.chassis.stores import HeldStore, make
from tests.unit.ledger.calls import KEY, TENANT

ATTEMPT = AttemptKey(TENANT, KEY)
REQUESTS = [f"3f2b8a52-0a3a-4b5e-9a58-0d9f8d2f7b{number:02}" for number in range(10, 20)]


@dataclass
class Bench:
    """A ledger whose store can be held before a commit."""

    ledger: Ledger
    watch: SettlementWatch
    lmdb: HeldStore
    store: LmdbLedgerStore

    async def open(self, request: int = 0, rollout: str = KEY) -> attempt_pb2.Attempt:
        return await self.ledger.open_attempt(TENANT, rollout, REQUESTS[request])

    def hold(self) -> None:
        self.lmdb.reached.clear()
        self.lmdb.gate.clear()

    def release(self) -> None:
        self.lmdb.gate.set()

    def durable_revision(self, attempt: AttemptKey = ATTEMPT) -> int:
        return self.store.read(lambda log: log.revision(attempt))

    async def rows(self, attempt: AttemptKey = ATTEMPT) -> list[str]:
        found = []
        async for part in self.ledger.manifest(attempt):
            if not isinstance(part, attempt_pb2.Attempt):
                found += [one.record.coords.call_id or one.failure.call_id for one in part]
        return found


@asynccontextmanager
async def opened_bench(folder: Path, **options: object) -> AsyncIterator[Bench]:
    """Run one in a folder, whose store must not fail."""
    lmdb = make(folder / "ledger", HeldStore, databases=DATABASES, name="ledger", **options)
    store = LmdbLedgerStore(lambda: lmdb)
    store.open()
    watch = SettlementWatch("ledger", waits_max=4)
    made = Bench(Ledger(store, watch, cached_calls_max=1000), watch, lmdb, store)
    yield made
    made.release()
    await store.close()
    await made.ledger.stop()
