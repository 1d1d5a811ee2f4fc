"""The scripted engine's own vocabulary and template: bytes, in ChatML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from callforest_mesh.worker.engine import EngineRefusalError, TokenIds

Message: TypeAlias = Mapping[str, object]

TURN_BEGIN = 256
"""Id of `<|im_start|>`."""
TURN_END = 257
"""Id of `<|im_end|>`."""


@dataclass(frozen=True, slots=True)
class ByteVocabulary:
    """One id a byte of UTF-8, and two that have no text: the turn's begin and end."""

    def encode(self, text: str) -> TokenIds:
        """Give the bytes of a text as ids."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint32)

    def decode(self, token_ids: TokenIds) -> str:
        """Give the text of the ids that are bytes."""
        return token_ids[token_ids < TURN_BEGIN].astype(np.uint8).tobytes().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class ChatMlTemplate:
    """Begin, role, line feed, text, end, line feed; and the opening of the assistant's turn."""

    terminators: frozenset[int] = frozenset({TURN_END})

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        """Render a conversation.

        Raises:
            EngineRefusalError: a message has no role, or content that is no text.
        """
        return self._rendered(messages, add_generation_prompt=add_generation_prompt)[0]

    def render_parts(self, messages: Sequence[Message], count: int) -> tuple[TokenIds, TokenIds]:
        """Give the prompt of a conversation, and that part of it that is its first messages.

        Every message is rendered for itself, so the part is what `render` would make of them alone.

        Args:
            messages: the conversation.
            count: how many messages the part has, at least one.

        Raises:
            EngineRefusalError: as `render`.
        """
        token_ids, marks = self._rendered(messages, add_generation_prompt=True)
        return token_ids, token_ids[: int(marks[2 * count - 1]) + 2]  # a line feed ends a turn

    def _rendered(
        self, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> tuple[TokenIds, NDArray[np.intp]]:
        """Render, and say where turns begin and end, in turn."""
        turns = [_turn_of(message) for message in messages]
        if add_generation_prompt:
            turns.append("\0assistant\n")
        text = "".join(turns).encode("utf-8", "replace")
        token_ids = np.frombuffer(text, np.uint8).astype(np.uint32)
        marks = (token_ids == 0).nonzero()[0]
        if len(marks) != 2 * len(messages) + add_generation_prompt:
            marks = _marks(turns)  # a message has a zero of its own
        token_ids[marks[::2]] = TURN_BEGIN
        token_ids[marks[1::2]] = TURN_END
        return token_ids, marks


def _turn_of(message: Message) -> str:
    """Write a turn; zeros stand for its begin and its end."""
    content = message.get("content")
    if type(content) is not str or "tool_calls" in message:
        content = text_of(message)
    return f"\0{message.get('role')}\n{content}\0\n"


def _marks(turns: Sequence[str]) -> NDArray[np.intp]:
    """Find where turns begin and end: their first byte, and their last but one."""
    sizes = [len(turn.encode("utf-8", "replace")) for turn in turns]
    begins = np.cumsum([0, *sizes])
    pairs = np.stack((begins[:-1], begins[1:] - 2), axis=1).ravel()
    return pairs if turns[-1].endswith("\0\n") else pairs[:-1]


def text_of(message: Message) -> str:
    """Give what a message says: its text, then its tool calls as JSON lines.

    Raises:
        EngineRefusalError: its content is neither text nor a list of text parts.
    """
    content = message.get("content")
    if isinstance(content, str) and "tool_calls" not in message:
        return content
    parts: list[object]
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [content]
    elif isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    else:
        parts = [content]
    if not all(isinstance(part, str) for part in parts):
        raise EngineRefusalError(
            "content must be text or a list of text parts", parameter="content"
        )
    calls = message.get("tool_calls")
    lines = [json.dumps(call, sort_keys=True) for call in calls] if isinstance(calls, list) else []
    return (
        "\n".join(["".join(str(part) for part in parts), *lines])
        if lines
        else "".join(str(part) for part in parts)
    )
