"""Reject a definite response and sample again, within limits (CAP-12).

A resample is a new logical request: the same messages under a new idempotency key. What was
rejected enters neither the history nor the result. Whether a request that broke was served is not
known, so nothing is sent again after that: the client is closed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

OVERHEAD_HEADER: Final = "x-callforest-overhead-ms"


@dataclass(frozen=True, slots=True)
class SelectionLimits:
    """How often may be sampled.

    Attributes:
        max_response_retries: resamples of one turn.
        max_model_calls: calls of one rollout, rejected ones included.
    """

    max_response_retries: int = 1
    max_model_calls: int = 32

    def __post_init__(self) -> None:
        """Refuse limits that allow no call.

        Raises:
            ValueError: naming the limit.
        """
        if self.max_response_retries < 0:
            raise ValueError("max_response_retries must not be negative")
        if self.max_model_calls < 1:
            raise ValueError("max_model_calls must be at least 1")


class CallLimitError(Exception):
    """The rollout has made all its model calls."""


class ClientClosedError(Exception):
    """An earlier request ended without a definite answer; this client asks nothing more."""


@dataclass(slots=True)
class ResponseSelector:
    """Asks a model for the turns of one rollout.

    Attributes:
        client: an OpenAI client of the rollout.
        model: the served model's name.
        answer_tokens: most tokens of an answer.
        limits: how often may be sampled.
        calls: calls so far, rejected ones included.
        overhead_ms: what each call took beyond the generation itself, as the gateway says.
    """

    client: openai.AsyncOpenAI
    model: str
    answer_tokens: int
    limits: SelectionLimits
    calls: int = 0
    overhead_ms: list[float] = field(default_factory=list)
    _is_closed: bool = False

    async def select_response(
        self,
        messages: Sequence[ChatCompletionMessageParam],
        accept: Callable[[ChatCompletion], bool],
    ) -> ChatCompletion:
        """Ask until a response is accepted; the last one that the limits allow is accepted as is.

        Args:
            messages: the turn's context; unchanged between the samples.
            accept: judges a complete response.

        Raises:
            CallLimitError: no call is left.
            ClientClosedError: an earlier request had no definite answer.
            openai.OpenAIError: this one was refused, or had none.
        """
        for left in range(self.limits.max_response_retries, -1, -1):
            completion = await self._ask(messages)
            is_last = left == 0 or self.calls == self.limits.max_model_calls
            if is_last or accept(completion):
                return completion
        raise AssertionError("the last sample is accepted")

    async def _ask(self, messages: Sequence[ChatCompletionMessageParam]) -> ChatCompletion:
        if self._is_closed:
            raise ClientClosedError
        if self.calls >= self.limits.max_model_calls:
            raise CallLimitError
        self.calls += 1
        try:
            raw = await self.client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=messages,
                max_completion_tokens=self.answer_tokens,
                temperature=1.0,
                extra_headers={"Idempotency-Key": str(uuid.uuid4())},
            )
            completion = raw.parse()
        except openai.APIStatusError as error:
            self._is_closed = error.status_code >= 500
            raise
        except openai.OpenAIError:
            self._is_closed = True
            raise
        self.overhead_ms.append(float(raw.headers.get(OVERHEAD_HEADER, "nan")))
        return completion
