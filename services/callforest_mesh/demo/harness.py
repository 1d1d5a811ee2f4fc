"""An ordinary agent harness on the unmodified `openai` SDK.

It plays a small counting game over several turns: it reads an action from the answer's text, tells
the model what came of it, and scores the whole rollout. It knows a base URL and nothing else: no
tokens, no segments, no parents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import openai
from openai.types.chat import ChatCompletionMessageParam

_DIGIT = re.compile(r"[0-9]")


@dataclass(frozen=True, slots=True)
class GameOptions:
    """How the game is played.

    Attributes:
        system: the system message.
        turns: model calls of one rollout.
        answer_tokens: most tokens of an answer.
        temperature: of the sampling.
    """

    system: str = "Count up. Answer in digits."
    turns: int = 3
    answer_tokens: int = 16
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a rollout.

    Attributes:
        reward: the share of the answers' characters that are digits, mean over the turns.
        response_id: the id of the last response.
        answers: what the model said.
        overhead_ms: what each call took beyond the generation itself, as the gateway says.
        result: the returned history as JSON bytes, of a harness that returns one.
        context_boundaries: how often the harness rewrote its context.
    """

    reward: float
    response_id: str
    answers: tuple[str, ...]
    overhead_ms: tuple[float, ...]
    result: bytes = b""
    context_boundaries: int = 0


class Harness(Protocol):
    """Whatever plays a rollout."""

    async def play(self, client: openai.AsyncOpenAI, model: str, opening: str) -> Played:
        """Play one rollout.

        Args:
            client: an OpenAI client whose base URL names the rollout.
            model: the served model's name.
            opening: the first user message; the same for a whole group.

        Raises:
            openai.OpenAIError: a call failed.
        """
        ...


def read_action(answer: str) -> int:
    """Read the action from an answer: its first digit; 0, a pass, when it has none."""
    found = _DIGIT.search(answer)
    return int(found.group()) if found else 0


def digit_share(answer: str) -> float:
    """Give the share of an answer's characters that are digits; 0.0 for an empty answer."""
    return len(_DIGIT.findall(answer)) / len(answer) if answer else 0.0


@dataclass(frozen=True, slots=True)
class CountingHarness:
    """Plays the counting game and shows the model the whole of it.

    Attributes:
        options: how it plays.
    """

    options: GameOptions = field(default_factory=GameOptions)

    async def play(self, client: openai.AsyncOpenAI, model: str, opening: str) -> Played:
        """Play one rollout.

        Raises:
            openai.OpenAIError: a call failed.
        """
        options = self.options
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": options.system},
            {"role": "user", "content": opening},
        ]
        answers: list[str] = []
        overheads: list[float] = []
        total = 0
        response_id = ""
        for _ in range(options.turns):
            raw = await client.chat.completions.with_raw_response.create(
                model=model,
                messages=messages,
                max_completion_tokens=options.answer_tokens,
                temperature=options.temperature,
            )
            completion = raw.parse()
            response_id = completion.id
            overheads.append(float(raw.headers.get("x-callforest-overhead-ms", "nan")))
            answer = completion.choices[0].message.content or ""
            answers.append(answer)
            action = read_action(answer)
            total += action
            verdict = f"added {action}" if action else "no move"
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": f"{verdict}, total {total}. Next?"})
        return Played(
            _mean([digit_share(answer) for answer in answers]),
            response_id,
            tuple(answers),
            tuple(overheads),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
