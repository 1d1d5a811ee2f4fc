"""A Responses request as the Chat request for the engine."""

import json

import pytest

from callforest_core.lineage.fingerprint import assistant_fingerprint
from callforest_core.lineage.items import Dialect, request_items
from callforest_mesh.gateway import core
from callforest_mesh.gateway.refusals import HttpRefusal
from callforest_mesh.gateway.responses import chat_request, echo_of, parameter_of

GO = {"role": "user", "content": "go"}
TOOL = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}
CALL = {"type": "function_call", "call_id": "c1", "name": "run", "arguments": "{}", "id": "fc_1"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "why"}],
}


def said(text: str) -> dict[str, object]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": [part]}


def chat_call(call_id: str = "c1", name: str = "run") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def messages_of(turns: object, **fields: object) -> object:
    return chat_request({"input": turns, **fields})["messages"]


@pytest.mark.requirement("CAP-1")
@pytest.mark.parametrize(
    ("turns", "messages"),
    [
        ("go", [GO]),
        ([GO], [GO]),
        ([{"type": "message", **GO}], [GO]),
        ([{"role": "user", "content": [{"type": "input_text", "text": "go"}]}], [GO]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": part} for part in "ab"]}],
            [{"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]}],
        ),
        (
            [GO, said("ok"), GO],
            [GO, {"role": "assistant", "content": "ok"}, GO],
        ),
        (
            [GO, {"role": "assistant", "content": "ok"}, GO],
            [GO, {"role": "assistant", "content": "ok"}, GO],
        ),
        (
            [GO, said("a"), said("b"), GO],
            [GO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, GO],
        ),
        (
            [GO, CALL, RESULT],
            [
                GO,
                {"role": "assistant", "content": None, "tool_calls": [chat_call()]},
                {"role": "tool", "tool_call_id": "c1", "content": "done"},
            ],
        ),
        (
            [GO, REASONING, said("ok"), CALL, {**CALL, "call_id": "c2"}, RESULT],
            [
                GO,
                {
                    "role": "assistant",
                    "content": "ok",
                    "reasoning": "why",
                    "tool_calls": [chat_call(), chat_call("c2")],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "done"},
            ],
        ),
        (
            [GO, said("a"), REASONING, said("b"), GO],
            [
                GO,
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning": "why"},
                GO,
            ],
        ),
        (
            [GO, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, said("ok"), GO],
            [GO, {"role": "assistant", "content": "ok"}, GO],
        ),
        (
            [GO, {**CALL, "namespace": "files"}, {**RESULT, "output": []}],
            [
                GO,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [chat_call(name="files__run")],
                },
                {"role": "tool", "tool_call_id": "c1", "content": ""},
            ],
        ),
    ],
)
def test_input_becomes_messages(turns: object, messages: object) -> None:
    assert messages_of(turns) == messages


def test_what_opens_the_conversation_is_one_system_message() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "be kind"}]}
    later = {"role": "system", "content": "now be quick"}
    assert messages_of([developer, GO, later, GO], instructions="be brief") == [
        {"role": "system", "content": "be brief\n\nbe kind"},
        GO,
        later,
        GO,
    ]


def test_fields_are_translated_passed_on_or_without_effect() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    chat = chat_request(
        {
            "model": "m",
            "input": "go",
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "top_k": 3,
            "structured_outputs": {"regex": "a*"},
            "parallel_tool_calls": True,
            "stop": None,
            "max_output_tokens": 64,
            "tools": [{**TOOL, "description": "runs"}, {**TOOL, "strict": True}],
            "tool_choice": {"type": "function", "name": "run"},
            "text": {"format": schema, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
            "top_logprobs": 2,
            "store": False,
            "stream": True,
            "truncation": "disabled",
            "background": False,
            "previous_response_id": None,
            "prompt_cache_key": "k",
            "metadata": {"a": "b"},
            "client_metadata": {"x": "y"},
            "service_tier": "auto",
        }
    )
    function = {"name": "run", "parameters": {"type": "object"}}
    assert chat == {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "top_k": 3,
        "structured_outputs": {"regex": "a*"},
        "parallel_tool_calls": True,
        "messages": [GO],
        "max_completion_tokens": 64,
        "tools": [
            {"type": "function", "function": {**function, "description": "runs"}},
            {"type": "function", "function": {**function, "strict": True}},
        ],
        "tool_choice": {"type": "function", "function": {"name": "run"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
    }


@pytest.mark.parametrize(
    ("form", "translated"),
    [({"type": "text"}, None), ({"type": "json_object"}, {"type": "json_object"})],
)
def test_format_of_the_text(form: object, translated: object) -> None:
    assert chat_request({"input": "go", "text": {"format": form}}).get("response_format") == (
        translated
    )


@pytest.mark.requirement("CAP-3")
@pytest.mark.bugcase("B33")
@pytest.mark.parametrize(
    ("fields", "parameter", "text"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole history"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "whole history"),
        ({"store": True}, "store", "`store` false"),
        ({"background": True}, "background", "waits"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "templates"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "Rewrite"),
        ({"truncation": "auto"}, "truncation", "truncated"),
        ({"n": 2}, "n", "one generation"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids", "callers send text"),
        ({"messages": [GO]}, "messages", "`input`"),
        ({"max_tokens": 5}, "max_tokens", "`max_output_tokens`"),
        ({"response_format": {"type": "json_object"}}, "response_format", "`text.format`"),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1]", "No tools are hosted"),
        ({"tools": [{"type": "mcp", "server_url": "x"}]}, "tools[0]", "No tools are hosted"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]", "type 'function'"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'allowed_tools'"),
        ({"tool_choice": "any"}, "tool_choice", "'any'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "'grammar'"),
        ({"input": [GO, said("sure")]}, "input", "prefill"),
        ({"input": [GO, CALL]}, "input", "prefill"),
        ({"input": [GO, REASONING]}, "input", "prefill"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "Send the item"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]", "'web_search_call'"),
        ({"input": [GO, {**said("a"), "generation_token_ids": [1]}, GO]},
         "input[1].generation_token_ids", "callers send text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]", "Images"),
        ({"input": [GO, CALL, {**RESULT, "output": [{"type": "input_file", "file_id": "f"}]}]},
         "input[2].output[0]", "files"),
        ({"input": [{"role": "user", "content": [{"type": "poem", "text": "x"}]}]},
         "input[0].content[0]", "Only text"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused(
    fields: dict[str, object], parameter: str, text: str
) -> None:
    with pytest.raises(HttpRefusal) as caught:
        core.read_request(json.dumps({"input": "go", **fields}).encode(), Dialect.RESPONSES)
    assert (caught.value.status, caught.value.code) == (400, "unsupported_value")
    assert caught.value.parameter == parameter
    assert text in caught.value.message


@pytest.mark.requirement("API-6")
@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": {"role": "user"}}, "input"),
        ({"input": ["go"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "go"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "go"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0].text"),
        ({"input": [{**CALL, "call_id": ""}, RESULT]}, "input[0].call_id"),
        ({"input": [{**CALL, "arguments": {}}, RESULT]}, "input[0].arguments"),
        ({"input": [CALL, {**RESULT, "call_id": None}]}, "input[1].call_id"),
        ({"input": [{"type": "reasoning", "content": "why"}, GO]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": ["why"]}, GO]}, "input[0].summary[0]"),
        ({"instructions": ["be brief"]}, "instructions"),
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"text": "short"}, "text"),
        ({"reasoning": "low"}, "reasoning"),
        ({"include": "all"}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
    ],
)  # fmt: skip
def test_malformed_fields_are_refused(fields: dict[str, object], parameter: str) -> None:
    with pytest.raises(HttpRefusal) as caught:
        core.read_request(json.dumps({"input": "go", **fields}).encode(), Dialect.RESPONSES)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request_error")
    assert caught.value.parameter == parameter


def test_items_are_fingerprinted_as_received() -> None:
    turns = [GO, REASONING, said("ok"), CALL, RESULT]
    fields = {"input": turns, "instructions": "be brief", "tools": [TOOL]}
    request = core.read_request(json.dumps(fields).encode(), Dialect.RESPONSES)
    items = request_items(fields, Dialect.RESPONSES)
    assert request.evidence.probe.item_count == len(items) == 6
    assert request.evidence.probe.assistant_fingerprint == assistant_fingerprint(items)
    chat = {"role": "assistant", "content": "ok", "tool_calls": [chat_call()]}
    assert request.evidence.probe.assistant_fingerprint == assistant_fingerprint([GO, chat])
    assert json.loads(request.body)["messages"][0] == {"role": "system", "content": "be brief"}


def test_render_options_are_of_what_the_engine_gets() -> None:
    def digest(**fields: object) -> bytes:
        body = json.dumps({"input": [GO], **fields}).encode()
        replay = core.read_request(body, Dialect.RESPONSES).evidence.replay
        assert replay is not None
        return replay.render_digest

    assert digest() == digest(reasoning={"summary": "auto"}) == digest(metadata={"a": "b"})
    assert len({digest(), digest(reasoning={"effort": "low"}), digest(instructions="a")}) == 3


def test_engines_complaint_gets_the_requests_own_name() -> None:
    assert parameter_of("messages") == "input"
    assert parameter_of("max_completion_tokens") == "max_output_tokens"
    assert parameter_of("temperature") == "temperature"
    assert parameter_of(None) is None


def test_response_says_again_what_was_asked() -> None:
    echo = echo_of({"input": "go", "tools": [TOOL], "metadata": {"a": "b"}, "store": False})
    assert echo["tools"] == [TOOL]
    assert echo["metadata"] == {"a": "b"}
    assert (echo["store"], echo["tool_choice"], echo["parallel_tool_calls"]) == (
        False,
        "auto",
        True,
    )
    assert "input" not in echo


@pytest.mark.parametrize(
    "turns",
    [[{"type": "reasoning", "summary": []}], [{"role": "system", "content": ""}]],
)
def test_input_without_any_message_is_refused(turns: list[object]) -> None:
    body = json.dumps({"model": "m", "input": turns}).encode()
    with pytest.raises(HttpRefusal) as caught:
        core.read_request(body, Dialect.RESPONSES)
    assert (caught.value.status, caught.value.parameter) == (400, "input")
