"""A disk that takes two seconds for a sync now and then: only what must wait for it waits."""

import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from callforest.capture.v1 import group_batch_pb2
from callforest_client.channel import connect
from callforest_client.finalizer import FinalizerClient
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from tests.integration.finalizer_mesh import TENANT, FinalizerMesh, publish_chain_group
from tests.robustness.slow_disk import WAIT_S, WRITERS, Load, Write, slow_service
from tests.unit.ledger.calls import intent, probe, record, said, user
from tests.unit.staging.calls import Chain

pytestmark = pytest.mark.timeout(300 * int(os.environ.get("DEPTH", "1")))
STALLS = 3 * int(os.environ.get("DEPTH", "1"))
BUSY = [f"r{number}" for number in range(8)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


async def staged(client: StagingClient, name: str) -> AsyncIterator[Write]:
    chain = Chain(name)
    while True:
        yield partial(client.stage, chain.add(), timeout_s=WAIT_S)


@pytest.mark.requirement("CAP-6")
async def test_a_slow_sync_holds_up_only_what_must_wait_for_it(folder: Path) -> None:
    """P1, P8: reads and health go on, writers are pushed back, nobody is told too early."""
    async with (
        slow_service(folder, "staging", "default"),
        connect(f"unix:{folder}/staging.sock") as channel,
    ):
        client = StagingClient(channel, timeout_s=WAIT_S)
        await client.stage(Chain("first").add())

        async def fetch() -> None:
            (found,) = await client.fetch("first", ["call-00000"])
            assert found.call_id == "call-00000"

        writers = [staged(client, f"writer-{number}") for number in range(WRITERS)]
        await Load(folder, "staging", STALLS).run(channel, writers, {"fetch": fetch})
        await client.close()


async def played(client: LedgerClient, key: str, writer: int) -> AsyncIterator[Write]:
    """Announce calls of an attempt and commit them."""
    number = 0
    while True:
        number += 1
        name = f"c{writer}-{number}"
        items = [user(f"ask {name}")]
        admitted = intent(name, items, key=key)
        yield partial(client.record_intent, admitted, timeout_s=WAIT_S)
        row = record(name, items, f"answer {name}", key=key)
        yield partial(client.record, row, timeout_s=WAIT_S)


@pytest.mark.requirement("LED-1", "LED-2", "API-6")
async def test_reads_of_the_ledger_wait_for_no_sync(folder: Path) -> None:
    """P1, P8, row 13: also of attempts whose calls wait in the commit that stalls."""
    async with (
        slow_service(folder, "ledger", "default"),
        connect(f"unix:{folder}/ledger.sock") as channel,
    ):
        client = LedgerClient(channel, timeout_s=WAIT_S)
        for key in (*BUSY, "quiet"):
            await client.open_attempt(key, request_id=str(uuid.uuid4()))
            await client.record_intent(intent("first", key=key))
            await client.record(record("first", key=key))

        async def rows() -> None:
            assert await client.has_rows("r0")
            assert await client.has_rows("quiet")

        async def call() -> None:
            assert (await client.get_call("r0", "first")).HasField("record")

        async def predecessor() -> None:
            verdict = await client.find_predecessor(
                "r0", probe([user("one"), said("A"), user("2")])
            )
            assert verdict.continuation.parent_call_id == "first"

        async def settled() -> None:
            assert (await client.await_settled("r0", wait_s=0)).record_count
            assert not (await client.await_settled("quiet", wait_s=WAIT_S)).pending_call_ids

        async def manifest() -> None:
            found = await client.manifest("r0")
            assert len(found.records) == found.attempt.record_count >= 1

        writers = [played(client, BUSY[number % len(BUSY)], number) for number in range(WRITERS)]
        reads = {
            "has_rows": rows,
            "get_call": call,
            "find_predecessor": predecessor,
            "await_settled": settled,
            "manifest": manifest,
        }
        await Load(folder, "ledger", STALLS).run(channel, writers, reads)
        await client.close()


class SlowFinalizerMesh(FinalizerMesh):
    """A mesh whose Finalizer is a process with a slow disk."""

    async def begin(self, name: str) -> None:
        if name != "finalizer":
            await super().begin(name)
            return
        self.channels[name] = connect(f"unix:{self.folder}/{name}.sock")


async def abandoned(client: FinalizerClient, name: str) -> AsyncIterator[Write]:
    """Publish dropped groups: a row log grows by any."""
    number = 0
    while True:
        number += 1
        yield partial(client.finalize_group, f"{name}-{number}", 1, abandon_reason="none came")


@pytest.mark.requirement("FIN-3", "API-3", "API-6")
async def test_reads_of_the_finalizer_and_its_delivery_wait_for_no_sync(folder: Path) -> None:
    """P1, P8, row 13: a subscription gets what is published already."""
    mesh = SlowFinalizerMesh(folder)
    async with slow_service(folder, "finalizer", TENANT):
        await mesh.start()
        client = mesh.finalizer
        await publish_chain_group(mesh, "first", rollouts=1)
        await client.finalize_group("second", 1, abandon_reason="none came")
        rows = client.subscribe("trainer")
        batches = aiter(rows)
        await rows.credit(1)
        first = await anext(batches)
        assert (first.group_id, first.cursor) == ("first", 1)
        taken = [first.cursor]

        async def receipt() -> None:
            assert not (await client.receipt("first-r0")).masked

        async def group() -> None:
            assert (await client.group("first")) == first

        async def log() -> None:
            assert (await client.row_log()).head_cursor >= taken[-1]

        async def delivery() -> None:
            await rows.credit(1)
            batch: group_batch_pb2.GroupBatch = await anext(batches)
            assert batch.cursor == taken[-1] + 1
            taken.append(batch.cursor)

        writers = [abandoned(client, f"writer-{number}") for number in range(WRITERS)]
        reads = {"receipt": receipt, "group": group, "row_log": log, "delivery": delivery}
        await Load(folder, "finalizer", STALLS).run(mesh.channels["finalizer"], writers, reads)
        await rows.close()
        await mesh.stop()
