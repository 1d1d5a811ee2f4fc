"""Group commit: one batch, and no write spoils another."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import WriteTxn
from tests.unit.chassis.stores import (
    HeldStore,
    Opener,
    getting,
    in_one_batch,
    make,
    putting,
    reach,
    refusal,
)


async def test_what_queues_during_a_commit_is_the_next_batch(opened: Opener) -> None:
    async with opened(kind=HeldStore) as store:
        store.gate.clear()
        first = asyncio.ensure_future(store.write(putting(b"first", b"x")))
        await reach(store)
        others = [asyncio.ensure_future(store.write(putting(b"%d" % n, b"x"))) for n in range(50)]
        await asyncio.sleep(0)
        assert store.statistics().queue_depth == 50
        store.gate.set()
        await asyncio.gather(first, *others)
        statistics = store.statistics()
        assert (statistics.commits, statistics.records) == (2, 51)
        assert statistics.queue_depth == 0


async def test_what_a_loop_queues_in_one_go_is_one_commit(opened: Opener) -> None:
    async with opened() as store:
        switching = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # the writer thread runs between any two writes, if it may
        try:
            writes = [store.submit(putting(b"%d" % n, b"x"), lambda _: None) for n in range(2000)]
        finally:
            sys.setswitchinterval(switching)
        await asyncio.gather(*writes)
        assert store.statistics().commits == 2, "of at most 1024 writes each"


async def test_a_full_queue_refuses_at_once(opened: Opener) -> None:
    async with opened(kind=HeldStore, queue_limit=2) as store:
        store.gate.clear()
        taken = [asyncio.ensure_future(store.write(putting(b"a", b"x")))]
        await asyncio.sleep(0)
        await reach(store)
        taken += [asyncio.ensure_future(store.write(putting(b"b", b"x"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as refused:
            await store.write(putting(b"c", b"x"))
        assert refused.value.reason == er.ERROR_REASON_OVERLOADED
        assert refused.value.retry_after_ms is not None
        assert refused.value.facts == {"limit": "store_queue", "limit_value": "2"}
        store.gate.set()
        await asyncio.gather(*taken)
        assert store.read(getting(b"c")) is None


@pytest.mark.parametrize("error", [refusal(), ValueError("bug")], ids=["refusal", "exception"])
@pytest.mark.parametrize("dirty", [False, True], ids=["before", "after"])
async def test_one_failing_write_leaves_its_siblings(
    opened: Opener, error: Exception, dirty: bool
) -> None:
    def fail(txn: WriteTxn) -> None:
        if dirty:
            txn.put("calls", b"spoiled", b"x")
            txn.delete("calls", b"first")
        raise error

    async with opened(kind=HeldStore) as store:
        outcomes = await in_one_batch(
            store, putting(b"a", b"1"), fail, lambda txn: txn.get("calls", b"first")
        )
        assert outcomes == [None, error, b"x"]
        assert store.read(getting(b"a")) == b"1"
        assert store.read(getting(b"spoiled")) is None
        # The first write alone; then the others, again without the failing one if it spoiled them.
        assert store.statistics().commits == 2
        assert store.statistics().records == 3


async def test_many_failing_writes_leave_the_rest(opened: Opener) -> None:
    def fail(txn: WriteTxn) -> None:
        txn.put("calls", b"spoiled", b"x")
        raise ValueError("bug")

    writes = [fail if n % 2 else putting(b"%d" % n, b"x") for n in range(20)]
    async with opened(kind=HeldStore) as store:
        outcomes = await in_one_batch(store, *writes)
        assert [type(outcome) for outcome in outcomes] == [type(None), ValueError] * 10
        assert store.read(lambda txn: [key for key, _ in txn.scan("calls", b"")]) == sorted(
            [b"first", *(b"%d" % n for n in range(0, 20, 2))]
        )


class Concatenation:
    """Collects what the writes of one commit add, and puts it as one value."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def finish(self, txn: WriteTxn) -> None:
        txn.put("names", b"all", b"".join(self.parts))


async def test_writes_of_a_commit_share_a_collector(opened: Opener) -> None:
    def add(part: bytes) -> Callable[[WriteTxn], None]:
        return lambda txn: txn.shared(Concatenation, len(part)).parts.append(part)

    def fail(txn: WriteTxn) -> None:
        add(b"spoiled")(txn)
        raise refusal()

    async with opened(kind=HeldStore) as store:
        await in_one_batch(store, add(b"a"), add(b"b"), fail, add(b"c"))
        assert store.read(getting(b"all", "names")) == b"abc"
        await store.write(add(b"d"))
        assert store.read(getting(b"all", "names")) == b"d"


async def test_a_failing_collector_fails_its_writes_alone(opened: Opener) -> None:
    class Broken:
        def finish(self, _txn: WriteTxn) -> None:
            raise ValueError("bug")

    def add(txn: WriteTxn) -> None:
        txn.shared(Broken)

    async with opened(kind=HeldStore) as store:
        outcomes = await in_one_batch(store, putting(b"a", b"1"), add, putting(b"b", b"2"))
        assert [type(outcome) for outcome in outcomes] == [type(None), ValueError, type(None)]
        assert store.read(lambda txn: len(list(txn.scan("calls", b"")))) == 3


async def test_a_cancelled_waiter_still_commits(opened: Opener) -> None:
    async with opened(kind=HeldStore) as store:
        store.gate.clear()
        task = asyncio.ensure_future(store.write(putting(b"a", b"x")))
        await reach(store)
        queued = asyncio.ensure_future(store.write(putting(b"b", b"x")))
        await asyncio.sleep(0)
        task.cancel()
        queued.cancel()
        assert await asyncio.gather(task, queued, return_exceptions=True)
        store.gate.set()
        await store.write(putting(b"c", b"x"))
        assert store.read(getting(b"a")) == store.read(getting(b"b")) == b"x"


class FailingStore(HeldStore):
    """Fails a commit as a disk would."""

    def _commit(self, raw) -> None:
        self.reached.set()
        assert self.gate.wait(20)
        raw.abort()
        raise lmdb.DiskError("Input/output error")


async def test_a_failed_commit_is_fatal(tmp_path: Path) -> None:
    faults: list[Exception] = []
    store = make(tmp_path / "store", FailingStore, on_fatal=faults.append)
    store.gate.clear()
    first = asyncio.ensure_future(store.write(putting(b"a", b"x")))
    await reach(store)
    queued = [asyncio.ensure_future(store.write(putting(b"b", b"x"))) for _ in range(3)]
    await asyncio.sleep(0)
    store.gate.set()
    outcomes = await asyncio.gather(first, *queued, return_exceptions=True)
    reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Refusal)]
    assert reasons == [er.ERROR_REASON_DRAINING] * 4
    with pytest.raises(Refusal):
        await store.write(putting(b"c", b"x"))
    with pytest.raises(Refusal):
        store.read(getting(b"a"))
    await store.close()
    assert [type(fault) for fault in faults] == [lmdb.DiskError]


async def test_the_answer_is_made_even_if_nobody_waits_any_more(opened: Opener) -> None:
    async with opened(kind=HeldStore) as store:
        store.gate.clear()
        made: list[str] = []

        def answer_of(_result: None) -> None:
            assert store.read(getting(b"a")) == b"1"
            made.append("a")

        gone = store.submit(putting(b"a", b"1"), answer_of)
        gone.cancel()
        assert not made
        store.gate.set()
        await store.write(putting(b"b", b"2"))
        assert made == ["a"]


async def test_what_making_the_answer_raises_is_the_callers(opened: Opener) -> None:
    def answer_of(_result: None) -> None:
        raise refusal()

    async with opened() as store:
        with pytest.raises(Refusal):
            await store.submit(putting(b"a", b"1"), answer_of)
        assert store.read(getting(b"a")) == b"1", "it was durable before the answer was made"
