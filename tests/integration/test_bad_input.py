"""Bad input that once looked like a fault of the service; fuzz finds each again, given time."""

import asyncio
import base64
import gzip
import hashlib
import json
import logging
import os
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import httpx
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
from tests.robustness.fuzz_rpc import fault_of_text

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


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 30_000 + b" HTTP/1.1\r\n",
        b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"X: y\r\n" * 2_000,
        b"GET /healthz HTTP/1.1\r\nExpect: 200-maybe\r\n",
        b"POST /nowhere HTTP/1.1\r\nExpect: 200-maybe\r\n",
        b"\x16\x03\x01\r\n",
    ],
)
async def test_what_no_route_sees_is_refused_in_the_form_of_all_errors(
    mesh: FirstPathMesh, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    url = httpx.URL(mesh.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head + b"Connection: close\r\n\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    status, _, rest = answer.partition(b"\r\n")
    assert status.split()[1] in (b"400", b"417")
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"
    assert fault_of_text(error["message"]) is None
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"seed":' + b"9" * 5000 + b"}", "an integer has more digits than any reader takes"),
        (b'{"model":"\xff"}', "byte 10 is not of UTF-8"),
        (b"\xef\xbb\xbf{}", "character 0 is not what must stand there"),
        (b'{"a":1,}', "character 7 is not what must stand there"),
    ],
)
async def test_a_body_that_is_no_json_is_refused_in_our_own_words(
    mesh: FirstPathMesh, body: bytes, said: str
) -> None:
    key = await mesh.open()
    url = f"{mesh.url}/rollouts/{key}/v1/chat/completions"
    response = await mesh.http.post(url, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"The body is not valid JSON: {said}."


async def test_a_client_that_asks_nothing_is_not_waited_for(tmp_path: Path) -> None:
    """A head that never ends, and none at all."""
    options: dict[str, object] = {"body_timeout_s": 0.3}
    async with running_mesh(tmp_path, ScriptedEngine(), gateway=options) as mesh:
        url = httpx.URL(mesh.url)
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost: me"):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(sent)
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()
        reader, writer = await asyncio.open_connection(url.host, url.port)
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: me\r\n\r\n")
            assert (await reader.readuntil(b'{"status": "ok"}')).startswith(b"HTTP/1.1 200")
            with pytest.raises(TimeoutError):  # it stays open for the next one
                async with asyncio.timeout(0.5):
                    await reader.read(1)
        writer.close()


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
