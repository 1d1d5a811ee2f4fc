"""What a service exports of its store."""

from __future__ import annotations

from collections.abc import Callable

from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.lmdb_environment import READERS_MAX
from callforest_mesh.chassis.lmdb_store import QUEUE_LIMIT
from callforest_mesh.chassis.store_statistics import StoreStatistics
from callforest_mesh.chassis.telemetry import Metrics
from callforest_mesh.chassis.transaction import READ_S


def measure_store(metrics: Metrics, statistics: Callable[[], StoreStatistics | None]) -> None:
    """Export a store's counts and sizes; the records a commit are the one count by the other.

    Args:
        metrics: the service's.
        statistics: gives them; None while the store is not open.
    """

    def value(name: str) -> Callable[[], float | None]:
        def read() -> float | None:
            now = statistics()
            return None if now is None else float(getattr(now, name))

        return read

    totals = (
        ("commits", "{commit}", "Durable commits."),
        ("records", "{record}", "Of commits."),
        ("stale_readers", "{reader}", "Slots of dead readers that were freed."),
    )
    levels = (
        ("queue_depth", "{write}", "Writes that wait for a commit."),
        ("used_bytes", "By", "Pages in use."),
        ("quota_bytes", "By", "Used bytes from which writes are refused."),
        ("oldest_reader_s", "s", "How long the oldest snapshot is read that keeps pages."),
        ("disk_free_bytes", "By", "What the store's file system has left."),
        ("disk_kept_bytes", "By", "Blocks that the store's file has ahead of its end."),
    )
    metrics.limit("store_queue", QUEUE_LIMIT)
    metrics.limit("store_readers", READERS_MAX)
    for name in ("store_read_s", "store_snapshot_s"):
        metrics.limit(name, READ_S)
    for name, unit, text in totals:
        metrics.gauge(Description(f"callforest.store.{name}", unit, text), value(name), "total")
    for name, unit, text in levels:
        metrics.gauge(Description(f"callforest.store.{name}", unit, text), value(name))
