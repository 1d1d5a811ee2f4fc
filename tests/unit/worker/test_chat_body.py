"""What a Chat Completions body may ask of a captured call, and what its response may show."""

import json

import pytest

from callforest_mesh.worker.engine import EngineRefusalError
from callforest_mesh.worker.vllm.chat_body import (
    asked_token_count,
    history_body,
    read_body,
    write_response,
)

USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}


def test_reads_the_body_under_the_calls_name() -> None:
    body = {"messages": [USER], "request_id": "mine", "n": 1, "stream": False, "top_p": 0.5}
    read = read_body(json.dumps({**body, "return_token_ids": True}).encode(), "call-1")
    assert read == {"messages": [USER], "request_id": "call-1", "top_p": 0.5}


@pytest.mark.requirement("CAP-3")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("stream", True),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", -1),
        ("echo", True),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
        ("kv_transfer_params", {}),
        ("ec_transfer_params", {}),
    ],
)
def test_refuses_what_would_bypass_the_capture(name: str, value: object) -> None:
    with pytest.raises(EngineRefusalError, match=name) as refusal:
        read_body(json.dumps({name: value}).encode(), "call-1")
    assert refusal.value.parameter == name


@pytest.mark.parametrize("body", [b"", b"{", b"3", b"[]", b'{"a":NaN}', b'{"a":1e999}', b"\xff"])
def test_refuses_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(EngineRefusalError):
        read_body(body, "call-1")


def test_history_ends_with_the_last_assistant_message() -> None:
    body = {"messages": [USER, ASSISTANT, USER, ASSISTANT, USER], "tools": ["t"]}
    history = history_body(body)
    assert history == {
        "messages": [USER, ASSISTANT, USER, ASSISTANT],
        "tools": ["t"],
        "add_generation_prompt": False,
    }
    assert history["messages"][0] is not USER
    assert len(body["messages"]) == 5
    assert history_body({"messages": [USER]}) is None
    assert history_body({"messages": "a"}) is None


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": True}, None),
    ],
)
def test_asked_token_count(body: dict[str, object], count: int | None) -> None:
    assert asked_token_count(body) == count


def test_response_shows_the_calls_time_and_no_tokens() -> None:
    response = {
        "id": "chatcmpl-1",
        "created": 5,
        "choices": [{"index": 0, "token_ids": [1], "routed_experts": "x", "logprobs": None}],
        "prompt_token_ids": [1],
        "prompt_logprobs": [],
        "prompt_text": "t",
        "kv_transfer_params": {},
        "ec_transfer_params": {},
        "metrics": {},
        "usage": {"half a pair": "\ud800"},
    }
    assert json.loads(write_response(response, created=7)) == {
        "id": "chatcmpl-1",
        "created": 7,
        "choices": [{"index": 0, "logprobs": None}],
        "usage": {"half a pair": "\ud800"},
    }
