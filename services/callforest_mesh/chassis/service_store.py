"""Opening a service's store by the options that all of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from callforest_mesh.chassis.lmdb_store import LmdbStore


class StoreOptions(Protocol):
    """What the options of every service with a store say of it."""

    @property
    def path(self) -> Path:
        """The store's directory."""
        ...

    @property
    def map_size_bytes(self) -> int:
        """The most that the store's file grows to."""
        ...

    @property
    def quota_bytes(self) -> int:
        """Used bytes from which writes are refused."""
        ...

    @property
    def disk_reserve_bytes(self) -> int:
        """What its file system must have left for a write to be taken."""
        ...


def open_store(
    options: StoreOptions,
    databases: Sequence[str],
    *,
    name: str,
    on_fatal: Callable[[Exception], None],
    room_bytes: int | None = None,
) -> LmdbStore:
    """Open a store.

    Args:
        options: of its service.
        databases: names of its databases.
        name: the service's, for refusals and the log.
        on_fatal: called when the store can be trusted no more; the process must end.
        room_bytes: what its file may grow by while a snapshot is held, before new work is pushed
            back; None for a service whose writes all end work that others have begun.

    Raises:
        Refusal: STORE_CORRUPT.
    """
    return LmdbStore(
        options.path,
        map_size_bytes=options.map_size_bytes,
        databases=databases,
        quota_bytes=options.quota_bytes,
        disk_reserve_bytes=options.disk_reserve_bytes,
        on_fatal=on_fatal,
        name=name,
        room_bytes=room_bytes,
    )
