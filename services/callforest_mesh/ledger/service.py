"""The Ledger as a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import grpc.aio

from callforest.ledger.v1 import ledger_care_service_pb2_grpc as care_rpc
from callforest.ledger.v1 import ledger_service_pb2_grpc as rpc
from callforest_mesh.chassis.fatal import exit_process
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.lmdb_store import DISK_RESERVE_BYTES, LmdbStore
from callforest_mesh.chassis.reader_watch import ROOM_BYTES
from callforest_mesh.chassis.service import ServerLike
from callforest_mesh.chassis.service_store import open_store
from callforest_mesh.chassis.store_measures import measure_store
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.ledger import refusals
from callforest_mesh.ledger.ledger import Ledger
from callforest_mesh.ledger.servicer import LedgerCareServicer, LedgerServicer
from callforest_mesh.ledger.settlement import SettlementWatch
from callforest_mesh.ledger.store import DATABASES, LmdbLedgerStore

_FULL_NAMES: Final = frozenset(
    {"callforest.ledger.v1.LedgerService", "callforest.ledger.v1.LedgerCareService"}
)
_DURABLE_STORE: Final = "lmdb"


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """How the Ledger runs.

    Attributes:
        path: the store's directory.
        store: the kind of store; every kind but `lmdb` is refused at start (LED-4).
        map_size_bytes: the most that the store's file grows to.
        quota_bytes: used bytes from which new attempts and calls are refused; rows of admitted
            calls and seals still have a tenth of the map.
        disk_reserve_bytes: free bytes of the file system below which new attempts and calls
            are refused.
        cached_calls_max: most calls whose views are kept in memory, about 4 KiB each, since the
            writer and the reads have views of their own; a colder attempt is read again from its
            log when it is next used.
        waits_max: most callers of AwaitSettled at once.
    """

    path: Path
    store: str = _DURABLE_STORE
    map_size_bytes: int = 8 << 30
    quota_bytes: int = 7 << 30
    disk_reserve_bytes: int = DISK_RESERVE_BYTES
    cached_calls_max: int = 131_072
    waits_max: int = 16_384

    def __post_init__(self) -> None:
        """Refuse limits that let nothing pass."""
        if self.cached_calls_max < 1 or self.waits_max < 1:
            raise ValueError("cached_calls_max and waits_max must be at least 1")


class LedgerService:
    """Who continued whom, what committed, what failed.

    Args:
        options: how it runs.
        drain: when begun, streams and waits end.
        on_fatal: called when the store can be trusted no more; the process must end.
        telemetry: what it says of its work.
    """

    name = "ledger"
    full_names = _FULL_NAMES

    def __init__(
        self,
        options: LedgerOptions,
        drain: Drain,
        *,
        on_fatal: Callable[[Exception], None] = exit_process,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        telemetry.metrics.limit("settlement_waits", options.waits_max)
        self._options = options
        self._drain = drain
        self._on_fatal = on_fatal
        self._watch = SettlementWatch(self.name, waits_max=options.waits_max)
        self._store = LmdbLedgerStore(self._open_store)
        self._ledger = Ledger(self._store, self._watch, cached_calls_max=options.cached_calls_max)
        self._servicer = LedgerServicer(self._ledger, drain, telemetry)
        self._care = LedgerCareServicer(self._ledger)
        self._telemetry = telemetry
        self._ending: asyncio.Task[None] | None = None

    def attach(self, server: ServerLike) -> None:
        """Add the RPCs to a server."""
        handlers = cast("grpc.aio.Server", server)  # takes handlers as a server does
        rpc.add_LedgerServiceServicer_to_server(self._servicer, handlers)
        care_rpc.add_LedgerCareServiceServicer_to_server(self._care, handlers)

    async def start(self) -> None:
        """Open the store.

        Raises:
            Refusal: VOLATILE_STORE, the configured store can lose rows; STORE_CORRUPT.
        """
        if self._options.store != _DURABLE_STORE:
            raise refusals.volatile_store(self._options.store)
        await asyncio.to_thread(self._store.open)
        self._ending = asyncio.ensure_future(self._end_waits())

    async def stop(self) -> None:
        """Commit what was begun and close the store."""
        self._watch.end()
        if self._ending is not None:
            self._ending.cancel()
            await asyncio.wait({self._ending})
        await self._store.close()
        await self._ledger.stop()

    def _open_store(self) -> LmdbStore:
        # Attempts and intents are where work begins: what they let in must be let to its end.
        store = open_store(
            self._options,
            DATABASES,
            name=self.name,
            on_fatal=self._on_fatal,
            room_bytes=ROOM_BYTES,
        )
        measure_store(self._telemetry.metrics, store.statistics)
        return store

    async def _end_waits(self) -> None:
        """Send those who wait for settlement away once the service drains."""
        await self._drain.wait()
        self._watch.end()
