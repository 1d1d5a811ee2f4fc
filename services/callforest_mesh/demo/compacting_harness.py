"""The example of a harness that compacts its own history, on the unmodified `openai` SDK (CFG-2).

It plays the counting game of `harness.py` with long observations, shows the model a part of its
history (`recency.py`), asks `measure` before each call whether the context still fits, and returns
all that it accepted: the trainer's rows come from that history, not from what was shown last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

import openai
from openai.types.chat import ChatCompletion

from callforest_mesh.demo.harness import Played, digit_share, read_action
from callforest_mesh.demo.recency import RecencyHistory, RecencyOptions
from callforest_mesh.demo.response_selection import (
    CallLimitError,
    ResponseSelector,
    RetriesSpentError,
    SelectionLimits,
)

_SYSTEM: Final = "Count up. Answer in digits."


@dataclass(frozen=True, slots=True)
class CompactingOptions:
    """How the compacting harness plays.

    Attributes:
        turns: accepted answers of one rollout, at most.
        answer_tokens: most tokens of an answer.
        context_tokens: the guard: most tokens that a prompt and its answer may have together.
        observation_words: length of an observation.
        recency: how much of the history is shown.
        limits: how often may be sampled.
    """

    turns: int = 4
    answer_tokens: int = 12
    context_tokens: int = 512
    observation_words: int = 24
    recency: RecencyOptions = field(default_factory=RecencyOptions)
    limits: SelectionLimits = field(default_factory=SelectionLimits)


@dataclass(frozen=True, slots=True)
class CompactingHarness:
    """Plays rollouts and compacts their context.

    Attributes:
        options: how it plays.
    """

    options: CompactingOptions = field(default_factory=CompactingOptions)

    async def play(self, client: openai.AsyncOpenAI, model: str, opening: str) -> Played:
        """Play one rollout.

        It ends early, with what was accepted until then, when the guard lets no context through or
        the limits of the sampling are spent.

        Raises:
            openai.OpenAIError: a call failed.
        """
        options = self.options
        history = RecencyHistory(
            [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": opening}],
            options.recency,
        )
        selector = ResponseSelector(client, model, options.answer_tokens, options.limits)
        accepted: list[ChatCompletion] = []
        total = 0
        while len(accepted) < options.turns and await self._fits(client, model, history):
            try:
                completion = await selector.select_response(history.context(), _says_something)
            except (CallLimitError, RetriesSpentError):
                break
            accepted.append(completion)
            answer = _text(completion)
            total += read_action(answer)
            observation = _observation(total, options.observation_words)
            history.add(answer, observation, completion.id)
        answers = tuple(_text(one) for one in accepted)
        return Played(
            reward=_mean([digit_share(answer) for answer in answers]),
            response_id=accepted[-1].id if accepted else "",
            answers=answers,
            overhead_ms=tuple(selector.overhead_ms),
            result=_returned_history(accepted),
            context_boundaries=history.boundaries,
        )

    async def _fits(self, client: openai.AsyncOpenAI, model: str, history: RecencyHistory) -> bool:
        """Ask whether the next call fits; close the chunk early when it does not.

        First as usual, then with fewer and fewer rounds kept. False is the guard's rejection:
        nothing is left to hide, and the rollout ends with what it has.
        """
        room = self.options.context_tokens - self.options.answer_tokens
        if await measure(client, model, history) <= room:
            return True
        for keep in range(self.options.recency.keep_rounds, -1, -1):
            if history.close_chunk(keep) and await measure(client, model, history) <= room:
                return True
        return False


async def measure(client: openai.AsyncOpenAI, model: str, history: RecencyHistory) -> int:
    """Ask how many prompt tokens the next call would have; nothing is generated or recorded.

    Raises:
        openai.OpenAIError: the gateway refused, or is away.
    """
    root, _, key = str(client.base_url).rstrip("/").removesuffix("/v1").rpartition("/rollouts/")
    answer = await client.post(
        f"{root}/context/{key}/measure",
        cast_to=dict[str, object],
        body={"model": model, "messages": history.context()},
    )
    count = answer.get("prompt_token_count")
    if answer.get("is_exact") is not True or not isinstance(count, int):
        raise openai.OpenAIError("the gateway does not measure exactly")
    return count


def _says_something(completion: ChatCompletion) -> bool:
    """Accept an answer that is not blank: one without a digit is a pass, which the game allows."""
    return bool(_text(completion).strip())


def _observation(total: int, words: int) -> str:
    counted = " ".join(str((total + step) % 10) for step in range(words))
    return f"total {total}: {counted}. Next?"


def _returned_history(accepted: list[ChatCompletion]) -> bytes:
    """Write what the harness returns: every accepted answer in order, whatever was shown."""
    responses = [
        {
            "id": one.id,
            "output": [{"type": "message", "role": "assistant", "content": _text(one)}],
        }
        for one in accepted
    ]
    return json.dumps({"responses": responses}).encode()


def _text(completion: ChatCompletion) -> str:
    return completion.choices[0].message.content or ""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
