"""An acknowledgement that comes late: before the settle deadline, and after it (B22).

Times are those of the case divided by many: the deadline is an option, and nothing here waits for
a clock but the one wait that must run out.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from callforest.capture.v1 import attempt_pb2, group_batch_pb2, receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.codec import staged_call_to_proto
from callforest_mesh.chassis.configuration import SERVICES
from callforest_mesh.terminal import DONE
from callforest_mesh.trainer.batch import BatchOptions, plan_step
from callforest_mesh.trainer.core import AdvantageOptions, MaskedRewardPolicy
from callforest_mesh.trainer.rows import gather_step
from tests.integration.finalizer_mesh import FinalizerMesh, take
from tests.integration.forest_mesh import ForestPlayer, paths, play, refused
from tests.integration.offline_rows import verify_offline
from tests.unit.staging.calls import COMPLETION

pytestmark = [pytest.mark.bugcase("B22"), pytest.mark.requirement("LED-6", "LED-8")]
LONG_S = 30.0
SHORT_S = 0.05
REWARDS = (1.0, 1.0, 0.0, 0.0)
EXCLUDE = AdvantageOptions(normalise=False)
INCLUDE = AdvantageOptions(normalise=False, masked_reward_policy=MaskedRewardPolicy.INCLUDE)


@pytest.fixture
async def mesh() -> AsyncIterator[FinalizerMesh]:
    with tempfile.TemporaryDirectory() as folder:
        running = FinalizerMesh(Path(folder))
        await running.start()
        yield running
        await running.stop()


async def withheld(mesh: FinalizerMesh) -> ForestPlayer:
    """Play four calls; the acknowledgement of the second is under way when the rollout closes."""
    player = ForestPlayer(mesh, "r0")
    await play(player, ("c1", None))
    await player.stage("c2", "c1")
    await player.call("c3")
    await player.call("c4", "c3")
    await mesh.admission.close_attempt(player.key)
    return player


async def finish(player: ForestPlayer, slot: int, *shown: str) -> receipt_pb2.Receipt:
    return await player.finish("g", slot, result=player.result(*shown), reward=REWARDS[slot])


async def finish_healthy(mesh: FinalizerMesh) -> list[ForestPlayer]:
    players = [ForestPlayer(mesh, f"r{slot}") for slot in (1, 2, 3)]
    for slot, player in enumerate(players, 1):
        await play(player, ("a", None), ("b", "a"))
        assert not (await finish(player, slot, "a", "b")).masked
    return players


async def publish(mesh: FinalizerMesh) -> group_batch_pb2.GroupBatch:
    """Publish the group and consume it."""
    assert not (await mesh.finalizer.finalize_group("g", 4)).drop_reason
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    await rows.commit(1)
    await rows.close()
    await mesh.cleaned()
    return batch


def scored(
    batch: group_batch_pb2.GroupBatch, options: AdvantageOptions
) -> tuple[dict[str, float], int]:
    """The advantage of each rollout, and the tokens that the loss is divided by."""
    rows = gather_step([batch], options).rows
    retained = plan_step(rows, BatchOptions()).retained_token_count
    return {row.rollout_id: row.advantage for row in rows}, retained


async def test_an_acknowledgement_before_the_deadline_makes_a_full_row(mesh: FinalizerMesh) -> None:
    player = await withheld(mesh)
    settled = asyncio.ensure_future(mesh.ledger.await_settled(player.key, wait_s=LONG_S))
    await finish_healthy(mesh)
    assert not settled.done(), "others are finished while this one waits"
    await mesh.ledger.record(player._record(player.made["c2"], "stop"))
    assert not (await settled).pending_call_ids
    receipt = await finish(player, 0, "c1", "c2", "c3", "c4")
    assert (receipt.masked, receipt.generated_token_count) == (False, 12)
    batch = await publish(mesh)
    assert paths(batch, 0) == [["c1", "c2"], ["c3", "c4"]]
    for options in (EXCLUDE, INCLUDE):
        advantages, retained = scored(batch, options)
        expected = {"r0": 2 / 3, "r1": 2 / 3, "r2": -2 / 3, "r3": -2 / 3}
        assert advantages == pytest.approx(expected, abs=1e-15)
        assert retained == 12 + 3 * 6


@pytest.mark.requirement("LED-7", "TRN-3", "TRN-4")
async def test_an_acknowledgement_after_the_deadline_is_refused_and_its_bytes_go(
    mesh: FinalizerMesh,
) -> None:
    player = await withheld(mesh)
    waited = await mesh.ledger.await_settled(player.key, wait_s=SHORT_S)
    assert list(waited.pending_call_ids) == ["c2"]
    sealed = await mesh.ledger.seal(player.key)
    assert sealed.state == attempt_pb2.ATTEMPT_STATE_SEALED
    error = await refused(mesh.ledger.record(player._record(player.made["c2"], "stop")))
    assert error.reason == er.ERROR_REASON_ATTEMPT_SEALED
    assert error.code == grpc.StatusCode.FAILED_PRECONDITION
    await finish_healthy(mesh)
    receipt = await finish(player, 0, "c1", "c3", "c4")
    assert (receipt.masked, receipt.mask_reason) == (True, "pending_call")
    assert receipt.mask_detail == "c2"
    assert [one.call_id for one in receipt.calls] == ["c1", "c3", "c4"], "c2 is no key of cleanup"
    batch = await publish(mesh)

    # What was staged late stays apart, is never a parent, and is reclaimed by the next sweep.
    assert await player.staged_ids() == ["c2"]
    await swept(mesh)
    assert await player.staged_ids() == []
    late = staged_call_to_proto(player.made["c2"].call, b"{}", COMPLETION)
    assert (await refused(mesh.staging.stage(late))).reason == er.ERROR_REASON_PARTITION_DROPPED

    excluded = {"r0": 0.0, "r1": 1.0, "r2": -0.5, "r3": -0.5}
    included = {"r0": 0.0, "r1": 2 / 3, "r2": -2 / 3, "r3": -2 / 3}
    for options, expected in ((EXCLUDE, excluded), (INCLUDE, included)):
        advantages, retained = scored(batch, options)
        assert advantages == pytest.approx(expected, abs=1e-15)
        assert retained == 3 * 6, "a masked rollout trains nothing, whether it votes or not"


@pytest.mark.requirement("FIN-8")
async def test_what_does_not_touch_the_late_call_trains_when_that_is_asked_for() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mesh = FinalizerMesh(Path(folder), "local", incomplete_capture="train_verified_paths")
        await mesh.start()
        try:
            player = await withheld(mesh)
            assert (await mesh.ledger.await_settled(player.key, wait_s=SHORT_S)).pending_call_ids
            await finish_healthy(mesh)
            receipt = await finish(player, 0, "c1", "c2", "c3", "c4")
            batch = await publish(mesh)
        finally:
            await mesh.stop()
    assert (receipt.masked, receipt.salvaged_from) == (False, "pending_call")
    assert (receipt.mask_detail, receipt.generated_token_count) == ("c2", 9)
    verify_offline(batch)
    assert paths(batch, 0) == [["c1"], ["c3", "c4"]], "root to call 1, and what came behind"
    for options in (EXCLUDE, INCLUDE):
        advantages, retained = scored(batch, options)
        voted = {"r0": 2 / 3, "r1": 2 / 3, "r2": -2 / 3, "r3": -2 / 3}
        assert advantages == pytest.approx(voted, abs=1e-15), "it votes as if it were whole"
        assert retained == 9 + 3 * 6


async def swept(mesh: FinalizerMesh) -> None:
    """Sweep whatever the age, from another process, as stores must be."""
    sockets = [f"addresses.{name}=unix:{mesh.folder}/{name}.sock" for name in SERVICES]
    flags = [word for one in (f"state_dir={mesh.folder}", *sockets) for word in ("--set", one)]
    command = "import sys; from callforest_mesh.cli import main; sys.exit(main())"
    sweeping = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", command, "gc", "--apply", "--settle", "0", "--late-age", "0"),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await asyncio.wait_for(sweeping.communicate(), 120)
    assert sweeping.returncode == DONE, told.decode()
