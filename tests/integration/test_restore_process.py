"""A Ledger that dies while it restores an attempt: the one before is as it was, or all is there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest_client.channel import connect
from callforest_client.ledger import LedgerClient
from callforest_mesh.chassis.failpoint import VARIABLE
from tests.unit.ledger.calls import KEY, SECOND, TENANT, intent, record
from tests.unit.ledger.restored_calls import SECOND_KEY, point

WAIT_S = 30.0
CHILD = Path(__file__).with_name("ledger_child.py")


@contextlib.asynccontextmanager
async def ledger(
    directory: Path, name: str, armed: str = ""
) -> AsyncIterator[tuple[asyncio.subprocess.Process, LedgerClient]]:
    """Run a ledger on the directory's store; it ends itself where it is armed."""
    address = f"unix:{directory}/{name}.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable, CHILD, directory / "ledger", address, env={**os.environ, VARIABLE: armed}
    )
    channel = connect(address)
    client = LedgerClient(channel, tenant=TENANT, timeout_s=WAIT_S)
    try:
        yield process, client
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        await client.close()
        await channel.close()


@pytest.mark.requirement("TRN-12")
@pytest.mark.parametrize(
    ("armed", "whole"),
    [
        ("ledger.after_append=exit@1", False),  # between the seal and the opening
        ("ledger.after_append=exit@2", False),
        ("store.after_commit=exit", True),
        ("ledger.after_durable=exit", True),
    ],
)
async def test_a_restore_is_done_whole_or_not_at_all(
    tmp_path: Path, armed: str, whole: bool
) -> None:
    request_id = str(uuid.uuid4())
    first = record("a")
    async with ledger(tmp_path, "first") as (_, client):
        await client.open_attempt(KEY, request_id=str(uuid.uuid4()))
        await client.record_intent(intent("a"))
        await client.record(first)
        await client.record_intent(intent("b", SECOND))
        await client.record(record("b", SECOND, "B", parent=first))
        before = (await client.manifest(KEY)).attempt
    async with ledger(tmp_path, "armed", armed) as (process, client):
        restoring = asyncio.ensure_future(
            client.restore_attempt(KEY, request_id=request_id, point=point("b"))
        )
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == -signal.SIGKILL
        restoring.cancel()
        await asyncio.gather(restoring, return_exceptions=True)
    async with ledger(tmp_path, "last") as (_, client):
        shown = (await client.manifest(KEY)).attempt
        if whole:
            assert shown.superseded
            assert shown.state == attempt_pb2.ATTEMPT_STATE_SEALED
            manifest = await client.manifest(SECOND_KEY)
            assert [row.coords.call_id for row in manifest.records] == ["a", "b"]
        else:
            assert shown == before
        restored = await client.restore_attempt(KEY, request_id=request_id, point=point("b"))
        assert (restored.capture_key, restored.restored_count) == (SECOND_KEY, 2)
        assert (restored.revision, restored.superseded) == (3, False)
