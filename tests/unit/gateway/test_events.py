"""Buffered events say what the plain response says."""

import json

import pytest

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core, refusals
from callforest_mesh.gateway.events import Streaming, chat_events, failure_events, response_events
from callforest_mesh.gateway.refusals import HttpRefusal
from callforest_mesh.gateway.response_output import response_of
from callforest_mesh.gateway.responses import echo_of
from tests.unit.gateway.test_response_output import CALL, completion


def events_of(stream: bytes) -> list[dict[str, object]]:
    frames = [frame for frame in stream.decode("ascii").split("\n\n") if "data: {" in frame]
    events = []
    for frame in frames:
        *named, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert named == ([f"event: {event['type']}"] if "type" in event else [])
        events.append(event)
    return events


@pytest.mark.requirement("CAP-2")
def test_chunks_say_role_text_calls_and_end() -> None:
    whole = completion("tool_calls", content="ok\n\nyes", tool_calls=[CALL, CALL], reasoning="why")
    stream = chat_events(whole, Streaming(include_usage=False))
    assert stream.endswith(b"data: [DONE]\n\n")
    chunks = events_of(stream)
    assert {(one["id"], one["object"], one["created"], one["model"]) for one in chunks} == {
        ("chatcmpl-77", "chat.completion.chunk", 5, "m")
    }
    assert not any("usage" in one for one in chunks)
    deltas = [one["choices"][0]["delta"] for one in chunks]
    assert deltas == [
        {"role": "assistant"},
        {
            "content": "ok\n\nyes",
            "reasoning": "why",
            "tool_calls": [{"index": 0, **CALL}, {"index": 1, **CALL}],
        },
        {},
    ]
    reasons = [one["choices"][0]["finish_reason"] for one in chunks]
    assert reasons == [None, None, "tool_calls"]


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for() -> None:
    chunks = events_of(chat_events(completion(content="ok"), Streaming(include_usage=True)))
    assert [one["usage"] for one in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == completion()["usage"]


def test_logprobs_travel_with_what_was_said() -> None:
    whole = completion(content="ok")
    whole["choices"][0]["logprobs"] = {"content": [{"token": "ok", "logprob": -0.5}]}
    chunks = events_of(chat_events(whole, Streaming(include_usage=False)))
    given = [one["choices"][0]["logprobs"] for one in chunks]
    assert given == [None, whole["choices"][0]["logprobs"], None]


@pytest.mark.requirement("CAP-2")
def test_responses_events_are_complete_and_in_order() -> None:
    whole = completion("tool_calls", content="ok", tool_calls=[CALL], reasoning="why")
    response = response_of(whole, echo_of({"input": "go"}))
    events = events_of(response_events(response))
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    text = [
        "response.output_item.added",
        "response.content_part.added",
        "response.{}.delta",
        "response.{}.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert [one["type"] for one in events] == [
        "response.created",
        "response.in_progress",
        *(one.format("reasoning_text") for one in text),
        *(one.format("output_text") for one in text),
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"] == response
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == response["output"]
    deltas = [one["delta"] for one in events if one["type"].endswith(".delta")]
    assert deltas == ["why", "ok", CALL["function"]["arguments"]]


@pytest.mark.bugcase("B33")
@pytest.mark.parametrize(
    ("finish_reason", "last"),
    [("stop", "response.completed"), ("length", "response.incomplete")],
)
def test_last_event_says_how_it_ended(finish_reason: str, last: str) -> None:
    response = response_of(completion(finish_reason, content=""), echo_of({"input": "go"}))
    events = events_of(response_events(response))
    assert events[-1]["type"] == last
    assert not any(one["type"].endswith(".delta") for one in events)


def test_failure_behind_the_status_line() -> None:
    refusal = refusals.unavailable("The ledger is away; nothing was served.")
    (chat,) = events_of(failure_events(Dialect.CHAT, refusal, "chatcmpl-77", 5))
    assert chat == {"error": refusal.shown()}
    created, failed, error = events_of(failure_events(Dialect.RESPONSES, refusal, "chatcmpl-77", 5))
    assert created["response"]["id"] == failed["response"]["id"] == "chatcmpl-77"
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "unavailable"
    assert (error["type"], error["error"]) == ("error", refusal.shown())


@pytest.mark.requirement("CAP-3")
@pytest.mark.parametrize("dialect", list(Dialect))
def test_increments_of_the_engine_are_refused(dialect: Dialect) -> None:
    turns = [{"role": "user", "content": "go"}]
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    body = json.dumps({"messages" if dialect is Dialect.CHAT else "input": turns, **options})
    with pytest.raises(HttpRefusal, match="captured whole") as caught:
        core.read_request(body.encode(), dialect)
    assert caught.value.parameter == "stream_options.continuous_usage_stats"


def test_engine_is_never_asked_to_stream() -> None:
    body = b'{"messages":[{"role":"user","content":"h\\u00e9"}],"stream":true,"stream_options":{}}'
    request = core.read_request(body)
    assert request.streaming == Streaming(include_usage=False)
    assert json.loads(request.body) == {"messages": [{"role": "user", "content": "h\u00e9"}]}
    plain = core.read_request(b'{"messages":[{"role":"user","content":"h\\u00e9"}]}')
    assert request.evidence.probe == plain.evidence.probe
    assert request.evidence.replay == plain.evidence.replay


@pytest.mark.parametrize("choices", ["none", [5], [{}]])
def test_completion_without_messages_has_no_events(choices: object) -> None:
    request = core.read_request(b'{"messages":[{"role":"user","content":"a"}],"stream":true}')
    with pytest.raises(core.ServedResponseError):
        core.read_response(json.dumps({"id": "c", "choices": choices}).encode(), request)
