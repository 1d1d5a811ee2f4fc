"""Compaction and backup: whole at every moment, and never of what is damaged or in use."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import WriteTxn
from callforest_mesh.chassis.store_copy import UNFINISHED, back_up, compact
from callforest_mesh.chassis.store_hold import StoreHold, StoreInUseError
from callforest_mesh.chassis.store_snapshot import StoreSnapshot
from callforest_mesh.chassis.store_walk import walk
from tests.integration import store_damage as damage
from tests.robustness.powercut import ROOT
from tests.unit.chassis.stores import getting, make, putting
from tests.unit.chassis.test_lmdb_store import WRITER

pytestmark = pytest.mark.requirement("OPS-3")
WAIT_S = 120
PIPE = asyncio.subprocess.PIPE
STRANGER = """
import lmdb, sys
environment = lmdb.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""

SECOND_WRITER = """
import sys
from pathlib import Path
from callforest_mesh.chassis.store_hold import StoreInUseError
from tests.unit.chassis.stores import make
try:
    make(Path(sys.argv[1]))
except StoreInUseError as error:
    print(error, flush=True)
"""


async def started(*arguments: str) -> asyncio.subprocess.Process:
    """Start a program that says when it is ready, then waits for its end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=PIPE, stdout=PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), WAIT_S)
    return process


async def filled(path: Path) -> dict[bytes, bytes]:
    """Make a store most of whose pages are free; give what it holds."""
    kept = {b"kept%02d" % number: bytes([number]) * 3000 for number in range(20)}

    def put_all(txn: WriteTxn) -> None:
        for number in range(40):
            txn.put("calls", b"gone%02d" % number, bytes(100_000))
        for key, value in kept.items():
            txn.put("names", key, value)

    def delete_some(txn: WriteTxn) -> None:
        for number in range(40):
            txn.delete("calls", b"gone%02d" % number)

    store = make(path)
    await store.write(put_all)
    await store.write(delete_some, reserve=True)
    await store.close()
    return kept


def content(path: Path) -> dict[bytes, bytes | None]:
    with StoreSnapshot(path) as snapshot:
        return {key: value for name in snapshot.databases for key, value in snapshot.records(name)}


async def test_a_compacted_store_is_smaller_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "store"
    kept = await filled(path)
    copied = compact(path)
    assert copied.records == len(kept)
    assert copied.bytes_after < copied.bytes_before // 10
    assert copied.bytes_after == (path / "data.mdb").stat().st_size
    assert {file.name for file in path.iterdir()} == {"data.mdb", "made"}
    assert [folder.name for folder in tmp_path.iterdir()] == ["store"]
    assert content(path) == kept
    store = make(path)
    await store.write(putting(b"more", b"x"))
    assert store.read(getting(b"kept00", "names")) == kept[b"kept00"]
    await store.close()
    assert content(path) == kept | {b"more": b"x"}
    assert compact(path).records == len(kept) + 1


@pytest.mark.requirement("LED-1")
async def test_a_store_has_one_writer(tmp_path: Path) -> None:
    """Two meshes on one state directory would make each other's views wrong."""
    path = tmp_path / "store"
    store = make(path)
    await store.write(putting(b"a", b"x"))
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SECOND_WRITER, str(path), stdout=PIPE, cwd=ROOT
    )
    told, _ = await asyncio.wait_for(second.communicate(), WAIT_S)
    assert b"another service writes it" in told
    assert store.read(getting(b"a")) == b"x"
    await store.close()
    make_again = make(path)
    await make_again.close()


async def test_a_store_in_use_is_not_compacted(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = make(path)
    with pytest.raises(StoreInUseError, match="stop it first"):
        compact(path)
    await store.close()
    stranger = await started("-c", STRANGER, str(path))
    with pytest.raises(StoreInUseError, match="another program"):
        compact(path)
    stranger.kill()
    await asyncio.wait_for(stranger.wait(), WAIT_S)
    compact(path)
    with StoreHold(path, alone=True), pytest.raises(StoreInUseError, match="compacting"):
        make(path)
    store = make(path)
    await store.close()


async def test_a_damaged_store_is_neither_compacted_nor_backed_up(tmp_path: Path) -> None:
    path = tmp_path / "store"
    await filled(path)
    raw = damage.stored(path, "names", b"kept07")
    damage.put(path, "names", b"kept07", raw[:-1] + b"!")
    before = (path / "data.mdb").read_bytes()

    def copy_elsewhere() -> None:
        with StoreSnapshot(path) as snapshot:
            back_up(snapshot, path, tmp_path / "backup")

    for copy in (lambda: compact(path), copy_elsewhere):
        with pytest.raises(Refusal) as refused:
            copy()
        assert refused.value.reason == er.ERROR_REASON_STORE_CORRUPT
        assert refused.value.facts["key"] == f"names/{b'kept07'.hex()}"
    assert (path / "data.mdb").read_bytes() == before
    assert [folder.name for folder in tmp_path.iterdir()] == ["store"]


KILLED = """
import os, signal, sys
from pathlib import Path
from callforest_mesh.chassis import store_copy

left = int(sys.argv[2])

def dying(what):
    def call(*args, **named):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return what(*args, **named)
    return call

for name in ("replace", "unlink", "rmdir", "mkdir"):
    setattr(Path, name, dying(getattr(Path, name)))
os.fsync = dying(os.fsync)
store_copy._compare = dying(store_copy._compare)
store_copy.sync_directory = dying(store_copy.sync_directory)
print(store_copy.compact(Path(sys.argv[1])).records)
"""


async def test_a_compaction_that_is_killed_leaves_a_whole_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    kept = await filled(path)
    sizes = set()
    for step in range(30):
        ended = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, str(path), str(step), stdout=PIPE, stderr=PIPE
        )
        said, complaint = await asyncio.wait_for(ended.communicate(), WAIT_S)
        sizes.add((path / "data.mdb").stat().st_size)
        store = make(path)
        assert store.read(getting(b"kept19", "names")) == kept[b"kept19"]
        await store.close()
        assert content(path) == kept
        if ended.returncode == 0:
            break
        assert ended.returncode == -signal.SIGKILL, complaint
    assert said.split() == [b"%d" % len(kept)]
    assert step >= 10, "it must have been killed at many moments"
    assert len(sizes) > 1, "before the swap and after it"
    assert not path.with_name(path.name + UNFINISHED).exists()


async def test_a_backup_of_a_live_store_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "store"
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(path), stdout=asyncio.subprocess.PIPE
    )
    assert writer.stdout is not None

    async def acknowledged(count: int) -> set[bytes]:
        lines = [await asyncio.wait_for(writer.stdout.readline(), 60) for _ in range(count)]
        return {line.strip() for line in lines}

    before: set[bytes] = set()
    for number in range(4):
        before |= await acknowledged(100)
        target = tmp_path / f"backup-{number}"
        with StoreSnapshot(path) as snapshot:
            copied = back_up(snapshot, path, target)
            # The writer went on meanwhile; the snapshot did not.
            after = await acknowledged(100)
            assert copied.records == sum(1 for _ in snapshot.records("calls"))
        assert walk(target) == []
        found = content(target)
        assert before <= set(found)
        assert all(value == key * 10 for key, value in found.items())
        assert copied.records == len(found)
        before |= after
        assert writer.returncode is None, "the writer must live through its backup"
    with pytest.raises(FileExistsError), StoreSnapshot(path) as snapshot:
        back_up(snapshot, path, tmp_path / "backup-0")
    writer.kill()
    await asyncio.wait_for(writer.wait(), 60)
    # A backup is a store: it opens, and takes writes.
    store = make(tmp_path / "backup-3")
    await store.write(putting(b"after", b"x"))
    await store.close()


async def test_a_snapshot_that_is_killed_does_not_hold_pages_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = make(path)
    await store.write(putting(b"a", bytes(1000)))
    reader = (
        "import sys\n"
        "from pathlib import Path\n"
        "from callforest_mesh.chassis.store_snapshot import StoreSnapshot\n"
        "snapshot = StoreSnapshot(Path(sys.argv[1]))\n"
        "print(len(list(snapshot.records('calls'))), flush=True)\n"
        "sys.stdin.read()\n"
    )
    reading = await started("-c", reader, str(path))
    assert store._env.info()["num_readers"] >= 1, "a writer must know of it"
    assert not store._env.reader_check()
    reading.kill()
    await asyncio.wait_for(reading.wait(), 60)
    assert store._env.reader_check() == 1
    await store.close()
