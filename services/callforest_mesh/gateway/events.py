"""A whole response as the events in which a harness asked for it: buffered streaming. Pure.

The call's row is durable before the first event leaves; joined again, the events say what the plain
response says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from callforest_core.lineage.items import Dialect, Item
from callforest_mesh.gateway.json_body import write_json
from callforest_mesh.gateway.refusals import HttpRefusal, malformed, unsupported

KEEP_ALIVE: Final = b": keep-alive\n\n"
_DONE: Final = b"data: [DONE]\n\n"
_CHOICE_PARTS: Final = frozenset({"index", "message", "logprobs", "finish_reason"})


@dataclass(frozen=True, slots=True)
class Streaming:
    """How a response is to be streamed.

    Attributes:
        include_usage: whether Chat chunks end with one that has the usage.
    """

    include_usage: bool


def read_streaming(fields: Item) -> Streaming | None:
    """Read whether a request asks for events; None when it does not.

    Raises:
        HttpRefusal: `stream` is no boolean, or the engine's own increments are asked for.
    """
    stream, options = fields.get("stream"), fields.get("stream_options")
    if stream is not None and not isinstance(stream, bool):
        raise malformed("`stream` must be true or false.", "stream")
    if options is not None and not isinstance(options, dict):
        raise malformed("`stream_options` must be an object.", "stream_options")
    if options and options.get("continuous_usage_stats"):
        raise unsupported(
            "stream_options.continuous_usage_stats",
            "The engine's increments are not passed on: a response is captured whole before it is "
            "served, then its events are sent. Ask with `stream` alone.",
        )
    if not stream:
        return None
    return Streaming(include_usage=bool(options and options.get("include_usage")))


def chat_events(completion: Item, streaming: Streaming) -> bytes:
    """Give a completion as Chat chunks.

    Args:
        completion: the response, parsed; its choices are objects with a message.
        streaming: what was asked for.
    """
    chunks = list(_chunks(completion))
    if streaming.include_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        usage = {"choices": [], "usage": completion.get("usage")}
        chunks.append({**_chunk_head(completion), **usage})
    return b"".join(_frame(chunk) for chunk in chunks) + _DONE


def response_events(response: Item) -> bytes:
    """Give a Responses response as its events, the last one `response.completed`/`.incomplete`."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    events: list[Item] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    output = response["output"]
    assert isinstance(output, list)
    for index, item in enumerate(output):
        events += ({**event, "output_index": index} for event in _item_events(item))
    events.append({"type": f"response.{response['status']}", "response": response})
    return _numbered(events)


def failure_events(dialect: Dialect, refusal: HttpRefusal, response_id: str, created: int) -> bytes:
    """Give an error in place of a response whose status line is sent already.

    SDKs raise at the error itself; a reader of Responses events finds a `response.failed` before.
    """
    shown = refusal.shown()
    if dialect is Dialect.CHAT:
        return _frame({"error": shown}) + _DONE
    failed = {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "failed",
        "error": {"code": refusal.code, "message": refusal.message},
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    begun = {**failed, "status": "in_progress", "error": None}
    named = {"code": refusal.code, "message": refusal.message, "param": refusal.parameter}
    return _numbered(
        [
            {"type": "response.created", "response": begun},
            {"type": "response.failed", "response": failed},
            {"type": "error", **named, "error": shown},
        ]
    )


def _chunks(completion: Item) -> Iterator[Item]:
    """Give the chunks of every choice: its role, what it says, how it ended."""
    head = _chunk_head(completion)
    choices = completion["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        message = choice["message"]
        said = {name: value for name, value in message.items() if name != "role"}
        said = {name: value for name, value in said.items() if value is not None}
        calls = said.pop("tool_calls", None)
        if isinstance(calls, list) and calls:
            said["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        ended = {name: value for name, value in choice.items() if name not in _CHOICE_PARTS}
        index = choice.get("index", 0)
        finish_reason = choice.get("finish_reason")
        for delta, logprobs, finished, rest in (
            ({"role": message.get("role", "assistant")}, None, None, {}),
            (said, choice.get("logprobs"), None, {}),
            ({}, None, finish_reason, ended),
        ):
            shown = {"index": index, "delta": delta, "logprobs": logprobs}
            yield {**head, "choices": [{**shown, "finish_reason": finished, **rest}]}


def _chunk_head(completion: Item) -> Item:
    """Give what every chunk says of its completion."""
    rest = {name: completion[name] for name in completion if name not in ("choices", "usage")}
    return {**rest, "object": "chat.completion.chunk"}


def _item_events(item: Item) -> Iterator[Item]:
    """Give the events of one output item."""
    begun = {**item, "status": "in_progress"}
    where = {"item_id": item["id"]}
    match item["type"]:
        case "message" | "reasoning":
            yield {"type": "response.output_item.added", "item": {**begun, "content": []}}
            content = item["content"]
            assert isinstance(content, list)
            for number, part in enumerate(content):
                place = {**where, "content_index": number}
                yield from ({**event, **place} for event in _part_events(part))
        case _:
            arguments = item["arguments"]
            named = "response.function_call_arguments"
            yield {"type": "response.output_item.added", "item": {**begun, "arguments": ""}}
            yield {"type": f"{named}.delta", "delta": arguments, **where}
            done = {"arguments": arguments, "name": item["name"]}
            yield {"type": f"{named}.done", **done, **where}
    yield {"type": "response.output_item.done", "item": item}


def _part_events(part: Item) -> Iterator[Item]:
    """Give the events of one part of a message or of reasoning."""
    named = f"response.{part['type']}"
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    none: Item = {name: [] for name in logprobs}
    yield {"type": "response.content_part.added", "part": {**part, "text": "", **none}}
    if part["text"]:
        yield {"type": f"{named}.delta", "delta": part["text"], **logprobs}
    yield {"type": f"{named}.done", "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", "part": part}


def _numbered(events: list[Item]) -> bytes:
    return b"".join(
        b"event: " + str(event["type"]).encode("ascii") + b"\n"
        + _frame({**event, "sequence_number": number})
        for number, event in enumerate(events)
    )  # fmt: skip


def _frame(event: Item) -> bytes:
    return b"data: " + write_json(event) + b"\n\n"
