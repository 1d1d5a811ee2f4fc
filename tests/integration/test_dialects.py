"""Chat and Responses, plain and as events: the same tokens, and rollouts that chain."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import openai
import pytest
from openai.types.responses import Response

from callforest.capture.v1 import staged_call_pb2
from callforest_client.codec import staged_call_from_proto
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedTurn
from tests.integration.first_path_mesh import (
    GO,
    FirstPathMesh,
    events_of,
    running_mesh,
    scripted,
    turn,
)
from tests.integration.kinds_of_mesh import embedded_mesh

CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}]
ANSWERS = {
    "text": turn(10, 11, 4),
    "cut": turn(30, 31, finish_reason="length"),
    "calls": turn(
        30,
        31,
        4,
        finish_reason="tool_calls",
        message={"content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    ),
    "all": turn(
        *(30, 31, 4),
        finish_reason="tool_calls",
        message={"reasoning": "why", "content": "some", "tool_calls": [CALL]},
    ),
    "empty": turn(4),
}

Said: TypeAlias = tuple[object, ...]
Opened: TypeAlias = Callable[[Path, ScriptedEngine], AbstractAsyncContextManager[FirstPathMesh]]
Way: TypeAlias = Callable[[openai.AsyncOpenAI], Awaitable[Said]]


@pytest.fixture
def mesh(mesh_of_each_kind: FirstPathMesh) -> FirstPathMesh:
    """On sockets, embedded, and in processes."""
    return mesh_of_each_kind


def said_in_chat(served: openai.types.chat.ChatCompletion) -> Said:
    (choice,) = served.choices
    message = choice.message
    calls = [
        (one.id, one.function.name, one.function.arguments) for one in message.tool_calls or ()
    ]
    reasoning = getattr(message, "reasoning", None)
    assert served.usage is not None
    length = choice.finish_reason == "length"
    return reasoning, message.content or "", calls, length, served.usage.completion_tokens


def said_in_responses(served: Response) -> Said:
    reasoning = next(
        (one.content[0].text for one in served.output if one.type == "reasoning"), None
    )
    calls = [
        (one.call_id, one.name, one.arguments)
        for one in served.output
        if one.type == "function_call"
    ]
    assert served.usage is not None
    cut = served.status == "incomplete"
    return reasoning, served.output_text, calls, cut, served.usage.output_tokens


async def chat(client: openai.AsyncOpenAI) -> Said:
    return said_in_chat(await client.chat.completions.create(model="m", messages=[GO]))


async def chat_events(client: openai.AsyncOpenAI) -> Said:
    options = {"include_usage": True}
    asked = client.chat.completions.stream(model="m", messages=[GO], stream_options=options)
    async with asked as stream:
        async for _ in stream:
            pass
        # `get_final_completion` raises for an answer that was cut, as the SDK does when parsing.
        return said_in_chat(stream.current_completion_snapshot)


async def responses(client: openai.AsyncOpenAI) -> Said:
    return said_in_responses(await client.responses.create(model="m", input=[GO]))


async def responses_events(client: openai.AsyncOpenAI) -> Said:
    async with client.responses.stream(model="m", input=[GO]) as stream:
        events = [event async for event in stream]
    assert events[-1].type in ("response.completed", "response.incomplete")
    return said_in_responses(events[-1].response)


WAYS: dict[str, Way] = {
    "chat": chat,
    "chat events": chat_events,
    "responses": responses,
    "responses events": responses_events,
}


@pytest.mark.requirement("CAP-1", "CAP-2")
@pytest.mark.parametrize("opened", [running_mesh, embedded_mesh])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_every_way_says_and_captures_the_same(
    answer: str, opened: Opened, tmp_path: Path
) -> None:
    """An unmodified SDK parses the same answer, and the same tokens are staged."""
    engine = scripted(*[ANSWERS[answer]] * len(WAYS))
    said: dict[str, Said] = {}
    staged: dict[str, staged_call_pb2.StagedCall] = {}
    async with opened(tmp_path, engine) as mesh:
        for number, (name, way) in enumerate(WAYS.items()):
            key = await mesh.open(f"way{number}")
            async with mesh.harness(key) as client:
                said[name] = await way(client)
            manifest = await mesh.manifest(key)
            (record,) = manifest.records
            assert not manifest.failures
            assert record.response_id == f"chatcmpl-{record.coords.call_id}"
            (staged[name],) = await mesh.staging.fetch(key, [record.coords.call_id])
    assert all(one == said["chat"] for one in said.values()), said
    first = staged_call_from_proto(staged["chat"])
    for one in map(staged_call_from_proto, staged.values()):
        assert np.array_equal(one.token_ids, first.token_ids)
        assert np.array_equal(one.logprobs, first.logprobs)
        assert (one.prev_len, one.carry_len) == (first.prev_len, first.carry_len)
        assert one.chain_hash == first.chain_hash
        assert one.cumulative_hash == first.cumulative_hash
        assert one.extras == first.extras


@pytest.mark.requirement("CAP-1", "LED-13")
@pytest.mark.parametrize("opened", [running_mesh, embedded_mesh])
@pytest.mark.parametrize("buffered", [False, True])
async def test_responses_rollout_chains_through_its_output_items(
    buffered: bool, opened: Opened, tmp_path: Path
) -> None:
    """Reasoning, text and a call are echoed as the SDK gave them; the sampled ids come back."""
    engine = scripted(ANSWERS["all"], turn(10, 11, 4), turn(30, 4))
    async with opened(tmp_path, engine) as mesh:
        key = await mesh.open()

        async def ask(client: openai.AsyncOpenAI, turns: list[object]) -> Response:
            fields = {"model": "m", "input": turns, "tools": TOOLS, "store": False}
            if not buffered:
                return await client.responses.create(**fields)
            async with client.responses.stream(**fields) as stream:
                return await stream.get_final_response()

        async with mesh.harness(key) as client:
            turns: list[object] = [GO]
            first = await ask(client, turns)
            turns += [*first.output]
            turns += [{"type": "function_call_output", "call_id": "call_1", "output": "text"}]
            second = await ask(client, turns)
            turns += [*second.output, GO]
            await ask(client, turns)
        manifest = await mesh.manifest(key)
        prompts = mesh.prompts()
    assert prompts == [
        [1, 20, 2, 3],
        [1, 20, 2, 3, 30, 31, 4, 1, 31, 2, 3],
        [1, 20, 2, 3, 30, 31, 4, 1, 31, 2, 3, 10, 11, 4, 1, 20, 2, 3],
    ]
    assert_chained(manifest.records, manifest.failures)


def assert_chained(records: object, failures: object) -> None:
    """Each call continues the one before."""
    assert not failures
    parents = [record.coords.parent_call_id for record in records]
    assert parents == ["", *(record.coords.call_id for record in records[:-1])]


@pytest.mark.requirement("CAP-1")
async def test_chat_rollout_chains_through_its_events(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    async with mesh.harness(key) as client:
        history: list[object] = [GO]
        for _ in range(4):
            spoken = ""
            stream = await client.chat.completions.create(model="m", messages=history, stream=True)
            async for chunk in stream:
                spoken += chunk.choices[0].delta.content or ""
            history += [{"role": "assistant", "content": spoken}, GO]
    manifest = await mesh.manifest(key)
    assert len(manifest.records) == 4
    assert_chained(manifest.records, manifest.failures)


@pytest.mark.parametrize("opened", [running_mesh, embedded_mesh])
async def test_dialects_of_one_attempt_continue_each_other(opened: Opened, tmp_path: Path) -> None:
    engine = scripted(turn(10, 11, 4), turn(30, 4), turn(30, 4))
    async with opened(tmp_path, engine) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as client:
            first = await client.chat.completions.create(model="m", messages=[GO])
            said = {"role": "assistant", "content": first.choices[0].message.content}
            second = await client.responses.create(model="m", input=[GO, said, GO])
            history = [GO, said, GO, {"role": "assistant", "content": second.output_text}, GO]
            await client.chat.completions.create(model="m", messages=history)
        manifest = await mesh.manifest(key)
    assert_chained(manifest.records, manifest.failures)


@pytest.mark.requirement("CAP-2", "CAP-3")
@pytest.mark.bugcase("B33")
async def test_agent_that_speaks_only_responses_events(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    turns = [
        {"type": "message", "role": "developer", "content": [text("be kind")]},
        {"type": "message", "role": "user", "content": [text("go")]},
    ]
    asked = {
        "instructions": "be brief",
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "5eed",
        "text": {"verbosity": "low"},
    }
    response = await mesh.respond(key, turns, **asked)
    events = events_of(response)
    assert response.headers["x-callforest-call-id"]
    assert float(response.headers["x-callforest-ttfb-ms"]) >= 0
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    again = await mesh.respond(key, [*turns, *done, turns[-1]], **asked)
    assert events_of(again)[-1]["type"] == "response.completed"
    manifest = await mesh.manifest(key)
    assert_chained(manifest.records, manifest.failures)
    async with mesh.harness(key) as client:
        with pytest.raises(openai.BadRequestError, match="whole history") as caught:
            await client.responses.create(
                model="m", input="go", previous_response_id=done[0]["id"], stream=True
            )
    assert (caught.value.code, caught.value.param) == ("unsupported_value", "previous_response_id")
    assert (await mesh.manifest(key)).attempt.revision == manifest.attempt.revision
    mesh.assert_generated(2)


def text(said: str) -> dict[str, str]:
    return {"type": "input_text", "text": said}


@pytest.mark.requirement("CAP-3", "CAP-7")
@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [GO, {"role": "assistant", "content": "Sure"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
    ],
)
async def test_responses_are_refused_before_the_intent(
    mesh: FirstPathMesh, fields: dict[str, object], parameter: str
) -> None:
    key = await mesh.open()
    async with mesh.harness(key) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "m", "input": [GO], **fields})
    assert (caught.value.code, caught.value.param) == ("unsupported_value", parameter)
    assert (await mesh.manifest(key)).attempt.revision == 1
    mesh.assert_generated(0)


async def test_images_in_chat_are_refused_before_the_intent(mesh: FirstPathMesh) -> None:
    key = await mesh.open()
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for part in (image, {"image_url": "x"}):
        response = await mesh.ask(key, {"role": "user", "content": [part]})
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_value", "messages[0].content[0]")
    assert (await mesh.manifest(key)).attempt.revision == 1


@pytest.mark.requirement("LED-13")
async def test_staged_response_is_the_engines_and_the_record_is_of_the_served(
    tmp_path: Path,
) -> None:
    """Whatever the dialect, a repeat can be served from what is staged."""

    def script(*_: object) -> ScriptedTurn:
        return ANSWERS["all"]

    async with running_mesh(tmp_path, ScriptedEngine(script=script)) as mesh:
        key = await mesh.open()
        response = (await mesh.respond(key, [GO])).json()
        (record,) = (await mesh.manifest(key)).records
        (staged,) = await mesh.staging.fetch(key, [record.coords.call_id])
    assert record.response_id == response["id"]
    assert b'"choices"' in staged.served_response
    assert response["id"].encode() in staged.served_response
