"""A backup of all stores is of one moment, however busy the mesh is meanwhile."""

import argparse
import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from callforest_mesh import store_commands
from callforest_mesh.chassis.configuration import load
from callforest_mesh.chassis.store_moment import UnsteadyStoresError, at_one_moment
from callforest_mesh.chassis.store_snapshot import StoreSnapshot
from callforest_mesh.store_verification import Verification, verify_stores
from tests.integration.finalizer_mesh import FinalizerMesh, Player, publish_chain_group, take
from tests.integration.running_mesh import settings

pytestmark = pytest.mark.requirement("OPS-3")
WAIT_S = 60
Work = Callable[[], Awaitable[object]]


@pytest.fixture
async def mesh() -> AsyncIterator[FinalizerMesh]:
    with tempfile.TemporaryDirectory() as folder:
        made = FinalizerMesh(Path(folder), "processes")
        await made.start()
        yield made
        await made.stop()


async def backed_up(mesh: FinalizerMesh, name: str) -> Verification:
    """Run the command beside the mesh, and verify what it made."""
    target = mesh.folder / "backups" / name
    configuration = load(environment={}, settings=settings(mesh.folder))
    parsed = argparse.Namespace(name="all", directory=target)
    assert await asyncio.to_thread(store_commands._backup, parsed, configuration) == 0
    return await asyncio.to_thread(verify_stores, target)


def interleave(monkeypatch: pytest.MonkeyPatch, *works: Work) -> list[Work]:
    """Have work done before each of the first snapshots of Staging, which is taken last."""
    loop, left = asyncio.get_running_loop(), list(works)
    first, renew = StoreSnapshot.__init__, StoreSnapshot.renew

    def work(path: Path) -> None:
        if path.name == "staging" and left:
            asyncio.run_coroutine_threadsafe(left.pop(0)(), loop).result(WAIT_S)

    def opened(self: StoreSnapshot, path: Path, *, alone: bool = False) -> None:
        if not alone:
            work(path)
        first(self, path, alone=alone)

    def renewed(self: StoreSnapshot) -> None:
        work(self._path)
        renew(self)

    monkeypatch.setattr(StoreSnapshot, "__init__", opened)
    monkeypatch.setattr(StoreSnapshot, "renew", renewed)
    return left


async def test_what_happens_between_the_snapshots_is_in_all_of_them_or_in_none(
    mesh: FinalizerMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = await publish_chain_group(mesh, "g", 2)
    begun, new = Player(mesh, "begun"), Player(mesh, "new")
    await begun.open()

    async def call() -> None:
        await begun.call("a")

    async def begin() -> None:
        await new.chain(1)

    async def consume() -> None:
        rows = mesh.finalizer.subscribe("trainer")
        await rows.credit(1)
        (batch,) = await take(rows, 1)
        await rows.commit(batch.cursor)
        await rows.close()
        await mesh.cleaned(*trained)

    left = interleave(monkeypatch, begin, call, consume)
    found = await backed_up(mesh, "one")
    assert found.faults == []
    assert not left, "all of it happened between two snapshots"
    assert (found.counts["attempts"], found.counts["staged_calls"]) == (4, 2)


async def test_a_mesh_that_is_never_idle_is_backed_up_whole(mesh: FinalizerMesh) -> None:
    ends, moved = asyncio.Event(), asyncio.Event()
    made = 0

    async def play(number: int) -> None:
        nonlocal made
        for rollout in itertools.count():
            player = Player(mesh, f"r{number}-{rollout}")
            await player.open()
            for call in range(4):
                await player.call(f"c{call}", f"c{call - 1}" if call else None)
                made += 1
                moved.set()
                if ends.is_set():
                    return

    async with asyncio.TaskGroup() as players:
        for number in range(8):
            players.create_task(play(number))
        for number in range(5):
            moved.clear()
            await asyncio.wait_for(moved.wait(), WAIT_S)
            before = made
            found = await backed_up(mesh, str(number))
            assert found.faults == []
            assert found.counts["records"] >= before
        ends.set()


class Restless:
    """A snapshot of a store that has a later commit for some time."""

    def __init__(self, name: str, commits: int) -> None:
        self.name = name
        self.commits = commits
        self.reads = 0

    @property
    def is_latest(self) -> bool:
        return self.commits <= 0

    def renew(self) -> None:
        self.commits -= 1

    def read_databases(self) -> None:
        self.reads += 1


def test_stores_that_never_stand_still_are_told_from_those_that_do() -> None:
    idle, busy = Restless("staging", 0), Restless("ledger", 7)
    assert at_one_moment([idle, busy], tries=7) == 7
    assert (idle.reads, busy.reads) == (1, 1)
    idle, busy = Restless("staging", 0), Restless("ledger", 8)
    with pytest.raises(UnsteadyStoresError, match=r"staging, ledger .* 7 times: try") as never:
        at_one_moment([idle, busy], tries=7)
    assert isinstance(never.value, OSError), "the command says it and ends with 1"
    assert (idle.reads, busy.reads) == (0, 0)
