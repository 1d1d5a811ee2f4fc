"""Rollouts of forest mode through real Admission, Ledger, Staging and Finalizer (FOR, SEL, FIN)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.capture.v1 import selection_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.rollout import RolloutOwner
from callforest_mesh.chassis.configuration import load
from callforest_mesh.cli import main
from callforest_mesh.finalizer.service import FinalizerService
from callforest_mesh.mesh_options import finalizer_options
from tests.integration.finalizer_mesh import TENANT, FinalizerMesh, Player, read_again, take
from tests.integration.forest_mesh import (
    ForestPlayer,
    chain,
    opened,
    owned,
    paths,
    play,
    refused,
)
from tests.integration.offline_rows import verify_offline

CUSTOM = "tests.unit.finalizer.harness_policies:last_root"


@pytest.fixture(params=["socket", "local"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(tmp_path, request.param)
    await mesh.start()
    yield mesh
    await mesh.stop()


@pytest.mark.requirement("FOR-1", "FOR-2", "FOR-3", "SEL-2", "SEL-6", "FIN-1")
async def test_the_walkthrough_of_the_design_from_calls_to_rows_and_away(
    mesh: FinalizerMesh,
) -> None:
    """c3 begins anew behind a rewrite, c4 is rejected, c5 is its retry: two rows, one reward."""
    rewritten, linear = ForestPlayer(mesh, "r0"), ForestPlayer(mesh, "r1")
    calls = [("c1", None), ("c2", "c1"), ("c3", None), ("c4", "c3"), ("c5", "c3")]
    await play(rewritten, *calls)
    await play(linear, *chain(["c1", "c2"]))
    first = await rewritten.finish("g", 0, result=rewritten.result("c1", "c2", "c3", "c5"))
    second = await linear.finish("g", 1, result=linear.result("c1", "c2"), reward=0.0)
    assert [(one.call_id, one.reason) for one in first.calls] == [
        ("c1", "selected"),
        ("c2", "selected"),
        ("c3", "selected"),
        ("c4", "not_returned"),
        ("c5", "selected"),
    ]
    assert (first.terminal_call_id, first.terminal_selection) == ("c5", "content")
    assert (first.generated_token_count, first.longest_generation_token_count) == (12, 3)
    published = await mesh.finalizer.finalize_group("g", 2)
    assert list(published.row_ids) == ["g_g0_s0", "g_g0_s1", "g_g1_s0"]
    assert not published.replacement_wanted
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    verify_offline(batch)
    assert list(batch.receipts) == [first, second]
    assert paths(batch, 0) == [["c1", "c2"], ["c3", "c5"]]
    assert sorted(owned(batch, 0)) == ["c1", "c2", "c3", "c5"]
    assert await mesh.finalizer.group("g") == batch, "reading a group is its delivery"
    await rows.commit(1)
    await mesh.cleaned()
    assert await rewritten.staged_ids() == [], "the rejected call is cleaned with the others"
    assert await linear.staged_ids() == []
    gone = await refused(mesh.finalizer.group("g"))
    assert gone.reason == er.ERROR_REASON_CALL_NOT_FOUND


@pytest.mark.requirement("FOR-2", "FOR-3")
async def test_shared_ancestors_and_resumed_chains(mesh: FinalizerMesh) -> None:
    player = ForestPlayer(mesh, "r0")
    calls = [("a1", None), ("b1", None), ("a2", "a1"), ("b2", "b1"), ("a3", "a1")]
    await play(player, *calls)
    accepted = ["a1", "b1", "a2", "b2", "a3"]
    receipt = await player.finish("g", 0, result=player.result(*accepted))
    assert not receipt.masked, receipt
    await mesh.finalizer.finalize_group("g", 1)
    (batch,) = await read_again(mesh, 1)
    verify_offline(batch)
    assert paths(batch) == [["a1", "a2"], ["a1", "a3"], ["b1", "b2"]]
    assert [len(batch.segments), sorted(owned(batch, 0))] == [5, sorted(accepted)]


@pytest.mark.requirement("SEL-2")
async def test_evidence_that_cannot_be_taken_leaves_no_receipt(mesh: FinalizerMesh) -> None:
    player = ForestPlayer(mesh, "r0")
    await play(player, ("a", None), ("b", "a"))
    error = await refused(player.finish("g", 0, result=player.result("b", "b")))
    assert error.reason == er.ERROR_REASON_SELECTION_REFUSED
    assert error.metadata == {
        "rollout_id": "r0",
        "fault": "answer_duplicated",
        "call_ids": "b",
    }
    nothing = await refused(mesh.finalizer.receipt("r0"))
    assert nothing.reason == er.ERROR_REASON_RECEIPT_NOT_FOUND
    missing = await refused(player.finish("g", 0))
    assert missing.metadata["fault"] == "history_missing"
    request = await player.request("g", 0, result=player.result("a", "b"))
    receipt = await mesh.finalizer.finalize_rollout(request)
    assert not receipt.masked
    assert await mesh.finalizer.finalize_rollout(request) == receipt, "a repeat answers the same"
    other = await player.request("g", 0, result=player.result("a"))
    again = await refused(mesh.finalizer.finalize_rollout(other))
    assert (again.reason, again.metadata["field"]) == (er.ERROR_REASON_GROUP_MISMATCH, "result")


@pytest.mark.requirement("FIN-9")
@pytest.mark.parametrize("forest", [True, False])
async def test_an_environment_mask_keeps_the_generations(
    mesh: FinalizerMesh, *, forest: bool
) -> None:
    player = ForestPlayer(mesh, "r0") if forest else Player(mesh, "r0")
    await player.open()
    await player.call("a")
    await player.call("b", "a")
    asked = {"result": player.result("a", "b")} if isinstance(player, ForestPlayer) else {}
    receipt = await player.finish(
        "g", 0, environment_masked=True, declared_response_id="chatcmpl-b", **asked
    )
    assert (receipt.masked, receipt.mask_reason) == (True, "environment_masked")
    assert (receipt.generated_token_count, receipt.total_token_count) == (6, 12)
    assert not any(one.selected for one in receipt.calls)
    published = await mesh.finalizer.finalize_group("g", 1)
    assert published.drop_reason == "no_valid_layout"


@pytest.mark.requirement("FOR-6")
async def test_a_cut_generation_truncates_its_rollout_if_it_is_selected(
    mesh: FinalizerMesh,
) -> None:
    player = ForestPlayer(mesh, "r0")
    await player.open()
    await player.call("a")
    await player.call("cut", "a", finish="length")
    await player.call("b", "a")
    request = await player.request("g", 0, result=player.result("a", "cut", "b"))
    assert (await mesh.finalizer.finalize_rollout(request)).truncated
    other = ForestPlayer(mesh, "r1")
    await other.open()
    await other.call("a")
    await other.call("cut", "a", finish="length")
    await other.call("b", "a")
    assert not (await other.finish("g", 1, result=other.result("a", "b"))).truncated


@pytest.mark.requirement("SEL-4", "SEL-7")
async def test_an_explicit_selection_is_of_forest_mode_alone(mesh: FinalizerMesh) -> None:
    selection = selection_pb2.Selection(call_ids=["a"], terminal_call_id="a")
    linear = Player(mesh, "r0")
    await linear.chain(1)
    error = await refused(linear.finish("g", 0, selection=selection))
    assert error.reason == er.ERROR_REASON_MODE_MISMATCH
    player = ForestPlayer(mesh, "r1")
    await play(player, ("a", None), ("b", "a"))
    receipt = await player.finish("g", 0, selection=selection)
    assert (receipt.selection_policy, list(receipt.selected_call_ids)) == ("explicit", ["a"])
    assert [one.reason for one in receipt.calls] == ["selected", "not_chosen"]


@pytest.mark.requirement("SEL-3", "SEL-4")
@pytest.mark.parametrize(
    ("policy", "result", "rows"),
    [
        ("all_captured", None, [["a", "b"], ["a", "c"]]),
        (CUSTOM, {"keep": ["a", "c"]}, [["a", "c"]]),
    ],
)
async def test_other_policies_select_too(
    tmp_path: Path, policy: str, result: object, rows: list[list[str]]
) -> None:
    mesh = await opened(tmp_path, selection_policy=policy)
    try:
        player = ForestPlayer(mesh, "r0")
        await play(player, ("a", None), ("b", "a"), ("c", "a"))
        given = b"" if result is None else json.dumps(result).encode()
        receipt = await player.finish("g", 0, result=given, declared_response_id="chatcmpl-c")
        assert (receipt.masked, receipt.selection_policy) == (False, policy)
        await mesh.finalizer.finalize_group("g", 1)
        (batch,) = await read_again(mesh, 1)
        assert paths(batch) == rows
    finally:
        await mesh.stop()


@pytest.mark.requirement("SEL-3", "LED-1")
@pytest.mark.parametrize("kind", ["socket", "local"])
async def test_neither_a_clock_that_is_set_back_nor_who_finished_first_orders_rows(
    kind: str, tmp_path: Path
) -> None:
    mesh = FinalizerMesh(tmp_path, kind, selection_policy="all_captured")
    await mesh.start()
    try:
        player = ForestPlayer(mesh, "r0")
        player.tick_s = -3600
        await player.open()
        for call_id in ("z", "m", "a"):
            await player.stage(call_id)
        for call_id in ("a", "z", "m"):
            await player.commit(call_id)
        records = (await mesh.ledger.manifest("r0")).records
        assert [(one.coords.call_id, one.intent_number) for one in records] == [
            ("a", 3),
            ("z", 1),
            ("m", 2),
        ]
        assert records[0].admit_time.seconds < records[1].admit_time.seconds
        receipt = await player.finish("g", 0, declared_response_id="chatcmpl-m")
        assert list(receipt.selected_call_ids) == ["z", "m", "a"]
        await mesh.finalizer.finalize_group("g", 1)
        (batch,) = await read_again(mesh, 1)
        assert paths(batch) == [["z"], ["m"], ["a"]]
    finally:
        await mesh.stop()


@pytest.mark.requirement("FIN-6")
@pytest.mark.bugcase("B27")
async def test_six_rollouts_thirteen_rows_and_three_of_padding_over_four_ranks(
    tmp_path: Path,
) -> None:
    settings = ["trainer.batch.rank_count=4", "trainer.batch.train_microbatch_size=1"]
    configured = finalizer_options(load(environment={}, settings=settings))
    mesh = await opened(tmp_path, row_multiple=configured.row_multiple)
    try:
        for slot, roots in enumerate([3, 2, 2, 2, 3, 1]):
            player = ForestPlayer(mesh, f"r{slot}")
            names = [f"c{number}" for number in range(roots)]
            await play(player, *((name, None) for name in names))
            await player.finish("g", slot, result=player.result(*names))
        published = await mesh.finalizer.finalize_group("g", 6)
        assert len(published.row_ids) == 16
        assert list(published.row_ids[13:]) == ["g_pad0", "g_pad1", "g_pad2"]
        (batch,) = await read_again(mesh, 1)
        verify_offline(batch)
        assert not any(span.owns_loss for row in batch.rows[13:] for span in row.spans)
    finally:
        await mesh.stop()


@pytest.mark.requirement("FIN-5")
async def test_a_group_with_too_few_verified_rollouts_asks_for_another(tmp_path: Path) -> None:
    mesh = await opened(tmp_path, min_valid_fraction_per_group=0.6)
    owner = RolloutOwner(
        mesh.admission, mesh.ledger, mesh.finalizer, "http://localhost", replacement_budget=2
    )
    try:
        for group, valid in (("g0", 1), ("g1", 1), ("g2", 2)):
            for slot in range(3):
                player = ForestPlayer(mesh, f"{group}-r{slot}")
                await play(player, ("a", None), ("b", "a"))
                shown = ["a", "b"] if slot < valid else ["b"]
                await player.finish(group, slot, result=player.result(*shown))
        first = await owner.publish("g0", 3)
        assert (first.drop_reason, first.replacement_wanted) == ("below_min_valid_fraction", True)
        assert (await owner.publish("g0", 3)).replacement_wanted, "a repeat answers the same"
        assert owner.may_replace("g0", first)
        assert not owner.may_replace("g0", first), "one group in the place of one"
        assert owner.replacements_left == 1
        second = await owner.publish("g1", 3)
        assert owner.may_replace("g1", second)
        assert owner.replacements_left == 0
        assert not owner.may_replace("g3", second), "the budget is spent"
        third = await owner.publish("g2", 3)
        assert (third.drop_reason, third.replacement_wanted) == ("", False)
        assert not owner.may_replace("g2", third)
    finally:
        await mesh.stop()


@pytest.mark.requirement("FOR-7", "SEL-5")
async def test_a_rollout_is_measured_once_however_often_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = await opened(tmp_path)
    try:
        service = mesh.services["finalizer"]
        assert isinstance(service, FinalizerService)
        counted: list[str] = []
        finalized = service._servicer._finalized
        monkeypatch.setattr(finalized, "count", lambda one: counted.append(one.rollout_id))
        player = ForestPlayer(mesh, "r0")
        await play(player, ("a", None))
        request = await player.request("g", 0, result=player.result("a"))
        asked = [mesh.finalizer.finalize_rollout(request) for _ in range(4)]
        receipts = await asyncio.gather(*asked)
        assert all(one == receipts[0] for one in receipts)
        await mesh.finalizer.finalize_rollout(request)
        assert counted == ["r0"]
        stored = service._row_log.rollout(TENANT, "r0")
        await mesh.finalizer.finalize_group("g", 1)
        (segment,) = (await mesh.finalizer.group("g")).segments
        assert stored is not None
        assert stored.path_bytes == segment.ByteSize()
        assert list(stored.call_bytes) == [segment.ByteSize()]
    finally:
        await mesh.stop()


@pytest.mark.requirement("SEC-3")
async def test_exported_rows_verify_with_nothing_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = FinalizerMesh(tmp_path, "socket")
    await mesh.start()
    file = tmp_path / "rows"
    there = ["--set", f"tenant={TENANT}"]
    there += ["--set", f"addresses.finalizer=unix:{tmp_path}/finalizer.sock"]
    try:
        player = ForestPlayer(mesh, "r0")
        await play(player, ("a", None), ("b", "a"), ("c", "a"))
        await player.finish("g", 0, result=player.result("a", "b", "c"))
        absent = await asyncio.to_thread(main, ["export", "g", str(file), *there])
        assert (absent, file.exists()) == (1, False), "it was not published yet"
        await mesh.finalizer.finalize_group("g", 1)
        assert await asyncio.to_thread(main, ["export", "g", str(file), *there]) == 0
    finally:
        await mesh.stop()
    assert await asyncio.to_thread(main, ["verify", str(file)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == "intact: 2 rows of 1 rollouts of group g, 9 tokens with loss"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert await asyncio.to_thread(main, ["verify", str(file)]) == 1
    assert capsys.readouterr().out.startswith("broken: ")
