"""The gRPC edge: the same calls, refusals and bytes as HTTP, by the stubs alone."""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from callforest.error.v1 import error_reason_pb2 as er
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest_client.channel import connect
from callforest_client.errors import CallforestError, RefusedError, UnavailableError
from callforest_client.gateway import CHAT, RESPONSES
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions, ScriptedTurn
from tests.integration.first_path_mesh import GO, FirstPathMesh, running_mesh, scripted, turn


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[FirstPathMesh]:
    """A mesh whose engine answers pseudo-randomly, in ChatML."""
    async with running_mesh(tmp_path, ScriptedEngine()) as running:
        yield running


def chat(*messages: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


def nameless(response: bytes, call_id: str) -> bytes:
    """Take out what differs between two calls of one request: the call's name and its time."""
    assert call_id.encode() in response
    stripped = response.replace(call_id.encode(), b"")
    return re.sub(rb'"(created|created_at)":\d+', b"", stripped)


@pytest.mark.requirement("CAP-1")
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    ("api", "path", "body"),
    [
        (CHAT, "chat/completions", chat(GO, logprobs=True)),
        (RESPONSES, "responses", json.dumps({"model": "m", "input": [GO], "top_p": 0.5}).encode()),
    ],
)
async def test_bytes_are_those_of_http(
    api: pb.CompletionApi.ValueType, path: str, body: bytes, local: bool, tmp_path: Path
) -> None:
    async with running_mesh(tmp_path, ScriptedEngine(), local=local) as mesh:
        over_http, over_grpc = await mesh.open("http"), await mesh.open("grpc")
        response = await mesh.http.post(f"{mesh.url}/rollouts/{over_http}/v1/{path}", content=body)
        served = await mesh.gateway.complete(over_grpc, body, api)
        (record,) = (await mesh.manifest(over_grpc)).records
        models = await mesh.gateway.list_models()
    assert response.status_code == 200
    call_id = response.headers["x-callforest-call-id"]
    assert nameless(served.response, served.call_id) == nameless(response.content, call_id)
    assert record.coords.call_id == served.call_id
    assert record.response_id == json.loads(served.response)["id"]
    assert models == ["scripted"]


@pytest.mark.requirement("API-4", "CAP-1", "API-3")
async def test_rollout_by_the_stubs_alone(tmp_path: Path) -> None:
    """Opened, asked, continued, closed and sealed over gRPC; no token is sent or seen."""
    engine = scripted(turn(10, 11, 4), turn(30, 4), turn(5, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        attempt = await mesh.admission.open_attempt("r", request_id=str(uuid.uuid4()))
        key = attempt.capture_key
        history: list[object] = [GO]
        for _ in range(3):
            served = await mesh.gateway.complete(key, chat(*history))
            assert b"token_ids" not in served.response
            history += [json.loads(served.response)["choices"][0]["message"], GO]
        await mesh.admission.close_attempt(key)
        await mesh.ledger.await_settled(key, wait_s=10.0)
        manifest = await mesh.manifest(key)
        staged = await mesh.staging.fetch(key, [one.coords.call_id for one in manifest.records])
    assert not manifest.failures
    assert not manifest.attempt.pending_call_ids
    parents = [one.coords.parent_call_id for one in manifest.records]
    assert parents == ["", *(one.coords.call_id for one in manifest.records[:-1])]
    assert [one.digest for one in staged] == [one.coords.digest for one in manifest.records]


@pytest.mark.requirement("API-6", "CAP-3")
@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        (chat(GO, n=2), "n"),
        (chat(GO, stream=True), "stream"),
        (chat(GO, previous_response_id="resp_1"), "previous_response_id"),
        (chat(), "messages"),
        (b"not JSON", None),
    ],
)
async def test_bad_requests_are_refused_with_the_field_at_fault(
    mesh: FirstPathMesh, body: bytes, parameter: str | None
) -> None:
    key = await mesh.open()
    error = await refused(mesh, key, body)
    assert error.reason == er.ERROR_REASON_REQUEST_REFUSED
    assert error.metadata.get("parameter") == parameter
    assert (await mesh.manifest(key)).attempt.revision == 1


async def refused(
    mesh: FirstPathMesh, key: str, body: bytes, api: pb.CompletionApi.ValueType = CHAT
) -> CallforestError:
    with pytest.raises(CallforestError) as caught:
        await mesh.gateway.complete(key, body, api, timeout_s=10.0)
    return caught.value


@pytest.mark.requirement("API-6")
async def test_attempts_that_take_no_calls(mesh: FirstPathMesh) -> None:
    error = await refused(mesh, "nobody", chat(GO))
    assert error.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    assert error.metadata == {"capture_key": "nobody"}
    key = await mesh.open()
    with pytest.raises(RefusedError) as caught:
        await mesh.gateway.for_tenant("stranger").complete(key, chat(GO))
    assert caught.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    await mesh.admission.close_attempt(key)
    error = await refused(mesh, key, chat(GO))
    assert error.reason == er.ERROR_REASON_ATTEMPT_CLOSED
    assert error.metadata["capture_key"] == key
    assert not mesh.prompts()


@pytest.mark.requirement("API-6")
async def test_malformed_messages_name_their_fields(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    for error in (
        await refused(mesh, key, chat(GO), pb.COMPLETION_API_UNSPECIFIED),
        await refused(mesh, "bad key", chat(GO)),
        await refused(mesh, key, b""),
    ):
        assert error.reason == er.ERROR_REASON_INVALID_MESSAGE
    served = await mesh.gateway.complete(key, chat(GO))  # the stream went on
    assert served.call_id


@pytest.mark.requirement("API-6")
async def test_bound_of_calls_in_work_says_when_to_repeat(tmp_path: Path) -> None:
    generating, release = asyncio.Event(), asyncio.Event()

    async def pause(_call_id: str) -> None:
        generating.set()
        await release.wait()

    engine = ScriptedEngine(pause=pause)
    async with running_mesh(tmp_path, engine, gateway={"calls_max": 1}) as mesh:
        key = await mesh.open()
        asking = asyncio.ensure_future(mesh.gateway.complete(key, chat(GO)))
        await generating.wait()
        error = await refused(mesh, key, chat(GO))
        assert error.reason == er.ERROR_REASON_OVERLOADED
        assert error.metadata == {"limit": "calls_in_work", "limit_value": "1"}
        assert error.retry_after_ms == 1000
        release.set()
        assert (await asking).call_id


@pytest.mark.requirement("API-6", "CAP-7")
async def test_what_is_away_and_what_the_engine_refuses(tmp_path: Path) -> None:
    engine = ScriptedEngine(ScriptedOptions(context_token_count=64))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        error = await refused(mesh, key, chat({"role": "user", "content": "long " * 20}))
        assert error.reason == er.ERROR_REASON_REQUEST_REFUSED
        assert error.metadata == {"parameter": "messages"}
        await engine.stop()
        error = await refused(mesh, await mesh.open("other"), chat(GO))
        assert isinstance(error, UnavailableError)
        assert error.reason == er.ERROR_REASON_ENGINE_UNAVAILABLE
        await mesh.servers["ledger"].stop()
        error = await refused(mesh, key, chat(GO))
        assert error.reason == er.ERROR_REASON_PEER_UNAVAILABLE


@pytest.mark.requirement("API-6", "LED-11")
async def test_cancelled_call_ends_its_generation_and_poisons(tmp_path: Path) -> None:
    generating, cancelled = asyncio.Event(), asyncio.Event()

    async def pause(_call_id: str) -> None:
        generating.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with running_mesh(tmp_path, ScriptedEngine(pause=pause)) as mesh:
        key = await mesh.open()
        asking = asyncio.ensure_future(mesh.gateway.complete(key, chat(GO)))
        await generating.wait()
        asking.cancel()
        async with asyncio.timeout(10):
            await cancelled.wait()
        await mesh.admission.close_attempt(key)
        assert not (await mesh.ledger.await_settled(key, wait_s=10.0)).pending_call_ids
        (failure,) = (await mesh.manifest(key)).failures
    assert failure.reason == "request_finished_without_staged_coordinates"


@pytest.mark.requirement("API-6")
async def test_deadline_of_a_call_is_its_items(tmp_path: Path) -> None:
    async def pause(_call_id: str) -> None:
        await asyncio.Event().wait()

    async with running_mesh(tmp_path, ScriptedEngine(pause=pause)) as mesh:
        key = await mesh.open()
        with pytest.raises(UnavailableError) as caught:
            await mesh.gateway.complete(key, chat(GO), timeout_s=0.3)
    assert caught.value.reason == er.ERROR_REASON_ITEM_DEADLINE


@pytest.mark.requirement("API-6")
async def test_gateway_reports_its_health(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, ScriptedEngine()) as mesh:
        async with connect(f"unix:{tmp_path}/gateway.sock") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in ("callforest.gateway.v1.GatewayService", "gateway"):
                request = health_pb2.HealthCheckRequest(service=name)
                answer = await stub.Check(request, timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await mesh.http.get(f"{mesh.url}/healthz")).status_code == 200


async def test_large_calls_travel_in_frames(tmp_path: Path) -> None:
    engine = ScriptedEngine(
        ScriptedOptions(context_token_count=8 << 20),
        script=lambda *_: ScriptedTurn(
            [65, 257], [-0.5, -0.5], message={"content": "y" * 3_000_000}
        ),
    )
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        long = {"role": "user", "content": "x" * (3 << 20)}
        served = await mesh.gateway.complete(key, chat(long))
    assert len(served.response) > 3_000_000
