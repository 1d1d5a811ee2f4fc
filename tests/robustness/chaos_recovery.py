"""How soon a killed service serves again when its store has a gibibyte.

The stores are grown at rest, through the project's own store; then each service is killed at its
commits while it writes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from callforest.capture.v1 import call_record_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as finalizer_pb
from callforest.finalizer.v1 import row_log_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_client.errors import UnavailableError
from callforest_mesh.chassis.fatal import exit_process
from callforest_mesh.chassis.lmdb_store import LmdbStore, WriteTxn
from callforest_mesh.finalizer import store as finalizer_store
from callforest_mesh.ledger import store as ledger_store
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.staging import store as staging_store
from tests.robustness.chaos_hunt import ArmedVictims, Death
from tests.robustness.chaos_points import Target
from tests.robustness.chaos_run import STORES, ChaosOptions, hunters_of
from tests.robustness.victim_mesh import GAUGES, VictimMesh, running_mesh
from tests.unit.staging.calls import Chain

MAP_BYTES: Final = 3 << 30
QUOTA_BYTES: Final = 5 << 29
_VALUE_BYTES: Final = 64 << 10
_CALL_TOKENS: Final = 64 << 10
_PUTS: Final = 256
"""Values that one commit writes."""
POINTS: Final = ("store.before_commit", "store.after_commit")
_Pair: TypeAlias = tuple[str, bytes, bytes]


async def grow(state: Path, size: int) -> None:
    """Fill the three stores until each file has `size` bytes.

    Args:
        state: the mesh's state directory.
        size: of each file.
    """
    ledger = _opened(state, "ledger", ledger_store.DATABASES)
    await _fill(ledger, _ledger_events(), size)
    finalizer = _opened(state, "finalizer", finalizer_store.DATABASES)
    await _fill(finalizer, _finalizer_groups(), size)
    staging = _opened(state, "staging", staging_store.DATABASES)
    calls = staging_store.StagedCalls(lambda: staging)
    number = 0
    while staging.statistics().file_bytes < size:
        named = [(f"grown-{number + n}", f"call-{number + n}") for n in range(16)]
        made = [Chain(key).add(call_id, tokens=_CALL_TOKENS) for key, call_id in named]
        await asyncio.gather(*(calls.put("default", call) for call in made))
        number += len(named)
    await staging.close()


def _opened(state: Path, name: str, databases: tuple[str, ...]) -> LmdbStore:
    return LmdbStore(
        state / name,
        map_size_bytes=MAP_BYTES,
        quota_bytes=QUOTA_BYTES,
        databases=databases,
        on_fatal=exit_process,
        name=name,
    )


async def _fill(store: LmdbStore, pairs: Iterator[_Pair], size: int) -> None:
    def put(txn: WriteTxn) -> None:
        for _ in range(_PUTS):
            txn.put(*next(pairs))

    while store.statistics().file_bytes < size:
        await store.write(put)
    await store.close()


def _ledger_events() -> Iterator[_Pair]:
    """Give the logs of attempts, 64 large rows each."""
    record = call_record_pb2.CallRecord(traceparent="0" * _VALUE_BYTES)
    value = ledger_event_pb2.LedgerEvent(record=record).SerializeToString()
    attempt = 0
    while True:
        prefix = ledger_store.attempt_prefix(AttemptKey("default", f"grown-{attempt}"))
        for revision in range(1, 65):
            yield "events", prefix + revision.to_bytes(8, "big"), value
        attempt += 1


def _finalizer_groups() -> Iterator[_Pair]:
    """Give receipts of rollouts with long paths."""
    path = ["c" * 100] * (_VALUE_BYTES // 102)
    value = row_log_pb2.FinalizedRollout(path_call_ids=path).SerializeToString()
    number = 0
    while True:
        yield "rollouts", finalizer_store.tenant_key("default", f"grown-{number}"), value
        number += 1


async def measure_recovery(directory: Path, *, size: int, kills: int, seed: int) -> list[Death]:
    """Grow the stores, kill their services at their commits, and time them.

    Args:
        directory: short enough for a socket.
        size: of each store's file, in bytes.
        kills: of each service, at each of two points.
        seed: of the order.
    """
    await grow(directory / "state", size)
    changed = [
        setting
        for name in STORES
        for setting in (f"{name}.map_size_bytes={MAP_BYTES}", f"{name}.quota_bytes={QUOTA_BYTES}")
    ]
    wanted = Counter({Target(name, point): kills for name in STORES for point in POINTS})
    hunters = hunters_of(directory / GAUGES, ChaosOptions(wanted, random_kills=0, seed=seed))
    async with running_mesh(directory, STORES, changed=changed, kind=ArmedVictims) as mesh:
        writers = [asyncio.ensure_future(_again(write)) for write in _writes(mesh)]
        try:
            for hunter in hunters:  # one after the other: each has the machine to itself
                hunter.victims = mesh.victims
                await hunter.hunt()
        finally:
            for one in writers:
                one.cancel()
            await asyncio.gather(*writers, return_exceptions=True)
    return [death for hunter in hunters for death in hunter.deaths]


def _writes(mesh: VictimMesh) -> list[Callable[[], Awaitable[object]]]:
    """Give one small write of each service."""

    async def stage() -> object:
        return await mesh.staging.stage(Chain(str(uuid.uuid4())).add(), timeout_s=10.0)

    async def open_attempt() -> object:
        return await mesh.ledger.open_attempt(str(uuid.uuid4()), request_id=str(uuid.uuid4()))

    async def finalize() -> object:
        name = str(uuid.uuid4())
        request = finalizer_pb.FinalizeRolloutRequest(group_id=name, rollout_id=name, reward=0.0)
        return await mesh.finalizer.finalize_rollout(request)

    return [stage, open_attempt, finalize]


async def _again(write: Callable[[], Awaitable[object]]) -> None:
    """Write again and again, whoever is away."""
    while True:
        with suppress(UnavailableError):
            await write()
        await asyncio.sleep(0.02)
