"""A completion as a Responses response."""

import json

import pytest

from callforest_core.lineage.fingerprint import assistant_fingerprint
from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core
from callforest_mesh.gateway.response_output import TranslationError, response_of
from callforest_mesh.gateway.responses import echo_of

CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}
ECHO = echo_of({"input": "go"})


def completion(finish_reason: str = "stop", **message: object) -> dict[str, object]:
    choice = {"index": 0, "message": {"role": "assistant", **message}}
    return {
        "id": "chatcmpl-77",
        "created": 5,
        "model": "m",
        "choices": [{**choice, "logprobs": None, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def outline(output: object) -> list[tuple[object, ...]]:
    """Give each item's type, id and status."""
    assert isinstance(output, list)
    return [(item["type"], item["id"], item["status"]) for item in output]


def test_text() -> None:
    response = response_of(completion(content="ok"), ECHO)
    assert (response["id"], response["created_at"]) == ("chatcmpl-77", 5)
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert outline(response["output"]) == [("message", "msg_77", "completed")]
    assert response["output"][0]["content"] == [
        {"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}
    ]
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_text_and_calls_in_this_order(name: str) -> None:
    message = {"content": "ok", "tool_calls": [CALL, {**CALL, "id": ""}], name: "why"}
    response = response_of(completion("tool_calls", **message), ECHO)
    assert outline(response["output"]) == [
        ("reasoning", "rs_77", "completed"),
        ("message", "msg_77", "completed"),
        ("function_call", "fc_77_0", "completed"),
        ("function_call", "fc_77_1", "completed"),
    ]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert [item["call_id"] for item in response["output"][2:]] == ["c1", "call_77_1"]
    assert response["output"][2]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize("content", [None, ""])
def test_calls_alone_and_nothing_at_all(content: str | None) -> None:
    calls = response_of(completion("tool_calls", content=content, tool_calls=[CALL]), ECHO)
    assert [item["type"] for item in calls["output"]] == ["function_call"]
    nothing = response_of(completion(content=content, reasoning="why", tool_calls=[]), ECHO)
    assert [item["type"] for item in nothing["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize(
    ("finish_reason", "reason"),
    [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("abort", "abort")],
)
def test_what_was_cut_is_incomplete(finish_reason: str, reason: str) -> None:
    response = response_of(completion(finish_reason, content="ok", tool_calls=[CALL]), ECHO)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": reason},
    )
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_logprobs_and_details_of_usage() -> None:
    given = completion(content="ok")
    token = {"token": "ok", "logprob": -0.5, "bytes": [111, 107], "top_logprobs": []}
    given["choices"][0]["logprobs"] = {"content": [token]}
    given["usage"] |= {
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    response = response_of(given, ECHO)
    assert response["output"][0]["content"][0]["logprobs"] == [token]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


@pytest.mark.parametrize(
    "broken",
    [
        {"choices": []},
        {"choices": None},
        {"choices": [completion()["choices"][0]] * 2},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": [5]}}]},
        {"choices": [{"message": {"tool_calls": {"a": 1}}}]},
        {"choices": [{"message": {"tool_calls": [{"id": "c1"}]}}]},
        {"choices": [{"message": {"tool_calls": [{"function": {"name": "run"}}]}}]},
    ],
)
def test_what_no_engine_gives_is_not_served(broken: dict[str, object]) -> None:
    with pytest.raises(TranslationError):
        response_of({**completion(content="ok"), **broken}, ECHO)
    request = core.read_request(b'{"input":"go"}', Dialect.RESPONSES)
    body = json.dumps({**completion(content="ok"), **broken}).encode()
    with pytest.raises(core.ServedResponseError):
        core.read_response(body, request)


@pytest.mark.requirement("LED-13")
def test_record_is_of_the_served_items_and_they_are_recognised() -> None:
    request = core.read_request(b'{"input":[{"role":"user","content":"go"}]}', Dialect.RESPONSES)
    body = json.dumps(completion("tool_calls", content="ok", tool_calls=[CALL], reasoning="why"))
    served = core.read_response(body.encode(), request)
    output = json.loads(served.body)["output"]
    assert served.items == output
    assert served.response_id == "chatcmpl-77"
    assert request.evidence.scan is not None
    turns = [{"role": "user", "content": "go"}, *output]
    echoed = [*turns, {"type": "function_call_output", "call_id": "c1", "output": "done"}]
    again = core.read_request(json.dumps({"input": echoed}).encode(), Dialect.RESPONSES)
    expected = request.evidence.scan.continued(served.items).fingerprint
    assert again.evidence.probe.assistant_fingerprint == expected == assistant_fingerprint(turns)
    (assistant,) = [one for one in json.loads(again.body)["messages"] if "tool_calls" in one]
    assert assistant == {
        "role": "assistant",
        "content": "ok",
        "reasoning": "why",
        "tool_calls": [CALL],
    }
