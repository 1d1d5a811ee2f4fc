"""A service whose disk is slow now and then; it shows when.

Every STALL_EVERY-th commit waits STALL_S on the writer thread before it is durable, as a sync
would. The gauge says whether it waits now, and how often it has waited. All is in one folder: the
store, the socket `NAME.sock`, the gauge, and the sockets of the services that this one needs.

Usage: python -m tests.robustness.slow_service staging|ledger|finalizer FOLDER TENANT
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from callforest_client.channel import connect
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_mesh.chassis.fatal import exit_process
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.chassis.server import run
from callforest_mesh.chassis.service import MeshService
from callforest_mesh.chassis.service_store import StoreOptions
from callforest_mesh.finalizer import store as row_log
from callforest_mesh.finalizer.service import FinalizerOptions, FinalizerService
from callforest_mesh.ledger import store as ledger_log
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from callforest_mesh.staging import store as calls
from callforest_mesh.staging.service import StagingOptions, StagingService
from tests.robustness.gauge import Gauge, gauge_file

STALL_EVERY = 50
STALL_S = 2.0
QUEUE_LIMIT = 32
SIZE = {"map_size_bytes": 256 << 20, "quota_bytes": 128 << 20}


class SlowStore(LmdbStore):
    """A store whose commits are slow now and then."""

    gauge: Gauge
    never = threading.Event()
    count = 0

    def _commit(self, raw) -> None:
        self.count += 1
        stall = self.count // STALL_EVERY
        if self.count % STALL_EVERY:
            super()._commit(raw)
            return
        self.gauge.show(1, stall)
        self.never.wait(STALL_S)
        super()._commit(raw)
        self.gauge.show(0, stall)


def slow_store(options: StoreOptions, databases: Sequence[str], name: str) -> LmdbStore:
    return SlowStore(
        options.path,
        map_size_bytes=options.map_size_bytes,
        databases=databases,
        quota_bytes=options.quota_bytes,
        on_fatal=exit_process,
        name=name,
        queue_limit=QUEUE_LIMIT,
    )


class SlowStaging(StagingService):
    def open_store(self, options: StagingOptions) -> LmdbStore:
        return slow_store(options, calls.DATABASES, self.name)


class SlowLedger(LedgerService):
    def _open_store(self) -> LmdbStore:
        return slow_store(self._options, ledger_log.DATABASES, self.name)


class SlowFinalizer(FinalizerService):
    def _open_store(self) -> LmdbStore:
        return slow_store(self._options, row_log.DATABASES, self.name)


def staging(folder: Path, _tenant: str, drain: Drain) -> MeshService:
    return SlowStaging(StagingOptions(folder / "staging", **SIZE), drain)


def ledger(folder: Path, _tenant: str, drain: Drain) -> MeshService:
    return SlowLedger(LedgerOptions(folder / "ledger", **SIZE), drain)


def finalizer(folder: Path, tenant: str, drain: Drain) -> MeshService:
    options = FinalizerOptions(folder / "finalizer", **SIZE, cleanup_tenants=(tenant,))
    return SlowFinalizer(
        options,
        drain,
        LedgerClient(connect(f"unix:{folder}/ledger.sock"), tenant=tenant),
        StagingClient(connect(f"unix:{folder}/staging.sock"), tenant=tenant),
    )


KINDS: dict[str, Callable[[Path, str, Drain], MeshService]] = {
    "staging": staging,
    "ledger": ledger,
    "finalizer": finalizer,
}


def main() -> int:
    name, words, tenant = sys.argv[1:]
    folder = Path(words)
    SlowStore.gauge = Gauge(gauge_file(folder, name, 0))
    return run(
        lambda drain, _closers: KINDS[name](folder, tenant, drain), f"unix:{folder}/{name}.sock"
    )


if __name__ == "__main__":
    sys.exit(main())
