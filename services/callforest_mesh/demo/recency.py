"""Recency compaction: which part of its history a harness shows to the model (CFG-2). Pure.

A history is an opening and rounds, each an answer and the observation that it got. It is shown in
chunks. Within a chunk every context extends the one before, so that its calls are one chain. When
a chunk is closed, the observations of all but the last `keep_rounds` rounds are hidden from then
on: the context is rewritten, and the next call begins a context of its own. What the model wrote
is never hidden, and nothing of it leaves the history that the harness returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from openai.types.chat import ChatCompletionMessageParam

HIDDEN = "[older result hidden]"


@dataclass(frozen=True, slots=True)
class RecencyOptions:
    """How much is shown.

    Attributes:
        keep_rounds: rounds whose observations survive the closing of a chunk.
        chunk_rounds: rounds after which a chunk is closed.
    """

    keep_rounds: int = 1
    chunk_rounds: int = 2

    def __post_init__(self) -> None:
        """Refuse counts that make no chunk.

        Raises:
            ValueError: naming the count.
        """
        if self.keep_rounds < 0:
            raise ValueError("keep_rounds must not be negative")
        if self.chunk_rounds < 1:
            raise ValueError("chunk_rounds must be at least 1")


@dataclass(frozen=True, slots=True)
class Round:
    """One turn.

    Attributes:
        answer: what the model said.
        observation: what came of it.
        response_id: of the response that said it.
    """

    answer: str
    observation: str
    response_id: str


@dataclass(slots=True)
class RecencyHistory:
    """A rollout's history, and the part of it that is shown.

    Attributes:
        opening: system and first user message.
        options: how much is shown.
        rounds: all of them.
        hidden: rounds from the first on whose observations are hidden.
        boundaries: how often the context was rewritten.
    """

    opening: Sequence[ChatCompletionMessageParam]
    options: RecencyOptions
    rounds: list[Round] = field(default_factory=list)
    hidden: int = 0
    boundaries: int = 0
    _chunk_begin: int = 0

    def add(self, answer: str, observation: str, response_id: str) -> None:
        """Add a round; close its chunk when it is full."""
        self.rounds.append(Round(answer, observation, response_id))
        if len(self.rounds) - self._chunk_begin >= self.options.chunk_rounds:
            self.close_chunk()

    def close_chunk(self, keep_rounds: int | None = None) -> bool:
        """Hide the observations of older rounds; say whether that changed anything.

        Args:
            keep_rounds: fewer than the options keep, when even those are too many.
        """
        keep = self.options.keep_rounds if keep_rounds is None else keep_rounds
        self._chunk_begin = len(self.rounds)
        hidden = max(self.hidden, len(self.rounds) - keep)
        if hidden == self.hidden:
            return False
        self.hidden = hidden
        self.boundaries += 1
        return True

    def context(self) -> list[ChatCompletionMessageParam]:
        """Give the messages of the next call.

        An answer carries the id of its response: a rejected sample may have said the same, and
        then the id alone tells which of the two is continued.
        """
        messages = list(self.opening)
        for index, one in enumerate(self.rounds):
            shown = HIDDEN if index < self.hidden else one.observation
            answer = {"role": "assistant", "content": one.answer, "id": one.response_id}
            messages.append(cast("ChatCompletionMessageParam", answer))
            messages.append({"role": "user", "content": shown})
        return messages
