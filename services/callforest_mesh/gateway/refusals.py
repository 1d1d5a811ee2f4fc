"""What the edge refuses, and how it says so: OpenAI-shaped errors.

What exact capture cannot serve is refused before anything is generated (CAP-3, CAP-7). Contract:
docs/protocol.md, section "The HTTP edge".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from callforest.capture.v1 import capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, UnavailableError
from callforest_core.lineage.items import TOKEN_FIELDS, Item


class HttpRefusal(Exception):  # noqa: N818 - a refusal is an answer, not a programming error
    """A request that gets an error for an answer.

    Attributes:
        status: the HTTP status.
        code: the machine-readable code.
        message: what is wrong and what to do.
        parameter: the field at fault, if there is one.
        retry_after_s: when a repeat can succeed, in whole seconds.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        parameter: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.parameter = parameter
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Give the error as OpenAI shapes it."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        fields = {
            "message": self.message,
            "type": kind,
            "param": self.parameter,
            "code": self.code,
        }
        return json.dumps({"error": fields}).encode("ascii")


@dataclass(frozen=True, slots=True)
class _Rule:
    """Fields that are refused, unless their value asks for nothing."""

    names: tuple[str, ...]
    harmless: tuple[object, ...]
    why: str


_RULES: Final = (
    _Rule(
        ("stream",),
        (None, False),
        "A response is captured whole before it is served, so it cannot be streamed by this "
        "release. Send the request without it.",
    ),
    _Rule(
        ("n", "best_of"),
        (None, 1),
        "A call is one generation. Send one request for each.",
    ),
    _Rule(("use_beam_search",), (None, False), "Beam search does not sample from the policy."),
    _Rule(
        ("previous_response_id", "conversation"),
        (None,),
        "No conversation is kept here. Send the whole history in `messages`.",
    ),
    _Rule(
        ("store",),
        (None, False),
        "No completion is kept here for later retrieval. Send the request without it.",
    ),
    _Rule(
        ("continue_final_message",),
        (None, False),
        "Text that the model did not sample cannot begin its turn (assistant prefill).",
    ),
    _Rule(
        ("add_generation_prompt",),
        (None, True),
        "Text that the model did not sample cannot begin its turn (assistant prefill).",
    ),
    _Rule(
        ("truncate_prompt_tokens",),
        (None,),
        "A truncated prompt is not the conversation that was recorded. Shorten the history.",
    ),
    _Rule(
        ("truncation",),
        (None, "disabled"),
        "A truncated prompt is not the conversation that was recorded. Shorten the history.",
    ),
    _Rule(
        (
            "prompt_token_ids",
            "required_prefix_token_ids",
            "kv_transfer_params",
            "ec_transfer_params",
            "offload_params",
            "vllm_xargs",
            "ng_capture",
            "ng_commit_coords",
        ),
        (None,),
        "Tokens and capture fields are the server's own; callers send text.",
    ),
    _Rule(
        ("echo", "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text"),
        (None, False),
        "Token material does not leave the server.",
    ),
    _Rule(
        ("prompt_logprobs", "logprob_token_ids"),
        (None,),
        "Token material does not leave the server.",
    ),
)


def refuse_unsupported(body: Item) -> None:
    """Refuse what exact capture cannot serve (CAP-3).

    Args:
        body: a parsed Chat Completions request whose `messages` is a list of objects.

    Raises:
        HttpRefusal: 400 `unsupported_value`, with the first field at fault.
    """
    for rule in _RULES:
        for name in rule.names:
            if name in body and not _is_one_of(body[name], rule.harmless):
                raise unsupported(name, f"`{name}` is not supported. {rule.why}")
    messages = body["messages"]
    assert isinstance(messages, list)
    for index, message in enumerate(messages):
        for name in TOKEN_FIELDS & message.keys():
            if message[name] is not None:
                raise unsupported(
                    f"messages[{index}].{name}",
                    "Tokens are the server's own; callers send text.",
                )
    if messages[-1].get("role") == "assistant":
        raise unsupported(
            "messages",
            "The last message is the assistant's. Text that the model did not sample cannot begin "
            "its turn (assistant prefill); end with a message of the user or of a tool.",
        )


def unsupported(parameter: str, message: str) -> HttpRefusal:
    """Make the refusal of what cannot be captured."""
    return HttpRefusal(400, "unsupported_value", message, parameter=parameter)


def malformed(message: str, parameter: str | None = None) -> HttpRefusal:
    """Make the refusal of a body that cannot be read."""
    return HttpRefusal(400, "invalid_request_error", message, parameter=parameter)


def no_attempt_named() -> HttpRefusal:
    """Make the refusal of a request that names no attempt."""
    return HttpRefusal(
        401,
        "invalid_api_key",
        "Name an attempt by its capture key: as bearer key, or in the base URL as "
        "/rollouts/<capture key>/v1.",
    )


def attempt_not_found(capture_key: str) -> HttpRefusal:
    """Make the refusal of an attempt that was never opened."""
    return HttpRefusal(404, "attempt_not_found", f"No attempt {capture_key} was opened.")


def too_large(limit_bytes: int) -> HttpRefusal:
    """Make the refusal of a body over the limit."""
    return HttpRefusal(413, "request_too_large", f"The body exceeds {limit_bytes} bytes.")


def overloaded(limit: str, limit_value: int) -> HttpRefusal:
    """Make the refusal at a bound of the gateway."""
    return HttpRefusal(
        429, "overloaded", f"{limit} is at its limit of {limit_value}. Repeat.", retry_after_s=1
    )


def unavailable(message: str, *, retry_after_s: int = 1) -> HttpRefusal:
    """Make the answer when a service behind the gateway is away; nothing was served."""
    return HttpRefusal(503, "unavailable", message, retry_after_s=retry_after_s)


def faulty(incident_id: str) -> HttpRefusal:
    """Make the answer to a fault; a log explains the incident."""
    return HttpRefusal(
        500, "internal_error", f"A fault of the server; its log has incident {incident_id}."
    )


def refused_verdict(capture_key: str, refused: capture_admission_pb2.Refused) -> HttpRefusal:
    """Make the answer to a call that must not be generated.

    A closed attempt gets 422: SDKs repeat 409 on their own.
    """
    if refused.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND:
        return attempt_not_found(capture_key)
    if refused.reason in (er.ERROR_REASON_ATTEMPT_CLOSED, er.ERROR_REASON_ATTEMPT_SEALED):
        return HttpRefusal(422, "attempt_closed", refused.message)
    return HttpRefusal(422, "call_refused", refused.message)


def of_service(error: CallforestError) -> HttpRefusal:
    """Make the answer to what a service behind the gateway said."""
    retry_after_s = None
    if error.retry_after_ms is not None:
        retry_after_s = max(1, -(-error.retry_after_ms // 1000))
    match error.reason:
        case er.ERROR_REASON_REQUEST_REFUSED:
            return malformed(error.message, error.metadata.get("parameter"))
        case er.ERROR_REASON_OVERLOADED:
            return HttpRefusal(429, "overloaded", error.message, retry_after_s=retry_after_s or 1)
        case er.ERROR_REASON_ATTEMPT_NOT_FOUND:
            return attempt_not_found(error.metadata.get("capture_key", ""))
        case er.ERROR_REASON_STORE_FULL:
            return unavailable("The store is full.", retry_after_s=retry_after_s or 30)
    if isinstance(error, UnavailableError):
        return unavailable("A service behind the gateway is away. Repeat.")
    return faulty(error.metadata.get("incident_id", "unknown"))


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    return any(type(value) is type(allowed) and value == allowed for allowed in harmless)
