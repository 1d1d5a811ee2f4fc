"""When a snapshot that is held pushes new work back: only if the file grows meanwhile."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.chassis.transaction import READ_S
from callforest_mesh.finalizer.service import FinalizerOptions, FinalizerService
from callforest_mesh.ledger.ledger import Ledger
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from callforest_mesh.ledger.settlement import SettlementWatch
from callforest_mesh.ledger.store import LmdbLedgerStore
from callforest_mesh.staging.service import StagingOptions, StagingService
from callforest_mesh.staging.store import StagedCalls
from tests.unit.chassis.stores import make, putting
from tests.unit.ledger.calls import KEY, TENANT, intent, record
from tests.unit.staging.calls import Chain

pytestmark = pytest.mark.requirement("OPS-3")
VALUE = bytes(30_000)
ROOM_BYTES = 1 << 20
STEP_S = 16.0
"""Longer than from one look to the next."""
LITTLE_BYTES = 200_000
"""What the writes that let time pass make the file grow by, at most."""
PUT_AT_MOST = 500


@dataclass
class Watched:
    """A store whose clock is the test's.

    Attributes:
        store: it.
        now: what its clock says.
    """

    store: LmdbStore = field(init=False)
    now: float = 0.0

    async def put(self, key: bytes = b"a") -> None:
        await self.store.write(putting(key, VALUE))

    async def hold(self) -> object:
        """Begin to read, and let the store see that for too long."""
        reader = self.store._env.begin(buffers=True)
        await self.pass_by()
        return reader

    async def pass_by(self) -> None:
        """Let time pass, with looks, until what is held has been held for too long."""
        for _ in range(5):
            self.now += STEP_S
            for _ in range(2):  # a look comes after a commit, and before the next one
                await self.store.write(lambda txn: txn.put("names", b"n", b""), reserve=True)
        assert self.store.statistics().oldest_reader_s > READ_S

    async def grow(self) -> Refusal:
        """Rewrite one value until that is pushed back."""
        for _ in range(PUT_AT_MOST):
            try:
                await self.put()
            except Refusal as refusal:
                return refusal
        raise AssertionError("nothing was pushed back")

    def last_page(self) -> int:
        return self.store._env.info()["last_pgno"]


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    made = Watched()
    made.store = make(
        tmp_path / "store",
        clock=lambda: made.now,
        room_bytes=ROOM_BYTES,
        map_size_bytes=1 << 29,
        quota_bytes=1 << 28,
    )
    yield made
    await made.store.close()


async def fill(watched: Watched, count: int) -> None:
    for number in range(count):
        await watched.put(b"%d" % number)


async def test_a_swept_store_takes_work_while_its_file_does_not_grow(watched: Watched) -> None:
    """Its file is many times what is in use, and what is free of it is used again."""
    await fill(watched, 300)
    for number in range(300):
        await watched.store.write(
            lambda txn, number=number: txn.delete("calls", b"%d" % number), reserve=True
        )
    await fill(watched, 3)
    reader, before = await watched.hold(), watched.last_page()
    statistics = watched.store.statistics()
    assert statistics.file_bytes > 20 * statistics.used_bytes
    assert statistics.file_bytes > 4 * ROOM_BYTES
    await fill(watched, 100)
    assert watched.last_page() == before
    reader.abort()


async def test_growth_pushes_new_work_back_until_the_reader_is_gone(watched: Watched) -> None:
    await fill(watched, 10)
    reader, before = await watched.hold(), watched.last_page()
    refusal = await watched.grow()
    assert refusal.reason == er.ERROR_REASON_OVERLOADED
    assert (refusal.facts["limit"], refusal.retry_after_ms) == ("store_snapshot_s", 5000)
    grown = (watched.last_page() - before) * 4096
    assert abs(grown - ROOM_BYTES) < LITTLE_BYTES
    await watched.store.write(putting(b"old", VALUE), reserve=True)
    assert await watched.store.write(lambda txn: txn.delete("calls", b"0"), reserve=True)
    with pytest.raises(Refusal):
        await watched.put()
    reader.abort()
    await watched.put()
    assert watched.store.statistics().oldest_reader_s == 0.0


async def test_the_file_may_grow_by_half_of_what_is_in_use(watched: Watched) -> None:
    await fill(watched, 200)
    used = watched.store.statistics().used_bytes
    assert used > 4 * ROOM_BYTES
    reader, before = await watched.hold(), watched.last_page()
    await watched.grow()
    assert abs((watched.last_page() - before) * 4096 - used / 2) < LITTLE_BYTES
    reader.abort()


async def test_what_grew_before_a_snapshot_was_held_for_too_long_is_not_counted(
    watched: Watched,
) -> None:
    first = await watched.hold()
    await watched.grow()
    second = watched.store._env.begin(buffers=True)
    first.abort()
    await watched.pass_by()
    before = watched.last_page()
    await watched.grow()
    assert abs((watched.last_page() - before) * 4096 - ROOM_BYTES) < LITTLE_BYTES
    second.abort()


def options_of(kind: Callable[..., object], path: Path) -> object:
    return kind(path=path, map_size_bytes=1 << 28, quota_bytes=1 << 27)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every snapshot be held for too long at once, and a file grow by little."""
    watch = "callforest_mesh.chassis.reader_watch"
    monkeypatch.setattr(f"{watch}.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(f"{watch}.READ_S", -1.0)
    monkeypatch.setattr("callforest_mesh.ledger.service.ROOM_BYTES", 1 << 16)


def request_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


@pytest.mark.usefixtures("hasty")
async def test_the_ledger_pushes_attempts_and_intents_back_and_takes_rows(tmp_path: Path) -> None:
    service = LedgerService(options_of(LedgerOptions, tmp_path / "ledger"), Drain())
    lmdb = service._open_store()
    store = LmdbLedgerStore(lambda: lmdb)
    store.open()
    ledger = Ledger(store, SettlementWatch("ledger", waits_max=4), cached_calls_max=1000)
    await ledger.open_attempt(TENANT, KEY, request_id(0))
    reader, taken = lmdb._env.begin(buffers=True), []
    with contextlib.suppress(Refusal):
        for number in range(PUT_AT_MOST):
            await ledger.record_intent(TENANT, intent(f"c{number}"))
            taken.append(f"c{number}")
    assert 0 < len(taken) < PUT_AT_MOST
    with pytest.raises(Refusal, match="store_snapshot_s"):
        await ledger.record_intent(TENANT, intent("too-many"))
    with pytest.raises(Refusal, match="store_snapshot_s"):
        await ledger.open_attempt(TENANT, KEY, request_id(1))
    await ledger.record_intent(TENANT, intent(taken[0]))  # a repeat writes nothing
    for call_id in taken:
        await ledger.commit_record(TENANT, record(call_id))
    reader.abort()
    await ledger.record_intent(TENANT, intent("later"))
    sealed = await ledger.seal(AttemptKey(TENANT, KEY))
    assert (sealed.record_count, list(sealed.pending_call_ids)) == (len(taken), ["later"])
    await store.close()
    await ledger.stop()


@pytest.mark.usefixtures("hasty")
async def test_staging_takes_the_calls_that_were_admitted(tmp_path: Path) -> None:
    options = options_of(StagingOptions, tmp_path / "staging")
    store = StagingService(options, Drain()).open_store(options)
    calls, chain = StagedCalls(lambda: store), Chain()
    await calls.put(TENANT, chain.add())
    reader, before = store._env.begin(buffers=True), store.statistics()
    for number in range(400):
        await calls.put(TENANT, chain.add(tokens=1000))
        await calls.delete(TENANT, "rollout-1", [f"call-{number:05d}"])
    assert store.statistics().oldest_reader_s > 0.0
    assert store.statistics().file_bytes > before.file_bytes + (1 << 22)
    reader.abort()
    await store.close()


@pytest.mark.usefixtures("hasty")
async def test_the_finalizer_takes_what_ends_a_rollout(tmp_path: Path) -> None:
    options = options_of(FinalizerOptions, tmp_path / "finalizer")
    store = FinalizerService(options, Drain(), None, None)._open_store()
    reader = store._env.begin(buffers=True)
    for _ in range(200):
        await store.write(putting(b"a", VALUE, "rollouts"))
    assert store.statistics().oldest_reader_s > 0.0
    reader.abort()
    await store.close()
