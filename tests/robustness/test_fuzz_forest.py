"""Bad input on a gateway of forest mode: calls, deltas and measures, on both edges.

`test_fuzz.py` sends to every RPC and route of a mesh of chain mode; here is what differs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx
import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest_client.errors import CallforestError, reason_name, status_of_error
from callforest_client.gateway import CHAT, RESPONSES
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions
from tests.integration.first_path_mesh import FirstPathMesh, running_mesh
from tests.robustness.fuzz_http import CHAT_BODY, RESPONSES_BODY, Request, fault_of_answer
from tests.robustness.fuzz_rpc import fault_of_status
from tests.robustness.mutation import broken_json, wrong_at_every_key

SEED = 0
REQUESTS = 400
TURNS = 3
BODIES = {CHAT: CHAT_BODY, RESPONSES: RESPONSES_BODY}
PATHS = {CHAT: "v1/chat/completions", RESPONSES: "v1/responses"}


def bodies(api: pb.CompletionApi.ValueType, chance: random.Random) -> list[bytes]:
    """Give some broken requests, and a whole one."""
    broken = [*wrong_at_every_key(BODIES[api]), *broken_json(BODIES[api], chance)]
    whole = json.dumps(BODIES[api]).encode()
    return [*chance.sample(broken, min(REQUESTS, len(broken))), whole]


async def calls_of(mesh: FirstPathMesh, key: str, api: pb.CompletionApi.ValueType) -> list[str]:
    """Play some calls of an attempt; give their ids, and some that are none's."""
    whole = json.dumps({**BODIES[api], "stream": False}).encode()
    name = "messages" if api == CHAT else "input"
    delta = json.dumps(
        {**BODIES[api], "stream": False, name: [{"role": "user", "content": "go on"}]}
    ).encode()
    served = [await mesh.gateway.complete(key, whole, api)]
    for _ in range(TURNS):
        last = served[-1].call_id
        served.append(await mesh.gateway.complete(key, delta, api, continues_call_id=last))
    return [*(one.call_id for one in served), "nobody", "x" * 128]


@pytest.mark.requirement("API-6", "API-8", "CAP-10")
@pytest.mark.parametrize("api", [CHAT, RESPONSES])
async def test_bad_input_to_a_gateway_of_forest_mode(
    api: pb.CompletionApi.ValueType, tmp_path: Path
) -> None:
    """Typed errors only; the attempt that took all of it still continues its calls."""
    chance = random.Random(SEED)
    engine = ScriptedEngine(ScriptedOptions(context_token_count=4096))
    faults: list[str] = []
    answers: dict[str, int] = {}
    async with running_mesh(tmp_path, engine, local=True, forest=True) as mesh:
        key = await mesh.open()
        calls = await calls_of(mesh, key, api)

        async def over_grpc(request: bytes) -> str:
            send = chance.choice([mesh.gateway.complete, mesh.gateway.measure])
            claim = chance.choice([None, *calls])
            whole = chance.random() < 0.5
            given = {} if claim is None else {"continues_call_id": claim, "history_is_whole": whole}
            try:
                await send(key, request or b"{}", api, timeout_s=20.0, **given)
            except CallforestError as error:
                reason, fault = fault_of_status(status_of_error(error))
                if fault is not None:
                    faults.append(f"{fault}; sent {request[:300]!r} {given}")
                return reason
            return "served"

        async def over_http(request: bytes) -> str:
            path = chance.choice([f"rollouts/{key}/{PATHS[api]}", f"context/{key}/measure"])
            headers = {"x-callforest-continues": chance.choice(["", "a b", *calls])}
            response = await mesh.http.post(
                f"{mesh.url}/{path}",
                content=request,
                headers=chance.choice([{}, headers]),
            )
            code, fault = fault_of_answer(raw(response), Request(b"POST"))
            if fault is not None:
                faults.append(f"{fault}; sent {request[:300]!r} to {path}")
            return code

        for request in bodies(api, chance):
            for ask in (over_grpc, over_http):
                code = await ask(request)
                answers[code] = answers.get(code, 0) + 1
        manifest = await mesh.manifest(key)
        again = await calls_of(mesh, await mesh.open("after"), api)
    assert faults == [], answers
    assert len(again) == TURNS + 3
    assert manifest.attempt.state == attempt_pb2.ATTEMPT_STATE_OPEN
    # What was generated and cannot be captured is a failure: a `max_tokens` of a hundred digits,
    # and a stop string within the tokens.
    reasons = {one.worker_reason for one in manifest.failures}
    assert reasons <= {"invalid_extras", "text_ends_early"}
    assert not manifest.attempt.pending_call_ids
    seen = {reason_name(er.ERROR_REASON_HISTORY_REQUIRED), "served", "200"}
    assert seen <= answers.keys(), answers
    assert answers["200"] > 10


def raw(response: httpx.Response) -> bytes:
    """Write a response as it came."""
    head = f"HTTP/1.1 {response.status_code} x\r\n"
    head += f"content-type: {response.headers.get('content-type', '')}\r\n"
    head += f"content-length: {len(response.content)}\r\n\r\n"
    return head.encode() + response.content
