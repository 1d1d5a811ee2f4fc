"""Answers as harnesses echo them in forest mode: what SDKs add to them, and what changes them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import httpx
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import Response

from callforest_core.custody.tokens import TokenIds
from callforest_mesh.worker.chat_text import TURN_END
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedTurn
from tests.integration.first_path_mesh import GO, FirstPathMesh, running_mesh, spoken, turn

Fields: TypeAlias = dict[str, object]

FUNCTION = {"name": "run", "parameters": {"type": "object"}}
RESPONSES_TOOLS = [{"type": "function", **FUNCTION}]
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}
ANSWERS: dict[str, Fields] = {
    "text": {"content": "some"},
    "json": {"content": '{"a":1}'},
    "reasoning": {"reasoning": "why", "reasoning_content": "why", "content": "some"},
    "calls": {"content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
    "all": {"reasoning": "why", "content": "some", "tool_calls": [CALL]},
    "refusal": {"content": None, "refusal": "no"},
    "as vllm writes it": {
        "role": "assistant",
        "content": "some",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
    },
}
DUMPS: dict[str, Callable[[pydantic.BaseModel], object]] = {
    "all of it": lambda model: model.model_dump(warnings=False),
    "what is set": lambda model: model.model_dump(exclude_unset=True, warnings=False),
    "without nulls": lambda model: model.model_dump(exclude_none=True, warnings=False),
    "by alias": lambda model: model.model_dump(by_alias=True, warnings=False),
    "as json": lambda model: json.loads(model.model_dump_json(warnings=False)),
    "itself": lambda model: model,
}


class Form(pydantic.BaseModel):
    """What an answer in JSON is parsed as."""

    a: int


@dataclass
class Speaker:
    """What the engine says next; "ok" when nothing is set."""

    message: Fields | None = None

    def say(self, _prompt: TokenIds, _call_id: str, _ordinal: int) -> ScriptedTurn:
        message, self.message = self.message, None
        if message is None:
            return turn(*b"ok", TURN_END)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        return turn(*b"some", TURN_END, finish_reason=reason, message=message)


SPEAKER = Speaker()


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[FirstPathMesh]:
    """A mesh of forest mode whose engine says what SPEAKER is told."""
    engine = ScriptedEngine(script=SPEAKER.say)
    async with running_mesh(tmp_path, engine, local=True, forest=True) as running:
        yield running


async def completed(sdk: openai.AsyncOpenAI, _form: bool, more: Fields) -> ChatCompletionMessage:
    served = await sdk.chat.completions.create(
        model="scripted", messages=[GO], logprobs=True, extra_body=more
    )
    return served.choices[0].message


async def parsed(sdk: openai.AsyncOpenAI, form: bool, more: Fields) -> ChatCompletionMessage:
    wanted = Form if form else openai.NOT_GIVEN
    served = await sdk.chat.completions.parse(
        model="scripted", messages=[GO], response_format=wanted, extra_body=more
    )
    message = served.choices[0].message
    assert not form or message.parsed == Form(a=1)
    return message


async def streamed(sdk: openai.AsyncOpenAI, _form: bool, more: Fields) -> ChatCompletionMessage:
    async with sdk.chat.completions.stream(
        model="scripted", messages=[GO], extra_body=more
    ) as stream:
        return (await stream.get_final_completion()).choices[0].message


async def responded(sdk: openai.AsyncOpenAI, _form: bool, more: Fields) -> Response:
    return await sdk.responses.create(
        model="scripted",
        input=[GO],
        include=["message.output_text.logprobs"],
        extra_body=more,
    )


async def response_parsed(sdk: openai.AsyncOpenAI, form: bool, more: Fields) -> Response:
    wanted = Form if form else openai.NOT_GIVEN
    served = await sdk.responses.parse(
        model="scripted", input=[GO], text_format=wanted, extra_body=more
    )
    assert not form or served.output_parsed == Form(a=1)
    return served


async def response_streamed(sdk: openai.AsyncOpenAI, _form: bool, more: Fields) -> Response:
    async with sdk.responses.stream(model="scripted", input=[GO], extra_body=more) as stream:
        return await stream.get_final_response()


def context_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-callforest-context"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the SDK's, of its own model
@pytest.mark.requirement("ADM-2", "CAP-1")
@pytest.mark.parametrize("way", [completed, parsed, streamed])
async def test_what_the_sdk_dumps_of_a_message_is_the_answer(
    way: Callable[[openai.AsyncOpenAI, bool, Fields], Awaitable[ChatCompletionMessage]],
    mesh: FirstPathMesh,
) -> None:
    for answer, said in ANSWERS.items():
        key = await mesh.open(f"r {answer}".replace(" ", "-"))
        more: Fields = {"tools": CHAT_TOOLS} if said.get("tool_calls") else {}
        async with mesh.harness(key) as sdk:
            SPEAKER.message = said
            message = await way(sdk, answer == "json", more)
            for name, dump in DUMPS.items():
                served = await sdk.chat.completions.with_raw_response.create(
                    model="scripted", messages=[GO, dump(message), GO], extra_body=more
                )
                context = served.headers["x-callforest-context"]
                assert context == "continuation", (answer, name, dump(message))


@pytest.mark.requirement("ADM-2", "CAP-1")
@pytest.mark.parametrize("way", [responded, response_parsed, response_streamed])
async def test_what_the_sdk_dumps_of_a_response_is_the_answer(
    way: Callable[[openai.AsyncOpenAI, bool, Fields], Awaitable[Response]], mesh: FirstPathMesh
) -> None:
    for answer, said in ANSWERS.items():
        key = await mesh.open(f"r {answer}".replace(" ", "-"))
        more: Fields = {"tools": RESPONSES_TOOLS} if said.get("tool_calls") else {}
        async with mesh.harness(key) as sdk:
            SPEAKER.message = said
            response = await way(sdk, answer == "json", more)
            for name, dump in DUMPS.items():
                echoed = [dump(item) for item in response.output]
                served = await sdk.responses.with_raw_response.create(
                    model="scripted", input=[GO, *echoed, GO], extra_body=more
                )
                context = served.headers["x-callforest-context"]
                assert context == "continuation", (answer, name, echoed)


@pytest.mark.requirement("ADM-2")
@pytest.mark.bugcase("B05")
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"function_call": {"name": "rm", "arguments": "{}"}}, "extra_keys"),
        ({"thinking": "x"}, "extra_keys"),
        ({"reasoning_details": [{"text": "x"}]}, "extra_keys"),
        ({"tool_plan": "I will delete"}, "extra_keys"),
        ({"audio": {"id": "x"}}, "extra_keys"),
        ({"prefix": True}, "extra_keys"),
        ({"end_turn": False}, "extra_keys"),
        ({"weight": 0}, "extra_keys"),
        ({"recipient": "browser"}, "extra_keys"),
        ({"content": [{"type": "text", "text": "some", "thought": True}]}, "extra_keys"),
        ({"refusal": "no"}, "rewritten_history"),
        ({"reasoning": "secret"}, "rewritten_history"),
        ({"name": "bob"}, "rewritten_history"),
        ({"tool_calls": []}, None),
        ({"annotations": [{"type": "url_citation"}], "audio": None, "refusal": None}, None),
        ({"provider_specific_fields": {"refusal": None}, "index": None}, None),
    ],
    ids=str,
)
async def test_what_a_harness_adds_to_an_answer_is_a_change_of_it(
    more: Fields, expected: str | None, mesh: FirstPathMesh
) -> None:
    """A template could show it; the captured tokens would hide it."""
    key = await mesh.open()
    SPEAKER.message = {"content": "some"}
    said = spoken(await mesh.ask(key, GO))
    context = context_of(await mesh.ask(key, GO, {**said, **more}, GO))
    if expected is None:
        assert context == "continuation"
    else:
        assert context == f"root; reason=history_not_recorded; difference={expected}"
    assert context_of(await mesh.ask(key, GO, said, GO)) == "continuation"


@pytest.mark.requirement("ADM-2")
async def test_what_a_harness_adds_to_an_item_of_responses_is_a_change_of_it(
    mesh: FirstPathMesh,
) -> None:
    key = await mesh.open()
    tools: Fields = {"tools": RESPONSES_TOOLS}
    SPEAKER.message = ANSWERS["all"]
    output = (await mesh.respond(key, [GO], **tools)).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    for place, item in enumerate(output):
        changed = [*output[:place], {**item, "plan": "x"}, *output[place + 1 :]]
        context = context_of(await mesh.respond(key, [GO, *changed, result], **tools))
        assert context == "root; reason=history_not_recorded; difference=extra_keys"
    assert context_of(await mesh.respond(key, [GO, *output, result], **tools)) == "continuation"
