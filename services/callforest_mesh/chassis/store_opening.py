"""The opening of a store by the process that writes it: held, free of dead readers, and whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis import lmdb_environment
from callforest_mesh.chassis.store_hold import StoreHold, WriterHold
from callforest_mesh.chassis.store_walk import walk
from callforest_mesh.chassis.transaction import FORMAT_DATABASE, FORMAT_KEY

MADE_FILE: Final = "made"
"""Says that the store was once whole: LMDB takes an empty file, or none, for a new store."""


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """An environment that may be written.

    Attributes:
        environment: LMDB's.
        hold: keeps others from replacing its file.
        writer: keeps others from writing it.
        stale_readers: slots of dead readers that were freed.
    """

    environment: lmdb_environment.Environment
    hold: StoreHold
    writer: WriterHold
    stale_readers: int

    def close(self) -> None:
        """Close the environment, then let go of its directory."""
        self.environment.close()
        self.writer.release()
        self.hold.release()


def open_store(
    path: Path,
    name: str,
    *,
    map_size_bytes: int,
    databases_max: int,
    durability: Mapping[str, bool],
) -> OpenedStore:
    """Open a store's environment; it is made when missing.

    Args:
        path: the directory, which exists.
        name: names the store in refusals.
        map_size_bytes: the most that the file can grow to.
        databases_max: most named databases.
        durability: LMDB's settings of it.

    Raises:
        StoreInUseError: the store is being compacted, or another process writes it.
        Refusal: STORE_CORRUPT, the file is no store, another program's, or a part or all of it is
            missing.
    """
    hold = StoreHold(path)
    try:
        _refuse_loss(path, name)
        environment = lmdb_environment.open_writable(
            path, map_size_bytes=map_size_bytes, databases_max=databases_max, durability=durability
        )
    except lmdb_environment.InvalidError as error:
        hold.release()
        raise unreadable(name, "is no store, or its head is damaged") from error
    except BaseException:
        hold.release()
        raise
    try:
        writer = WriterHold(path / lmdb_environment.CONTENT_FILE)
    except BaseException:
        environment.close()
        hold.release()
        raise
    opened = OpenedStore(environment, hold, writer, environment.reader_check())
    try:
        missing = lmdb_environment.missing_bytes(environment, path)
        # Reading a record behind the end would end this process, so another one looks first.
        if missing and (faults := walk(path)):
            raise unreadable(name, f"lacks {missing} bytes at its end", faults[0].key)
        if environment.stat()["entries"]:
            with environment.begin(buffers=True) as txn:
                if txn.get(FORMAT_DATABASE.encode()) is None:
                    raise foreign(name, "another program's environment")
    except BaseException:
        opened.close()
        raise
    return opened


def mark_made(path: Path) -> None:
    """Remember that the store's first commit is durable; the caller syncs the directory."""
    (path / MADE_FILE).touch()


def foreign(name: str, found: str) -> Refusal:
    """Make the refusal of a directory that is not this store's."""
    return Refusal(
        er.ERROR_REASON_STORE_CORRUPT,
        f"the directory of the {name} store holds {found}",
        store=name,
        key=f"{FORMAT_DATABASE}/{FORMAT_KEY.decode()}",
    )


def unreadable(name: str, fault: str, key: str = lmdb_environment.CONTENT_FILE) -> Refusal:
    """Make the refusal of a store's whole file."""
    return Refusal(
        er.ERROR_REASON_STORE_CORRUPT,
        f"the file of the {name} store {fault}; verify the store, or restore a backup",
        store=name,
        key=key,
    )


def _refuse_loss(path: Path, name: str) -> None:
    file = path / lmdb_environment.CONTENT_FILE
    if (path / MADE_FILE).exists() and not (file.exists() and file.stat().st_size):
        raise unreadable(name, f"is empty or gone (for a new store, remove {path} as a whole)")
