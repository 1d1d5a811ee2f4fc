"""Restored attempts over whole meshes: all dies, starts anew, and goes on exactly."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

import aiohttp
import pytest

from callforest.capture.v1 import attempt_pb2, restore_point_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.admission import AdmissionClient
from callforest_client.certificates import certify, verify_certificate
from callforest_client.errors import RefusedError
from callforest_client.restore_point import RestorePointError, restore_point
from callforest_client.rollout import Outcome, RolloutFinalizedError
from callforest_mesh import inspection
from callforest_mesh.exported_rows import export, verify_file
from callforest_mesh.gateway.edge import MANIFEST_ROUTE
from callforest_mesh.trainer.core import AdvantageOptions
from callforest_mesh.trainer.rows import gather_step
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.integration.first_path_mesh import (
    CONTROL_TOKEN,
    GO,
    running_mesh,
    scripted,
    spoken,
    turn,
)
from tests.integration.offline_rows import verify_offline
from tests.integration.running_mesh import Running, running

pytestmark = pytest.mark.requirement("TRN-12", "ADM-9")

FOREST = ("token_capture.forest_training=true", "token_capture.selection_policy=all_captured")
MODES = pytest.mark.parametrize("forest", [False, True], ids=["chain", "forest"])
HAVING = (10, 11, 4)
PROMPT = [1, 20, 2, 3]


def named(key: str, *call_ids: str) -> restore_point_pb2.RestorePoint:
    return restore_point(attempt_pb2.Attempt(capture_key=key), call_ids)


async def restored(admission: AdmissionClient, key: str, *call_ids: str) -> str:
    attempt = await admission.restore_attempt(
        "r", request_id=str(uuid.uuid4()), point=named(key, *call_ids)
    )
    assert attempt.restored_from == key
    return attempt.capture_key


@pytest.mark.requirement("ADM-6")
@MODES
@pytest.mark.parametrize("worker", [{}, {"prefix_cache_bytes": 0}], ids=["cache", "store"])
async def test_captured_tokens_are_continued_bit_for_bit(
    forest: bool, worker: dict[str, object], tmp_path: Path
) -> None:
    """What the model sampled is no tokenization of what it said; it heads the prompt all the same.

    Every service restarts between the checkpoint and the restore, twice.
    """
    history: list[object] = [GO]
    async with running_mesh(tmp_path, scripted(turn(*HAVING)), forest=forest) as mesh:
        key = await mesh.open()
        response = await mesh.ask(key, *history)
        first = response.headers["x-callforest-call-id"]
        history += [spoken(response), GO]
        staged = await mesh.staging.fetch(key, [first])
    engine = scripted(turn(30, 4))
    async with running_mesh(tmp_path, engine, forest=forest, worker=worker) as mesh:
        key = await restored(mesh.admission, "r", first)
        assert key == "r-a1"
        response = await mesh.ask(key, *history)
        second = response.headers["x-callforest-call-id"]
        history += [spoken(response), GO]
        assert mesh.prompts() == [[*PROMPT, *HAVING, *PROMPT]]
        assert await mesh.staging.fetch("r", [first]) == staged, "nothing is staged again"
    engine = scripted(turn(31, 4), turn(30, 31, 4))
    async with running_mesh(tmp_path, engine, forest=forest, worker=worker) as mesh:
        key = await restored(mesh.admission, "r-a1", second)
        response = await mesh.ask(key, *history)
        history += [spoken(response), GO]
        await mesh.ask(key, *history)
        before = [*PROMPT, *HAVING, *PROMPT, 30, 4, *PROMPT]
        assert mesh.prompts() == [before, [*before, 31, 4, *PROMPT]]
        manifest = await mesh.manifest("r-a2")
        rows = [(one.source_capture_key, one.coords.parent_capture_key) for one in manifest.records]
        assert rows == [("r", ""), ("r-a1", "r"), ("", "r-a1"), ("", "")]
        assert not manifest.failures
        owners = [one.source_capture_key or "r-a2" for one in manifest.records]
        names = [one.coords.call_id for one in manifest.records]
        calls = await mesh.staging.fetch_owned(list(zip(owners, names, strict=True)))
        assert [one.capture_key for one in calls] == owners
        shown = await mesh.http.get(
            mesh.url + MANIFEST_ROUTE.format(rollout_id="r-a2"),
            headers={"authorization": f"Bearer {CONTROL_TOKEN}"},
        )
        listed = [one.get("source_capture_key") for one in shown.json()["records"]]
        assert listed == ["r", "r-a1", None, None]


@MODES
async def test_a_restored_call_is_measured_and_repeated_as_what_it_is(
    forest: bool, tmp_path: Path
) -> None:
    """A key of the first attempt makes another call; Measure counts the captured tokens."""
    engine = scripted(turn(*HAVING), turn(30, 4), turn(31, 4))
    async with running_mesh(tmp_path, engine, forest=forest) as mesh:
        await mesh.open()
        url = f"{mesh.url}/rollouts/%s/v1/chat/completions"
        headers = {"idempotency-key": "k1"}
        body = json.dumps({"model": "scripted", "messages": [GO]})
        response = await mesh.http.post(url % "r", content=body, headers=headers)
        first = response.headers["x-callforest-call-id"]
        key = await restored(mesh.admission, "r", first)
        history = [GO, spoken(response), GO]
        body = json.dumps({"model": "scripted", "messages": history})
        measured = await mesh.http.post(f"{mesh.url}/context/{key}/measure", content=body)
        assert measured.json()["is_continuation"]
        assert measured.json()["prompt_token_count"] == 2 * len(PROMPT) + len(HAVING)
        again = await mesh.http.post(url % key, content=body, headers=headers)
        assert again.headers["x-callforest-call-id"] != first
        assert spoken(again)["content"] == "some"
        # The dead harness: its attempt takes nothing new, and answers what it has.
        late = await mesh.ask("r", *history)
        assert (late.status_code, late.json()["error"]["code"]) == (422, "attempt_closed")
        repeat = await mesh.http.post(
            url % "r", content=json.dumps({"model": "scripted", "messages": [GO]}), headers=headers
        )
        assert repeat.content == response.content
        assert not (await mesh.manifest(key)).failures


async def play(base_url: str, turns: int, messages: list[object] | None = None):
    """Be a harness that can go on; give the calls, and what it would keep in its checkpoint."""
    history = list(messages or [{"role": "user", "content": "begin"}])
    calls: list[str] = []
    async with aiohttp.ClientSession() as http:
        for number in range(turns):
            body = {"model": "scripted", "messages": history, "seed": number}
            async with http.post(f"{base_url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                calls.append(response.headers["x-callforest-call-id"])
                answer = json.loads(await response.text())["choices"][0]["message"]
            history += [answer, {"role": "user", "content": f"go on {len(history)}"}]
    return calls, history


async def checkpointed(mesh: Running, rollout_id: str) -> tuple[list[str], list[object]]:
    rollout = await mesh.owner.open(rollout_id)
    return await play(rollout.base_url, 2)


@pytest.mark.requirement("FIN-1", "SEC-3")
@pytest.mark.parametrize(
    ("kind", "forest"), [("embedded", False), ("embedded", True), ("processes", True)]
)
async def test_a_rollout_goes_on_from_its_checkpoint_and_trains(
    kind: str, forest: bool, tmp_path: Path
) -> None:
    """Owner, gateway, worker and all stores are new; one receipt, one row, cleaned once."""
    modes = FOREST if forest else ()
    async with running(kind, tmp_path, *modes) as mesh:
        calls, history = await checkpointed(mesh, "r0")
        lost, _ = await play(f"{mesh.gateway_url}/rollouts/r0/v1", 1, history)
    async with running(kind, tmp_path, *modes) as mesh:
        point = named("r0", *calls)
        rollout = await mesh.owner.restore(point, request_id=str(uuid.uuid4()))
        assert (rollout.rollout_id, rollout.capture_key) == ("r0", "r0-a1")
        more, _ = await play(rollout.base_url, 2, history)
        assert more[0] not in lost
        outcome = Outcome(reward=1.0, declared_response_id=f"chatcmpl-{more[-1]}")
        receipt = await mesh.owner.finish(rollout, outcome, group_id="g", slot=0)
        assert not receipt.masked, receipt
        assert [(one.call_id, one.source_capture_key) for one in receipt.calls] == [
            *((call_id, "r0") for call_id in calls),
            *((call_id, "") for call_id in more),
        ]
        assert all(one.selected for one in receipt.calls)
        await mesh.owner.publish("g", 1)
        batch = await mesh.clients.finalizer().group("g")
        verify_offline(batch)
        for certificate in certify(batch):
            verify_certificate(certificate)
        (row,) = gather_step([batch], AdvantageOptions()).rows
        assert len(row.token_ids) == receipt.total_token_count
        assert int(row.loss_mask.sum()) == receipt.generated_token_count
        await looked_at(mesh, tmp_path, calls)
        with pytest.raises(RolloutFinalizedError, match="one receipt"):
            await mesh.owner.restore(named("r0-a1", *calls), request_id=str(uuid.uuid4()))


async def looked_at(mesh: Running, folder: Path, calls: list[str]) -> None:
    """Look at the restored attempt with the commands of the command line."""
    configuration = mesh.configuration
    lines, status = await asyncio.to_thread(inspection.verify, configuration, "r0-a1")
    assert status == 0, lines
    assert lines[-1].startswith("intact: 4 calls on 1 paths")
    lines, status = await asyncio.to_thread(
        inspection.show, configuration, "r0-a1", folder / "calls.svg"
    )
    assert "  restored from r0, 2 calls" in lines
    assert sum("restored from r0" in line for line in lines) == 3
    for name in (f"r0/{calls[0]}", f"r0-a1/{calls[0]}"):
        lines, status = await asyncio.to_thread(inspection.explain_call, configuration, name)
        assert status == 0
        assert ("restored from r0" in lines[1]) == name.startswith("r0-a1")
        assert any(line.startswith("  selection: in") for line in lines)
    lines, status = await asyncio.to_thread(export, configuration, "g", folder / "rows")
    assert status == 0, lines
    lines, status = verify_file(folder / "rows")
    assert status == 0, lines


@pytest.mark.requirement("API-8")
async def test_a_delta_request_needs_its_history_once_more(tmp_path: Path) -> None:
    """The gateway keeps no histories of another attempt; a whole one with a claim continues."""
    async with running_mesh(tmp_path, ScriptedEngine(), local=True, forest=True) as mesh:
        await mesh.open()
        turns: list[object] = [GO]
        first = await mesh.gateway.complete("r", body(*turns))
        key = await restored(mesh.admission, "r", first.call_id)
        with pytest.raises(RefusedError) as refused:
            await mesh.gateway.complete(key, body(GO), continues_call_id=first.call_id)
        assert refused.value.reason == er.ERROR_REASON_HISTORY_REQUIRED
        message = json.loads(first.response)["choices"][0]["message"]
        turns += [message, GO]
        second = await mesh.http.post(
            f"{mesh.url}/rollouts/{key}/v1/chat/completions",
            content=body(*turns),
            headers={"x-callforest-continues": first.call_id},
        )
        assert second.headers["x-callforest-context"] == "continuation"
        call_id = second.headers["x-callforest-call-id"]
        third = await mesh.gateway.complete(key, body(GO), continues_call_id=call_id)
        assert third.context.is_continuation
        parents = [one.coords.parent_call_id for one in (await mesh.manifest(key)).records]
        assert parents == ["", first.call_id, call_id]


def body(*turns: object) -> bytes:
    return json.dumps({"model": "scripted", "messages": turns}).encode()


async def test_an_owner_is_told_what_to_do(tmp_path: Path) -> None:
    async with running("embedded", tmp_path) as mesh:
        calls, history = await checkpointed(mesh, "r0")
        request = str(uuid.uuid4())
        point = named("r0", *calls)
        point.capture_schema = 2
        with pytest.raises(RestorePointError, match="begin anew"):
            await mesh.owner.restore(point, request_id=request)
        with pytest.raises(RefusedError) as refused:
            await mesh.owner.restore(named("nobody", *calls), request_id=request)
        assert refused.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
        first = await mesh.owner.restore(named("r0", *calls), request_id=request)
        again = await mesh.owner.restore(named("r0", *calls), request_id=request)
        assert again == first, "the answer was lost; nothing was used"
        await play(first.base_url, 1, history)
        with pytest.raises(RefusedError) as refused:
            await mesh.owner.restore(named("r0", *calls), request_id=request)
        assert refused.value.metadata["fault"] == "in_use"
        with pytest.raises(RefusedError) as refused:
            await mesh.owner.restore(named("r0", *calls), request_id=str(uuid.uuid4()))
        assert refused.value.metadata == {
            "capture_key": "r0",
            "fault": "not_latest",
            "latest_capture_key": "r0-a1",
        }
