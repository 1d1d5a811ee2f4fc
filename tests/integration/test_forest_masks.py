"""What keeps a rollout of forest mode from training, and in which order (LED, SEL, FIN)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.capture.v1 import group_batch_pb2, selection_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.custody.call import CallRecord
from callforest_mesh.attempt_report import report
from tests.integration.finalizer_mesh import FinalizerMesh, read_again
from tests.integration.forest_mesh import (
    ForestPlayer,
    opened,
    owned,
    paths,
    play,
    refused,
)
from tests.integration.offline_rows import verify_offline
from tests.unit.finalizer import harness_policies
from tests.unit.ledger.calls import failure, withdrawal

EXCUSED = "request_finished_without_staged_coordinates"
CUSTOM = "tests.unit.finalizer.harness_policies:last_root"


@pytest.fixture(params=["socket", "local"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(tmp_path, request.param)
    await mesh.start()
    yield mesh
    await mesh.stop()


@pytest.mark.requirement("SEL-2", "FIN-4")
async def test_evidence_that_cannot_be_taken_masks_when_its_owner_says_so(
    mesh: FinalizerMesh,
) -> None:
    odd, healthy = ForestPlayer(mesh, "r0"), ForestPlayer(mesh, "r1")
    for player in (odd, healthy):
        await play(player, ("a", None), ("b", "a"))
    asked = {"result": odd.result("b", "b"), "mask_refused_selection": True}
    request = await odd.request("g", 0, **asked)
    receipt = await mesh.finalizer.finalize_rollout(request)
    assert (receipt.masked, receipt.mask_reason) == (True, "selection_refused")
    assert (receipt.mask_cause, receipt.generated_token_count) == ("answer_duplicated", 0)
    assert receipt.mask_detail.endswith("shown twice (b)")
    assert {one.reason for one in receipt.calls} == {"masked"}
    assert await mesh.finalizer.finalize_rollout(request) == receipt, "a repeat answers the same"
    for field, changed in (
        ("result", {"result": odd.result("a")}),
        ("selection", {"selection": selection_pb2.Selection(call_ids=["a"], terminal_call_id="a")}),
        ("environment_masked", {"environment_masked": True}),
        ("mask_refused_selection", {"mask_refused_selection": False}),
    ):
        other = await odd.request("g", 0, **(asked | changed))
        error = await refused(mesh.finalizer.finalize_rollout(other))
        assert (error.reason, error.metadata["field"]) == (er.ERROR_REASON_GROUP_MISMATCH, field)
    await healthy.finish("g", 1, result=healthy.result("a", "b"))
    published = await mesh.finalizer.finalize_group("g", 2)
    assert (published.drop_reason, list(published.row_ids)) == ("", ["g_g0_s0", "g_g1_s0"])


@pytest.mark.requirement("SEL-4")
async def test_a_repeat_is_answered_before_any_policy_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def choose(records: list[CallRecord], result: object) -> object:
        asked.append(len(records))
        return records, records[-1].response_id

    monkeypatch.setattr(harness_policies, "last_root", choose)
    mesh = await opened(tmp_path, selection_policy=CUSTOM)
    try:
        player = ForestPlayer(mesh, "r0")
        await play(player, ("a", None), ("b", "a"))
        request = await player.request("g", 0)
        receipt = await mesh.finalizer.finalize_rollout(request)
        assert await mesh.finalizer.finalize_rollout(request) == receipt
        other = await player.request("g", 0, result=b"{}")
        await refused(mesh.finalizer.finalize_rollout(other))
        assert asked == [2]
    finally:
        await mesh.stop()


@pytest.mark.requirement("FIN-9", "LED-7")
@pytest.mark.parametrize(
    ("shown", "besides"), [(["b", "b"], "selection_refused"), (["b"], "selection_not_closed")]
)
async def test_what_the_environment_masks_needs_no_evidence(
    mesh: FinalizerMesh, shown: list[str], besides: str
) -> None:
    player, failed = ForestPlayer(mesh, "r0"), ForestPlayer(mesh, "r1")
    await play(player, ("a", None), ("b", "a"))
    receipt = await player.finish("g", 0, result=player.result(*shown), environment_masked=True)
    assert (receipt.mask_reason, receipt.mask_cause) == ("environment_masked", "")
    assert f"besides, {besides}" in receipt.mask_detail
    assert receipt.generated_token_count == 0, "nothing was verified"
    await play(failed, ("a", None))
    await failed.fail("b")
    first = await failed.finish("g", 1, environment_masked=True)
    assert first.mask_reason == "capture_poisoned", "what the ledger shows comes first"


@pytest.mark.requirement("SEL-5", "FIN-4")
async def test_a_selection_that_is_not_closed_masks_its_rollout_alone(mesh: FinalizerMesh) -> None:
    open_ended, healthy = ForestPlayer(mesh, "r0"), ForestPlayer(mesh, "r1")
    for player in (open_ended, healthy):
        await play(player, ("a", None), ("b", "a"))
    masked = await open_ended.finish("g", 0, result=open_ended.result("b"))
    assert (masked.masked, masked.mask_reason) == (True, "selection_not_closed")
    assert "b continues a" in masked.mask_detail
    assert [(one.call_id, one.reason) for one in masked.calls] == [
        ("a", "not_returned"),
        ("b", "masked"),
    ]
    await healthy.finish("g", 1, result=healthy.result("a", "b"))
    published = await mesh.finalizer.finalize_group("g", 2)
    assert list(published.row_ids) == ["g_g0_s0", "g_g1_s0"]
    (batch,) = await read_again(mesh, 1)
    verify_offline(batch)
    kinds = [row.kind for row in batch.rows]
    assert kinds == [group_batch_pb2.ROW_KIND_PLACEHOLDER, group_batch_pb2.ROW_KIND_TRAINING]
    assert owned(batch, 0) == []


@pytest.mark.requirement("LED-9")
async def test_a_late_failure_of_a_recorded_call_masks_only_if_it_is_selected(
    mesh: FinalizerMesh,
) -> None:
    masks = []
    for slot, accepted in enumerate((["a", "c"], ["a", "b"])):
        player = ForestPlayer(mesh, f"r{slot}")
        await play(player, ("a", None), ("b", "a"), ("c", "a"))
        await mesh.ledger.record_failure(failure("b", EXCUSED, key=player.key))
        receipt = await player.finish("g", slot, result=player.result(*accepted))
        masks.append(receipt.mask_reason)
        assert receipt.mask_cause == EXCUSED
    assert masks == ["", "capture_poisoned"]


@pytest.mark.requirement("SEL-3", "LED-2")
async def test_a_withdrawn_call_is_none_for_the_selection(tmp_path: Path) -> None:
    mesh = await opened(tmp_path, selection_policy="all_captured")
    try:
        player = ForestPlayer(mesh, "r0")
        await play(player, ("a", None))
        await player.admit("w")
        await mesh.ledger.record_withdrawal(withdrawal("w", key=player.key))
        receipt = await player.finish("g", 0, declared_response_id="chatcmpl-a")
        manifest = await mesh.ledger.manifest(player.key)
    finally:
        await mesh.stop()
    assert [one.call_id for one in manifest.withdrawals] == ["w"]
    assert (receipt.masked, [one.call_id for one in receipt.calls]) == (False, ["a"])
    assert "  withdrawn w  REQUEST_REFUSED" in report(manifest, receipt)


@pytest.mark.requirement("FIN-8", "LED-9")
async def test_verified_paths_of_an_incomplete_attempt_train_when_that_is_asked_for(
    tmp_path: Path,
) -> None:
    mesh = await opened(tmp_path, incomplete_capture="train_verified_paths")
    try:
        late, served, hopeless = (ForestPlayer(mesh, f"r{slot}") for slot in range(3))
        await play(late, ("a", None), ("b", "a"), ("c", "a"))
        await mesh.ledger.record_failure(failure("b", EXCUSED, key=late.key))
        first = await late.finish("g", 0, result=late.result("a", "b", "c"))
        await play(served, ("a", None))
        await served.fail("b")
        await served.call("c")
        answers = [served.answer("a"), {"role": "assistant", "content": "lost"}, served.answer("c")]
        shown = json.dumps({"responses": [{"output": [one]} for one in answers]}).encode()
        second = await served.finish(
            "g", 1, result=shown, declared_response_id="chatcmpl-c", reward=0.0
        )
        await play(hopeless, ("a", None))
        await hopeless.fail("b")
        third = await hopeless.finish("g", 2, declared_response_id="chatcmpl-b")
        await mesh.finalizer.finalize_group("g", 3)
        (batch,) = await read_again(mesh, 1)
    finally:
        await mesh.stop()
    verify_offline(batch)
    for receipt, cause in ((first, EXCUSED), (second, "worker_capture_failed")):
        assert (receipt.masked, receipt.salvaged_from) == (False, "capture_poisoned")
        assert receipt.mask_cause == cause
    assert [paths(batch, slot) for slot in (0, 1)] == [[["a", "c"]], [["a"], ["c"]]]
    assert [one.reason for one in first.calls] == ["selected", "capture_failed", "selected"]
    assert (third.masked, third.mask_reason, third.salvaged_from) == (True, "capture_poisoned", "")
    assert "not salvaged, selection_refused: history_missing" in third.mask_detail


@pytest.mark.requirement("LED-7")
async def test_a_lost_first_call_masks_without_any_witness(mesh: FinalizerMesh) -> None:
    player = ForestPlayer(mesh, "r0")
    await player.open()
    await player.fail("a")
    receipt = await player.finish("g", 0)
    assert (receipt.masked, receipt.mask_reason) == (True, "capture_poisoned")
    pending = ForestPlayer(mesh, "r1")
    await play(pending, ("a", None))
    await pending.admit("late")
    receipt = await pending.finish("g", 1, result=b"not even JSON")
    assert receipt.mask_reason == "pending_call"
