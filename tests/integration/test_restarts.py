"""Services end and start again under load, and harnesses never notice."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from callforest_client.ledger import LedgerClient
from tests.integration.running_mesh import Running, play, roll_out, running

WAIT_S = 60.0
SLOW = "worker.scripted.latency_s=[0.05, 0.3]"


async def restart(mesh: Running, name: str, number: signal.Signals) -> None:
    """Signal a service's process and wait until another one is ready."""
    assert mesh.supervisor is not None
    before = mesh.supervisor.pid(name)
    restarts = mesh.supervisor.restarts(name)
    os.kill(before, number)
    await mesh.supervisor.wait_ready(name, WAIT_S, restarts=restarts + 1)
    assert mesh.supervisor.pid(name) != before
    expected = 0 if number is signal.SIGTERM else -number
    assert mesh.supervisor.exit_status(name) == expected


async def admitted(ledger: LedgerClient, capture_key: str) -> None:
    """Wait until a call of the attempt is under way."""
    for _ in range(1000):
        if (await ledger.manifest(capture_key)).attempt.pending_call_ids:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"no call of {capture_key} was admitted")


@pytest.mark.requirement("API-6")
async def test_a_rolling_restart_loses_no_call(tmp_path: Path) -> None:
    async with running("processes", tmp_path, SLOW) as mesh:
        ended = asyncio.Event()
        receipts = []

        async def keep_playing(player: int) -> None:
            number = 0
            while not ended.is_set() or not number:
                receipts.append(await roll_out(mesh, f"r{player}-{number}"))
                number += 1

        players = [asyncio.ensure_future(keep_playing(player)) for player in range(4)]
        for name in ("ledger", "staging", "admission", "worker", "finalizer"):
            await restart(mesh, name, signal.SIGTERM)
            assert not any(player.done() for player in players), "they played meanwhile"
        ended.set()
        await asyncio.gather(*players)
        assert len(receipts) >= len(players)
        assert [receipt.mask_reason for receipt in receipts if receipt.masked] == []


@pytest.mark.requirement("API-6")
async def test_a_gateway_that_ends_answers_what_it_took(tmp_path: Path) -> None:
    async with running("processes", tmp_path, "worker.scripted.latency_s=[1.0, 1.5]") as mesh:
        rollouts = [await mesh.owner.open(f"r{number}") for number in range(8)]
        calls = [asyncio.ensure_future(play(one.base_url, 1)) for one in rollouts]
        for one in rollouts:
            await admitted(mesh.clients.ledger(), one.capture_key)
        await restart(mesh, "gateway", signal.SIGTERM)
        assert all(await asyncio.gather(*calls))
