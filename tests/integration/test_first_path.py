"""From a harness's request to a durable, token-free row: real services, an unmodified SDK."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from callforest.capture.v1 import attempt_pb2, completion_pb2
from callforest_client.codec import call_record_from_proto, staged_call_from_proto
from callforest_client.errors import RefusedError
from callforest_core.custody.call import Receipt
from callforest_core.custody.row import LinearizedRow
from callforest_core.custody.verification import verify_and_linearize
from callforest_mesh.conformance.peer_json import parse_record
from callforest_mesh.gateway.core import BODY_BYTES_MAX
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions, ScriptedTurn
from tests.integration.first_path_mesh import (
    CONTROL_TOKEN,
    FirstPathMesh,
    TurnTemplate,
    WordVocabulary,
    running_mesh,
)

GO = {"role": "user", "content": "go"}
WORDS = WordVocabulary(
    {
        5: "ok",
        6: "o",
        7: "k",
        10: "H",
        11: "AVING",
        12: "HAV",
        13: "ING",
        20: "go",
        30: "some",
        31: "text",
        40: "Hi",
        41: "!",
        98: "\n",
        99: "!\n\n",
    }
)


def scripted(*turns: ScriptedTurn, after_turn: str = "") -> ScriptedEngine:
    """Make an engine of the bug cases' vocabulary that gives these turns in order."""
    return ScriptedEngine(
        vocabulary=WORDS,
        template=TurnTemplate(WORDS, after_turn),
        script=lambda _prompt, _call_id, ordinal: turns[ordinal],
    )


def turn(*token_ids: int, finish_reason: str = "stop", **changed: object) -> ScriptedTurn:
    logprobs = [-0.1 * (index + 1) for index in range(len(token_ids))]
    fields = {"token_ids": token_ids, "logprobs": logprobs, "finish_reason": finish_reason}
    return ScriptedTurn(**{**fields, **changed})


def spoken(response: httpx.Response) -> dict[str, object]:
    """Give the served message, as a harness echoes it."""
    assert response.status_code == 200, response.text
    message: dict[str, object] = response.json()["choices"][0]["message"]
    return message


async def row_of(mesh: FirstPathMesh, capture_key: str) -> LinearizedRow:
    """Verify an attempt and join the path to its last call."""
    manifest = await mesh.manifest(capture_key)
    records = [call_record_from_proto(record) for record in manifest.records]
    calls = await mesh.staging.fetch(capture_key, [record.call_id for record in records])
    receipt = Receipt(
        capture_key=capture_key,
        manifest=tuple(records),
        terminal_call_id=records[-1].call_id,
        capture_poisoned=bool(manifest.failures),
        terminal_selection="declared",
    )
    return verify_and_linearize(receipt, [staged_call_from_proto(call) for call in calls])


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[FirstPathMesh]:
    """A mesh whose engine answers pseudo-randomly, in ChatML."""
    async with running_mesh(tmp_path, ScriptedEngine()) as running:
        yield running


@pytest.mark.requirement("ADM-6", "CAP-1", "CAP-5", "CAP-6")
@pytest.mark.bugcase("B01")
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("worker", [{}, {"prefix_cache_bytes": 0}])
async def test_sampled_ids_replace_their_re_tokenisation(
    local: bool, worker: dict[str, object], tmp_path: Path
) -> None:
    """Whether the predecessor's tokens are still in memory or come from the store."""
    engine = scripted(turn(10, 11, 4), turn(30, 4))
    assert WORDS.encode("HAVING").tolist() == [12, 13]
    async with running_mesh(tmp_path, engine, local=local, worker=worker) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as client:
            first = await client.chat.completions.create(model="m", messages=[GO])
            assert first.choices[0].message.content == "HAVING"
            history = [GO, {"role": "assistant", "content": "HAVING"}, GO]
            second = await client.chat.completions.create(model="m", messages=history)
            assert second.choices[0].message.content == "some"
        assert mesh.prompts() == [[1, 20, 2, 3], [1, 20, 2, 3, 10, 11, 4, 1, 20, 2, 3]]
        row = await row_of(mesh, key)
    assert row.token_ids.tolist() == [1, 20, 2, 3, 10, 11, 4, 1, 20, 2, 3, 30, 4]
    assert row.token_mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert row.logprobs[4:7].tolist() == np.array([-0.1, -0.2, -0.3], np.float32).tolist()


@pytest.mark.requirement("CAP-4", "CAP-6", "LED-13")
async def test_record_is_of_the_call_that_was_served(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    response = await mesh.ask(key, GO)
    call_id = response.headers["x-callforest-call-id"]
    assert float(response.headers["x-callforest-overhead-ms"]) >= 0
    manifest = await mesh.manifest(key)
    (record,) = manifest.records
    assert not manifest.failures
    assert not manifest.attempt.pending_call_ids
    assert (record.coords.call_id, record.coords.capture_key) == (call_id, key)
    assert record.response_id == response.json()["id"] == f"chatcmpl-{call_id}"
    assert record.admit_time.seconds == response.json()["created"]
    assert record.completion.generation_token_count == response.json()["usage"]["completion_tokens"]
    (staged,) = await mesh.staging.fetch(key, [call_id])
    assert staged.served_response == response.content
    assert staged.digest == record.coords.digest


@pytest.mark.requirement("CAP-4")
async def test_calls_of_an_attempt_overlap(tmp_path: Path) -> None:
    """Each has an intent before any has generated."""
    together = asyncio.Barrier(8)

    async def pause(_call_id: str) -> None:
        await together.wait()

    async with running_mesh(tmp_path, ScriptedEngine(pause=pause)) as mesh:
        key = await mesh.open()
        asked = [{"role": "user", "content": f"question {number}"} for number in range(8)]
        responses = await asyncio.gather(*(mesh.ask(key, message) for message in asked))
        assert {response.status_code for response in responses} == {200}
        manifest = await mesh.manifest(key)
    assert len({record.coords.call_id for record in manifest.records}) == 8
    assert not manifest.failures


@pytest.mark.bugcase("B07")
async def test_terminator_that_the_template_adds_has_no_loss(tmp_path: Path) -> None:
    engine = scripted(turn(30, 31, finish_reason="length"), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO))
        await mesh.ask(key, GO, answer, GO)
        assert mesh.prompts()[1] == [1, 20, 2, 3, 30, 31, 4, 1, 20, 2, 3]
        cut, _ = (await mesh.manifest(key)).records
        row = await row_of(mesh, key)
    assert cut.completion.status == completion_pb2.COMPLETION_STATUS_INCOMPLETE
    assert cut.completion.finish_reason == "length"
    assert cut.completion.generation_token_count == 2
    assert row.token_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert row.logprobs[6] == 0


@pytest.mark.bugcase("B07")
async def test_terminator_that_was_sampled_stands_once(tmp_path: Path) -> None:
    engine = scripted(turn(30, 31, 4), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO))
        await mesh.ask(key, GO, answer, GO)
        assert mesh.prompts()[1] == [1, 20, 2, 3, 30, 31, 4, 1, 20, 2, 3]
        row = await row_of(mesh, key)
    assert row.token_mask.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.bugcase("B07")
async def test_tokens_do_not_merge_over_the_turns_end(tmp_path: Path) -> None:
    engine = scripted(turn(40, 41, 4), turn(30, 4), after_turn="\n\n")
    assert WORDS.encode("Hi!\n\n").tolist() == [40, 99]
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        answer = spoken(await mesh.ask(key, GO))
        assert answer["content"] == "Hi!"
        await mesh.ask(key, GO, answer, GO)
        assert mesh.prompts()[1] == [1, 20, 2, 3, 40, 41, 4, 98, 98, 1, 20, 2, 3]


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


@pytest.mark.requirement("CAP-3", "CAP-7")
@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"truncation": "auto"}, "truncation"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"return_token_ids": True}, "return_token_ids"),
    ],
)
async def test_refusals_come_before_the_intent_and_in_the_sdks_form(
    mesh: FirstPathMesh, fields: dict[str, object], parameter: str
) -> None:
    key = await mesh.open()
    async with mesh.harness(key) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=[GO], extra_body=fields)
        assert (caught.value.code, caught.value.param) == ("unsupported_value", parameter)
        assert caught.value.type == "invalid_request_error"
        prefilled = [GO, {"role": "assistant", "content": "Sure"}]
        with pytest.raises(openai.BadRequestError, match="prefill"):
            await client.chat.completions.create(model="m", messages=prefilled)
    assert (await mesh.manifest(key)).attempt.revision == 1
    assert not mesh.prompts()


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


@pytest.mark.requirement("LED-3")
async def test_manifest_route_is_the_peers_and_needs_its_token(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    answer = spoken(await mesh.ask(key, GO))
    await mesh.ask(key, GO, answer, GO)
    await mesh.ask(key, GO, {"role": "assistant", "content": "never said"}, GO)
    route = f"{mesh.url}/training-token-capture/control/rollouts/{key}/manifest"
    bearer = {"Authorization": f"Bearer {CONTROL_TOKEN}"}
    shown = (await mesh.http.get(route, headers=bearer)).json()
    assert shown["rollout_id"] == key
    first, second = [parse_record(record) for record in shown["records"]]
    assert second.parent_call_id == first.call_id
    assert second.prev_len == first.cum_len
    assert [one["reason"] for one in shown["failures"]] == ["unresolved_parent"]
    stored = (await mesh.manifest(key)).records
    assert [call_record_from_proto(one).digest for one in stored] == [first.digest, second.digest]
    for wrong in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": CONTROL_TOKEN},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer \u00e9".encode("latin-1")},
    ):
        assert (await mesh.http.get(route, headers=wrong)).status_code == 401
    base = route.removesuffix(f"{key}/manifest")
    unknown = await mesh.http.get(f"{base}nobody/manifest", headers=bearer)
    assert (unknown.status_code, unknown.json()["records"]) == (200, [])
    assert (await mesh.http.get(f"{base}bad%20id/manifest", headers=bearer)).status_code == 400


def keys_of(value: object) -> set[str]:
    """Give every key of a JSON value."""
    if isinstance(value, dict):
        return set(value) | set().union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


@pytest.mark.requirement("CAP-6", "CAP-1")
async def test_tokens_are_in_no_response(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    answered = await mesh.ask(key, GO, logprobs=True)
    route = f"{mesh.url}/training-token-capture/control/rollouts/{key}/manifest"
    responses = [
        answered,
        await mesh.ask(key, GO, spoken(answered), GO),
        await mesh.ask(key, GO, {"role": "assistant", "content": "never said"}, GO),
        await mesh.ask(key, GO, stream=True),
        await mesh.http.get(f"{mesh.url}/rollouts/{key}/v1/models"),
        await mesh.http.get(route, headers={"Authorization": f"Bearer {CONTROL_TOKEN}"}),
    ]
    shown = set().union(*(keys_of(response.json()) for response in responses))
    assert not [name for name in shown if "token_ids" in name or name.endswith("log_probs")]
    content = answered.json()["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == spoken(answered)["content"]


async def test_attempt_is_named_by_path_or_by_key(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    base_url = f"{mesh.url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        served = await client.chat.completions.create(model="m", messages=[GO])
        models = await client.models.list()
    assert [model.id for model in models.data] == ["scripted"]
    assert [one.response_id for one in (await mesh.manifest(key)).records] == [served.id]
    for header in ({}, {"Authorization": "Basic eA=="}, {"Authorization": "Bearer a/b"}):
        response = await mesh.http.post(
            f"{base_url}/chat/completions", json={"messages": [GO]}, headers=header
        )
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_unknown_and_closed_attempts_take_no_calls(mesh: FirstPathMesh) -> None:
    response = await mesh.ask("nobody", GO)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "attempt_not_found")
    key = await mesh.open()
    await mesh.admission.close_attempt(key)
    response = await mesh.ask(key, GO)
    assert (response.status_code, response.json()["error"]["code"]) == (422, "attempt_closed")
    superseded, _ = await mesh.open("twice"), await mesh.open("twice")
    response = await mesh.ask(superseded, GO)
    assert (response.status_code, response.json()["error"]["code"]) == (422, "attempt_closed")
    assert not mesh.prompts()


@pytest.mark.requirement("LED-11")
async def test_context_overflow_is_the_engines_refusal_and_poisons(tmp_path: Path) -> None:
    engine = ScriptedEngine(ScriptedOptions(context_token_count=64))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length"):
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "long " * 20}]
                )
        manifest = await mesh.manifest(key)
    (failure,) = manifest.failures
    assert failure.reason == "request_finished_without_staged_coordinates"
    assert "maximum context length" in failure.detail


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


async def test_large_conversation_travels_in_frames(tmp_path: Path) -> None:
    engine = ScriptedEngine(
        ScriptedOptions(context_token_count=8 << 20),
        script=lambda *_: ScriptedTurn([65, 257], [-0.5, -0.5]),
    )
    long = {"role": "user", "content": "x" * (3 << 20)}
    # Without memory for it, the predecessor's tokens travel too.
    async with running_mesh(tmp_path, engine, worker={"prefix_cache_bytes": 0}) as mesh:
        key = await mesh.open()
        first = await mesh.ask(key, long)
        assert spoken(await mesh.ask(key, long, spoken(first), GO))
        manifest = await mesh.manifest(key)
    assert len(manifest.records) == 2, manifest.failures
    assert manifest.records[1].coords.prev_token_count > 3 << 20
    assert manifest.records[1].coords.delta_token_count < 100


async def test_bodies_beyond_the_limits_are_refused(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    response = await mesh.ask(key, {"role": "user", "content": "x" * BODY_BYTES_MAX})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    response = await mesh.http.post(
        f"{mesh.url}/rollouts/{key}/v1/chat/completions", content=b'{"messages": [}'
    )
    assert (response.status_code, response.json()["error"]["code"]) == (
        400,
        "invalid_request_error",
    )
    assert (await mesh.manifest(key)).attempt.revision == 1


async def test_unknown_routes_and_health(mesh: FirstPathMesh) -> None:
    response = await mesh.http.get(f"{mesh.url}/v2/chat")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await mesh.http.get(f"{mesh.url}/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (await mesh.http.get(f"{mesh.url}/healthz")).json() == {"status": "ok"}


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
        generate.set()
        assert (await asking).status_code == 200
        await stopping
        with pytest.raises(httpx.TransportError):
            await mesh.ask(key, GO)
        assert len((await mesh.manifest(key)).records) == 1


@pytest.mark.requirement("CAP-8")
async def test_weights_pushed_during_a_call_leave_its_version(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with running_mesh(tmp_path, engine) as mesh:
        file = tmp_path / "v3.safetensors"
        file.write_bytes(b"weights")
        key = await mesh.open()
        with pytest.raises(RefusedError, match="another digest"):
            await mesh.worker.update_weights(str(file), 3, bytes(32))
        await push(mesh, file, 3)
        await mesh.ask(key, GO)

        async def pause(_call_id: str) -> None:
            engine.pause = None
            await push(mesh, file, 4)

        engine.pause = pause
        await mesh.ask(key, {"role": "user", "content": "other"})
        records = (await mesh.manifest(key)).records
    assert [one.coords.weight_version for one in records] == [3, 3]
    assert [one.completion.weight_version_count for one in records] == [1, 2]


async def push(mesh: FirstPathMesh, file: Path, version: int) -> None:
    digest = hashlib.sha256(file.read_bytes()).digest()
    assert await mesh.worker.update_weights(str(file), version, digest) == version


@pytest.mark.requirement("CAP-4")
async def test_attempts_are_named_by_the_server(mesh: FirstPathMesh) -> None:
    assert [await mesh.open("r") for _ in range(3)] == ["r", "r-a1", "r-a2"]
    repeated = str(uuid.uuid4())
    first = await mesh.admission.open_attempt("q", request_id=repeated)
    again = await mesh.admission.open_attempt("q", request_id=repeated)
    assert first.capture_key == again.capture_key == "q"
    assert first.state == attempt_pb2.ATTEMPT_STATE_OPEN
