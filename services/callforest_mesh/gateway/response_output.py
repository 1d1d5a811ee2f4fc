"""A Chat Completions response as the Responses response that is served. Pure.

Ids derive from the completion's, so that the same completion always gives the same bytes. The
response keeps the completion's id: an id that an agent holds joins the ledger (contract 4.7).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from callforest_core.lineage.items import Item

_ID_PREFIX: Final = "chatcmpl-"
_ENDED: Final = frozenset({"stop", "tool_calls", "function_call"})
_INCOMPLETE: Final = {"length": "max_output_tokens"}
_REASONING: Final = ("reasoning_content", "reasoning")


class TranslationError(ValueError):
    """A completion that has no Responses form; `fact` says why."""

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact


def response_of(completion: Item, echo: Mapping[str, object]) -> Item:
    """Translate a completion.

    Args:
        completion: the engine's, with one choice.
        echo: what the response says again of its request.

    Raises:
        TranslationError: it is not what an engine gives.
    """
    choices = completion.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise TranslationError("the completion has not one choice")
    (choice,) = choices
    message = choice.get("message")
    if not isinstance(message, dict):
        raise TranslationError("the completion has no message")
    finish_reason = choice.get("finish_reason")
    ended = finish_reason in _ENDED
    reason = None if ended else _INCOMPLETE.get(str(finish_reason), str(finish_reason))
    identity = completion.get("id")
    response_id = identity if isinstance(identity, str) else ""
    output = _output(message, response_id.removeprefix(_ID_PREFIX), _logprobs(choice))
    output[-1]["status"] = "completed" if ended else "incomplete"
    return {
        "id": response_id,
        "object": "response",
        "created_at": completion.get("created"),
        "status": "completed" if ended else "incomplete",
        "error": None,
        "incomplete_details": None if ended else {"reason": reason},
        "model": completion.get("model"),
        "output": output,
        "usage": _usage(completion.get("usage")),
        **echo,
    }


def _output(message: Item, stem: str, logprobs: list[object]) -> list[Item]:
    """Give the output items: reasoning, text, calls.

    A message without calls always gives a text, empty if need be: reasoning alone is nothing that
    a later request could be recognised by.
    """
    output: list[Item] = []
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    if isinstance(reasoning, str):
        output.append(
            {
                "type": "reasoning",
                "id": f"rs_{stem}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reasoning}],
                "encrypted_content": None,
                "status": "completed",
            }
        )
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise TranslationError("tool_calls is no list")
    text = message.get("content") or message.get("refusal") or ""
    if not isinstance(text, str):
        raise TranslationError("the message's content is no text")
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        output.append(
            {
                "type": "message",
                "id": f"msg_{stem}",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    output += [_call(call, f"{stem}_{index}") for index, call in enumerate(calls)]
    return output


def _call(call: object, stem: str) -> Item:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise TranslationError("a tool call is no function's")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise TranslationError("a tool call has no name or no arguments")
    call_id = call.get("id")
    return {
        "type": "function_call",
        "id": f"fc_{stem}",
        "call_id": call_id if isinstance(call_id, str) and call_id else f"call_{stem}",
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }


def _logprobs(choice: Item) -> list[object]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return content if isinstance(content, list) else []


def _usage(usage: object) -> Item | None:
    if not isinstance(usage, dict):
        return None
    cached = _detail(usage, "prompt_tokens_details", "cached_tokens")
    reasoning = _detail(usage, "completion_tokens_details", "reasoning_tokens")
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.get("total_tokens", 0),
    }


def _detail(usage: Item, holder: str, name: str) -> object:
    details = usage.get(holder)
    return (details.get(name) if isinstance(details, dict) else None) or 0
