"""On a full disk what ends old work has blocks of its own, and then a typed refusal."""

import errno
import os
from collections.abc import Iterator

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis import disk_room
from callforest_mesh.chassis.lmdb_store import LmdbStore
from tests.unit.chassis.stores import Opener, getting, putting

pytestmark = pytest.mark.requirement("OPS-3")


class Shared(LmdbStore):
    """A store on a file system that others fill too."""

    free = 1 << 40

    def _free_bytes(self) -> int:
        return self.free


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    Shared.free = 1 << 40


def refuse_blocks(code: int) -> object:
    def allocate(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(code, os.strerror(code))

    return allocate


async def expect_full(store: LmdbStore, key: bytes = b"row") -> None:
    with pytest.raises(Refusal, match="its disk is full; free space there") as refused:
        await store.write(putting(key, bytes(400)), reserve=True)
    assert refused.value.reason == er.ERROR_REASON_STORE_FULL
    assert refused.value.retry_after_ms == 5000
    assert refused.value.facts["free_bytes"] == str(Shared.free)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP, errno.ENOSYS])
async def test_old_work_waits_for_the_disk_and_nothing_dies(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(disk_room, "allocate", refuse_blocks(code))
    async with opened(kind=Shared) as store:
        await store.write(putting(b"old", b"x"))
        assert store.statistics().disk_kept_bytes == 0
        Shared.free = 0
        commits = store.statistics().commits
        await expect_full(store)
        with pytest.raises(Refusal, match="its disk is full"):
            await store.write(lambda txn: txn.delete("calls", b"old"), reserve=True)
        assert store.statistics().commits == commits + 2, "a refusal leaves a commit of nothing"
        assert store.read(getting(b"old")) == b"x"
        assert store.read(getting(b"row")) is None
        # The floor is no room: others write there too.
        Shared.free = disk_room.FLOOR_BYTES
        await expect_full(store)
        Shared.free = 3 * disk_room.FLOOR_BYTES
        await store.write(putting(b"row", bytes(400)), reserve=True)
        assert await store.write(lambda txn: txn.delete("calls", b"old"), reserve=True)


async def test_blocks_that_are_kept_end_old_work_on_a_full_disk(opened: Opener) -> None:
    async with opened(kind=Shared) as store:
        await store.write(putting(b"old", bytes(100_000)))
        assert store.statistics().disk_kept_bytes > disk_room.KEPT_BYTES // 2
        Shared.free = 0
        with pytest.raises(Refusal, match="almost full"):
            await store.write(putting(b"new", b"x"))
        written = 0
        refused: Refusal | None = None
        while refused is None and written < 1000:
            try:
                await store.write(putting(b"row%d" % written, bytes(100_000)), reserve=True)
                written += 1
            except Refusal as refusal:
                refused = refusal
        assert "its disk is full" in str(refused)
        assert disk_room.KEPT_BYTES // 2 < written * 100_000 < disk_room.KEPT_BYTES
        assert store.statistics().disk_kept_bytes > 0
        for number in range(written):
            assert await store.write(
                lambda txn, number=number: txn.delete("calls", b"row%d" % number), reserve=True
            )
        assert store.read(getting(b"old")) == bytes(100_000)
        Shared.free = 1 << 40
        await store.write(putting(b"row", bytes(100_000)), reserve=True)
        await store.write(putting(b"later", b"x"), reserve=True)
        assert store.statistics().disk_kept_bytes > disk_room.KEPT_BYTES // 2


async def test_a_large_batch_is_let_in_as_far_as_its_blocks_reach(opened: Opener) -> None:
    """What a function does behind its first change is not refused: what begins also ends."""
    async with opened(kind=Shared, databases=["calls"]) as store:
        Shared.free = 0
        with pytest.raises(Refusal, match="its disk is full"):
            await store.write(putting(b"a", bytes(6 << 20)), reserve=True)
        await store.write(putting(b"a", bytes(1 << 20)), reserve=True)


async def test_no_blocks_are_kept_beyond_the_map(opened: Opener) -> None:
    size = 2 << 20
    async with opened(kind=Shared, map_size_bytes=size, quota_bytes=size // 2) as store:
        kept, length = store.statistics().disk_kept_bytes, store.statistics().file_bytes
        assert 0 < kept <= size - length
        assert length < 1 << 20, "the file is no longer for its blocks"
