"""The store keeps what it acknowledged, checks what it reads, and is used as it must be."""

import asyncio
import signal
import sys
import threading
from pathlib import Path

import lmdb
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_environment import READERS_MAX
from callforest_mesh.chassis.lmdb_store import KEY_BYTES_MAX, ReadTxn, WriteTxn
from tests.unit.chassis.stores import (
    Opener,
    getting,
    make,
    putting,
)


async def test_records_come_back_after_reopening(opened: Opener) -> None:
    async with opened() as store:
        await store.write(putting(b"a", b"one"))
        assert await store.write(lambda txn: txn.get("calls", b"a")) == b"one"
    async with opened() as store:
        assert store.read(getting(b"a")) == b"one"
        assert store.read(getting(b"b")) is None
        assert await store.write(lambda txn: txn.delete("calls", b"a")) is True
        assert await store.write(lambda txn: txn.delete("calls", b"a")) is False
        assert store.read(getting(b"a")) is None


async def test_scan_and_last_stay_inside_their_prefix(opened: Opener) -> None:
    keys = [b"a", b"b/1", b"b/2", b"b/3", b"b\xff", b"b\xff\xff", b"c"]

    def put_all(txn: WriteTxn) -> None:
        for key in keys:
            txn.put("calls", key, key * 2)

    async with opened() as store:
        await store.write(put_all)

        def scan(*args: object) -> list[bytes]:
            pairs = store.read(lambda txn: list(txn.scan("calls", *args)))
            assert all(value == key * 2 for key, value in pairs)
            return [key for key, _ in pairs]

        assert scan(b"") == keys
        assert scan(b"b/") == [b"b/1", b"b/2", b"b/3"]
        assert scan(b"b/", b"b/2") == [b"b/2", b"b/3"]
        assert scan(b"b/", b"b/2", 1) == [b"b/2"]
        assert scan(b"b/", b"b/9") == []
        assert scan(b"b", None, 0) == []
        for prefix, last in [(b"b/", b"b/3"), (b"b\xff", b"b\xff\xff"), (b"", b"c"), (b"c", b"c")]:
            found = store.read(lambda txn, prefix=prefix: txn.last("calls", prefix))
            assert found == (last, last * 2)
        for prefix in (b"a/", b"d", b"\xff"):
            assert store.read(lambda txn, prefix=prefix: txn.last("calls", prefix)) is None
        assert store.read(lambda txn: txn.last("names", b"")) is None


async def test_pieces_of_a_value(opened: Opener) -> None:
    async with opened() as store:
        await store.write(putting(b"a", b"0123456789"))

        def piece(*where: int) -> bytes | None:
            return store.read(lambda txn: txn.piece("calls", b"a", *where))

        assert piece(2, 3) == b"234"
        assert piece(0, 10) == b"0123456789"
        assert piece(8, 3) is None
        assert piece(-1, 3) is None
        assert store.read(lambda txn: txn.piece("calls", b"b", 0, 1)) is None


async def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    value = bytes(range(40))
    store = make(tmp_path / "store")
    await store.write(putting(b"a", value))
    await store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=3) as env:
        calls = env.open_db(b"calls")
        with env.begin() as txn:
            stored = txn.get(b"a", db=calls)
    assert stored.endswith(value)
    damaged = [stored[:at] + bytes([stored[at] ^ 1 << at % 8]) + stored[at + 1 :]
               for at in range(len(stored))]  # fmt: skip
    for wrong in [*damaged, stored[:-1], stored + b"\0", stored[:10], b""]:
        with lmdb.open(str(tmp_path / "store"), max_dbs=3) as env:
            calls = env.open_db(b"calls")
            with env.begin(write=True) as txn:
                txn.put(b"a", wrong, db=calls)
        store = make(tmp_path / "store")
        with pytest.raises(Refusal) as refused:
            store.read(getting(b"a"))
        assert refused.value.reason == er.ERROR_REASON_STORE_CORRUPT
        assert refused.value.facts == {"store": "test", "key": "calls/61"}
        await store.close()


@pytest.mark.parametrize("move", [(b"a", "calls", b"b", "calls"), (b"a", "calls", b"a", "names")])
async def test_a_value_in_anothers_place_is_noticed(
    tmp_path: Path, move: tuple[bytes, str, bytes, str]
) -> None:
    key, db, other_key, other_db = move
    store = make(tmp_path / "store")
    await store.write(putting(key, b"one", db))
    await store.close()
    with lmdb.open(str(tmp_path / "store"), max_dbs=3) as env:
        source, target = env.open_db(db.encode()), env.open_db(other_db.encode())
        with env.begin(write=True) as txn:
            txn.put(other_key, txn.get(key, db=source), db=target)
    store = make(tmp_path / "store")
    with pytest.raises(Refusal, match="checksum"):
        store.read(getting(other_key, other_db))
    assert store.read(getting(key, db)) == b"one"
    await store.close()


async def test_a_transaction_stays_on_its_thread_and_ends(opened: Opener) -> None:
    kept: list[WriteTxn] = []

    def keep(txn: WriteTxn) -> str:
        kept.append(txn)
        found: list[BaseException] = []

        def use() -> None:
            try:
                txn.get("calls", b"a")
            except RuntimeError as error:
                found.append(error)

        other = threading.Thread(target=use)
        other.start()
        other.join(20)
        return str(found[0])

    async with opened() as store:
        assert "belongs to the thread" in await store.write(keep)
        with pytest.raises(RuntimeError, match="ended"):
            kept[0].put("calls", b"a", b"x")
        names = set()
        for _ in range(3):
            names.add(await store.write(lambda _: threading.current_thread().name))
        assert names == {"test-writer"}


def refuse(txn: ReadTxn) -> None:
    txn.get("calls", b"a")
    for _ in txn.scan("calls", b""):
        raise Refusal(er.ERROR_REASON_CALL_NOT_FOUND, "missing")


async def test_refusals_that_are_kept_hold_no_reader(opened: Opener) -> None:
    async with opened() as store:
        await store.write(putting(b"a", b"one"))
        kept: list[Refusal] = []
        for _ in range(READERS_MAX + 1):
            with pytest.raises(Refusal) as caught:
                store.read(refuse)
            kept.append(caught.value)
        assert {one.reason for one in kept} == {er.ERROR_REASON_CALL_NOT_FOUND}
        assert store.read(getting(b"a")) == b"one"


async def test_keys_are_bounded(opened: Opener) -> None:
    async with opened() as store:
        await store.write(putting(b"k" * KEY_BYTES_MAX, b"x"))
        with pytest.raises(ValueError, match="512 bytes"):
            await store.write(putting(b"k" * (KEY_BYTES_MAX + 1), b"x"))
        with pytest.raises(ValueError, match="empty"):
            await store.write(putting(b"", b"x"))
        with pytest.raises(ValueError, match="512 bytes"):
            store.read(getting(b"k" * (KEY_BYTES_MAX + 1)))


async def test_closing_commits_what_waits_and_ends(opened: Opener) -> None:
    async with opened() as store:
        waiting = [asyncio.ensure_future(store.write(putting(b"%d" % n, b"x"))) for n in range(9)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*waiting)
        with pytest.raises(Refusal) as refused:
            await store.write(putting(b"a", b"x"))
        assert refused.value.reason == er.ERROR_REASON_DRAINING
        with pytest.raises(Refusal):
            store.read(getting(b"a"))
    async with opened() as store:
        assert store.read(lambda txn: len(list(txn.scan("calls", b"")))) == 9


async def test_foreign_stores_are_refused(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    await store.close()
    with pytest.raises(Refusal, match="'test'"):
        make(tmp_path / "store", name="other")
    with lmdb.open(str(tmp_path / "foreign"), max_dbs=3) as env:
        env.open_db(b"calls")
    with pytest.raises(Refusal, match="another program"):
        make(tmp_path / "foreign")
    more = make(tmp_path / "store", databases=["calls", "names", "added"])
    await more.write(putting(b"a", b"x", "added"))
    await more.close()


async def test_use_after_fork_is_refused(opened: Opener) -> None:
    async with opened() as store:
        store._pid += 1
        with pytest.raises(RuntimeError, match="fork"):
            await store.write(putting(b"a", b"x"))
        with pytest.raises(RuntimeError, match="fork"):
            store.read(getting(b"a"))
        store._pid -= 1


WRITER = """
import asyncio, sys
from pathlib import Path
from callforest_mesh.chassis.lmdb_store import LmdbStore

async def main():
    store = LmdbStore(Path(sys.argv[1]), map_size_bytes=16 << 20, databases=["calls", "names"],
                      quota_bytes=8 << 20, on_fatal=print, name="test")
    async def caller(name):
        for number in range(100_000):
            key = b"%d/%06d" % (name, number)
            await store.write(lambda txn: txn.put("calls", key, key * 10))
            print(key.decode(), flush=True)
    await asyncio.gather(*(caller(name) for name in range(4)))

asyncio.run(main())
"""


async def test_what_was_acknowledged_survives_kill(tmp_path: Path) -> None:
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(tmp_path / "store"), stdout=asyncio.subprocess.PIPE
    )
    assert writer.stdout is not None
    seen = [await asyncio.wait_for(writer.stdout.readline(), 60) for _ in range(60)]
    assert writer.returncode is None, "the victim must be alive when it is killed"
    writer.kill()
    # What it had printed before it died was acknowledged too; the last line may be torn.
    seen += (await asyncio.wait_for(writer.stdout.read(), 60)).splitlines(keepends=True)
    assert await asyncio.wait_for(writer.wait(), 60) == -signal.SIGKILL
    store = make(tmp_path / "store")
    for line in seen:
        if line.endswith(b"\n"):
            key = line.strip()
            assert store.read(getting(key)) == key * 10
    await store.write(putting(b"after", b"x"))
    await store.close()
