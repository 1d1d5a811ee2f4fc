"""A full store refuses writes in a typed way, and never deletes."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import LmdbStore, WriteTxn
from callforest_mesh.chassis.store_walk import walk
from tests.unit.chassis.stores import (
    MAP_BYTES,
    HeldStore,
    Opener,
    getting,
    in_one_batch,
    make,
    putting,
)


def deleting(key: bytes) -> Callable[[WriteTxn], bool]:
    return lambda txn: txn.delete("calls", key)


async def fill(store: LmdbStore, size: int = 100_000) -> Refusal:
    for number in range(1000):
        try:
            await store.write(putting(b"%06d" % number, bytes(size)))
        except Refusal as refused:
            return refused
    raise AssertionError("the store never filled")


async def test_the_quota_stops_writes_but_not_deletes(opened: Opener) -> None:
    async with opened(quota_bytes=1 << 20) as store:
        refused = await fill(store)
        assert refused.reason == er.ERROR_REASON_STORE_FULL
        assert refused.retry_after_ms is not None
        assert refused.facts["quota_bytes"] == str(1 << 20)
        assert 0 < store.statistics().used_bytes <= (1 << 20) + 100_000
        assert store.read(getting(b"000000")) is not None
        assert await store.write(lambda txn: txn.get("calls", b"000000")) is not None
        with pytest.raises(Refusal):
            await store.write(putting(b"new", bytes(100_000)))
        await store.write(putting(b"new", bytes(100_000)), reserve=True)
        for number in range(9):
            assert await store.write(
                lambda txn, number=number: txn.delete("calls", b"%06d" % number), reserve=True
            )
        await store.write(putting(b"newer", bytes(100_000)))


async def test_what_began_within_the_quota_ends(opened: Opener) -> None:
    def put_many(txn: WriteTxn) -> None:
        for number in range(20):
            txn.put("calls", b"%d" % number, bytes(100_000))

    async with opened(quota_bytes=1 << 20) as store:
        await store.write(put_many)
        with pytest.raises(Refusal):
            await store.write(putting(b"new", b""))


async def test_a_full_map_is_a_typed_refusal(opened: Opener) -> None:
    def overfill(txn: WriteTxn) -> None:
        for number in range(100):
            txn.put("calls", b"big%d" % number, bytes(1 << 20))

    async with opened(kind=HeldStore) as store:
        outcomes = await in_one_batch(store, putting(b"a", b"1"), overfill, putting(b"b", b"2"))
        assert isinstance(outcomes[1], Refusal)
        assert outcomes[1].reason == er.ERROR_REASON_STORE_FULL
        assert (outcomes[0], outcomes[2]) == (None, None)
        assert store.read(lambda txn: [key for key, _ in txn.scan("calls", b"")]) == [
            b"a",
            b"b",
            b"first",
        ]
        await store.write(putting(b"later", b"x"))


async def test_a_full_disk_is_seen_before_it_fails_a_commit(opened: Opener) -> None:
    class Crowded(LmdbStore):
        free = 0

        def _free_bytes(self) -> int:
            return self.free

    async with opened(kind=Crowded) as store:
        with pytest.raises(Refusal) as refused:
            await store.write(putting(b"a", b"x"))
        assert refused.value.reason == er.ERROR_REASON_STORE_FULL
        await store.write(putting(b"b", b"x"), reserve=True)
        Crowded.free = 1 << 40
        await store.write(putting(b"a", b"x"))


def test_the_quota_leaves_a_reserve(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tenth"):
        make(tmp_path / "store", quota_bytes=MAP_BYTES)


async def test_slots_of_dead_readers_are_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("callforest_mesh.chassis.reader_watch.LOOK_EVERY_S", 0.01)
    store = make(tmp_path / "store")
    reader = (
        "import lmdb, sys, os, signal\n"
        "env = lmdb.open(sys.argv[1], max_dbs=3)\n"
        "txn = env.begin()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", reader, str(tmp_path / "store")
    )
    assert await asyncio.wait_for(killed.wait(), 60) == -signal.SIGKILL
    async with asyncio.timeout(20):
        while not store.statistics().stale_readers:
            await store.write(putting(b"a", b"x"))
    await store.close()


@pytest.mark.requirement("OPS-3")
async def test_a_write_that_the_disk_cannot_hold_is_refused_and_deletes_go_on(
    opened: Opener,
) -> None:
    class Small(LmdbStore):
        def _free_bytes(self) -> int:
            return (1 << 20) + 5000

    async with opened(kind=Small, disk_reserve_bytes=1 << 20) as store:
        await store.write(putting(b"small", bytes(1000)))
        with pytest.raises(Refusal, match="disk is almost full") as refused:
            await store.write(putting(b"large", bytes(6000)))
        assert refused.value.reason == er.ERROR_REASON_STORE_FULL
        assert refused.value.retry_after_ms is not None
        assert refused.value.facts["free_bytes"] == str((1 << 20) + 5000)
        assert store.read(getting(b"small")) == bytes(1000)
        assert await store.write(lambda txn: txn.delete("calls", b"small"), reserve=True)
        assert store.statistics().disk_free_bytes == (1 << 20) + 5000


@pytest.mark.requirement("OPS-3")
async def test_slots_of_dead_readers_are_freed_at_the_opening(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    reader = (
        "import lmdb, sys, os, signal\n"
        "env = lmdb.open(sys.argv[1], max_dbs=3, readonly=True)\n"
        "txn = env.begin()\n"
        "print('reading', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = asyncio.subprocess.PIPE
    reading = await asyncio.create_subprocess_exec(
        sys.executable, "-c", reader, str(tmp_path / "store"), stdin=pipe, stdout=pipe
    )
    assert reading.stdout is not None
    assert await asyncio.wait_for(reading.stdout.readline(), 60) == b"reading\n"
    # A second reader keeps the table of readers from being made anew by the next opener.
    keeping = await asyncio.create_subprocess_exec(
        sys.executable, "-c", reader, str(tmp_path / "store"), stdin=pipe, stdout=pipe
    )
    assert keeping.stdout is not None
    assert await asyncio.wait_for(keeping.stdout.readline(), 60) == b"reading\n"
    await store.close()
    reading.kill()
    assert await asyncio.wait_for(reading.wait(), 60) == -signal.SIGKILL
    store = make(tmp_path / "store")
    assert store.statistics().stale_readers == 1
    await store.close()
    keeping.kill()
    await asyncio.wait_for(keeping.wait(), 60)


@pytest.mark.requirement("OPS-3")
async def test_a_snapshot_is_not_read_for_ever(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as store:
        await store.write(putting(b"a", b"x"))
        monkeypatch.setattr("callforest_mesh.chassis.lmdb_store.READ_S", -1.0)
        with pytest.raises(Refusal) as refused:
            store.read(getting(b"a"))
        assert refused.value.reason == er.ERROR_REASON_OVERLOADED
        assert refused.value.facts["limit"] == "store_read_s"
        assert await store.write(lambda txn: txn.get("calls", b"a")) == b"x"


@pytest.mark.requirement("OPS-3")
@pytest.mark.parametrize("cut", [1, 4096, 40_960, 400_000])
async def test_a_file_that_lost_its_end_is_not_opened(tmp_path: Path, cut: int) -> None:
    store = make(tmp_path / "store")
    for number in range(8):
        await store.write(putting(b"%d" % number, bytes(100_000)))
    await store.close()
    file = tmp_path / "store" / "data.mdb"
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size - cut)
    with pytest.raises(Refusal, match="lacks") as refused:
        make(tmp_path / "store")
    assert refused.value.reason == er.ERROR_REASON_STORE_CORRUPT
    assert refused.value.facts["store"] == "test"
    assert refused.value.facts["key"]


@pytest.mark.requirement("OPS-3")
async def test_a_file_that_lost_only_free_pages_is_whole(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    await store.write(putting(b"a", bytes(100_000)))
    for number in range(4):
        await store.write(putting(b"b%d" % number, bytes(100_000)))
    for number in range(4):
        await store.write(deleting(b"b%d" % number), reserve=True)
    await store.close()
    file = tmp_path / "store" / "data.mdb"
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size - 10 * 4096)
    assert walk(tmp_path / "store") == []
    store = make(tmp_path / "store")
    assert store.read(getting(b"a")) == bytes(100_000)
    await store.write(putting(b"c", bytes(1_000_000)))
    await store.close()


@pytest.mark.requirement("OPS-3")
async def test_a_file_whose_head_is_damaged_is_not_opened(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    await store.close()
    file = tmp_path / "store" / "data.mdb"
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(Refusal, match="no store") as refused:
        make(tmp_path / "store")
    assert refused.value.facts == {"store": "test", "key": "data.mdb"}


@pytest.mark.requirement("OPS-3")
@pytest.mark.parametrize("loss", ["emptied", "removed"])
async def test_a_file_that_is_gone_is_no_new_store(tmp_path: Path, loss: str) -> None:
    store = make(tmp_path / "store")
    await store.write(putting(b"a", b"x"))
    await store.close()
    file = tmp_path / "store" / "data.mdb"
    if loss == "emptied":
        file.write_bytes(b"")
    else:
        file.unlink()
    with pytest.raises(Refusal, match="empty or gone") as refused:
        make(tmp_path / "store")
    assert refused.value.facts == {"store": "test", "key": "data.mdb"}
    # A directory whose store was never whole is as good as none.
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "data.mdb").write_bytes(b"")
    store = make(tmp_path / "new")
    await store.write(putting(b"a", b"x"))
    await store.close()
