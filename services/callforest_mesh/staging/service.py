"""The Staging service as a part of a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import grpc.aio

from callforest.staging.v1 import staging_service_pb2 as pb
from callforest.staging.v1 import staging_service_pb2_grpc as rpc
from callforest_mesh.chassis.fatal import exit_process
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.lmdb_store import DISK_RESERVE_BYTES, LmdbStore
from callforest_mesh.chassis.service import ServerLike
from callforest_mesh.chassis.service_store import open_store
from callforest_mesh.chassis.store_measures import measure_store
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.staging.core import check_store
from callforest_mesh.staging.servicer import StagingServicer
from callforest_mesh.staging.store import DATABASES, StagedCalls

__all__ = ["StagingOptions", "StagingService"]

_FULL_NAME: Final = pb.DESCRIPTOR.services_by_name["StagingService"].full_name


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """Where staged calls are kept.

    Attributes:
        path: the store's directory, on a local file system.
        map_size_bytes: the most that the store's file grows to.
        quota_bytes: used bytes from which calls are refused; at most nine tenths of the map.
        disk_reserve_bytes: free bytes of the file system below which calls are refused.
        store: the kind of store. Only durable ones are accepted, at start (LED-4).
    """

    path: Path
    map_size_bytes: int = 16 << 30
    quota_bytes: int = 12 << 30
    disk_reserve_bytes: int = DISK_RESERVE_BYTES
    store: str = "lmdb"


class StagingService:
    """Keeps the tokens of calls until they were trained.

    Args:
        options: where they are kept.
        drain: when begun, item streams end after the items they had taken.
        on_fatal: called when the store can be trusted no more; ends the process.
        telemetry: what it says of its work.
    """

    def __init__(
        self,
        options: StagingOptions,
        drain: Drain,
        *,
        on_fatal: Callable[[Exception], None] = exit_process,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._options = options
        self._on_fatal = on_fatal
        self._store: LmdbStore | None = None
        self._calls = StagedCalls(self._opened)
        self._servicer = StagingServicer(self._calls, drain, service=self.name, telemetry=telemetry)
        measure_store(telemetry.metrics, lambda: self._store.statistics() if self._store else None)

    @property
    def name(self) -> str:
        """The service's short name."""
        return "staging"

    @property
    def full_names(self) -> frozenset[str]:
        """The full names of its gRPC services."""
        return frozenset({_FULL_NAME})

    def attach(self, server: ServerLike) -> None:
        """Add the service's handlers to a server."""
        rpc.add_StagingServiceServicer_to_server(self._servicer, cast("grpc.aio.Server", server))

    async def start(self) -> None:
        """Open the store.

        Raises:
            Refusal: VOLATILE_STORE, or STORE_CORRUPT for a directory of something else.
        """
        check_store(self._options.store)
        self._store = self.open_store(self._options)

    async def stop(self) -> None:
        """Finish what was taken and close the store. Idempotent."""
        if self._store is not None:
            await self._servicer.settle()
            await self._store.close()

    def open_store(self, options: StagingOptions) -> LmdbStore:
        """Open the durable store. The power-cut tests put a forgetful one in its place."""
        return open_store(options, DATABASES, name=self.name, on_fatal=self._on_fatal)

    def _opened(self) -> LmdbStore:
        if self._store is None:
            raise RuntimeError("the service was not started")
        return self._store
