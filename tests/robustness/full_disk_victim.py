"""A store on a small file system of its own, of which another program takes the last byte.

Usage: python -m tests.robustness.full_disk_victim DIRECTORY, which is the small file system; it
prints what happened as one line of JSON.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import LmdbStore, WriteTxn

ROW_BYTES = 20_000
ROWS_MOST = 2000
OLD = 200


def open_store(path: Path) -> LmdbStore:
    """Open the store; it must never fail."""

    def fail(error: Exception) -> None:
        sys.stderr.write(f"fatal: {error!r}\n")
        os._exit(os.EX_IOERR)

    return LmdbStore(
        path,
        map_size_bytes=1 << 30,
        databases=("rows",),
        quota_bytes=1 << 28,
        on_fatal=fail,
        disk_reserve_bytes=1 << 20,
    )


def fill(path: Path) -> int:
    """Take every byte that is left, as another program would; give how many."""
    taken = 0
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    for size in (1 << 16, 4096, 1):
        try:
            while True:
                taken += os.write(file, bytes(size))
        except OSError:
            continue
    os.close(file)
    return taken


def putting(key: str, content: bytes) -> Callable[[WriteTxn], None]:
    """Make a write of one row."""
    return lambda txn: txn.put("rows", key.encode(), content)


async def outcome(store: LmdbStore, fn: Callable[[WriteTxn], object], *, reserve: bool) -> str:
    """Say what became of a write."""
    try:
        await store.write(fn, reserve=reserve)
    except Refusal as refusal:
        return f"{er.ErrorReason.Name(refusal.reason)} {refusal.retry_after_ms}"
    return "ok"


async def rows(store: LmdbStore, prefix: str) -> tuple[list[str], str]:
    """Write rows of old work until one is refused; give those that were acknowledged, and why."""
    written: list[str] = []
    said = "ok"
    while said == "ok" and len(written) < ROWS_MOST:
        name = f"{prefix}{len(written)}"
        said = await outcome(store, putting(name, name.encode() * 2000), reserve=True)
        written += [name] if said == "ok" else []
    return written, said


def lost(store: LmdbStore, names: list[str]) -> int:
    """Count the acknowledged rows that cannot be read."""
    held = [store.read(lambda txn, name=name: txn.get("rows", name.encode())) for name in names]
    return sum(value != name.encode() * 2000 for name, value in zip(names, held, strict=True))


async def play(root: Path) -> dict[str, object]:
    """Fill the disk; write, read and remove; start again; make room."""
    found: dict[str, object] = {}
    store = open_store(root / "store")
    old = [f"old{number}" for number in range(OLD)]
    for name in old:
        await store.write(putting(name, name.encode() * 2000))
    found["taken"] = fill(root / "other")
    found["free"] = os.statvfs(root).f_bavail
    found["new"] = await outcome(store, putting("new", b"x"), reserve=False)
    written, found["row"] = await rows(store, "row")
    found["rows"] = len(written)
    deletes = [
        await outcome(store, lambda txn, name=name: txn.delete("rows", name.encode()), reserve=True)
        for name in written[:50]
    ]
    found["deletes"] = sorted(set(deletes))
    found["lost"] = lost(store, old + written[50:])
    await store.close()
    store = open_store(root / "store")
    found["lost_after_start"] = lost(store, old + written[50:])
    _, found["row_after_start"] = await rows(store, "again")
    (root / "other").unlink()
    found["row_with_room"] = await outcome(store, putting("row", b"x"), reserve=True)
    found["new_with_room"] = await outcome(store, putting("new", b"x"), reserve=False)
    await store.close()
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(play(Path(sys.argv[1])))) + "\n")
