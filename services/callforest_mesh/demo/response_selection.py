"""Reject a definite response and sample again, within limits (CAP-12).

A resample is a new logical request: the same messages under a new idempotency key. What was
rejected enters neither the history nor the result, the last sample too: when that is rejected, the
turn has no answer. Whether a request that broke was served is not known, so nothing is sent again
after that: the client is closed. Of one whose body did not arrive it is known that no call began;
it is sent again as it was.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

OVERHEAD_HEADER: Final = "x-callforest-overhead-ms"
_NOT_ARRIVED: Final = 408
"""The gateway's word that the request did not arrive whole: it announces no call before it did."""


@dataclass(frozen=True, slots=True)
class SelectionLimits:
    """How often may be sampled.

    Attributes:
        max_response_retries: resamples of one turn, and requests sent again that did not arrive.
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


class RetriesSpentError(Exception):
    """Every sample of the turn that the limits allow was rejected; the rollout ends here."""


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
        """Ask until a response is accepted; each one is judged, the last one too.

        Args:
            messages: the turn's context; unchanged between the samples.
            accept: judges a complete response.

        Raises:
            RetriesSpentError: none was accepted.
            CallLimitError: no call is left.
            ClientClosedError: an earlier request had no definite answer.
            openai.OpenAIError: this one was refused, or had none.
        """
        key = _new_key()
        for left in range(self.limits.max_response_retries, -1, -1):
            try:
                completion = await self._ask(messages, key)
            except openai.APIStatusError as error:
                if error.status_code != _NOT_ARRIVED or not left:
                    raise
                continue  # the same request: nobody has seen it
            if accept(completion):
                return completion
            key = _new_key()
        raise RetriesSpentError(f"{self.limits.max_response_retries} retries, none accepted")

    async def _ask(
        self, messages: Sequence[ChatCompletionMessageParam], key: str
    ) -> ChatCompletion:
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
                extra_headers={"Idempotency-Key": key},
            )
            completion = raw.parse()
        except openai.APIStatusError as error:
            self._is_closed = error.status_code >= 500
            if error.status_code == _NOT_ARRIVED:
                self.calls -= 1  # no call began
            raise
        except openai.OpenAIError:
            self._is_closed = True
            raise
        self.overhead_ms.append(float(raw.headers.get(OVERHEAD_HEADER, "nan")))
        return completion


def _new_key() -> str:
    return str(uuid.uuid4())
