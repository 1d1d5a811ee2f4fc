"""The Chat Completions body as the scripted engine reads and writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from callforest_mesh.worker.chat_text import Message
from callforest_mesh.worker.engine import EngineRefusalError

_LOGPROB_MIN = -9999.0
"""What stands for a log-probability that JSON has no number for."""


@dataclass(frozen=True, slots=True)
class ScriptedBody:
    """What the scripted engine reads of a request."""

    messages: tuple[Message, ...]
    max_tokens: int | None
    seed: int | None
    temperature: float
    top_p: float
    logprobs: bool
    stop: tuple[str, ...]
    shows_stop: bool

    @property
    def history_count(self) -> int:
        """How many messages there are up to and including the assistant's last; 0 without one."""
        for index in range(len(self.messages), 0, -1):
            if self.messages[index - 1].get("role") == "assistant":
                return index
        return 0

    @property
    def history(self) -> tuple[Message, ...]:
        """The messages up to and including the last one of the assistant; empty without one."""
        return self.messages[: self.history_count]


def read_scripted_body(body: bytes) -> ScriptedBody:
    """Parse a request.

    Raises:
        EngineRefusalError: it is no JSON object, or a field has no sense.
    """
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise EngineRefusalError("The body is not valid JSON") from error
    if not isinstance(fields, dict):
        raise EngineRefusalError("The body must be a JSON object.")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise EngineRefusalError("messages must be a list that is not empty", parameter="messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise EngineRefusalError(
                "a message must be an object with a role", parameter="messages"
            )
    limit = fields.get("max_completion_tokens")
    return ScriptedBody(
        messages=tuple(messages),
        max_tokens=_integer(fields, "max_tokens", 1)
        if limit is None
        else _integer(fields, "max_completion_tokens", 1),
        seed=_integer(fields, "seed", None),
        temperature=_number(fields, "temperature"),
        top_p=_number(fields, "top_p"),
        logprobs=fields.get("logprobs") is True,
        stop=_stops(fields),
        shows_stop=fields.get("include_stop_str_in_output") is True,
    )


def write_completion(
    *,
    call_id: str,
    created: int,
    model: str,
    message: Mapping[str, object],
    finish_reason: str,
    token_counts: tuple[int, int],
    token_logprobs: Sequence[tuple[str, float]] | None,
) -> bytes:
    """Write the response to serve: JSON bytes without token material.

    Args:
        call_id: the response's id derives from it.
        created: seconds since the epoch.
        model: as served.
        message: the answer's fields beside its role.
        finish_reason: as served.
        token_counts: of the prompt and of the generation, as reported.
        token_logprobs: (text, log-probability) a token, when the request asked for them.
    """
    prompt_tokens, completion_tokens = token_counts
    logprobs = None
    if token_logprobs is not None:
        logprobs = {"content": [_token_logprob(*one) for one in token_logprobs]}
    response = {
        "id": f"chatcmpl-{call_id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", **message},
                "logprobs": logprobs,
                "finish_reason": finish_reason,
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return json.dumps(response, separators=(",", ":"), allow_nan=False).encode("ascii")


def _token_logprob(text: str, logprob: float) -> dict[str, object]:
    return {
        "token": text,
        "logprob": logprob if math.isfinite(logprob) else _LOGPROB_MIN,
        "bytes": list(text.encode()),
        "top_logprobs": [],
    }


def _stops(fields: dict[str, object]) -> tuple[str, ...]:
    given = fields.get("stop")
    if given is None:
        return ()
    stops = given if isinstance(given, list) else [given]
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise EngineRefusalError("stop must be strings that are not empty", parameter="stop")
    return tuple(stops)


def _integer(fields: dict[str, object], name: str, least: int | None) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or (least is not None and value < least):
        raise EngineRefusalError(f"{name} must be an integer of at least {least}", parameter=name)
    return value


def _number(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EngineRefusalError(f"{name} must be a number", parameter=name)
    try:
        return float(value)
    except OverflowError:
        raise EngineRefusalError(f"{name} is out of range", parameter=name) from None
