"""Opens what a power cut left, as a restarted service would, and says what is wrong with it.

Reads lines `STORE EXPECTATION` (a directory, a JSON file) and answers each with a line: `intact`,
`lost ...`, `corrupt ...` or `unopenable ...`. Each store is opened in a process of its own, since a
damaged one can end its process.

Usage: python -m tests.robustness.image_check
"""

import asyncio
import hashlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import LmdbStore, ReadTxn
from callforest_mesh.staging.entry import CallEntry, partition_key, tenant_key
from callforest_mesh.staging.segments import LIVES, SEGMENTS, segment_key, total_of
from callforest_mesh.staging.store import CALLS, DATABASES, PARTITIONS, StagedCalls
from tests.robustness.staging_victim import MAP_BYTES, TENANT

UNOPENABLE = "unopenable"


def verdict_on(path: Path, expectation: dict[str, dict[str, str | None]]) -> str:
    """Say what is wrong with a store, given what was acknowledged of it."""
    try:
        store = LmdbStore(
            path,
            map_size_bytes=MAP_BYTES,
            databases=DATABASES,
            quota_bytes=MAP_BYTES // 2,
            on_fatal=print,
            name="staging",
        )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
        return f"{UNOPENABLE} {error!r}"
    try:
        staged = StagedCalls(lambda: store)
        return lost(staged, store, expectation) or inconsistent(store) or writable(store)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
        return f"corrupt {error!r}"


def lost(
    staged: StagedCalls, store: LmdbStore, expectation: dict[str, dict[str, str | None]]
) -> str:
    """Name what was acknowledged and is not so."""
    for capture_key, calls in expectation["calls"].items():
        for call_id, digest in calls.items():
            try:
                (call,) = staged.some(TENANT, capture_key, [call_id])
            except Refusal as refusal:
                if refusal.reason != er.ERROR_REASON_CALL_NOT_FOUND:
                    return f"corrupt {capture_key}/{call_id}: {refusal.message}"
                found = None
            else:
                found = hashlib.sha256(call.SerializeToString()).hexdigest()
            if found != digest:
                return f"lost {capture_key}/{call_id}: expected {digest}, found {found}"
    for capture_key in expectation["dropped"]:
        key = partition_key(TENANT, capture_key)
        if store.read(lambda txn, key=key: txn.get(PARTITIONS, key)) is None:
            return f"lost tombstone of {capture_key}"
    return ""


def inconsistent(store: LmdbStore) -> str:
    """Name what contradicts itself: entries, segments, counts."""

    def check(txn: ReadTxn) -> str:
        entries = [CallEntry.from_bytes(stored) for _, stored in txn.scan(CALLS, b"")]
        lives = Counter(segment_key(entry.segment) for entry in entries)
        stored = {key: int.from_bytes(count, "big") for key, count in txn.scan(LIVES, b"")}
        segments = {key for key, _ in txn.scan(SEGMENTS, b"")}
        totals = (len(entries), sum(entry.size for entry in entries))
        if stored != lives or segments != set(lives):
            return f"corrupt counts: {stored} for {dict(lives)}"
        if total_of(txn, tenant_key(TENANT)) != totals:
            return f"corrupt totals: {total_of(txn, tenant_key(TENANT))} for {totals}"
        return ""

    return store.read(check)


def writable(store: LmdbStore) -> str:
    """Prove that the store takes and keeps another write."""

    async def write() -> None:
        await store.write(lambda txn: txn.put(PARTITIONS, b"after", b"x"))
        await store.close()

    asyncio.run(write())
    return "intact"


def answer(line: str) -> str:
    """Check one store in a child process, which cannot take this one down."""
    path, _, expected = line.strip().partition(" ")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        verdict = verdict_on(Path(path), json.loads(Path(expected).read_text()))
        os.write(writing, verdict.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        verdict = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return verdict or f"{UNOPENABLE} the process ended with {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    for request in sys.stdin:
        print(answer(request).replace("\n", " "), flush=True)
