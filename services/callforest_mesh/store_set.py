"""The stores of a state directory, or of a backup of one: Staging, Ledger and Finalizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from callforest_mesh.chassis.lmdb_environment import CONTENT_FILE
from callforest_mesh.chassis.store_snapshot import StoreSnapshot
from callforest_mesh.finalizer.inventory import FinalizerInventory
from callforest_mesh.ledger.inventory import LedgerInventory
from callforest_mesh.staging.inventory import StagedInventory
from callforest_mesh.store_names import STORES


class NoStoreError(FileNotFoundError):
    """A directory has none of the stores."""


def find_stores(path: Path) -> dict[str, Path]:
    """Give the stores in a directory, or the directory itself if it is one, in the order of STORES.

    Raises:
        NoStoreError: there is none.
    """
    if (path / CONTENT_FILE).is_file():
        return {path.name: path}
    found = {name: path / name for name in STORES if (path / name / CONTENT_FILE).is_file()}
    if not found:
        raise NoStoreError(f"{path} holds no store: name a state directory, a backup or one store")
    return found


class StoreSet:
    """Snapshots of the stores that are there, all as of one moment or nearly so.

    Args:
        paths: the stores' directories.
        alone: whether the caller holds them alone.

    Attributes:
        snapshots: by the stores' own names.
        staging: what Staging's store holds, or None without it.
        ledger: the same of the Ledger's.
        finalizer: the same of the Finalizer's.

    Raises:
        Refusal: STORE_CORRUPT, one cannot be opened.
    """

    def __init__(self, paths: Mapping[str, Path], *, alone: bool = False) -> None:
        self._closers = ExitStack()
        self.snapshots: dict[str, StoreSnapshot] = {}
        try:
            for path in paths.values():
                snapshot = self._closers.enter_context(StoreSnapshot(path, alone=alone))
                self.snapshots[snapshot.name] = snapshot
            found = self.snapshots
            self.staging = StagedInventory(found["staging"]) if "staging" in found else None
            self.ledger = LedgerInventory(found["ledger"]) if "ledger" in found else None
            rows = found.get("finalizer")
            self.finalizer = None if rows is None else FinalizerInventory(rows)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the snapshots. Idempotent."""
        self._closers.close()

    def __enter__(self) -> Self:
        """Give the set."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """End the snapshots."""
        self.close()
