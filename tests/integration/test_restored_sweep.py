"""`gc` and `verify --store` where attempts were restored: what the latest one holds stays."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest_mesh.chassis.configuration import SERVICES, load
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.ledger.store import attempt_prefix
from callforest_mesh.store_sweep import Removal, _apply
from callforest_mesh.store_verification import verify_stores
from tests.integration import store_damage as damage
from tests.integration.finalizer_mesh import TENANT, FinalizerMesh, Player, read_again, take
from tests.integration.forest_mesh import ForestPlayer
from tests.integration.test_restored_custody import consume, finished

pytestmark = pytest.mark.requirement("TRN-12", "OPS-3", "FIN-1")

MODES = pytest.mark.parametrize("kind", [Player, ForestPlayer], ids=["chain", "forest"])
ADMITTED_S = 1_700_000_000.0
"""When the players' calls were admitted, long ago."""
WAIT_S = 60.0


class World:
    """A mesh on sockets, and `gc` beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.players: list[Player] = []
        addresses = [f"addresses.{name}=unix:{folder}/{name}.sock" for name in SERVICES]
        settings = [f"state_dir={folder}", *addresses]
        self.flags = [word for one in settings for word in ("--set", one)]
        self.configuration = load(environment={}, settings=settings)

    async def sweep(self, retention_s: float = 1e12, *more: str) -> tuple[list[str], int]:
        """Remove what can go; give what was told, without the counts, and the status."""
        ages = ("--settle", "0", "--late-age", "0", "--retention", str(retention_s))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "callforest_mesh.cli", "gc", "--apply", *ages, *more),
            *self.flags,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
        assert process.returncode is not None
        return out.decode().splitlines()[:-1], process.returncode

    async def verify(self) -> list[str]:
        """Verify the stopped stores; give the faults."""
        await self.mesh.stop()
        found = await asyncio.to_thread(verify_stores, self.folder)
        await self.start()
        return [f"{name} {fault.key} {fault.text}" for name, fault in found.faults]

    async def lose_event(self, capture_key: str) -> None:
        """Damage the log of an attempt: its second event is gone."""
        await self.mesh.stop()
        event = attempt_prefix(AttemptKey(TENANT, capture_key)) + (2).to_bytes(8, "big")
        damage.delete(self.folder / "ledger", "events", event)
        await self.start()

    async def start(self) -> None:
        self.mesh = FinalizerMesh(self.folder)
        for player in self.players:
            player._mesh = self.mesh
        await self.mesh.start()

    def player(self, rollout_id: str, kind: type[Player] = Player) -> Player:
        self.players.append(kind(self.mesh, rollout_id))
        return self.players[-1]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.start()
    yield made
    await made.mesh.stop()


@MODES
async def test_what_the_latest_attempt_restored_stays_and_the_rest_goes(
    world: World, kind: type[Player]
) -> None:
    player = world.player("r0", kind)
    await player.chain(2)
    await player.call("x", "a")
    await player.restore("b")
    await player.call("c", "b")
    await player.call("y", "b")
    await player.restore("c")
    assert await world.verify() == []
    lines, status = await world.sweep()
    assert status == 0
    assert sorted(lines) == [
        "removed 1 staged calls that were not restored of acme/r0",
        "removed 1 staged calls that were not restored of acme/r0-a1",
    ]
    assert await player.staged_ids() == ["a", "b", "c"]
    assert await world.sweep() == ([], 0), "nothing is left to remove"
    assert await world.verify() == []
    for name in "xy":
        del player.made[name]
    receipt = await finished(player)
    assert not receipt.masked, receipt
    await world.mesh.finalizer.finalize_group("g", 1)
    assert await world.sweep() == ([], 0), "the rollout is its finalizer's"
    await consume(world.mesh)
    assert await world.sweep() == ([], 0), "the finalizer left nothing"
    assert (await world.mesh.staging.stat()).call_count == 0
    lines, status = await world.sweep(0)
    assert status == 0
    assert len([line for line in lines if "events: the log" in line]) == 3
    assert await world.verify() == []


async def test_an_attempt_of_which_nothing_was_restored_goes_whole(world: World) -> None:
    """The second attempt restores from the first, the third from none."""
    player = world.player("r0")
    await player.chain(2)
    await player.restore("b")
    await player.open()
    lines, status = await world.sweep()
    assert (lines, status) == (["removed 2 staged calls, and takes no more of acme/r0"], 0)
    assert await world.verify() == []


async def test_a_damaged_log_of_the_latest_attempt_keeps_all_of_its_rollout(
    world: World,
) -> None:
    player, other = world.player("r0"), world.player("r1")
    for one in (player, other):
        await one.chain(2)
        await one.call("x", "a")
        await one.restore("b")
    await world.lose_event("r0-a1")
    lines, status = await world.sweep()
    assert status == 1
    faults = [line for line in lines if line.startswith("fault")]
    assert len(faults) == 2
    assert any("  r0  " in line and "left alone" in line for line in faults)
    assert "removed 1 staged calls that were not restored of acme/r1" in lines
    assert await player.staged_ids() == ["a", "b", "x"]
    assert await other.staged_ids() == ["a", "b"]


async def test_a_damaged_log_keeps_nothing_of_a_rollout_that_was_cleaned(world: World) -> None:
    player = world.player("r0")
    await player.chain(2)
    await player.restore("b")
    await finished(player)
    await world.mesh.finalizer.finalize_group("g", 1)
    await consume(world.mesh)
    await world.lose_event("r0-a1")
    lines, status = await world.sweep(0)
    assert status == 1
    assert len([line for line in lines if line.startswith("fault")]) == 1, "the log itself"
    assert any("the log of acme/r0" in line for line in lines)


@pytest.mark.requirement("LED-8")
async def test_a_superseded_attempt_that_has_the_receipt_stays_until_it_is_cleaned(
    world: World,
) -> None:
    """Its owner opened another attempt after it had finalized: the group waits for it."""
    player = world.player("r0")
    await player.chain(2)
    receipt = await finished(player)
    await world.mesh.finalizer.finalize_group("g", 1)
    (batch,) = await read_again(world.mesh, 1)
    await player.open()
    assert await world.sweep() == ([], 0)
    (again,) = await read_again(world.mesh, 1)
    assert (again, again.receipts[0]) == (batch, receipt)
    await consume(world.mesh)
    assert await player.staged_ids() == []
    assert await world.verify() == []


async def test_a_receipt_that_came_behind_the_plan_keeps_its_calls(world: World) -> None:
    player = world.player("r0")
    await player.chain(2)
    planned = [
        Removal("drop", TENANT, "r0", (), 2, "r0"),
        Removal("late", TENANT, "r0", ("a",), 1, "r0"),
        Removal("unrestored", TENANT, "r0", ("b",), 1, "r0"),
    ]
    await finished(player)
    assert await asyncio.to_thread(asyncio.run, _apply(world.configuration, planned)) == []
    assert await player.staged_ids() == ["a", "b"]


async def test_an_open_attempt_of_a_cleaned_rollout_is_dropped(world: World) -> None:
    player = world.player("r0")
    await player.chain(2)
    await finished(player)
    await player.open()
    await player.call("late")
    await world.mesh.finalizer.finalize_group("g", 1)
    await consume(world.mesh)
    assert await player.staged_ids() == ["late"]
    lines, status = await world.sweep()
    assert (lines, status) == (["removed 1 staged calls, and takes no more of acme/r0-a1"], 0)
    assert await player.staged_ids() == []


async def test_an_attempt_of_restored_calls_alone_has_their_age(world: World) -> None:
    player = world.player("r0")
    await player.chain(2)
    await player.restore("b")
    await finished(player)
    await world.mesh.finalizer.finalize_group("g", 1)
    rows = world.mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    await rows.commit(batch.cursor)
    await rows.close()
    await world.mesh.cleaned()
    age_s = time.time() - ADMITTED_S
    assert await world.sweep(age_s + 1e8) == ([], 0)
    lines, _ = await world.sweep(age_s - 1000)
    assert len([line for line in lines if "events: the log" in line]) == 2


async def test_an_owner_whose_log_was_forgotten_holds_no_orphans(world: World) -> None:
    player = world.player("r0")
    await player.chain(2)
    await player.restore("b")
    assert await world.mesh.ledger.forget("r0") > 0
    assert await world.verify() == []
    await player.call("c", "b")
    receipt = await finished(player)
    assert not receipt.masked, receipt


async def test_verification_names_a_restored_call_that_is_not_there(world: World) -> None:
    player = world.player("r0")
    await player.chain(2)
    await player.restore("b")
    await world.mesh.staging.delete("r0", ["a"])
    (fault,) = await world.verify()
    assert "r0-a1/a" in fault
    assert "not staged under r0" in fault
