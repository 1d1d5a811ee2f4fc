"""Bad input that once looked like a fault of the service; fuzz finds each again, given time."""

import base64
import gzip
import hashlib
import json
import os
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status

from callforest.error.v1 import error_reason_pb2 as er
from callforest.gateway.v1 import gateway_service_pb2
from callforest.worker.v1 import engine_service_pb2, engine_service_pb2_grpc
from callforest_client.channel import connect
from callforest_client.errors import (
    RefusedError,
    UnavailableError,
    error_of_rpc,
    error_of_stream,
    status_of,
)
from callforest_core.refusal import Refusal
from callforest_mesh.worker.scripted import ScriptedEngine
from callforest_mesh.worker.vllm.child import make_server
from tests.integration.first_path_mesh import GO, FirstPathMesh, running_mesh

UNKNOWN = cast("gateway_service_pb2.CompletionApi.ValueType", 77)

pytestmark = pytest.mark.requirement("API-6")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[FirstPathMesh]:
    """A mesh whose engine answers pseudo-randomly, in ChatML."""
    async with running_mesh(tmp_path, ScriptedEngine()) as running:
        yield running


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "caf\u00e9", "gzip, gzip"])
async def test_compressed_bodies_are_refused(mesh: FirstPathMesh, coding: str) -> None:
    key = await mesh.open()
    for body in (b"nothing", gzip.compress(bytes(1 << 20))):
        response = await mesh.http.post(
            f"{mesh.url}/rollouts/{key}/v1/chat/completions",
            content=body,
            headers={"Content-Encoding": coding.encode()},
        )
        assert response.status_code == 415
        assert response.json()["error"]["code"] == "unsupported_encoding"


@pytest.mark.parametrize("kind", [[], {}, [["text"]], 1, None])
async def test_a_part_of_a_strange_type_is_refused(mesh: FirstPathMesh, kind: object) -> None:
    key = await mesh.open()
    content = [{"type": kind, "text": "go"}]
    response = await mesh.respond(key, [{"role": "user", "content": content}])
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("input")


async def test_numbers_out_of_range_are_refused(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    assert (await mesh.ask(key, GO, temperature=10**400)).status_code == 400


async def test_an_unknown_api_is_refused(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    with pytest.raises(RefusedError) as caught:
        await mesh.gateway.complete(key, json.dumps({"messages": [GO]}).encode(), UNKNOWN)
    assert caught.value.reason == er.ERROR_REASON_INVALID_MESSAGE


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a\0b", "pipe", "/dev/zero", "."])
async def test_weights_come_from_regular_files(
    mesh: FirstPathMesh, tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / name) if name == "pipe" else name
    with pytest.raises(RefusedError) as caught:
        await mesh.worker.update_weights(path, 1, hashlib.sha256(b"").digest())
    assert caught.value.reason == er.ERROR_REASON_REQUEST_REFUSED
    assert caught.value.metadata["parameter"] == "path"


async def test_the_engines_process_says_what_was_wrong(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    await engine.start()
    server = make_server(engine)
    server.add_insecure_port(f"unix:{tmp_path}/engine.sock")
    await server.start()
    channel = connect(f"unix:{tmp_path}/engine.sock")
    run = engine_service_pb2_grpc.EngineServiceStub(channel).RunEngine
    request = engine_service_pb2.RunEngineRequest(call_id="c", chat_request=b"{}")
    for change in ({"prefix_token_ids": b"abc"}, {"call_id": "a/b"}):
        wrong = engine_service_pb2.RunEngineRequest(**change)
        request.MergeFrom(wrong)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run(request)
        assert error_of_rpc(caught.value).reason == er.ERROR_REASON_INVALID_MESSAGE
    await channel.close()
    await server.stop(0)


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
def test_a_stream_that_grpc_itself_ends_may_be_opened_again(code: grpc.StatusCode) -> None:
    nothing = grpc.aio.Metadata()
    raised = grpc.aio.AioRpcError(code, nothing, nothing, "Internal error from Core")
    assert isinstance(error_of_stream(raised), UnavailableError)
    assert isinstance(error_of_rpc(raised), RefusedError)


def test_an_error_fits_into_the_trailers_of_any_client() -> None:
    """A message of the caller's own text, many fields at fault: at most 8 KiB as it travels."""
    text = "\u00e9\0" * 5000
    refusal = Refusal(
        er.ERROR_REASON_CHECKPOINT_REFUSED,
        text,
        violations=[(text, text)] * 300,
        path=text,
        field=text,
    )
    code, message, trailers = rpc_status.to_status(status_of(refusal))
    details = sum(len(base64.b64encode(value)) for _, value in trailers)
    assert details + len(urllib.parse.quote(message)) + 300 <= 8192
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), message)
    assert error_of_rpc(error).reason == er.ERROR_REASON_CHECKPOINT_REFUSED
    for other in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL):
        error = grpc.aio.AioRpcError(other, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), "x")
        assert error_of_rpc(error).code is other, "gRPC's own code stands, without a ValueError"
