"""The Finalizer as a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

import grpc.aio

from callforest.finalizer.v1 import finalizer_service_pb2_grpc as rpc
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_core.forest.selection import RETURNED_HISTORY
from callforest_mesh.chassis.fatal import exit_process
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.lmdb_store import DISK_RESERVE_BYTES, LmdbStore
from callforest_mesh.chassis.service import ServerLike
from callforest_mesh.chassis.service_store import open_store
from callforest_mesh.chassis.store_measures import measure_store
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.finalizer.cleanup import Cleanup
from callforest_mesh.finalizer.delivery import Subscriptions
from callforest_mesh.finalizer.judgement import Judge
from callforest_mesh.finalizer.policies import resolve_policy
from callforest_mesh.finalizer.servicer import FinalizerServicer
from callforest_mesh.finalizer.store import DATABASES, RowLog

TRAIN_VERIFIED_PATHS: Final = "train_verified_paths"
_FULL_NAME = "callforest.finalizer.v1.FinalizerService"


@dataclass(frozen=True, slots=True)
class FinalizerOptions:
    """How the Finalizer runs.

    Attributes:
        path: the store's directory.
        row_multiple: groups are padded to a multiple of this many rows (FIN-6); in a mesh with a
            trainer it follows from that one's batches.
        selection_policy: what selects in forest mode when a request does not: `returned_history`,
            `all_captured`, or `package.module:function` (SEL-4).
        min_valid_fraction_per_group: a group with a smaller part of verified rollouts is dropped,
            and another wanted; None keeps every group that has a valid row (FIN-5).
        incomplete_capture: `mask` an attempt with pending or failed calls, or, in forest mode,
            `train_verified_paths` of it (FIN-8).
        map_size_bytes: the most that the store's file grows to.
        quota_bytes: used bytes from which new receipts and groups are refused.
        disk_reserve_bytes: free bytes of the file system below which new receipts and groups
            are refused.
        cleanup_tenants: tenants whose cleanup duty is resumed at start; that of the others is
            resumed when their consumer subscribes.
    """

    path: Path
    row_multiple: int = 1
    selection_policy: str = RETURNED_HISTORY
    min_valid_fraction_per_group: float | None = None
    incomplete_capture: Literal["mask", "train_verified_paths"] = "mask"
    map_size_bytes: int = 4 << 30
    quota_bytes: int = 3 << 30
    disk_reserve_bytes: int = DISK_RESERVE_BYTES
    cleanup_tenants: tuple[str, ...] = ("default",)

    def __post_init__(self) -> None:
        """Refuse what no group can have, and a policy that cannot be found.

        Raises:
            ValueError: the message names the option.
        """
        if not 1 <= self.row_multiple <= 4096:
            raise ValueError("row_multiple must be 1 to 4,096")
        least = self.min_valid_fraction_per_group
        if least is not None and not 0 < least <= 1:
            raise ValueError(f"min_valid_fraction_per_group must be above 0 and at most 1: {least}")
        resolve_policy(self.selection_policy)


class FinalizerService:
    """Receipts, publication and delivery of rows.

    Args:
        options: how it runs.
        drain: when begun, subscriptions end.
        ledger: where manifests are.
        staging: where tokens are.
        on_fatal: called when the store can be trusted no more; the process must end.
        telemetry: what it says of its work.
    """

    name = "finalizer"
    full_names = frozenset({_FULL_NAME})

    def __init__(
        self,
        options: FinalizerOptions,
        drain: Drain,
        ledger: LedgerClient,
        staging: StagingClient,
        *,
        on_fatal: Callable[[Exception], None] = exit_process,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._options = options
        self._on_fatal = on_fatal
        self._row_log = RowLog(self._open_store)
        self._cleanup = Cleanup(self._row_log, staging)
        self._servicer = FinalizerServicer(
            self._row_log,
            Judge(
                ledger,
                staging,
                resolve_policy(options.selection_policy),
                telemetry,
                salvages=options.incomplete_capture == TRAIN_VERIFIED_PATHS,
            ),
            staging,
            Subscriptions(self._row_log, staging, self._cleanup, drain),
            row_multiple=options.row_multiple,
            min_valid_fraction=options.min_valid_fraction_per_group,
            telemetry=telemetry,
        )
        self._telemetry = telemetry

    def attach(self, server: ServerLike) -> None:
        """Add the RPCs to a server."""
        rpc.add_FinalizerServiceServicer_to_server(
            self._servicer,
            cast("grpc.aio.Server", server),  # takes handlers as a server does
        )

    async def start(self) -> None:
        """Open the store and go on with the cleanup that was left."""
        await asyncio.to_thread(self._row_log.open)
        for tenant in self._options.cleanup_tenants:
            self._cleanup.wake(tenant)

    async def stop(self) -> None:
        """End the cleanup tasks and close the store. Idempotent."""
        await self._cleanup.stop()
        await self._row_log.close()

    def _open_store(self) -> LmdbStore:
        store = open_store(self._options, DATABASES, name=self.name, on_fatal=self._on_fatal)
        measure_store(self._telemetry.metrics, store.statistics)
        return store
