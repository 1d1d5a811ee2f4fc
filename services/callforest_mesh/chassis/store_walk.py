"""A walk over every stored byte, in a process of its own: a damaged file can end its reader.

Usage: python -m callforest_mesh.chassis.store_walk DIRECTORY [alone]
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from callforest_core.refusal import Refusal
from callforest_mesh.chassis import lmdb_environment
from callforest_mesh.chassis.lmdb_environment import LmdbError
from callforest_mesh.chassis.store_fault import StoreFault
from callforest_mesh.chassis.store_snapshot import StoreSnapshot

WALK_S: Final = 3600.0
"""The longest walk; a store of the largest default quota takes minutes."""


def walk(path: Path, *, alone: bool = False) -> list[StoreFault]:
    """Read every record of a store in a child process; give those that are damaged.

    Args:
        path: the store's directory.
        alone: whether the caller holds it alone.

    Raises:
        TimeoutError: it did not end within WALK_S.
    """
    command = [
        sys.executable,
        "-m",
        "callforest_mesh.chassis.store_walk",
        str(path),
        *(["alone"] * alone),
    ]
    try:
        ended = subprocess.run(  # noqa: S603 - this program itself
            command, capture_output=True, text=True, timeout=WALK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"the walk over {path} did not end within {WALK_S:.0f} s") from error
    lines = ended.stdout.splitlines()
    found = [StoreFault(*json.loads(line)) for line in lines if line.endswith("]")]
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        text = f"reading it ends the process ({name}): a part of the file is missing or damaged"
        found.append(StoreFault(lmdb_environment.CONTENT_FILE, text))
    elif ended.returncode:
        words = (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
        found.append(StoreFault(lmdb_environment.CONTENT_FILE, words))
    return found


def damaged(path: Path, *, alone: bool) -> Iterator[StoreFault]:
    """Read every record of a store here; give those that are damaged.

    Raises:
        LmdbError: it is no environment at all.
    """
    try:
        with StoreSnapshot(path, alone=alone) as snapshot:
            if snapshot.is_cut:
                yield StoreFault(lmdb_environment.CONTENT_FILE, "ends within a page")
            for database in snapshot.databases:
                try:
                    for key, value in snapshot.records(database):
                        if value is None:
                            yield StoreFault(
                                f"{database}/{key.hex()}", "does not have its checksum"
                            )
                except LmdbError as error:
                    yield StoreFault(database, f"its pages are damaged: {error}")
    except Refusal as refusal:
        yield StoreFault(refusal.facts["key"], refusal.message)


def main() -> None:
    """Say what is damaged, one JSON array a line."""
    for record in damaged(Path(sys.argv[1]), alone="alone" in sys.argv[2:]):
        sys.stdout.write(json.dumps([record.key, record.text]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
