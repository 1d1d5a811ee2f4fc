"""The ledger over its store: durable before visible, one transaction, waits without polling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import WriteTxn
from callforest_mesh.ledger import manifest_pages
from callforest_mesh.ledger.ledger import Ledger
from callforest_mesh.ledger.outline import CLOSED, OPEN, SEALED, AttemptKey
from callforest_mesh.ledger.settlement import SettlementWatch
from callforest_mesh.ledger.store import DATABASES, LmdbLedgerStore
from tests.unit.chassis.stores import HeldStore, reach
from tests.unit.ledger.calls import (
    KEY,
    SECOND,
    TENANT,
    failure,
    intent,
    record,
    said,
    user,
)
from tests.unit.ledger.held_ledger import ATTEMPT, REQUESTS, Bench, opened_bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened_bench(tmp_path) as made:
        yield made


async def waiting(bench: Bench) -> asyncio.Task[attempt_pb2.Attempt]:
    """Start a wait and return once it really waits."""
    before = bench.watch.wait_count
    task = asyncio.ensure_future(bench.ledger.await_settled(ATTEMPT, wait_s=60.0))
    await asyncio.sleep(0)
    assert bench.watch.wait_count == before + 1
    await bench.ledger.has_rows(ATTEMPT)
    assert not task.done()
    return task


async def test_an_aborted_commit_leaves_no_trace_in_the_view(bench: Bench) -> None:
    """Another write spoils the commit; the call is announced once all the same."""
    await bench.open()

    def spoil(txn: WriteTxn) -> None:
        txn.put("rollouts", b"spoiled", b"x")
        raise ZeroDivisionError

    bench.hold()
    first = asyncio.ensure_future(bench.ledger.record_intent(TENANT, intent("a")))
    await reach(bench.lmdb)
    rest = [
        asyncio.ensure_future(bench.ledger.record_intent(TENANT, intent("b"))),
        asyncio.ensure_future(bench.lmdb.write(spoil)),
        asyncio.ensure_future(bench.ledger.commit_failure(TENANT, failure("b"))),
    ]
    await asyncio.sleep(0)
    bench.release()
    await first
    verdict, spoiled, failed = await asyncio.gather(*rest, return_exceptions=True)
    assert isinstance(spoiled, ZeroDivisionError)
    assert verdict.HasField("root")
    assert failed.revision == 4 == bench.durable_revision()
    assert await bench.rows() == ["b"]


async def test_opening_the_next_attempt_seals_the_one_before_at_once(bench: Bench) -> None:
    first = await bench.open(0)
    assert (first.capture_key, first.state, first.epoch, first.revision) == (KEY, OPEN, 1, 1)
    await bench.ledger.record_intent(TENANT, intent("a"))
    wait = await waiting(bench)
    second = await bench.open(1)
    assert (second.capture_key, second.attempt_number, second.state) == (f"{KEY}-a1", 1, OPEN)
    before = await wait
    assert (before.state, before.revision, before.superseded) == (SEALED, 3, True)
    assert list(before.pending_call_ids) == ["a"]
    with pytest.raises(Refusal) as caught:
        await bench.ledger.commit_record(TENANT, record("a"))
    assert caught.value.reason == er.ERROR_REASON_ATTEMPT_SEALED
    third = await bench.open(2)
    assert third.capture_key == f"{KEY}-a2"
    assert (await bench.ledger.seal(ATTEMPT)).revision == 3, "a later attempt adds no event"


@pytest.mark.requirement("CAP-4")
async def test_a_repeated_opening_gets_its_first_answer(bench: Bench) -> None:
    first = await bench.open(0)
    assert await bench.open(0) == first
    second = await bench.open(1)
    await bench.ledger.close_admissions(AttemptKey(TENANT, second.capture_key))
    assert await bench.open(0) == first
    assert await bench.open(1) == second
    other = await bench.open(0, rollout="r2")
    assert other.capture_key == "r2"


async def test_tenants_do_not_meet(bench: Bench) -> None:
    await bench.open()
    await bench.ledger.record_intent(TENANT, intent("a"))
    await bench.ledger.commit_record(TENANT, record("a"))
    stranger = AttemptKey("other", KEY)
    assert not await bench.ledger.has_rows(stranger)
    verdict = await bench.ledger.record_intent("other", intent("b", SECOND))
    assert verdict.refused.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    opened = await bench.ledger.open_attempt("other", KEY, REQUESTS[0])
    assert opened.attempt_number == 0
    assert (await bench.ledger.record_intent("other", intent("b", SECOND))).HasField("root")


async def test_a_settled_attempt_is_answered_at_once(bench: Bench) -> None:
    await bench.open()
    assert not (await bench.ledger.await_settled(ATTEMPT, wait_s=3600)).pending_call_ids
    await bench.ledger.record_intent(TENANT, intent("a"))
    pending = await bench.ledger.await_settled(ATTEMPT, wait_s=0)
    assert list(pending.pending_call_ids) == ["a"]
    sealed = await bench.ledger.seal(ATTEMPT)
    assert await bench.ledger.await_settled(ATTEMPT, wait_s=3600) == sealed
    assert bench.watch.wait_count == 0


@pytest.mark.requirement("LED-11")
@pytest.mark.parametrize("how", ["record", "failure", "seal"])
async def test_what_ends_the_last_pending_call_ends_the_wait(bench: Bench, how: str) -> None:
    await bench.open()
    await bench.ledger.record_intent(TENANT, intent("a"))
    await bench.ledger.record_intent(TENANT, intent("b", [user("two")]))
    await bench.ledger.close_admissions(ATTEMPT)
    wait = await waiting(bench)
    await bench.ledger.commit_record(TENANT, record("b", [user("two")]))
    await bench.ledger.has_rows(ATTEMPT)
    assert not wait.done(), "one call is still pending"
    if how == "record":
        await bench.ledger.commit_record(TENANT, record("a"))
    elif how == "failure":
        await bench.ledger.commit_failure(TENANT, failure("a"))
    else:
        await bench.ledger.seal(ATTEMPT)
    shown = await wait
    assert shown.state == (SEALED if how == "seal" else CLOSED)
    assert list(shown.pending_call_ids) == (["a"] if how == "seal" else [])
    assert bench.watch.wait_count == 0


async def test_a_caller_that_goes_away_still_ends_the_wait(bench: Bench) -> None:
    await bench.open()
    await bench.ledger.record_intent(TENANT, intent("a"))
    wait = await waiting(bench)
    bench.hold()
    commit = asyncio.ensure_future(bench.ledger.commit_record(TENANT, record("a")))
    await reach(bench.lmdb)
    commit.cancel()
    await asyncio.wait({commit})
    assert commit.cancelled()
    bench.release()
    assert (await wait).record_count == 1


async def test_a_wait_that_is_over_says_what_is_pending(bench: Bench) -> None:
    await bench.open()
    await bench.ledger.record_intent(TENANT, intent("a"))
    shown = await bench.ledger.await_settled(ATTEMPT, wait_s=0.05)
    assert list(shown.pending_call_ids) == ["a"]
    assert bench.watch.wait_count == 0


async def test_an_open_attempt_that_gets_another_call_is_waited_for(bench: Bench) -> None:
    await bench.open()
    await bench.ledger.record_intent(TENANT, intent("a"))
    wait = await waiting(bench)
    bench.hold()
    first = asyncio.ensure_future(bench.lmdb.write(lambda txn: txn.get("rollouts", b"x")))
    await reach(bench.lmdb)
    commit = asyncio.ensure_future(bench.ledger.commit_record(TENANT, record("a")))
    admit = asyncio.ensure_future(bench.ledger.record_intent(TENANT, intent("b", SECOND)))
    await asyncio.sleep(0)
    bench.release()
    await asyncio.gather(first, commit, admit)
    await bench.ledger.has_rows(ATTEMPT)
    assert not wait.done()
    await bench.ledger.commit_failure(TENANT, failure("b"))
    assert not (await wait).pending_call_ids


@pytest.mark.requirement("API-6")
async def test_waits_have_a_limit_of_their_own_and_end_with_the_drain(bench: Bench) -> None:
    await bench.open()
    await bench.ledger.record_intent(TENANT, intent("a"))
    waits = [await waiting(bench) for _ in range(4)]
    with pytest.raises(Refusal) as caught:
        await bench.ledger.await_settled(ATTEMPT, wait_s=60)
    assert caught.value.reason == er.ERROR_REASON_OVERLOADED
    bench.watch.end()
    for outcome in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(outcome, Refusal)
        assert outcome.reason == er.ERROR_REASON_DRAINING
    with pytest.raises(Refusal) as caught:
        await bench.ledger.await_settled(ATTEMPT, wait_s=60)
    assert caught.value.reason == er.ERROR_REASON_DRAINING


@pytest.mark.requirement("LED-2")
async def test_a_manifest_comes_in_pages_as_of_its_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_pages, "PAGE_EVENTS", 4)
    await bench.open()
    names = [f"c{number}" for number in range(9)]
    for name in names:
        await bench.ledger.record_intent(TENANT, intent(name, [user(name)]))
        await bench.ledger.commit_record(TENANT, record(name, [user(name)], name))
    parts = bench.ledger.manifest(ATTEMPT)
    shown = await anext(parts)
    assert isinstance(shown, attempt_pb2.Attempt)
    assert shown.record_count == 9
    await bench.ledger.record_intent(TENANT, intent("late", [user("late"), said("?")]))
    pages = [part async for part in parts]
    assert all(len(page) <= 4 for page in pages)
    listed = [entry.record.coords.call_id for page in pages for entry in page]
    assert listed == names, "rows behind the shown revision are left out"
    monkeypatch.setattr(manifest_pages, "PAGE_BYTES", 1)
    assert await bench.rows() == [*names, "late"]


async def test_a_missing_event_is_corruption(bench: Bench) -> None:
    await bench.open()
    for name in ("a", "b"):
        await bench.ledger.record_intent(TENANT, intent(name))
    keys = bench.lmdb.read(lambda txn: [key for key, _ in txn.scan("events", b"")])
    assert len(keys) == 3
    await bench.lmdb.write(lambda txn: txn.delete("events", keys[1]))
    with pytest.raises(Refusal) as caught:
        await bench.rows()
    assert caught.value.reason == er.ERROR_REASON_STORE_CORRUPT


async def test_a_full_store_refuses_new_work_and_ends_old(tmp_path: Path) -> None:
    """Admitted calls can still commit, fail and be sealed (P8, and no rollout hangs)."""
    lmdb = HeldStore(
        tmp_path / "ledger",
        map_size_bytes=4 << 20,
        databases=DATABASES,
        quota_bytes=40 << 10,
        on_fatal=lambda _: None,
        name="ledger",
    )
    store = LmdbLedgerStore(lambda: lmdb)
    store.open()
    ledger = Ledger(store, SettlementWatch("ledger", waits_max=1), cached_calls_max=1000)
    await ledger.open_attempt(TENANT, KEY, REQUESTS[0])
    admitted: list[str] = []

    async def fill() -> None:
        for number in range(1000):
            call = f"c{number}"
            await ledger.record_intent(TENANT, intent(call, [user(call)]))
            admitted.append(call)

    with pytest.raises(Refusal) as caught:
        await fill()
    assert caught.value.reason == er.ERROR_REASON_STORE_FULL
    with pytest.raises(Refusal):
        await ledger.open_attempt(TENANT, "r2", REQUESTS[0])
    await ledger.commit_record(TENANT, record(admitted[0], [user(admitted[0])]))
    await ledger.commit_failure(TENANT, failure(admitted[1]))
    await ledger.close_admissions(ATTEMPT)
    sealed = await ledger.seal(ATTEMPT)
    assert len(sealed.pending_call_ids) == len(admitted) - 2
    assert await ledger.has_rows(ATTEMPT)
    await store.close()
