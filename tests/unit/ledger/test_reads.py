"""Reads beside a commit: all that was acknowledged, nothing else, and no wait for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import WriteTxn
from callforest_mesh.ledger.outline import OPEN, SEALED, AttemptKey
from tests.unit.chassis.stores import reach
from tests.unit.ledger.calls import KEY, SECOND, TENANT, asking, failure, intent, record, said, user
from tests.unit.ledger.held_ledger import ATTEMPT, REQUESTS, Bench, opened_bench
from tests.unit.ledger.restored_calls import SECOND_KEY, point


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened_bench(tmp_path) as made:
        yield made


@pytest.mark.requirement("LED-1", "LED-2")
async def test_readers_see_what_is_durable_and_wait_for_nothing_else(bench: Bench) -> None:
    """While a commit is under way the reads answer out of what was durable before it."""
    await bench.open()
    await bench.ledger.record_intent(TENANT, intent("a"))
    bench.hold()
    commit = asyncio.ensure_future(bench.ledger.commit_record(TENANT, record("a")))
    await reach(bench.lmdb)
    assert not await bench.ledger.has_rows(ATTEMPT)
    assert (await bench.ledger.find_predecessor(asking(SECOND))).HasField("root")
    assert not (await bench.ledger.get_call(ATTEMPT, "a")).HasField("record")
    waited = await bench.ledger.await_settled(ATTEMPT, wait_s=0)
    assert list(waited.pending_call_ids) == ["a"]
    shown = await anext(bench.ledger.manifest(ATTEMPT))
    assert shown == waited
    assert (shown.revision, shown.record_count) == (2, 0)
    assert await bench.rows() == []
    assert not commit.done()
    assert bench.durable_revision() == 2
    bench.release()
    assert (await commit).revision == 3
    assert await bench.ledger.has_rows(ATTEMPT)
    verdict = await bench.ledger.find_predecessor(asking(SECOND))
    assert verdict.continuation.parent_call_id == "a"
    assert (await bench.ledger.get_call(ATTEMPT, "a")).HasField("record")
    assert not (await bench.ledger.await_settled(ATTEMPT, wait_s=0)).pending_call_ids
    assert await bench.rows() == ["a"]


@pytest.mark.requirement("LED-2")
async def test_a_row_is_seen_by_whoever_asks_behind_its_acknowledgement(bench: Bench) -> None:
    """Many callers at once, whose rows share commits."""
    await bench.open()

    async def play(call: str) -> None:
        said_to = [user(call)]
        await bench.ledger.record_intent(TENANT, intent(call, said_to))
        assert (await bench.ledger.get_call(ATTEMPT, call)).verdict.HasField("root")
        await bench.ledger.commit_record(TENANT, record(call, said_to, f"to {call}"))
        assert (await bench.ledger.get_call(ATTEMPT, call)).HasField("record")
        items = [*said_to, said(f"to {call}"), user("and")]
        verdict = await bench.ledger.find_predecessor(asking(items))
        assert verdict.continuation.parent_call_id == call

    await asyncio.gather(*(play(f"c{number}") for number in range(64)))


@pytest.mark.requirement("LED-1")
async def test_no_reader_hears_of_a_commit_that_fails(bench: Bench) -> None:
    """The writer's view had the row already; a write in the same commit spoils it."""
    await bench.open()
    await bench.ledger.record_intent(TENANT, intent("a"))
    bench.hold()
    first = asyncio.ensure_future(bench.lmdb.write(lambda txn: txn.get("rollouts", b"x")))
    await reach(bench.lmdb)
    seen: list[bool] = []

    def spoil(txn: WriteTxn) -> None:
        """Let reads run behind the decision, on the loop, and then take it back."""
        asked = asyncio.run_coroutine_threadsafe(bench.ledger.has_rows(ATTEMPT), loop)
        seen.append(asked.result(20))
        txn.put("rollouts", b"spoiled", b"x")
        raise ZeroDivisionError

    loop = asyncio.get_running_loop()
    writes = [
        asyncio.ensure_future(bench.ledger.commit_failure(TENANT, failure("a"))),
        asyncio.ensure_future(bench.lmdb.write(spoil)),
    ]
    await asyncio.sleep(0)
    bench.release()
    await first
    committed, spoiled = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(spoiled, ZeroDivisionError)
    assert seen
    assert not any(seen)
    assert committed.revision == 3
    assert await bench.ledger.has_rows(ATTEMPT), "the row ran again, in a commit of its own"


@pytest.mark.requirement("LED-2")
async def test_what_is_said_of_an_attempt_is_of_one_moment(bench: Bench) -> None:
    """The commit that opens the next attempt seals this one: no reader sees half of that."""
    await bench.open(0)
    bench.hold()
    opening = asyncio.ensure_future(bench.open(1))
    await reach(bench.lmdb)
    before = await anext(bench.ledger.manifest(ATTEMPT))
    assert (before.state, before.superseded) == (OPEN, False)
    bench.release()
    seen = []
    while not opening.done():
        shown = await anext(bench.ledger.manifest(ATTEMPT))
        seen.append((shown.state, shown.superseded))
        await asyncio.sleep(0)
    assert set(seen) <= {(OPEN, False), (SEALED, True)}
    after = await anext(bench.ledger.manifest(ATTEMPT))
    assert (after.state, after.superseded) == (SEALED, True)


@pytest.mark.requirement("LED-2")
async def test_a_restored_attempt_is_read_once_it_is_durable(bench: Bench) -> None:
    await bench.open(0)
    await bench.ledger.record_intent(TENANT, intent("a"))
    await bench.ledger.commit_record(TENANT, record("a"))
    bench.hold()
    restoring = asyncio.ensure_future(
        bench.ledger.restore_attempt(TENANT, KEY, REQUESTS[1], point("a"))
    )
    await reach(bench.lmdb)
    second = AttemptKey(TENANT, SECOND_KEY)
    assert not await bench.ledger.has_rows(second)
    with pytest.raises(Refusal) as caught:
        await bench.ledger.get_call(second, "a")
    assert caught.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    bench.release()
    await restoring
    assert await bench.ledger.has_rows(second)
    assert (await bench.ledger.get_call(second, "a")).HasField("record")
    assert await bench.rows(second) == ["a"]


@pytest.mark.requirement("LED-2", "API-6")
async def test_a_full_queue_pushes_writes_back_and_no_reads(tmp_path: Path) -> None:
    async with opened_bench(tmp_path, queue_limit=2) as bench:
        await bench.open()
        bench.hold()
        works = [bench.ledger.record_intent(TENANT, intent("a"))]
        await reach(bench.lmdb)
        works += [bench.ledger.record_intent(TENANT, intent(name)) for name in ("b", "c")]
        with pytest.raises(Refusal) as caught:
            bench.ledger.record_intent(TENANT, intent("d"))
        assert caught.value.reason == er.ERROR_REASON_OVERLOADED
        assert caught.value.facts["limit"] == "store_queue"
        assert caught.value.retry_after_ms
        assert not await bench.ledger.has_rows(ATTEMPT)
        bench.release()
        await asyncio.gather(*works)
