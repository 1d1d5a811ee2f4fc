"""What restoring an attempt costs the ledger's other writers: the limit of 2,048 calls.

A ledger over its real store, in this process, without channels. One attempt has as many committed
calls of forest mode in one chain; another one commits call after call while the first is restored.
Rounds alternate between a view that is in memory and one that is folded from its log first.

    writer_ms_warm, writer_ms_cold
                        from the submission of the restore to its durable answer, median
    longest_wait_ms     the longest that a concurrent commit took in any round
    usual_wait_ms       the median of concurrent commits without a restore
    log_bytes           what the restored attempt adds to the log, of all its records

    python -m benchmarks.restore [--rounds N] [--calls N]

Last line: `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
    restore_point_pb2,
)
from callforest_client.source_codec import (
    output_summary_to_proto,
    source_probe_to_proto,
    source_summary_to_proto,
)
from callforest_core.custody.restore import CAPTURE_SCHEMA, RESTORED_MAX
from callforest_core.lineage.source import EMPTY_HISTORY, output_summary, source_render_digest
from callforest_mesh.chassis.fatal import exit_process
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.ledger.ledger import Ledger
from callforest_mesh.ledger.outline import FOREST, AttemptKey
from callforest_mesh.ledger.settlement import SettlementWatch
from callforest_mesh.ledger.store import DATABASES, LmdbLedgerStore

TENANT = "t"
RENDER = source_render_digest({"model": "m"})
ENGINE = hashlib.sha256(b"engine").digest()
CONTINUATION = "continuation"


def said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


class Harness:
    """Makes calls of one attempt, each behind the one before.

    Args:
        ledger: records them.
        key: the attempt.
    """

    def __init__(self, ledger: Ledger, key: str) -> None:
        self.ledger = ledger
        self._key = key
        self._history = EMPTY_HISTORY
        self.calls = 0

    async def call(self) -> float:
        """Make a call; give how long its commit took, in seconds."""
        number, self.calls = self.calls, self.calls + 1
        asked = self._history.extended([{"role": "user", "content": f"{self._key} asks {number}"}])
        intent = attempt_pb2.CallIntent(
            capture_key=self._key,
            call_id=f"call-{number:026d}",
            body_digest=hashlib.sha256(str(number).encode()).digest(),
            source=source_probe_to_proto(asked.probe(RENDER, None)),
            configuration_digest=ENGINE,
        )
        intent.admit_time.FromSeconds(1_700_000_000)
        verdict = await self.ledger.record_intent(TENANT, intent)
        served = [said(f"{self._key} says {number}")]
        self._history = asked.extended(served)
        record = self._record(intent.call_id, verdict, served)
        begun = time.perf_counter()
        await self.ledger.commit_record(TENANT, record)
        return time.perf_counter() - begun

    def _record(
        self, call_id: str, verdict: capture_admission_pb2.Verdict, served: list[dict[str, object]]
    ) -> call_record_pb2.CallRecord:
        record = call_record_pb2.CallRecord(response_id=f"chatcmpl-{call_id}")
        coords = record.coords
        coords.capture_key, coords.call_id = self._key, call_id
        coords.delta_token_count, coords.weight_version = 1000, 7
        for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash"):
            setattr(coords, name, hashlib.sha256(f"{call_id}{name}".encode()).digest())
        record.decision.input = capture_admission_pb2.CAPTURE_INPUT_ROOT
        if verdict.WhichOneof("verdict") == CONTINUATION:
            coords.parent_call_id = verdict.continuation.parent_call_id
            coords.prev_token_count = verdict.continuation.prev_token_count
            record.decision.input = capture_admission_pb2.CAPTURE_INPUT_SPLICED
            record.decision.proof = hashlib.sha256(b"proof").digest()
        record.completion.finish_reason = "stop"
        record.admit_time.FromSeconds(1_700_000_000)
        record.replay.CopyFrom(source_summary_to_proto(self._history.summary(RENDER)))
        record.output.CopyFrom(output_summary_to_proto(output_summary(served)))
        return record


def opened(path: Path) -> tuple[LmdbLedgerStore, Ledger]:
    store = LmdbLedgerStore(
        lambda: LmdbStore(
            path,
            map_size_bytes=4 << 30,
            databases=DATABASES,
            quota_bytes=3 << 30,
            on_fatal=exit_process,
            name="ledger",
        )
    )
    store.open()
    watch = SettlementWatch("ledger", waits_max=4)
    return store, Ledger(store, watch, cached_calls_max=131_072)


async def restored(ledger: Ledger, rollout: str, before: str, last: str) -> tuple[float, str]:
    """Restore an attempt from its last call; give how long it took, and the next one's name."""
    point = restore_point_pb2.RestorePoint(
        capture_schema=CAPTURE_SCHEMA, capture_key=before, call_ids=[last]
    )
    begun = time.perf_counter()
    done = await ledger.restore_attempt(TENANT, rollout, str(uuid.uuid4()), point)
    return time.perf_counter() - begun, done.attempt.capture_key


async def measure(folder: Path, rounds: int, calls: int) -> dict[str, float]:
    store, ledger = opened(folder / "ledger")
    for key in ("large", "small"):
        await ledger.open_attempt(TENANT, key, str(uuid.uuid4()), FOREST)
    large, small = Harness(ledger, "large"), Harness(ledger, "small")
    for _ in range(calls):
        await large.call()
    usual = [await small.call() for _ in range(200)]
    last = f"call-{calls - 1:026d}"
    took: dict[str, list[float]] = {"warm": [], "cold": []}
    waits: list[float] = []
    key = "large"
    for number in range(2 * rounds):
        if number % 2:  # a ledger that has just begun folds the log first
            await store.close()
            await ledger.stop()
            store, ledger = opened(folder / "ledger")
            small.ledger = ledger
        restoring = asyncio.ensure_future(restored(ledger, "large", key, last))
        while not restoring.done():
            waits.append(await small.call())
        seconds, key = restoring.result()
        took["cold" if number % 2 else "warm"].append(seconds)
    size = store.read(
        lambda log: sum(one.ByteSize() for _, one in log.read(AttemptKey(TENANT, key)))
    )
    await store.close()
    await ledger.stop()
    return {
        "calls": calls,
        "writer_ms_warm": round(1000 * statistics.median(took["warm"]), 1),
        "writer_ms_cold": round(1000 * statistics.median(took["cold"]), 1),
        "longest_wait_ms": round(1000 * max(waits), 1),
        "usual_wait_ms": round(1000 * statistics.median(usual), 2),
        "log_bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=RESTORED_MAX)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), parsed.rounds, parsed.calls))
    print(f"RESULT {json.dumps(found)}")


if __name__ == "__main__":
    main()
