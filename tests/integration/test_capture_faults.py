"""What fails on the way of a call, and what the harness and the ledger get then."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from callforest_mesh.chassis import store_limits
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions, ScriptedTurn
from tests.integration.first_path_mesh import (
    GO,
    WORDS,
    FirstPathMesh,
    running_mesh,
    scripted,
    spoken,
    turn,
)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[FirstPathMesh]:
    """A mesh whose engine answers pseudo-randomly, in ChatML."""
    async with running_mesh(tmp_path, ScriptedEngine()) as running:
        yield running


@pytest.mark.requirement("CAP-7", "LED-11")
@pytest.mark.bugcase("B08", "B10")
@pytest.mark.parametrize(
    ("sampled", "reason"),
    [
        (turn(*[30] * 57, reported_count=57), None),
        (turn(30, 31, 4, reported_count=57), "count_mismatch"),
        (turn(*[30] * 57, logprobs=[-0.1] * 56), "count_mismatch"),
        (turn(30, 31, 4, logprobs=[-0.5, -np.inf, np.nan]), "non_finite_logprob"),
        (turn(), "empty_generation"),
    ],
)
async def test_engine_that_lost_count_is_served_and_poisons(
    sampled: ScriptedTurn, reason: str | None, tmp_path: Path
) -> None:
    async with running_mesh(tmp_path, scripted(sampled)) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as client:
            served = await client.chat.completions.create(model="m", messages=[GO], logprobs=True)
        assert served.choices[0].message.content == WORDS.decode(np.asarray(sampled.token_ids))
        manifest = await mesh.manifest(key)
        stored = await mesh.staging.stat()
    if reason is None:
        assert (len(manifest.records), len(manifest.failures)) == (1, 0)
        return
    assert not manifest.records
    assert stored.call_count == 0
    (failure,) = manifest.failures
    assert (failure.reason, failure.worker_reason) == ("worker_capture_failed", reason)


@pytest.mark.requirement("CAP-7", "LED-11")
@pytest.mark.bugcase("B08")
async def test_text_that_a_stop_string_cuts_is_served_and_poisons(tmp_path: Path) -> None:
    """What the harness never saw does not come back as its history."""
    engine = scripted(turn(30, 31, 20, 40, 4), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO, stop=["textgo"]))
        assert answer["content"] == "some"
        assert spoken(await mesh.ask(key, GO, answer, GO))["content"] == "some"
        manifest = await mesh.manifest(key)
        stored = await mesh.staging.stat()
        # The history is the text that was served; of 31 and 20 nothing is left.
        assert mesh.prompts()[1] == [1, 20, 2, 3, 30, 4, 1, 20, 2, 3]
    cut, orphan = manifest.failures
    assert (cut.reason, cut.worker_reason) == ("worker_capture_failed", "text_ends_early")
    assert orphan.reason == "unresolved_parent"
    assert not manifest.records
    assert stored.call_count == 0


@pytest.mark.bugcase("B08")
async def test_text_with_its_stop_string_is_captured_and_continued(tmp_path: Path) -> None:
    engine = scripted(turn(30, 31, 20, 40, 4), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        stop = {"stop": ["textgo"], "include_stop_str_in_output": True}
        answer = spoken(await mesh.ask(key, GO, **stop))
        assert answer["content"] == "sometextgo"
        await mesh.ask(key, GO, answer, GO)
        manifest = await mesh.manifest(key)
        assert mesh.prompts()[1] == [1, 20, 2, 3, 30, 31, 20, 4, 1, 20, 2, 3]
    assert (len(manifest.records), len(manifest.failures)) == (2, 0)


@pytest.mark.requirement("LED-11", "CAP-7")
async def test_failed_call_is_never_a_parent(tmp_path: Path) -> None:
    engine = scripted(turn(30, 4, reported_count=9), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO))
        spoken(await mesh.ask(key, GO, answer, GO))
        manifest = await mesh.manifest(key)
    assert [one.reason for one in manifest.failures] == [
        "worker_capture_failed",
        "unresolved_parent",
    ]
    assert not manifest.records


@pytest.mark.requirement("CAP-7")
@pytest.mark.bugcase("B15")
async def test_identical_texts_of_two_siblings_resolve_to_neither(tmp_path: Path) -> None:
    engine = scripted(turn(5, 4), turn(6, 7, 4), turn(30, 4), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key, other = await mesh.open("r"), await mesh.open("healthy")
        siblings = [await mesh.ask(key, GO) for _ in range(2)]
        assert [spoken(one)["content"] for one in siblings] == ["ok", "ok"]
        names = [one.headers["x-callforest-call-id"] for one in siblings]
        assert spoken(await mesh.ask(key, GO, spoken(siblings[0]), GO))["content"] == "some"
        await mesh.ask(other, GO)
        manifest, healthy = await mesh.manifest(key), await mesh.manifest(other)
        # Served from text: neither sibling's tokens were taken for the history's.
        assert mesh.prompts()[2] == [1, 20, 2, 3, 5, 4, 1, 20, 2, 3]
    assert len(manifest.records) == 2
    (failure,) = manifest.failures
    assert failure.reason == "unresolved_parent"
    assert all(name in failure.detail for name in names)
    assert (len(healthy.records), len(healthy.failures)) == (1, 0)


@pytest.mark.requirement("CAP-7")
async def test_staging_down_is_served_after_the_bound_with_a_failure(tmp_path: Path) -> None:
    options = {"stage_timeout_s": 0.3}
    async with running_mesh(tmp_path, ScriptedEngine(), worker=options) as mesh:
        key = await mesh.open()
        await mesh.servers["staging"].stop()
        assert spoken(await mesh.ask(key, GO))["content"]
        manifest = await mesh.manifest(key)
    (failure,) = manifest.failures
    assert failure.reason == "worker_capture_failed"
    assert failure.worker_reason == "stage_timeout"
    assert not manifest.attempt.pending_call_ids


@pytest.mark.requirement("CAP-7", "API-6")
async def test_ledger_down_is_refused_before_generation(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    await mesh.servers["ledger"].stop()
    response = await mesh.ask(key, GO)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"
    assert int(response.headers["retry-after"]) >= 1
    assert not mesh.prompts()


@pytest.mark.requirement("CAP-7")
async def test_ledger_that_goes_down_during_a_call_serves_nothing(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_mesh(tmp_path, engine, gateway={"commit_timeout_s": 0.3}) as mesh:
        key = await mesh.open()

        async def pause(_call_id: str) -> None:
            await mesh.servers["ledger"].stop()

        engine.pause = pause
        response = await mesh.ask(key, GO)
    assert response.status_code == 503
    assert "choices" not in response.json()


@pytest.mark.requirement("CAP-7")
async def test_context_overflow_is_the_engines_refusal_and_costs_only_its_call(
    tmp_path: Path,
) -> None:
    """Nothing was generated: the call is withdrawn, and its attempt goes on."""
    engine = ScriptedEngine(ScriptedOptions(context_token_count=64))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "long " * 20}]
                )
        manifest = await mesh.manifest(key)
        assert not manifest.failures
        assert not manifest.records
        assert not manifest.attempt.pending_call_ids
        assert manifest.attempt.failure_count == 0
        assert (await mesh.ask(key, GO)).status_code == 200
        await mesh.admission.close_attempt(key)
        assert not (await mesh.ledger.await_settled(key, wait_s=10.0)).pending_call_ids


@pytest.mark.requirement("CAP-7")
async def test_a_worker_at_its_bound_costs_only_the_call(tmp_path: Path) -> None:
    """Nothing was generated of it: harnesses that come back train like all others."""
    generating, go_on = asyncio.Event(), asyncio.Event()

    async def pause(_call_id: str) -> None:
        generating.set()
        await go_on.wait()

    engine = ScriptedEngine(pause=pause)
    async with running_mesh(tmp_path, engine, worker={"running_max": 1}) as mesh:
        keys = [await mesh.open(rollout_id) for rollout_id in ("r", "s")]
        first = asyncio.ensure_future(mesh.ask(keys[0], GO))
        await generating.wait()
        refused = await mesh.ask(keys[1], GO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        go_on.set()
        assert (await first).status_code == 200
        assert (await mesh.ask(keys[1], GO)).status_code == 200
        for key in keys:
            await mesh.admission.close_attempt(key)
            assert not (await mesh.ledger.await_settled(key, wait_s=10.0)).pending_call_ids
            manifest = await mesh.manifest(key)
            assert (len(manifest.records), len(manifest.failures)) == (1, 0)
        (withdrawal,) = manifest.withdrawals
        assert (withdrawal.reason, withdrawal.capture_key) == ("OVERLOADED", keys[1])


@pytest.mark.requirement("CAP-7")
async def test_a_full_staging_pushes_calls_back_until_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rollout that found it full is lost; one that comes back trains."""
    full_disks = {"staging"}
    free_bytes = LmdbStore._free_bytes

    def free(store: LmdbStore) -> int:
        return 0 if store._name in full_disks else free_bytes(store)

    monkeypatch.setattr(LmdbStore, "_free_bytes", free)
    monkeypatch.setattr(store_limits, "RETRY_AFTER_MS", 1)
    async with running_mesh(tmp_path, ScriptedEngine()) as mesh:
        full, after = [await mesh.open(rollout_id) for rollout_id in ("r", "s")]
        assert (await mesh.ask(full, GO)).status_code == 200
        for _ in range(2):
            refused = await mesh.ask(after, GO)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert "staging store is full" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
        mesh.assert_generated(1)
        full_disks.clear()
        assert (await mesh.ask(after, GO)).status_code == 200
        lost, kept = await mesh.manifest(full), await mesh.manifest(after)
        stat = await mesh.staging.stat()
    assert [one.worker_reason for one in lost.failures] == ["stage_failed"]
    assert (len(kept.records), len(kept.failures)) == (1, 0)
    assert {one.reason for one in kept.withdrawals} == {"STORE_FULL"}
    assert stat.room_bytes > 0


@pytest.mark.requirement("LED-11", "API-6")
async def test_harness_that_hangs_up_ends_its_generation_and_poisons(tmp_path: Path) -> None:
    generating, cancelled = asyncio.Event(), asyncio.Event()

    async def pause(_call_id: str) -> None:
        generating.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with running_mesh(tmp_path, ScriptedEngine(pause=pause)) as mesh:
        key = await mesh.open()
        asking = asyncio.ensure_future(mesh.ask(key, GO))
        await generating.wait()
        asking.cancel()
        await asyncio.wait({asking})
        async with asyncio.timeout(10):
            await cancelled.wait()
        await mesh.admission.close_attempt(key)
        attempt = await mesh.ledger.await_settled(key, wait_s=10.0)
        assert not attempt.pending_call_ids
        manifest = await mesh.manifest(key)
    assert [one.reason for one in manifest.failures] == [
        "request_finished_without_staged_coordinates"
    ]


@pytest.mark.requirement("API-6")
async def test_gateway_that_stops_finishes_the_calls_in_work(tmp_path: Path) -> None:
    generating, generate = asyncio.Event(), asyncio.Event()

    async def pause(_call_id: str) -> None:
        generating.set()
        await generate.wait()

    async with running_mesh(tmp_path, ScriptedEngine(pause=pause)) as mesh:
        key = await mesh.open()
        asking = asyncio.ensure_future(mesh.ask(key, GO))
        await generating.wait()
        stopping = asyncio.ensure_future(mesh.servers["gateway"].stop())
        while (health := await mesh.http.get(f"{mesh.url}/healthz")).status_code == 200:
            assert not stopping.done()
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        # One connection is old and one is new: the port is open as long as the call is in work.
        async with httpx.AsyncClient() as stranger:
            assert (await stranger.get(f"{mesh.url}/healthz")).status_code == 503
        for refused in (
            await mesh.ask(key, GO),
            await mesh.respond(key, [GO]),
            await mesh.http.get(f"{mesh.url}/rollouts/{key}/v1/models"),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
        assert not asking.done()
        assert not stopping.done()
        generate.set()
        assert (await asking).status_code == 200
        await stopping
        with pytest.raises(httpx.TransportError):
            await mesh.ask(key, GO)
        assert len((await mesh.manifest(key)).records) == 1
