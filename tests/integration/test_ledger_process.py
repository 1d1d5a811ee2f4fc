"""The Ledger in a process of its own, killed while it works."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest_client.channel import connect
from callforest_client.ledger import LedgerClient
from tests.unit.ledger.calls import TENANT, intent, record, user

WAIT_S = 30.0
CHILD = Path(__file__).with_name("ledger_child.py")


@contextlib.asynccontextmanager
async def ledger_process(
    store: Path, address: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, LedgerClient]]:
    process = await asyncio.create_subprocess_exec(sys.executable, CHILD, store, address)
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


@pytest.mark.requirement("LED-1", "LED-2")
async def test_a_killed_ledger_keeps_every_acknowledged_row(tmp_path: Path) -> None:
    """P1 as far as a killed process can show it; the unknown ones are learned by repeating."""
    names = [f"c{number}" for number in range(400)]
    contexts = {name: [user(name)] for name in names}
    acknowledged: list[str] = []
    enough = asyncio.Event()

    async def commit(client: LedgerClient, name: str) -> None:
        await client.record_intent(intent(name, contexts[name]))
        await client.record(record(name, contexts[name], name))
        acknowledged.append(name)
        if len(acknowledged) >= 50:
            enough.set()

    async with ledger_process(tmp_path / "ledger", f"unix:{tmp_path}/first.sock") as (
        process,
        client,
    ):
        await client.open_attempt("r1", request_id=str(uuid.uuid4()))
        work = [asyncio.ensure_future(commit(client, name)) for name in names]
        async with asyncio.timeout(WAIT_S):
            await enough.wait()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    known = set(acknowledged)
    assert len(known) >= 50
    async with ledger_process(tmp_path / "ledger", f"unix:{tmp_path}/second.sock") as (_, client):
        assert await client.has_rows("r1")  # repeats until the process serves
        manifest = await client.manifest("r1")
        kept = {row.coords.call_id: row for row in manifest.records}
        assert known <= kept.keys()
        numbers = sorted(row.intent_number for row in kept.values())
        assert numbers == sorted(set(numbers)), "each has its own place among the announced calls"
        for row in kept.values():
            row.ClearField("intent_number")  # the ledger's own
        assert all(kept[name] == record(name, contexts[name], name) for name in known)
        await asyncio.gather(*(commit(client, name) for name in names))
        whole = await client.manifest("r1")
        assert [row.coords.call_id for row in whole.records][: len(kept)] == list(kept)
        assert {row.coords.call_id for row in whole.records} == set(names)
        assert whole.attempt.revision == 1 + 2 * len(names)
