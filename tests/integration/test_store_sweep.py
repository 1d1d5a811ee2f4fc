"""`callforest gc` beside running services: what no training needs goes, and nothing else."""

import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.capture.v1 import group_batch_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.codec import staged_call_to_proto
from callforest_client.errors import RefusedError
from callforest_mesh.chassis.configuration import SERVICES
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.ledger.store import attempt_prefix
from callforest_mesh.terminal import DONE, NO
from tests.integration import store_damage as damage
from tests.integration.finalizer_mesh import (
    TENANT,
    FinalizerMesh,
    Player,
    publish_chain_group,
    read_again,
    take,
)
from tests.unit.staging.calls import COMPLETION

pytestmark = pytest.mark.requirement("OPS-3", "LED-8", "FIN-1")
WAIT_S = 120
AT_ONCE = ("--settle", "0", "--late-age", "0", "--retention", "0")
COMMAND = "import sys; from callforest_mesh.cli import main; sys.exit(main())"


class World:
    """A mesh on sockets with attempts in every state that a sweep tells apart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.players: dict[str, Player] = {}
        self.running = False

    async def play(self) -> None:
        mesh = self.mesh
        # Consumed: a healthy rollout, and one whose late bytes no receipt names.
        healthy, late = (self.player(name) for name in ("eaten", "eaten-late"))
        await healthy.chain(2)
        await late.chain(1)
        await late.stage("late", "a")
        for slot, player in enumerate((healthy, late)):
            await player.finish("eaten", slot)
        await mesh.finalizer.finalize_group("eaten", 2)
        rows = mesh.finalizer.subscribe("trainer")
        await rows.credit(1)
        (batch,) = await take(rows, 1)
        await rows.commit(batch.cursor)
        await rows.close()
        await mesh.cleaned()
        # Waits to be trained.
        for player in await publish_chain_group(mesh, "waits", 2, calls=2):
            self.players[player.rollout_id] = player
        # Runs, with a call whose record may still come.
        await self.player("running").chain(2)
        await self.players["running"].stage("c", "b")
        # Sealed and not finalized, with late bytes beside what may yet train.
        await self.player("sealed").chain(2)
        await self.players["sealed"].stage("late", "b")
        await self.players["sealed"].seal()
        # Superseded: its rollout is on its second attempt.
        first = self.player("again")
        await first.chain(2)
        second = self.players["again-a1"] = Player(mesh, "again")
        await second.chain(1)

    async def start(self) -> None:
        self.mesh = FinalizerMesh(self.folder)
        for player in self.players.values():
            player._mesh = self.mesh
        await self.mesh.start()
        self.running = True

    async def stop(self) -> None:
        if self.running:
            self.running = False
            await self.mesh.stop()

    def player(self, rollout_id: str) -> Player:
        self.players[rollout_id] = Player(self.mesh, rollout_id)
        return self.players[rollout_id]

    async def staged(self) -> dict[str, list[str]]:
        found = {name: await player.staged_ids() for name, player in self.players.items()}
        return {name: ids for name, ids in found.items() if ids}

    async def waiting(self) -> group_batch_pb2.GroupBatch:
        (batch,) = await read_again(self.mesh, 1)
        return batch

    async def command(self, *words: str, program: str = COMMAND) -> tuple[int, list[str], str]:
        settings = [
            f"state_dir={self.folder}",
            *(f"addresses.{name}=unix:{self.folder}/{name}.sock" for name in SERVICES),
        ]
        flags = [word for one in settings for word in ("--set", one)]
        ended = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, *words, *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(ended.communicate(), WAIT_S)
        assert ended.returncode is not None
        return ended.returncode, out.decode().splitlines(), err.decode()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        made = World(Path(folder))
        await made.start()
        await made.play()
        yield made
        await made.stop()


BEFORE = {
    "eaten-late": ["late"],
    "waits-r0": ["a", "b"],
    "waits-r1": ["a", "b"],
    "running": ["a", "b", "c"],
    "sealed": ["a", "b", "late"],
    "again": ["a", "b"],
    "again-a1": ["a"],
}
AFTER = {
    "waits-r0": ["a", "b"],
    "waits-r1": ["a", "b"],
    "running": ["a", "b", "c"],
    "sealed": ["a", "b"],
    "again-a1": ["a"],
}
WHOLE = {
    "late_attempts": 1,
    "late_records": 1,
    "unrestored_attempts": 0,
    "unrestored_records": 0,
    "drop_attempts": 3,
    "drop_records": 3,
    "abandoned_rollouts": 0,
    "abandoned_records": 0,
    "abandoned_bytes": 0,
}


UNITS = ("rollouts", "records", "bytes")


async def expect_swept(world: World, waiting: group_batch_pb2.GroupBatch) -> None:
    """Prove that what may go is gone, what must stay is there, and all fits together."""
    assert await world.staged() == AFTER
    assert await world.waiting() == waiting
    ledger = world.mesh.ledger
    for rollout_id in ("eaten", "eaten-late"):
        with pytest.raises(RefusedError) as refused:
            await ledger.manifest(rollout_id)
        assert refused.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
        receipt = await world.mesh.finalizer.receipt(rollout_id)
        assert receipt.capture_key == rollout_id, "what was trained stays on record"
    assert len((await ledger.manifest("again")).records) == 2
    # Late bytes of what was torn down are refused.
    for name in ("again", "eaten-late", "eaten"):
        late = staged_call_to_proto(world.players[name].made["a"].call, b"{}", COMPLETION)
        with pytest.raises(RefusedError) as refused:
            await world.mesh.staging.stage(late)
        assert refused.value.reason == er.ERROR_REASON_PARTITION_DROPPED
    await world.stop()
    status, lines, err = await world.command("verify", "--store")
    assert status == DONE, (lines, err)
    await world.start()


async def test_a_sweep_removes_what_no_training_needs(world: World) -> None:
    waiting = await world.waiting()
    assert await world.staged() == BEFORE
    status, lines, _ = await world.command("gc", *AT_ONCE)
    told = json.loads(lines[-1].removeprefix("RESULT "))
    assert (status, told) == (
        DONE,
        WHOLE
        | {"applied": False, "faults": 0, "log_attempts": 2, "log_records": 13}
        # What runs, is sealed, or was begun again is named, since its retention is over.
        | {"kept_rollouts": 3, "kept_records": 9, "kept_bytes": told["kept_bytes"]},
    )
    assert told["kept_bytes"] > 0
    assert "would remove 1 staged calls without a record of acme/sealed" in lines
    assert "would remove 2 staged calls, and takes no more of acme/again" in lines
    assert await world.staged() == BEFORE, "telling changes nothing"
    status, lines, _ = await world.command("gc", *AT_ONCE, "--apply")
    done = json.loads(lines[-1].removeprefix("RESULT "))
    assert (status, done) == (DONE, told | {"applied": True})
    await expect_swept(world, waiting)
    status, lines, _ = await world.command("gc", *AT_ONCE, "--apply")
    assert status == DONE
    again = json.loads(lines[-1].removeprefix("RESULT "))
    left = {key for key, value in again.items() if value} - {"applied"}
    assert left == {"kept_rollouts", "kept_records", "kept_bytes"}, "nothing is left to remove"


async def test_what_is_not_old_enough_stays(world: World) -> None:
    status, lines, _ = await world.command(
        "gc", "--apply", "--settle", "300", "--late-age", "1e10", "--retention", "1e10"
    )
    assert status == DONE
    # What was consumed needs no age: the finalizer would have removed it, had it known of it.
    assert await world.staged() == {
        name: ids for name, ids in BEFORE.items() if name != "eaten-late"
    }
    assert json.loads(lines[-1].removeprefix("RESULT ")) == {
        "applied": True,
        "faults": 0,
        "late_attempts": 0,
        "late_records": 0,
        "unrestored_attempts": 0,
        "unrestored_records": 0,
        "drop_attempts": 1,
        "drop_records": 1,
        "log_attempts": 0,
        "log_records": 0,
        **{f"{kind}_{what}": 0 for kind in ("abandoned", "kept") for what in UNITS},
    }
    assert (await world.mesh.ledger.manifest("eaten")).records


DYING = """
import os, signal, sys
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_mesh.cli import main

left, after = int(sys.argv.pop(1)), sys.argv.pop(1) == "after"

def dying(what):
    async def call(*args):
        global left
        left -= 1
        if left < 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await what(*args)
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    return call

StagingClient.delete = dying(StagingClient.delete)
StagingClient.drop_partition = dying(StagingClient.drop_partition)
LedgerClient.forget = dying(LedgerClient.forget)
sys.exit(main())
"""


async def test_a_sweep_that_is_killed_loses_nothing_and_ends_when_repeated(world: World) -> None:
    waiting = await world.waiting()
    kills = 0
    for step in range(20):
        # Removals shrink the plan, so each run dies at its first or its second.
        words = (str(step % 2), ("before", "after")[step % 3 == 0])
        status, lines, err = await world.command(*words, "gc", *AT_ONCE, "--apply", program=DYING)
        assert await world.waiting() == waiting
        if status == DONE:
            break
        assert status == -signal.SIGKILL, (lines, err)
        kills += 1
    assert status == DONE
    assert kills >= 4
    await expect_swept(world, waiting)


async def test_a_sweep_leaves_a_damaged_log_alone(world: World) -> None:
    await world.stop()
    event = attempt_prefix(AttemptKey(TENANT, "sealed")) + (3).to_bytes(8, "big")
    damage.delete(world.folder / "ledger", "events", event)
    await world.start()
    status, lines, _ = await world.command("gc", *AT_ONCE, "--apply")
    assert status == NO
    assert any(line.startswith("fault ") and "no event 3; left alone" in line for line in lines)
    assert await world.staged() == AFTER | {"sealed": BEFORE["sealed"]}


async def test_a_sweep_needs_all_three_stores(world: World) -> None:
    status, _, complaint = await world.command("gc", "--set", f"ledger.path={world.folder}/none")
    assert status == NO
    assert "run gc where all three stores are" in complaint


async def test_a_backup_of_a_running_mesh_verifies(world: World) -> None:
    target = world.folder / "backups" / "one"
    status, lines, complaint = await world.command("backup", "all", str(target))
    assert status == DONE, complaint
    assert [line.split(":")[0] for line in lines] == [
        "backed up finalizer",
        "backed up ledger",
        "backed up staging",
    ]
    status, lines, _ = await world.command("verify", "--store", str(target))
    assert status == DONE, lines
    assert "intact" in lines
    for words in (("compact", "staging"), ("verify", "--store")):
        status, _, complaint = await world.command(*words)
        assert status == NO
        assert "another process has it open" in complaint
    # The backup is a state directory: a mesh goes on from it.
    waiting = await world.waiting()
    await world.stop()
    for name in ("staging", "ledger", "finalizer"):
        shutil.rmtree(world.folder / name)
        (target / name).rename(world.folder / name)
    status, lines, _ = await world.command("compact", "all")
    assert (status, len(lines)) == (DONE, 3)
    await world.start()
    assert await world.staged() == BEFORE
    assert await world.waiting() == waiting
