"""Restores as callers and operators see them: over a channel, in counters, over a restart."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

from callforest.capture.v1 import restore_point_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError
from callforest_client.ledger import LedgerClient
from callforest_client.restore_point import restore_point
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from tests.integration.running_mesh import play
from tests.integration.traced_mesh import traced
from tests.unit.ledger.calls import KEY, TENANT
from tests.unit.ledger.forest_calls import FOREST, forest_intent, forest_record
from tests.unit.ledger.restored_calls import SECOND_KEY, point

WAIT_S = 30.0
ServiceOpener = Callable[..., Awaitable[grpc.aio.Channel]]


async def ledger_at(path: Path, open_service: ServiceOpener, name: str) -> LedgerClient:
    options = LedgerOptions(path / name, map_size_bytes=64 << 20, quota_bytes=32 << 20)
    drain = Drain()
    channel = await open_service(LedgerService(options, drain), drain)
    return LedgerClient(channel, tenant=TENANT, timeout_s=WAIT_S)


async def refused(asked: Awaitable[object]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await asked
    return caught.value


@pytest.mark.requirement("LED-10")
async def test_a_record_with_replay_items_never_reaches_the_log(
    tmp_path: Path, open_service: ServiceOpener
) -> None:
    """Taken, it would make the log of its attempt unreadable from the next fold on."""
    client = await ledger_at(tmp_path, open_service, "ledger")
    await client.open_attempt(KEY, request_id=str(uuid.uuid4()), mode=FOREST)
    await client.record_intent(forest_intent("a"))
    early = forest_record("a")
    early.replay.MergeFromString(b"\xfa\x3e\x02{}")
    error = await refused(client.record(early))
    assert error.reason == er.ERROR_REASON_INVALID_MESSAGE
    assert "replay" in error.message
    assert "capture schema 3" in error.message
    await client.record(forest_record("a"))
    restored = await client.restore_attempt(KEY, request_id=str(uuid.uuid4()), point=point("a"))
    assert restored.restored_count == 1
    await client.close()


@pytest.mark.requirement("TRN-12", "LED-10")
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"capture_schema": 2}, er.ERROR_REASON_RESTORE_REFUSED),
        ({"call_ids": []}, er.ERROR_REASON_INVALID_MESSAGE),
        ({"call_ids": ["a/b"]}, er.ERROR_REASON_INVALID_MESSAGE),
        ({"call_ids": ["x"] * 16_385}, er.ERROR_REASON_INVALID_MESSAGE),
        ({"call_ids": ["a"] * 5000}, None),
        ({"capture_key": ""}, er.ERROR_REASON_INVALID_MESSAGE),
        ({"capture_key": SECOND_KEY}, er.ERROR_REASON_RESTORE_REFUSED),
    ],
)
async def test_a_point_is_held_against_its_schema(
    changed: dict[str, object],
    reason: er.ErrorReason.ValueType | None,
    tmp_path: Path,
    open_service: ServiceOpener,
) -> None:
    client = await ledger_at(tmp_path, open_service, "ledger")
    await client.open_attempt(KEY, request_id=str(uuid.uuid4()), mode=FOREST)
    await client.record_intent(forest_intent("a"))
    await client.record(forest_record("a"))
    fields: dict[str, object] = {"capture_schema": 3, "capture_key": KEY, "call_ids": ["a"]}
    made = restore_point_pb2.RestorePoint(**{**fields, **changed})
    asked = client.restore_attempt(KEY, request_id=str(uuid.uuid4()), point=made)
    if reason is None:
        assert (await asked).restored_count == 1
    else:
        assert (await refused(asked)).reason == reason
        assert not (await client.manifest(KEY)).attempt.superseded
    await client.close()


@pytest.mark.requirement("TRN-12", "OPS-1")
async def test_restores_are_counted_by_what_came_of_them(tmp_path: Path) -> None:
    async with traced(tmp_path, sample_ratio=0.0) as mesh:
        rollout = await mesh.owner.open("r0")
        await play(rollout.base_url, 2)
        records = (await mesh.clients.ledger().manifest("r0")).records
        named = restore_point(rollout.attempt, [one.coords.call_id for one in records])
        request = str(uuid.uuid4())
        for _ in range(2):
            await mesh.owner.restore(named, request_id=request)
        error = await refused(mesh.owner.restore(named, request_id=str(uuid.uuid4())))
        assert error.metadata["fault"] == "not_latest"
        unknown = restore_point_pb2.RestorePoint(
            capture_schema=3, capture_key="nobody", call_ids=["a"]
        )
        await refused(mesh.owner.restore(unknown, request_id=str(uuid.uuid4())))
        measured = mesh.telemetry.measured
        assert measured("ledger", "callforest.ledger.restores") == {
            ("none",): 2,
            ("not_latest",): 1,
            ("other",): 1,
        }
        assert measured("ledger", "callforest.ledger.restored_calls") == {(): 2}
