"""Measuring calls that are not made: what generation then uses, and nothing written."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import httpx
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest_client.errors import RefusedError
from callforest_client.gateway import CHAT, RESPONSES
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions
from tests.integration.first_path_mesh import GO, FirstPathMesh, running_mesh


def body(*turns: object, api: pb.CompletionApi.ValueType = CHAT, **fields: object) -> bytes:
    name = "messages" if api == CHAT else "input"
    return json.dumps({"model": "scripted", name: turns, **fields}).encode()


def stored(path: Path) -> dict[str, str]:
    """Digest the stores' files."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("data.mdb"))
    }


async def measured_by_http(
    mesh: FirstPathMesh, key: str, request: bytes, **headers: str
) -> httpx.Response:
    return await mesh.http.post(
        f"{mesh.url}/context/{key}/measure", content=request, headers=headers
    )


@pytest.mark.requirement("CAP-10")
@pytest.mark.parametrize("forest", [True, False], ids=["forest", "chain"])
@pytest.mark.parametrize("api", [CHAT, RESPONSES])
async def test_a_measure_counts_what_the_call_then_has_and_writes_nothing(
    tmp_path: Path, api: pb.CompletionApi.ValueType, forest: bool
) -> None:
    async with running_mesh(tmp_path, ScriptedEngine(), local=True, forest=forest) as mesh:
        key = await mesh.open()
        turns: list[object] = [GO]
        for number in range(3):
            request = body(*turns, api=api)
            files, attempt = stored(tmp_path), (await mesh.manifest(key)).attempt
            by_http = await measured_by_http(mesh, key, request)
            by_grpc = await mesh.gateway.measure(key, request, api)
            assert stored(tmp_path) == files
            assert len(files) >= 2
            assert (await mesh.manifest(key)).attempt == attempt
            assert len(mesh.prompts()) == number, "nothing was generated"
            served = await mesh.gateway.complete(key, request, api)
            prompt = mesh.prompts()[-1]
            assert by_http.json() == {
                "prompt_token_count": len(prompt),
                "is_exact": True,
                "is_continuation": number > 0,
            }
            assert (by_grpc.prompt_token_count, by_grpc.is_exact) == (len(prompt), True)
            assert by_grpc.context == served.context
            assert by_http.headers.get("x-callforest-context") == (
                (["root", "continuation"][number > 0]) if forest else None
            )
            answer = json.loads(served.response)
            echoed = answer["output"] if api == RESPONSES else [answer["choices"][0]["message"]]
            turns += [*echoed, {"role": "user", "content": f"more {number}"}]


@pytest.mark.requirement("CAP-10", "API-8")
async def test_a_delta_is_measured_like_its_whole_request(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, ScriptedEngine(), forest=True) as mesh:
        key = await mesh.open()
        first = await mesh.gateway.complete(key, body(GO))
        said = json.loads(first.response)["choices"][0]["message"]
        whole = await mesh.gateway.measure(key, body(GO, said, GO))
        delta = await mesh.gateway.measure(key, body(GO), continues_call_id=first.call_id)
        assert whole == delta
        assert delta.context.is_continuation
        with pytest.raises(RefusedError) as caught:
            await mesh.gateway.measure(key, body(GO), continues_call_id="nobody")
    assert caught.value.reason == er.ERROR_REASON_HISTORY_REQUIRED


@pytest.mark.requirement("CAP-10")
async def test_a_measure_is_refused_as_its_call_would_be(tmp_path: Path) -> None:
    engine = ScriptedEngine(ScriptedOptions(context_token_count=64))
    async with running_mesh(tmp_path, engine, local=True, forest=True) as mesh:
        key = await mesh.open()
        long = {"role": "user", "content": "long " * 40}
        for request, status, code in (
            (body(GO, n=2), 400, "unsupported_value"),
            (body(), 400, "invalid_request_error"),
            (b"not JSON", 400, "invalid_request_error"),
            (body(long), 400, "invalid_request_error"),
        ):
            measured = await measured_by_http(mesh, key, request)
            called = await mesh.http.post(
                f"{mesh.url}/rollouts/{key}/v1/chat/completions", content=request
            )
            assert measured.json()["error"] == called.json()["error"]
            assert (measured.status_code, measured.json()["error"]["code"]) == (status, code)
        assert (await measured_by_http(mesh, "nobody", body(GO))).status_code == 404
        assert (await measured_by_http(mesh, "a b", body(GO))).status_code == 404
        odd = await measured_by_http(mesh, key, body(GO), **{"x-callforest-continues": "a b"})
        assert odd.status_code == 400
        await mesh.admission.close_attempt(key)
        closed = await measured_by_http(mesh, key, body(GO))
        assert (closed.status_code, closed.json()["error"]["code"]) == (422, "attempt_closed")
        await engine.stop()
        fresh = await mesh.open("fresh")
        assert (await measured_by_http(mesh, fresh, body(GO))).status_code == 503
        with pytest.raises(RefusedError) as caught:
            await mesh.gateway.for_tenant("stranger").measure(fresh, body(GO))
        assert caught.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    assert not mesh.prompts()


async def test_measures_have_a_limit_of_their_own(tmp_path: Path) -> None:
    async with running_mesh(
        tmp_path, ScriptedEngine(), local=True, forest=True, gateway={"measures_max": 1}
    ) as mesh:
        key = await mesh.open()
        answers = await asyncio.gather(
            *(mesh.gateway.measure(key, body(GO)) for _ in range(4)), return_exceptions=True
        )
        assert (await mesh.gateway.complete(key, body(GO))).call_id
    failed = [one for one in answers if isinstance(one, RefusedError)]
    assert 1 <= len(failed) <= 3
    assert {one.metadata["limit"] for one in failed} == {"measured_calls"}
