"""The HTTP edge in front of real services: refusals, routes, names, limits."""

import openai
import pytest

from callforest_client.codec import call_record_from_proto
from callforest_mesh.conformance.peer_json import parse_record
from callforest_mesh.gateway.core import BODY_BYTES_MAX
from tests.integration.first_path_mesh import (
    CONTROL_TOKEN,
    GO,
    FirstPathMesh,
    events_of,
    spoken,
)


@pytest.fixture
def mesh(mesh_of_each_kind: FirstPathMesh) -> FirstPathMesh:
    """On sockets, embedded, and in processes."""
    return mesh_of_each_kind


@pytest.mark.requirement("CAP-3", "CAP-7")
@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        (
            {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
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
    mesh.assert_generated(0)


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
        await mesh.http.get(f"{mesh.url}/rollouts/{key}/v1/models"),
        await mesh.http.get(route, headers={"Authorization": f"Bearer {CONTROL_TOKEN}"}),
    ]
    streamed = [
        await mesh.ask(key, GO, stream=True, logprobs=True),
        await mesh.respond(key, [GO], stream=True, include=["message.output_text.logprobs"]),
    ]
    bodies = [response.json() for response in [*responses, await mesh.respond(key, [GO])]]
    bodies += (event for response in streamed for event in events_of(response))
    shown = set().union(*map(keys_of, bodies))
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
    mesh.assert_generated(0)


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
