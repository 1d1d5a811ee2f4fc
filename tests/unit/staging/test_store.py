"""Staged calls in the store: one value a commit, once each, gone with their segment."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest_client.codec import coords_of
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.staging.segments import LIVES, SEGMENT_BYTES, SEGMENTS, TOTALS
from callforest_mesh.staging.store import CALLS, DATABASES, StagedCalls
from tests.unit.chassis.stores import HeldStore, reach
from tests.unit.staging.calls import KEY, Chain

TENANT = "tenant"


def open_store(path: Path, kind: type[LmdbStore] = LmdbStore) -> LmdbStore:
    def fatal(error: Exception) -> None:
        raise AssertionError(repr(error))

    return kind(
        path,
        map_size_bytes=256 << 20,
        databases=DATABASES,
        quota_bytes=200 << 20,
        on_fatal=fatal,
        name="staging",
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LmdbStore]:
    opened = open_store(tmp_path / "store")
    yield opened
    await opened.close()


@pytest.fixture
def staged(store: LmdbStore) -> StagedCalls:
    return StagedCalls(lambda: store)


def count(store: LmdbStore, db: str) -> int:
    return store.read(lambda txn: sum(1 for _ in txn.scan(db, b"")))


async def together(staged: StagedCalls, *calls) -> list[pb.StagedReceipt]:
    """Stage calls in as few commits as their queueing makes."""
    return await asyncio.gather(*(staged.put(TENANT, call) for call in calls))


@pytest.mark.requirement("CAP-6")
async def test_a_staged_call_reads_back_byte_for_byte(staged: StagedCalls) -> None:
    chain = Chain()
    calls = [chain.add(tokens=size) for size in (1, 8, 3000)]
    receipts = await together(staged, *calls)
    assert receipts == [pb.StagedReceipt(coords=coords_of(call)) for call in calls]
    ids = [call.call_id for call in calls]
    assert staged.some(TENANT, KEY, ids) == calls
    assert staged.some(TENANT, KEY, ids[::-1]) == calls[::-1]


async def test_concurrent_stages_of_one_call_have_one_winner(
    store: LmdbStore, staged: StagedCalls
) -> None:
    rivals = [Chain(seed=seed).add() for seed in range(20)]
    receipts = await together(staged, *rivals)
    assert {receipt.coords.digest for receipt in receipts} == {rivals[0].digest}
    winners = [receipt.winner for receipt in receipts if receipt.HasField("winner")]
    assert len(winners) == 19
    assert all(winner.served_response == rivals[0].served_response for winner in winners)
    assert staged.some(TENANT, KEY, [rivals[0].call_id]) == [rivals[0]]
    assert staged.stat(TENANT).call_count == count(store, CALLS) == 1


async def test_tenants_and_attempts_are_apart(staged: StagedCalls) -> None:
    call, other = Chain().add(), Chain("rollout-2").add()
    await staged.put("tenant", call)
    await staged.put("tenant2", call)
    await staged.put("tenant", other)
    assert await staged.delete("tenant", KEY, [call.call_id]) == 1
    assert staged.some("tenant2", KEY, [call.call_id]) == [call]
    assert staged.some("tenant", "rollout-2", [call.call_id]) == [other]
    with pytest.raises(Refusal) as refused:
        staged.some("tenant", KEY, [call.call_id])
    assert refused.value.reason == er.ERROR_REASON_CALL_NOT_FOUND
    assert (staged.stat("tenant").call_count, staged.stat("tenant2").call_count) == (1, 1)


async def test_a_segment_goes_with_its_last_call(store: LmdbStore, staged: StagedCalls) -> None:
    chain = Chain()
    first = chain.add()
    await staged.put(TENANT, first)
    rest = [chain.add(tokens=500) for _ in range(10)]
    await together(staged, *rest)
    segments = count(store, SEGMENTS)
    assert segments >= 2
    assert await staged.delete(TENANT, KEY, [first.call_id]) == 1
    assert count(store, SEGMENTS) == segments - 1
    ids = [call.call_id for call in rest]
    assert await staged.delete(TENANT, KEY, [*ids[:-1], "unknown", ids[0]]) == 9
    assert staged.some(TENANT, KEY, ids[-1:]) == rest[-1:]
    assert await staged.delete(TENANT, KEY, ids) == 1
    assert (count(store, SEGMENTS), count(store, LIVES), count(store, CALLS)) == (0, 0, 0)
    assert staged.stat(TENANT).call_bytes == 0
    again = Chain().add()
    await staged.put(TENANT, again)
    assert staged.some(TENANT, KEY, [again.call_id]) == [again]


async def test_segments_are_bounded_unless_a_call_is_longer(
    store: LmdbStore, staged: StagedCalls
) -> None:
    chain = Chain()
    calls = [chain.add(tokens=20_000) for _ in range(30)]
    calls.append(chain.add(tokens=200_000))
    await together(staged, *calls)
    sizes = store.read(lambda txn: [len(value) for _, value in txn.scan(SEGMENTS, b"")])
    assert len(sizes) >= 5
    assert [size > SEGMENT_BYTES for size in sizes].count(True) == 1
    for call in calls:
        assert staged.some(TENANT, KEY, [call.call_id]) == [call]


async def test_reads_come_in_portions(staged: StagedCalls) -> None:
    chain = Chain()
    calls = [chain.add(tokens=100_000) for _ in range(4)]
    await together(staged, *calls)
    portion = staged.some(TENANT, KEY, [call.call_id for call in calls])
    assert portion == calls[:2]


async def stage_in_one_commit(store: HeldStore, staged: StagedCalls, calls: list) -> None:
    """Stage calls that queue while another commit is under way."""
    store.gate.clear()
    store.reached.clear()
    first = asyncio.ensure_future(store.write(lambda _: None))
    await reach(store)
    waiting = asyncio.gather(*(staged.put(TENANT, call) for call in calls))
    await asyncio.sleep(0)
    store.gate.set()
    await first
    await waiting


@pytest.mark.requirement("API-7")
async def test_little_more_is_stored_than_was_staged(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", HeldStore)
    staged = StagedCalls(lambda: store)
    empty = store.statistics().used_bytes
    chains = [Chain(f"rollout-{writer}", seed=writer) for writer in range(8)]
    size = 0
    for _ in range(50):
        # 4 KiB of columns: 6 bytes a token, half of them generated.
        calls = [chain.add(tokens=683) for chain in chains]
        size += sum(call.ByteSize() for call in calls)
        await stage_in_one_commit(store, staged, calls)
    stored = store.statistics().used_bytes - empty
    assert count(store, SEGMENTS) == 50
    assert stored / size <= 1.3
    assert staged.stat(TENANT).call_bytes == size
    assert staged.stat(TENANT).call_count == 400
    await store.close()


@pytest.mark.requirement("CAP-14")
async def test_staged_bytes_do_not_grow_with_history(staged: StagedCalls) -> None:
    chain = Chain()
    sizes = []
    for _ in range(50):
        before = staged.stat(TENANT).call_bytes
        await staged.put(TENANT, chain.add(tokens=64))
        sizes.append(staged.stat(TENANT).call_bytes - before)
    assert max(sizes[1:]) - min(sizes[1:]) <= 4, "only the varint of prev_token_count may grow"


@pytest.mark.bugcase("B20")
async def test_no_damaged_byte_is_served(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    staged = StagedCalls(lambda: store)
    chain = Chain()
    calls = [chain.add(), chain.add()]
    await together(staged, *calls)
    await store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=8) as env:
        segments = env.open_db(SEGMENTS.encode())
        with env.begin() as txn:
            records = [(bytes(key), bytes(value)) for key, value in txn.cursor(segments)]
    size = sum(len(value) - 16 for _, value in records)
    noticed = 0
    positions = [(key, at) for key, value in records for at in range(16, len(value))]
    for key, at in positions[::17]:
        value = dict(records)[key]
        damaged = value[:at] + bytes([value[at] ^ 0x40]) + value[at + 1 :]
        with lmdb.open(str(tmp_path / "store"), max_dbs=8) as env:
            segments = env.open_db(SEGMENTS.encode())
            with env.begin(write=True) as txn:
                txn.put(key, damaged, db=segments)
        store = open_store(tmp_path / "store")
        wrong = [call for call in calls if not served(StagedCalls(lambda store=store: store), call)]
        assert len(wrong) == 1
        noticed += 1
        await store.close()
        with lmdb.open(str(tmp_path / "store"), max_dbs=8) as env:
            segments = env.open_db(SEGMENTS.encode())
            with env.begin(write=True) as txn:
                txn.put(key, value, db=segments)
    assert noticed >= size // 17


def served(staged: StagedCalls, call) -> bool:
    """Whether a call is served, as it was staged, rather than refused as damaged."""
    try:
        found = staged.some(TENANT, KEY, [call.call_id])
    except Refusal as refused:
        if refused.reason != er.ERROR_REASON_STORE_CORRUPT:
            raise
        return False
    assert found == [call]
    return True


async def test_a_prefix_is_the_whole_sequence(staged: StagedCalls) -> None:
    chain = Chain()
    calls = [chain.add(tokens=5 + number) for number in range(6)]
    await together(staged, *calls)
    prefix = staged.prefix(TENANT, pb.PrefixQuery(capture_key=KEY, call_id=calls[-1].call_id))
    assert [delta.call_id for delta in prefix.deltas] == [call.call_id for call in calls]
    tokens = b"".join(delta.token_ids for delta in prefix.deltas)
    assert np.array_equal(np.frombuffer(tokens, dtype="<u4"), chain.sequence)
    assert not prefix.HasField("held_call_id")
    held = pb.PrefixQuery(
        capture_key=KEY, call_id=calls[-1].call_id, held_call_ids=[calls[3].call_id]
    )
    prefix = staged.prefix(TENANT, held)
    assert prefix.held_call_id == calls[3].call_id
    assert [delta.call_id for delta in prefix.deltas] == [call.call_id for call in calls[4:]]


async def test_a_dropped_partition_takes_nothing_more(
    store: LmdbStore, staged: StagedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("callforest_mesh.staging.store._REMOVED_AT_ONCE", 4)
    chain, other = Chain(), Chain("rollout-2")
    calls = [chain.add() for _ in range(10)]
    await together(staged, *calls, other.add())
    assert await staged.drop(TENANT, KEY) == 10
    assert await staged.drop(TENANT, KEY) == 0
    with pytest.raises(Refusal) as refused:
        await staged.put(TENANT, calls[0])
    assert refused.value.reason == er.ERROR_REASON_PARTITION_DROPPED
    assert staged.stat(TENANT).call_count == count(store, CALLS) == 1
    await staged.put("tenant2", calls[0])


async def test_a_drop_and_a_stage_in_one_commit_agree(staged: StagedCalls) -> None:
    call = Chain().add()

    async def put() -> pb.StagedReceipt:
        return await staged.put(TENANT, call)

    before, dropped, after = await asyncio.gather(
        put(), staged.drop(TENANT, KEY), put(), return_exceptions=True
    )
    assert before.coords == coords_of(call)
    assert dropped == 1
    assert after.reason == er.ERROR_REASON_PARTITION_DROPPED
    assert staged.stat(TENANT).call_count == 0


async def outcome_of(staged: StagedCalls, call) -> er.ErrorReason.ValueType | None:
    """Stage a call; give the reason of its refusal."""
    try:
        await staged.put(TENANT, call)
    except Refusal as refused:
        return refused.reason
    return None


async def test_deletes_go_on_when_the_store_is_full(tmp_path: Path) -> None:
    store = LmdbStore(
        tmp_path / "small",
        map_size_bytes=8 << 20,
        databases=DATABASES,
        quota_bytes=2 << 20,
        on_fatal=print,
        name="staging",
    )
    staged = StagedCalls(lambda: store)
    chain = Chain()
    calls = [chain.add(tokens=20_000) for _ in range(40)]
    outcomes = [await outcome_of(staged, call) for call in calls]
    full = outcomes.index(er.ERROR_REASON_STORE_FULL)
    assert set(outcomes[full:]) == {er.ERROR_REASON_STORE_FULL}
    calls, late = calls[:full], calls[full]
    assert (await staged.put(TENANT, calls[0])).coords == coords_of(calls[0])
    assert staged.some(TENANT, KEY, [calls[0].call_id]) == calls[:1]
    assert await staged.delete(TENANT, KEY, [call.call_id for call in calls]) == len(calls)
    assert store.read(lambda txn: txn.last(TOTALS, b"")) is not None
    await staged.put(TENANT, late)
    await store.close()


@pytest.mark.requirement("ADM-9", "TRN-12")
async def test_a_prefix_is_read_from_the_attempts_that_its_calls_are_staged_under(
    staged: StagedCalls,
) -> None:
    chain = Chain("r1")
    first = [chain.add("a"), chain.add("b")]
    chain.goes_on_in("r1-a1")
    second = [chain.add("c"), chain.add("a")]
    assert [call.parent_capture_key for call in (*first, *second)] == ["", "", "r1", ""]
    await together(staged, *first, *second)
    query = pb.PrefixQuery(capture_key="r1-a1", call_id="a")
    read = staged.prefix(TENANT, query)
    assert [delta.call_id for delta in read.deltas] == ["a", "b", "c", "a"]
    tokens = b"".join(delta.token_ids for delta in read.deltas)
    assert tokens == chain.sequence.astype("<u4").tobytes()
    await staged.drop(TENANT, "r1")
    with pytest.raises(Refusal) as refused:
        staged.prefix(TENANT, query)
    assert refused.value.reason == er.ERROR_REASON_PREFIX_BROKEN
    held = pb.PrefixQuery(capture_key="r1-a1", call_id="a", held_call_ids=["c"])
    assert [delta.call_id for delta in staged.prefix(TENANT, held).deltas] == ["a"]
