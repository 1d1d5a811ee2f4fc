"""How a harness asks on each edge: HTTP, gRPC, or HTTP with events, which must be kept alive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import openai
from openai.types.chat import ChatCompletionMessageParam

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, RefusedError, UnavailableError
from callforest_client.gateway import GatewayClient
from callforest_client.rollout import OpenRollout

KEY_HEADER = "Idempotency-Key"
CALL_HEADER = "x-callforest-call-id"
CLAIM_HEADER = "x-callforest-continues"
CONTEXT_HEADER = "x-callforest-context"


class HarnessError(openai.OpenAIError):
    """A harness's call failed where the SDK has no error for it: over gRPC, or within events.

    Attributes:
        is_transient: whether the same request may be answered later.
    """

    def __init__(self, what: str, *, is_transient: bool = True) -> None:
        super().__init__(what)
        self.is_transient = is_transient


class HistoryRequiredError(HarnessError):
    """The gateway has no longer what a delta request stands on."""

    def __init__(self, what: str) -> None:
        super().__init__(what, is_transient=False)


@dataclass(frozen=True, slots=True)
class Question:
    """One logical request.

    Attributes:
        messages: the whole conversation.
        seed: of the sampling.
        claim: the call that the harness says it continues; "" when it says nothing.
        sent: how many of the last messages are sent, of a delta request; 0 sends all of them.
    """

    messages: Sequence[ChatCompletionMessageParam]
    seed: int
    claim: str = ""
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Said:
    """One response, whichever edge it came over.

    Attributes:
        call_id: what the edge called the call.
        response_id: what the body calls it.
        text: the assistant's message.
        body: the response byte for byte; b"" when it came as events.
        context: what the edge said of its context: `root`, `continuation`, or "" for nothing.
    """

    call_id: str
    response_id: str
    text: str
    body: bytes
    context: str = ""


def is_transient(error: openai.OpenAIError) -> bool:
    """Say whether the same request may be answered later."""
    if isinstance(error, HarnessError):
        return error.is_transient
    if isinstance(error, openai.APIStatusError):
        return error.status_code >= 500 or error.status_code == 429
    return isinstance(error, openai.APIConnectionError)


async def over_http(
    client: openai.AsyncOpenAI, rollout: OpenRollout, question: Question, key: str
) -> Said:
    """Ask over HTTP.

    Raises:
        OpenAIError: there is no answer.
    """
    raw = await client.with_options(
        base_url=rollout.base_url
    ).chat.completions.with_raw_response.create(
        model="scripted",
        messages=question.messages,
        seed=question.seed,
        extra_headers=_headers(question, key),
    )
    completion = raw.parse()
    return Said(
        raw.headers[CALL_HEADER],
        completion.id,
        completion.choices[0].message.content or "",
        raw.http_response.content,
        _taken(raw.headers.get(CONTEXT_HEADER, "")),
    )


async def with_events(
    client: openai.AsyncOpenAI, rollout: OpenRollout, question: Question, key: str
) -> Said:
    """Ask over HTTP for events.

    Raises:
        OpenAIError: there is no answer, or no whole one.
    """
    raw = await client.with_options(
        base_url=rollout.base_url
    ).chat.completions.with_raw_response.create(
        model="scripted",
        messages=question.messages,
        seed=question.seed,
        stream=True,
        extra_headers=_headers(question, key),
    )
    response_id, text, finished = "", "", False
    try:
        async for chunk in raw.parse():
            response_id = chunk.id
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finished = finished or choice.finish_reason is not None
    except Exception as error:
        raise HarnessError(f"the events broke off: {error!r}") from error
    if not finished:
        raise HarnessError("the events ended before the response")
    context = _taken(raw.headers.get(CONTEXT_HEADER, ""))
    return Said(raw.headers[CALL_HEADER], response_id, text, b"", context)


async def over_grpc(
    gateway: GatewayClient, rollout: OpenRollout, question: Question, key: str
) -> Said:
    """Ask over gRPC, with the whole conversation or with what is new of it.

    Raises:
        HistoryRequiredError: only the whole conversation can be answered.
        HarnessError: there is no answer.
    """
    sent = list(question.messages[-question.sent :])
    body = json.dumps({"model": "scripted", "messages": sent, "seed": question.seed})
    try:
        served = await gateway.complete(
            rollout.capture_key,
            body.encode(),
            continues_call_id=question.claim or None,
            history_is_whole=bool(question.claim) and not question.sent,
            idempotency_key=key,
        )
    except CallforestError as error:
        if isinstance(error, RefusedError) and error.reason == er.ERROR_REASON_HISTORY_REQUIRED:
            raise HistoryRequiredError(str(error)) from error
        transient = isinstance(error, UnavailableError) or error.retry_after_ms is not None
        raise HarnessError(str(error), is_transient=transient) from error
    completion = json.loads(served.response)
    text = completion["choices"][0]["message"]["content"] or ""
    context = ""
    if served.HasField("context"):
        context = "continuation" if served.context.is_continuation else "root"
    return Said(served.call_id, completion["id"], text, served.response, context)


def _headers(question: Question, key: str) -> dict[str, str]:
    return {KEY_HEADER: key} | ({CLAIM_HEADER: question.claim} if question.claim else {})


def _taken(header: str) -> str:
    """Read how a context was taken; the reason is left out."""
    return header.partition(";")[0]
