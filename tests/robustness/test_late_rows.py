"""Rows that come after the seal, and links that pass in one direction only, between processes."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.capture.v1 import attempt_pb2, group_batch_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.rollout import Outcome
from tests.robustness.proxied_mesh import LINKS, ProxiedMesh, proxied_mesh

DEPTH = int(os.environ.get("DEPTH", "1"))
RECOVERY_S = 5.0
HOLD_S = 1.0
WAIT_S = 60.0


@pytest.fixture
async def mesh() -> AsyncIterator[ProxiedMesh]:
    """Give a mesh in a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        async with proxied_mesh(Path(path)) as mesh:
            yield mesh


async def consume(mesh: ProxiedMesh, head: int) -> list[group_batch_pb2.GroupBatch]:
    """Be the trainer up to a position."""
    subscription = mesh.clients.finalizer().subscribe("trainer")
    await subscription.credit(head)
    batches = []
    async for batch in subscription:
        batches.append(batch)
        if batch.cursor == head:
            break
    await subscription.commit(head)
    await subscription.close()
    return batches


async def staged_count(mesh: ProxiedMesh, wanted: int) -> int:
    """Give how many calls are staged, as soon as it is as wanted."""
    staging = mesh.clients.staging()
    deadline = time.monotonic() + WAIT_S
    while True:
        count = (await staging.stat()).call_count
        if count == wanted or time.monotonic() > deadline:
            return count
        await asyncio.sleep(0.05)


@pytest.mark.timeout(240)
@pytest.mark.requirement("LED-6", "LED-8", "FIN-1", "CAP-7")
async def test_a_record_that_comes_after_the_seal_is_refused_and_swept(mesh: ProxiedMesh) -> None:
    """P9 closed is closed: the proxy holds the record until the attempt is sealed."""
    owner, ledger = mesh.owner, mesh.clients.ledger()
    to_ledger = mesh.proxies["gateway", "ledger"]
    rollout = await owner.open("late")
    first = await mesh.ask(rollout.capture_key, ["begin"])

    to_ledger.hold("requests")
    straggler = asyncio.ensure_future(mesh.ask(rollout.capture_key, ["something else"]))
    async with asyncio.timeout(WAIT_S):
        await to_ledger.holding("requests")
    assert await staged_count(mesh, 2) == 2, "its tokens are durable, its record is not"
    await ledger.close_admissions(rollout.capture_key)
    waited = await ledger.await_settled(rollout.capture_key, wait_s=HOLD_S)
    assert len(waited.pending_call_ids) == 1
    sealed = await ledger.seal(rollout.capture_key)
    before = await ledger.manifest(rollout.capture_key)
    to_ledger.release("requests")

    served = await straggler
    assert [served.call_id] == list(sealed.pending_call_ids), "it is served all the same"
    after = await ledger.manifest(rollout.capture_key)
    assert after == before
    assert [one.coords.call_id for one in after.records] == [first.call_id]
    assert after.attempt.state == attempt_pb2.ATTEMPT_STATE_SEALED

    again = await owner.open("late")
    third = await mesh.ask(again.capture_key, ["begin"])
    outcome = Outcome(1.0, declared_response_id=third.response_id)
    receipt = await owner.finish(again, outcome, group_id="g", slot=0)
    assert not receipt.masked, "what came late is no part of the next attempt"
    assert [call.call_id for call in receipt.calls] == [third.call_id]
    published = await owner.publish("g", 1)
    await consume(mesh, published.cursor)
    left = await staged_count(mesh, 0)
    print("RESULT " + json.dumps({"late_rows_accepted": 0, "staged_left": left}))
    assert left == 0, "what came late is swept with its attempt"


@pytest.mark.timeout(240)
@pytest.mark.requirement("LED-7")
async def test_a_rollout_that_was_sealed_over_a_record_is_masked(mesh: ProxiedMesh) -> None:
    owner, ledger = mesh.owner, mesh.clients.ledger()
    to_ledger = mesh.proxies["gateway", "ledger"]
    rollout = await owner.open("masked")
    to_ledger.hold("requests")
    straggler = asyncio.ensure_future(mesh.ask(rollout.capture_key, ["begin"]))
    async with asyncio.timeout(WAIT_S):
        await to_ledger.holding("requests")
    sealed = await ledger.seal(rollout.capture_key)
    to_ledger.release("requests")
    served = await straggler
    receipt = await mesh.clients.finalizer().finalize_rollout(
        pb.FinalizeRolloutRequest(
            group_id="g",
            rollout_id="masked",
            slot=0,
            capture_key=rollout.capture_key,
            epoch=sealed.epoch,
            revision=sealed.revision,
            reward=1.0,
            declared_response_id=served.response_id,
        )
    )
    assert (receipt.masked, receipt.mask_reason) == (True, "pending_call")


async def play_until(mesh: ProxiedMesh, healed: asyncio.Event, name: str) -> float:
    """Ask again and again; give when the first call ended that was answered after the healing."""
    number = 0
    while True:
        number += 1
        rollout = await mesh.owner.open(f"{name}-{number}")
        try:
            async with asyncio.timeout(WAIT_S):
                await mesh.ask(rollout.capture_key, ["begin"])
        except AssertionError:
            continue  # refused, since a peer was away
        if healed.is_set():
            return time.monotonic()


@pytest.mark.timeout(600)
async def test_a_link_that_passed_one_way_only_recovers(mesh: ProxiedMesh) -> None:
    """Row 11: each link is blocked in each direction; once healed, calls go through again."""
    recoveries: dict[str, float] = {}
    links = [link for link in LINKS if link[0] != "finalizer"]
    for number, (link, direction) in enumerate(
        (link, direction) for link in links for direction in ("requests", "answers")
    ):
        proxy, healed = mesh.proxies[link], asyncio.Event()
        # Half of them lose what is sent meanwhile, the others get it late.
        if number % 2:
            proxy.hold(direction)
        else:
            proxy.swallow(direction)
        playing = asyncio.ensure_future(play_until(mesh, healed, f"r{number}"))
        async with asyncio.timeout(WAIT_S):
            await proxy.holding(direction)
        await asyncio.wait({playing}, timeout=HOLD_S)
        assert not playing.done()
        healed.set()
        proxy.release(direction)
        began = time.monotonic()
        recoveries[f"{'>'.join(link)} {direction}"] = round(await playing - began, 2)
    for number in range(3):
        await mesh.play_one(f"after-{number}", f"g{number}")
    counts = mesh.faults()
    figures = {"recovery_s_max": max(recoveries.values()), "recoveries_s": recoveries}
    print("RESULT " + json.dumps(figures))
    assert max(recoveries.values()) <= RECOVERY_S
    assert counts["requests held"] + counts["answers held"] > 0
    assert counts["requests swallowed"] + counts["answers swallowed"] > 0
