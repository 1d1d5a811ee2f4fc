"""Restored attempts before the finalizer: receipts, rows, cleaning, `gc`, damage, late writes."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from callforest.capture.v1 import group_batch_pb2, receipt_pb2, selection_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.certificates import certify, verify_certificate
from callforest_client.codec import staged_call_to_proto
from callforest_client.staging import StagingClient
from callforest_mesh.finalizer.policies import RETURNED_HISTORY
from callforest_mesh.trainer.core import AdvantageOptions
from callforest_mesh.trainer.rows import gather_step
from tests.integration.finalizer_mesh import FinalizerMesh, Player, read_again, take
from tests.integration.forest_mesh import ForestPlayer, owned, paths, refused
from tests.integration.offline_rows import verify_offline
from tests.unit.staging.calls import COMPLETION

pytestmark = pytest.mark.requirement("TRN-12", "ADM-9")

MODES = pytest.mark.parametrize("kind", [Player, ForestPlayer], ids=["chain", "forest"])


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(tmp_path)
    await mesh.start()
    yield mesh
    await mesh.stop()


async def finished(player: Player, group_id: str = "g", slot: int = 0) -> receipt_pb2.Receipt:
    """Finalize a chain whose answers are all accepted."""
    if isinstance(player, ForestPlayer):
        result = player.result(*player.made)
        return await player.finish(group_id, slot, result=result)
    last = list(player.made)[-1]
    return await player.finish(group_id, slot, declared_response_id=f"chatcmpl-{last}")


async def published(mesh: FinalizerMesh) -> group_batch_pb2.GroupBatch:
    """Publish the group, and hold it against everything that reads it."""
    await mesh.finalizer.finalize_group("g", 1)
    (batch,) = await read_again(mesh, 1)
    verify_offline(batch)
    for certificate in certify(batch):
        verify_certificate(certificate)
    gather_step([batch], AdvantageOptions())
    return batch


async def consume(mesh: FinalizerMesh) -> None:
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    await rows.commit(batch.cursor)
    await rows.close()
    await mesh.cleaned()


@MODES
async def test_a_rollout_restored_twice_is_one_row_of_three_owners(
    mesh: FinalizerMesh, kind: type[Player]
) -> None:
    player = kind(mesh, "r0")
    await player.chain(2)
    await player.restore("b")
    await player.call("c", "b")
    await player.restore("b", "c")
    await player.call("d", "c")
    receipt = await finished(player)
    assert not receipt.masked, receipt
    sources = [(call.call_id, call.source_capture_key) for call in receipt.calls]
    assert sources == [("a", "r0"), ("b", "r0"), ("c", "r0-a1"), ("d", "")]
    assert receipt.total_token_count == 24
    batch = await published(mesh)
    assert [call.capture_key for call in batch.segments] == ["r0", "r0", "r0-a1", "r0-a2"]
    assert paths(batch) == [["a", "b", "c", "d"]]
    assert owned(batch, 0) == ["a", "b", "c", "d"]


@MODES
async def test_an_attempt_of_restored_calls_alone_trains(
    mesh: FinalizerMesh, kind: type[Player]
) -> None:
    player = kind(mesh, "r0")
    await player.chain(2)
    await player.restore("b")
    receipt = await finished(player)
    assert not receipt.masked, receipt
    assert [call.source_capture_key for call in receipt.calls] == ["r0", "r0"]
    assert owned(await published(mesh), 0) == ["a", "b"]


@MODES
async def test_a_dead_branch_that_was_not_restored_is_not_in_the_receipt(
    mesh: FinalizerMesh, kind: type[Player]
) -> None:
    player = kind(mesh, "r0")
    await player.chain(2)
    await player.call("x", "a")
    del player.made["x"]
    await player.restore("b")
    await player.call("c", "b")
    receipt = await finished(player)
    assert [call.call_id for call in receipt.calls] == ["a", "b", "c"]
    assert not receipt.masked, receipt


@MODES
async def test_a_poisoned_attempt_is_not_restored_and_stays_open(
    mesh: FinalizerMesh, kind: type[Player]
) -> None:
    player = kind(mesh, "r0")
    await player.chain(1)
    await player.fail("x")
    error = await refused(player.restore("a"))
    assert error.reason == er.ERROR_REASON_RESTORE_REFUSED
    assert error.metadata["fault"] == "capture_poisoned"
    await player.call("b", "a")
    assert (await finished(player)).mask_reason == "capture_poisoned"


@pytest.mark.requirement("SEL-6")
@pytest.mark.parametrize("selects", ["explicit", RETURNED_HISTORY])
async def test_a_selection_holds_over_checkpoint_restart_and_repeat(
    mesh: FinalizerMesh, selects: str
) -> None:
    """Made before the checkpoint, it means the same calls; repeated, the very same receipt."""
    player = ForestPlayer(mesh, "r0")
    await player.chain(2)
    await player.call("x", "a")  # a retry that the harness dropped
    before = {
        "explicit": {
            "selection": selection_pb2.Selection(call_ids=["a", "b"], terminal_call_id="b")
        },
        RETURNED_HISTORY: {"result": player.result("a", "b")},
    }[selects]
    await player.restore("b", "x")
    request = await player.request("g", 0, **before)
    receipt = await mesh.finalizer.finalize_rollout(request)
    assert not receipt.masked, receipt
    assert [(one.call_id, one.selected) for one in receipt.calls] == [
        ("a", True),
        ("b", True),
        ("x", False),
    ]
    for name in ("finalizer", "ledger", "staging"):
        await mesh.restart(name)
    again = await mesh.finalizer.finalize_rollout(request)
    assert again.SerializeToString(deterministic=True) == receipt.SerializeToString(
        deterministic=True
    )
    request.reward = 0.5
    error = await refused(mesh.finalizer.finalize_rollout(request))
    assert error.reason == er.ERROR_REASON_GROUP_MISMATCH
    await published(mesh)


@MODES
async def test_a_restored_call_is_cleaned_once_and_only_behind_the_cursor(
    tmp_path: Path, kind: type[Player]
) -> None:
    mesh = FinalizerMesh(tmp_path)
    removed: list[tuple[str, ...]] = []

    class Noting(StagingClient):
        async def delete(self, capture_key: str, call_ids: Sequence[str]) -> int:
            removed.append((capture_key, *call_ids))
            return await super().delete(capture_key, call_ids)

        async def drop_partition(self, capture_key: str) -> int:
            removed.append((capture_key,))
            return await super().drop_partition(capture_key)

    noting: list[StagingClient] = []

    def of_finalizer() -> StagingClient:
        noting.append(Noting(mesh.channels["staging"], tenant="acme", timeout_s=30.0))
        return noting[-1]

    mesh.staging_of_finalizer = of_finalizer
    await mesh.start()
    player = kind(mesh, "r0")
    await player.chain(2)
    await player.call("x", "a")  # never restored, and so in no receipt
    await player.restore("b")
    await player.call("c", "b")
    await player.restore("c")
    await player.call("d", "c")
    del player.made["x"]
    receipt = await finished(player)
    assert not receipt.masked, receipt
    await published(mesh)
    assert await player.staged_ids() == ["a", "b", "c", "d"]
    assert removed == []
    await consume(mesh)
    assert removed == [("r0-a2", "d"), ("r0",), ("r0-a1",)]
    assert (await mesh.staging.stat()).call_count == 0
    # Whatever the dead harnesses still stage is refused.
    for made in (player.made["a"], player.made["c"]):
        error = await refused(mesh.staging.stage(staged_call_to_proto(made.call, b"", COMPLETION)))
        assert error.reason == er.ERROR_REASON_PARTITION_DROPPED
    for client in noting:
        await client.close()
    await mesh.stop()


@MODES
async def test_a_lost_call_of_an_owner_masks_the_rollout_by_its_name(
    mesh: FinalizerMesh, kind: type[Player]
) -> None:
    player, healthy = kind(mesh, "r0"), kind(mesh, "r1")
    for one in (player, healthy):
        await one.chain(2)
        await one.restore("b")
        await one.call("c", "b")
    await mesh.staging.delete("r0", ["a"])
    masked, trains = await finished(player), await finished(healthy, slot=1)
    assert masked.mask_reason == "staged_call_missing"
    assert "r0/a" in masked.mask_detail
    assert not trains.masked, trains
    await mesh.finalizer.finalize_group("g", 2)
    (batch,) = await read_again(mesh, 1)
    verify_offline(batch)
    assert {call.capture_key for call in batch.segments} == {"r1", "r1-a1"}


@MODES
async def test_what_the_dead_harness_still_writes_is_nobodys(
    mesh: FinalizerMesh, kind: type[Player]
) -> None:
    player = kind(mesh, "r0")
    await player.chain(2)
    late = await player.stage("late", "b")
    await player.restore("b")
    row = player._record(late, "stop")
    row.coords.capture_key = "r0"
    error = await refused(mesh.ledger.record(row))
    assert error.reason == er.ERROR_REASON_ATTEMPT_SEALED
    after = player._complete("after", "b", 6)
    assert after.call.identity.capture_key == "r0-a1"
    del player.made["late"], player.made["after"]
    await player.call("c", "b")
    receipt = await finished(player)
    assert [call.call_id for call in receipt.calls] == ["a", "b", "c"]
    assert not receipt.masked, receipt


async def test_a_lost_answer_is_given_again(mesh: FinalizerMesh) -> None:
    player = Player(mesh, "r0")
    await player.chain(2)
    request = str(uuid.uuid4())
    first = await player.restore("b", request_id=request)
    player.key = "r0"
    for name in ("ledger", "admission"):
        await mesh.restart(name)
    assert await player.restore("b", request_id=request) == first
    await player.call("c", "b")
    player.key = "r0"
    error = await refused(player.restore("b", request_id=request))
    assert error.metadata["fault"] == "in_use"


async def test_an_attempt_opened_behind_a_receipt_is_never_finalized(mesh: FinalizerMesh) -> None:
    player = Player(mesh, "r0")
    await player.chain(2)
    await finished(player)
    await player.restore("b")
    error = await refused(finished(player))
    assert error.reason == er.ERROR_REASON_GROUP_MISMATCH
