"""The Chat Completions body on its way in and out: what the engine refuses, adds and takes away."""

from __future__ import annotations

import copy
import json
import math
from typing import Any, NoReturn

from callforest_mesh.worker.engine import EngineRefusalError
from callforest_mesh.worker.spelling import spellings_of

# Fields that would make the served tokens others than the captured ones, or bypass the template.
# Each with the values that are harmless.
_REFUSED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("stream", (None, False)),
    ("n", (None, 1)),
    ("use_beam_search", (None, False)),
    ("truncate_prompt_tokens", (None,)),
    ("echo", (None, False)),
    ("continue_final_message", (None, False)),
    ("add_generation_prompt", (None, True)),
    ("kv_transfer_params", (None,)),
    ("ec_transfer_params", (None,)),
)
# Fields that ask for token material, which never leaves in a response.
_TOKEN_REQUESTS = (
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
    "prompt_logprobs",
    "stream_options",
)
_TOKEN_MATERIAL = (
    "prompt_logprobs",
    "prompt_token_ids",
    "prompt_text",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
)
_CHOICE_TOKEN_MATERIAL = ("token_ids", "routed_experts")


def read_body(body: bytes, call_id: str) -> dict[str, Any]:
    """Parse a request for the serving layer, under the call's own name.

    Raises:
        EngineRefusalError: it is no JSON object, or it asks for something that cannot be captured.
    """
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant, parse_float=_read_float)
    except ValueError as error:
        raise EngineRefusalError("The body is not valid JSON") from error
    if not isinstance(parsed, dict):
        raise EngineRefusalError("The body must be a JSON object.")
    for name, harmless in _REFUSED:
        if name in parsed and not _is_one_of(parsed[name], harmless):
            raise EngineRefusalError(
                f"`{name}` is not supported with captured calls.", parameter=name
            )
        parsed.pop(name, None)
    for name in _TOKEN_REQUESTS:
        parsed.pop(name, None)
    parsed["request_id"] = call_id
    return parsed


def asked_token_count(body: dict[str, Any]) -> int | None:
    """Return how many tokens the client allows; None when it does not say so with an integer."""
    for name in ("max_completion_tokens", "max_tokens"):
        asked = body.get(name)
        if asked is not None:
            return asked if type(asked) is int else None
    return None


def history_body(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the request that renders the messages up to and including the last assistant's.

    None when no message is an assistant's: then there is no history to replace.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if isinstance(message, dict) and message.get("role") == "assistant":
            # A copy: the serving layer normalises messages in place.
            return copy.deepcopy(
                body | {"messages": messages[: index + 1], "add_generation_prompt": False}
            )
    return None


def spelled_bodies(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a request once with each spelling of the text that answers lack.

    Copies: the serving layer normalises messages in place.
    """
    messages = [message for message in body["messages"] if isinstance(message, dict)]
    return [copy.deepcopy(body | {"messages": spelled}) for spelled in spellings_of(messages)]


def write_response(response: dict[str, Any], *, created: int) -> bytes:
    """Serialise the serving layer's response, stamped with the call's time, without tokens."""
    response["created"] = created
    for name in _TOKEN_MATERIAL:
        response.pop(name, None)
    for choice in response["choices"]:
        for name in _CHOICE_TOKEN_MATERIAL:
            choice.pop(name, None)
    # ASCII: a parsed tool call may hold half a surrogate pair, which has no UTF-8 form.
    return json.dumps(response, separators=(",", ":")).encode("ascii")


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    return any(type(value) is type(allowed) and value == allowed for allowed in harmless)


def _read_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse_constant(text)
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")
