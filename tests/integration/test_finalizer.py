"""The Finalizer with real Ledger and Staging: rollouts judged, groups published, rows delivered."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc.aio
import pytest

from callforest.capture.v1 import group_batch_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.errors import RefusedError
from tests.integration.finalizer_mesh import (
    FinalizerMesh,
    Player,
    publish_chain_group,
    read_again,
    take,
)
from tests.integration.offline_rows import verify_offline


@pytest.fixture(params=["socket", "local"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(tmp_path, request.param)
    await mesh.start()
    yield mesh
    await mesh.stop()


async def refused(asked: Awaitable[object]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await asked
    return caught.value


@pytest.mark.requirement("FOR-4", "FIN-1", "FIN-2", "API-3")
@pytest.mark.parametrize("mesh", ["socket", "local", "processes"], indirect=True)
async def test_a_rollout_from_its_calls_to_its_rows_and_away(mesh: FinalizerMesh) -> None:
    """Play, finalize, publish, subscribe, verify from the bytes alone, commit, clean."""
    players = [Player(mesh, "r0"), Player(mesh, "r1")]
    bystander = Player(mesh, "elsewhere")
    await bystander.chain(1)
    for player in players:
        await player.chain(3)
        await player.call("retry", "b")  # an abandoned sibling of the last call
    late = await players[1].stage("late", "c")
    assert late.call.prev_len == 18
    await mesh.ledger.record(players[1]._record(late, "length"))
    first = await players[0].finish("g", 0, declared_response_id="chatcmpl-c", reward=1.0)
    second = await players[1].finish("g", 1, declared_response_id="chatcmpl-late", reward=0.0)
    assert [(call.call_id, call.selected) for call in first.calls] == [
        ("a", True),
        ("b", True),
        ("c", True),
        ("retry", False),
    ]
    assert (first.terminal_selection, first.terminal_call_id) == ("declared", "c")
    assert (first.generated_token_count, first.total_token_count) == (9, 18)
    assert (first.truncated, second.truncated) == (False, True)
    assert await mesh.finalizer.receipt("r1") == second

    published = await mesh.finalizer.finalize_group("g", 2)
    assert published.cursor == 1
    assert list(published.row_ids) == ["g_g0_s0", "g_g1_s0"]

    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    assert (batch.cursor, batch.group_id, batch.drop_reason) == (1, "g", "")
    assert [row.row_id for row in batch.rows] == list(published.row_ids)
    assert list(batch.receipts) == [first, second]
    assert [call.call_id for call in batch.segments] == ["a", "b", "c", "a", "b", "c", "late"]
    verify_offline(batch)
    assert await players[0].staged_ids() == ["a", "b", "c", "retry"]

    await rows.commit(1)
    await mesh.cleaned(*players)
    assert [await player.staged_ids() for player in players] == [[], []]
    assert await bystander.staged_ids() == ["a"], "nothing but the exact keys goes"
    await rows.close()
    state = await mesh.finalizer.row_log()
    assert (state.head_cursor, state.committed_cursor, state.consumer) == (1, 1, "trainer")


@pytest.mark.requirement("FIN-3")
@pytest.mark.parametrize("mesh", ["socket", "local", "processes"], indirect=True)
async def test_a_group_comes_again_byte_for_byte_until_it_is_committed(
    mesh: FinalizerMesh,
) -> None:
    await publish_chain_group(mesh, "g1")
    await publish_chain_group(mesh, "g2")
    first = [batch.SerializeToString() for batch in await read_again(mesh, 2)]
    again = [batch.SerializeToString() for batch in await read_again(mesh, 2)]
    assert first == again
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    await take(rows, 1)
    await rows.commit(1)
    await rows.close()
    (second,) = await read_again(mesh, 1)
    assert second.SerializeToString() == first[1]


@pytest.mark.requirement("FIN-3")
@pytest.mark.parametrize("mesh", ["socket", "local", "processes"], indirect=True)
async def test_a_repeated_publication_is_the_same_and_keeps_the_staged_calls(
    mesh: FinalizerMesh,
) -> None:
    """A lost acknowledgement makes the owner ask again."""
    player = Player(mesh, "r0")
    await player.chain(2)
    request = await player.request("g", 0, declared_response_id="chatcmpl-b")
    receipts = await asyncio.gather(*(mesh.finalizer.finalize_rollout(request) for _ in range(4)))
    assert all(receipt == receipts[0] for receipt in receipts)
    answers = await asyncio.gather(*(mesh.finalizer.finalize_group("g", 1) for _ in range(4)))
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].cursor == 1
    assert (await mesh.finalizer.row_log()).head_cursor == 1
    assert await player.staged_ids() == ["a", "b"]
    (batch,) = await read_again(mesh, 1)
    assert await player.staged_ids() == ["a", "b"], "delivery alone removes nothing"
    assert batch.receipts[0] == receipts[0]
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    await take(rows, 1)
    await rows.commit(1)
    await rows.close()
    await mesh.cleaned(player)
    assert await mesh.finalizer.finalize_group("g", 1) == answers[0]
    assert await mesh.finalizer.finalize_rollout(request) == receipts[0]
    assert (await mesh.finalizer.row_log()).head_cursor == 1


@pytest.mark.requirement("FIN-4")
async def test_a_masked_sibling_publishes_its_placeholder(mesh: FinalizerMesh) -> None:
    healthy = Player(mesh, "r0")
    await healthy.chain(2)
    await healthy.finish("g", 0)
    poisoned = Player(mesh, "r1")
    await poisoned.chain(1)
    await poisoned.fail("bad")
    receipt = await poisoned.finish("g", 1)
    assert (receipt.masked, receipt.mask_reason) == (True, "capture_poisoned")
    assert receipt.mask_cause == "worker_capture_failed"
    await mesh.finalizer.finalize_group("g", 2)
    (batch,) = await read_again(mesh, 1)
    training, placeholder = batch.rows
    assert placeholder.kind == group_batch_pb2.ROW_KIND_PLACEHOLDER
    assert [(row.row_id, row.slot) for row in batch.rows] == [("g_g0_s0", 0), ("g_g1_s0", 1)]
    assert [span.segment_index for span in placeholder.spans] == [
        span.segment_index for span in training.spans
    ]
    assert not any(span.owns_loss for span in placeholder.spans)
    assert all(span.owns_loss for span in training.spans)
    assert len(batch.receipts) == 2
    verify_offline(batch)


@pytest.mark.requirement("FIN-4")
async def test_a_group_that_is_masked_whole_is_a_dropped_position(mesh: FinalizerMesh) -> None:
    pending, silent = Player(mesh, "r0"), Player(mesh, "r1")
    await pending.chain(2)
    await pending.stage("c", "b")
    await silent.open()
    receipts = [await pending.finish("g", 0), await silent.finish("g", 1)]
    assert [receipt.mask_reason for receipt in receipts] == [
        "pending_call",
        "attempt_not_captured",
    ]
    assert receipts[0].mask_detail == "c"
    assert [call.call_id for call in receipts[0].calls] == ["a", "b"]
    never = pb.FinalizeRolloutRequest(group_id="g", rollout_id="r2", slot=2, reward=0.0)
    assert (await mesh.finalizer.finalize_rollout(never)).mask_reason == "attempt_not_captured"
    published = await mesh.finalizer.finalize_group("g", 3)
    assert (published.drop_reason, list(published.row_ids)) == ("no_valid_layout", [])
    await publish_chain_group(mesh, "next")
    dropped, following = await read_again(mesh, 2)
    assert (dropped.cursor, dropped.drop_reason) == (1, "no_valid_layout")
    assert (len(dropped.receipts), len(dropped.rows), len(dropped.segments)) == (3, 0, 0)
    assert (following.cursor, following.drop_reason) == (2, "")


@pytest.mark.requirement("SEL-1")
async def test_a_declared_terminal_that_matches_nothing_masks_and_never_falls_back(
    mesh: FinalizerMesh,
) -> None:
    player = Player(mesh, "r0")
    await player.chain(2)
    honest = json.dumps({"id": "chatcmpl-b"}).encode()
    receipt = await player.finish(
        "g", 0, declared_response_id="chatcmpl-nobody", scored_response=honest
    )
    assert (receipt.masked, receipt.mask_reason) == (True, "terminal_not_attributed")
    assert receipt.terminal_selection == "declared"
    assert "declared_terminal_not_captured" in receipt.terminal_trail
    assert not receipt.HasField("terminal_call_id")


@pytest.mark.requirement("SEL-1")
async def test_the_receipt_records_the_stage_and_the_group_its_heuristic_fraction(
    mesh: FinalizerMesh,
) -> None:
    """Four rollouts, each attributed by another stage; a fifth contradicts itself."""
    evidence: list[dict[str, object]] = [
        {"declared_response_id": "chatcmpl-a"},
        {"scored_response": b'{"id": "chatcmpl-a"}'},
        {"scored_response": b'{"output": [{"role": "assistant", "content": "r2 says a"}]}'},
        {},
        {
            "scored_response": b'{"id": "chatcmpl-b", "choices":'
            b' [{"message": {"role": "assistant", "content": "r4 says a"}}]}'
        },
    ]
    stages = []
    for slot, fields in enumerate(evidence):
        player = Player(mesh, f"r{slot}")
        await player.chain(2)
        receipt = await player.finish("g", slot, **fields)
        stages.append((receipt.terminal_selection, receipt.terminal_call_id, receipt.mask_reason))
    assert stages == [
        ("declared", "a", ""),
        ("response_id", "a", ""),
        ("content", "a", ""),
        ("heuristic", "b", ""),
        ("content", "", "terminal_not_attributed"),
    ]
    published = await mesh.finalizer.finalize_group("g", 5)
    assert published.heuristic_fraction == 0.2
    (batch,) = await read_again(mesh, 1)
    assert batch.heuristic_fraction == 0.2
    verify_offline(batch)


@pytest.mark.requirement("FIN-2", "API-6")
async def test_a_foreign_scope_fails_before_publication(mesh: FinalizerMesh) -> None:
    mine, other = Player(mesh, "mine"), Player(mesh, "other")
    await mine.chain(1)
    await other.chain(1)
    await other.seal()
    asked = await mine.request("g", 0)
    finalize = mesh.finalizer.finalize_rollout

    def but(**fields: object) -> pb.FinalizeRolloutRequest:
        changed = pb.FinalizeRolloutRequest()
        changed.CopyFrom(asked)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    foreign = await refused(finalize(but(capture_key="other")))
    assert (foreign.reason, foreign.code) == (
        er.ERROR_REASON_GROUP_MISMATCH,
        grpc.StatusCode.ALREADY_EXISTS,
    )
    assert foreign.metadata == {"group_id": "g", "rollout_id": "mine", "field": "capture_key"}
    for changed in (but(epoch=asked.epoch + 1), but(revision=asked.revision - 1)):
        stale = await refused(finalize(changed))
        assert (stale.reason, stale.code) == (
            er.ERROR_REASON_STALE_MANIFEST,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        assert stale.metadata["expected"] == f"{asked.epoch}.{asked.revision}"
    unknown = await refused(finalize(but(rollout_id="none", capture_key="none")))
    assert unknown.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    malformed = await refused(finalize(but(rollout_id="mine-a1")))
    assert malformed.reason == er.ERROR_REASON_INVALID_MESSAGE

    unsealed = Player(mesh, "unsealed")
    attempt = await unsealed.open()
    early = but(rollout_id="unsealed", capture_key="unsealed", epoch=attempt.epoch)
    assert (await refused(finalize(early))).reason == er.ERROR_REASON_ATTEMPT_NOT_SEALED

    assert (await refused(mesh.finalizer.receipt("mine"))).reason == (
        er.ERROR_REASON_RECEIPT_NOT_FOUND
    )
    incomplete = await refused(mesh.finalizer.finalize_group("g", 1))
    assert incomplete.reason == er.ERROR_REASON_GROUP_INCOMPLETE
    assert (await mesh.finalizer.row_log()).head_cursor == 0
    assert not (await finalize(asked)).masked


@pytest.mark.requirement("FIN-1", "FIN-2")
async def test_a_superseded_attempt_cannot_be_finalized_and_is_swept(mesh: FinalizerMesh) -> None:
    player = Player(mesh, "r0")
    await player.chain(2)
    old = await player.request("g", 0)
    abandoned = player.made
    player.made = {}
    await player.chain(1)
    assert player.key == "r0-a1"
    stale = await refused(mesh.finalizer.finalize_rollout(old))
    assert (stale.reason, stale.metadata["field"]) == (
        er.ERROR_REASON_GROUP_MISMATCH,
        "capture_key",
    )
    assert not (await player.finish("g", 0)).masked
    await mesh.finalizer.finalize_group("g", 1)
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    assert {call.capture_key for call in batch.segments} == {"r0-a1"}
    assert len(await mesh.staging.fetch("r0", list(abandoned))) == 2
    await rows.commit(1)
    await rows.close()
    await mesh.cleaned()
    for key, call_ids in (("r0", abandoned), ("r0-a1", player.made)):
        for call_id in call_ids:
            gone = await refused(mesh.staging.fetch(key, [call_id]))
            assert gone.reason == er.ERROR_REASON_CALL_NOT_FOUND
    with pytest.raises(RefusedError) as late:
        await mesh.staging.stage(staged_again(abandoned["b"].call))
    assert late.value.reason == er.ERROR_REASON_PARTITION_DROPPED


def staged_again(call):
    from tests.unit.staging.calls import message_of

    return message_of(call)


@pytest.mark.requirement("FIN-1")
async def test_a_pending_calls_bytes_are_left_when_its_rollout_is_cleaned(
    mesh: FinalizerMesh,
) -> None:
    player = Player(mesh, "r0")
    await player.chain(2)
    await player.stage("late", "b")
    assert (await player.finish("g", 0)).mask_reason == "pending_call"
    await mesh.finalizer.finalize_group("g", 1)
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    await take(rows, 1)
    await rows.commit(1)
    await rows.close()
    await mesh.cleaned()
    assert await player.staged_ids() == ["late"]


@pytest.mark.requirement("FIN-2")
async def test_a_rollout_has_one_receipt_in_one_slot_of_one_group(mesh: FinalizerMesh) -> None:
    player, rival = Player(mesh, "r0"), Player(mesh, "r1")
    await player.chain(1)
    await rival.chain(1)
    request = await player.request("g", 0, reward=1.0)
    await mesh.finalizer.finalize_rollout(request)
    request.reward = 2.0
    changed = await refused(mesh.finalizer.finalize_rollout(request))
    assert (changed.reason, changed.metadata["field"]) == (
        er.ERROR_REASON_GROUP_MISMATCH,
        "reward",
    )
    taken = await refused(mesh.finalizer.finalize_rollout(await rival.request("g", 0)))
    assert taken.metadata["field"] == "slot"
    assert (await mesh.finalizer.finalize_group("g", 1)).cursor == 1
    late = await refused(mesh.finalizer.finalize_rollout(await rival.request("g", 1)))
    assert late.metadata["field"] == "group_id"
    other = await refused(mesh.finalizer.finalize_group("g", 2))
    assert (other.reason, other.metadata["field"]) == (
        er.ERROR_REASON_GROUP_MISMATCH,
        "rollout_count",
    )


async def test_an_abandoned_group_is_dropped_as_it_is_and_cleaned(mesh: FinalizerMesh) -> None:
    player = Player(mesh, "r0")
    await player.chain(2)
    await player.finish("g", 0)
    published = await mesh.finalizer.finalize_group("g", 8, abandon_reason="agent_lost")
    assert (published.cursor, published.drop_reason) == (1, "agent_lost")
    assert await mesh.finalizer.finalize_group("g", 8, abandon_reason="agent_lost") == published
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    assert (batch.drop_reason, len(batch.receipts), len(batch.rows)) == ("agent_lost", 1, 0)
    await rows.commit(1)
    await rows.close()
    await mesh.cleaned()
    assert await player.staged_ids() == []
