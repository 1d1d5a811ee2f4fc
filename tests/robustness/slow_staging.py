"""A Staging process whose disk is slow now and then; it shows when.

Every STALL_EVERY-th commit waits STALL_S on the writer thread before it is durable, as a sync
would. The gauge says whether it waits now, and how often it has waited.

Usage: python -m tests.robustness.slow_staging STORE ADDRESS GAUGE
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from callforest_mesh.chassis.fatal import exit_process
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.chassis.server import run
from callforest_mesh.staging.service import StagingOptions, StagingService
from callforest_mesh.staging.store import DATABASES
from tests.robustness.gauge import Gauge

STALL_EVERY = 50
STALL_S = 2.0
QUEUE_LIMIT = 32
MAP_BYTES = 256 << 20


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


class SlowStaging(StagingService):
    """A Staging service on such a store."""

    def open_store(self, options: StagingOptions) -> LmdbStore:
        return SlowStore(
            options.path,
            map_size_bytes=options.map_size_bytes,
            databases=DATABASES,
            quota_bytes=options.quota_bytes,
            on_fatal=exit_process,
            name=self.name,
            queue_limit=QUEUE_LIMIT,
        )


def main() -> int:
    store, address, gauge = sys.argv[1:]
    SlowStore.gauge = Gauge(Path(gauge))
    options = StagingOptions(Path(store), map_size_bytes=MAP_BYTES, quota_bytes=MAP_BYTES // 2)
    return run(lambda drain, _closers: SlowStaging(options, drain), address)


if __name__ == "__main__":
    sys.exit(main())
