"""The disk in memory does what the durable store does, and crashes as a process does."""

import asyncio
import random
from pathlib import Path

import pytest

from callforest_core.refusal import Refusal
from callforest_mesh.chassis.transaction import ReadTxn, WriteTxn
from tests.simulation.disk import Disk, MemoryStore
from tests.unit.chassis.stores import getting, make, putting, refusal

TABLES = ("calls", "names")


def random_write(chance: random.Random, number: int):
    """Make a function that reads and changes a few keys, and at times refuses or fails."""
    steps = [
        (chance.choice(("put", "delete", "get", "scan", "last")), chance.randrange(40))
        for _ in range(chance.randint(1, 6))
    ]
    end = chance.random()

    def write(txn: WriteTxn) -> list[object]:
        told: list[object] = []
        for step, place in steps:
            key, prefix = b"k%02d" % place, b"k%d" % (place % 4)
            if step == "put":
                txn.put("calls", key, b"%d" % number)
            elif step == "delete":
                told.append(txn.delete("calls", key))
            else:
                told.append(look(txn, step, key, prefix))
        if end < 0.1:
            raise refusal()
        if end < 0.15:
            raise ValueError("a bug")
        return told

    return write


def look(txn: ReadTxn, step: str, key: bytes, prefix: bytes) -> object:
    if step == "get":
        return txn.get("calls", key)
    if step == "last":
        return txn.last("calls", prefix)
    return list(txn.scan("calls", prefix, key, 5))


async def outcome(store, write) -> object:
    try:
        return await store.write(write)
    except (Refusal, ValueError) as error:
        return repr(error)


@pytest.mark.parametrize("seed", range(5))
async def test_it_answers_as_the_durable_store_does(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    durable = make(tmp_path / "store")
    memory = MemoryStore(Disk(random.Random(seed), rerun=0.3), TABLES, "test")
    for number in range(80):
        write = random_write(chance, number)
        assert await outcome(memory, write) == await outcome(durable, write), number

    def everything(txn: ReadTxn) -> list[tuple[bytes, bytes]]:
        return list(txn.scan("calls", b"k"))

    assert memory.read(everything) == durable.read(everything) != []
    await durable.close()
    await memory.close()


async def test_readers_see_a_commit_when_it_is_durable() -> None:
    disk = Disk(random.Random(1))
    store = MemoryStore(disk, TABLES, "test")
    writing = store.submit(putting(b"k", b"v"), lambda done: done)
    await asyncio.sleep(0)
    assert disk.under_way
    assert store.read(getting(b"k")) is None
    await writing
    assert store.read(getting(b"k")) == b"v"


async def test_a_crash_keeps_all_of_a_commit_or_nothing() -> None:
    kept = set()
    for seed in range(20):
        disk = Disk(random.Random(seed))
        store = MemoryStore(disk, TABLES, "test")
        waiting = [store.submit(putting(b"k%d" % n, b"v"), lambda done: done) for n in range(3)]
        await asyncio.sleep(0)
        store._writer.cancel()
        store.crash()
        again = MemoryStore(disk, TABLES, "test")
        found = again.read(lambda txn: [key for key, _ in txn.scan("calls", b"k")])
        kept.add(len(found))
        assert not any(one.done() for one in waiting)
    assert kept == {0, 3}


async def test_a_flawed_disk_acknowledges_what_a_crash_takes() -> None:
    disk = Disk(random.Random(1), acks_early=True)
    store = MemoryStore(disk, TABLES, "test")
    await store.write(putting(b"k", b"v"))
    store._writer.cancel()
    store.crash()
    assert MemoryStore(disk, TABLES, "test").read(getting(b"k")) is None
