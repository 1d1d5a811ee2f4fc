"""Conversations, and what each of three APIs would send of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

Sent = list[dict[str, object]]


@dataclass(frozen=True)
class Turn:
    """What a user says, and how the model answers: thoughts, words, calls with their results."""

    prompt: str
    thought: str = ""
    answer: str = ""
    calls: Sequence[tuple[str, dict[str, object], str]] = field(default_factory=list)


@dataclass(frozen=True)
class Conversation:
    turns: Sequence[Turn]

    def chat(self) -> Sent:
        sent: Sent = []
        for place, turn in enumerate(self.turns):
            message: dict[str, object] = {"role": "assistant"}
            if turn.thought:
                message["reasoning"] = turn.thought
            if turn.answer or not turn.calls:
                message["content"] = turn.answer
            ids = [f"call_{place}_{number}" for number, _ in enumerate(turn.calls)]
            calls = [
                {"id": one, "type": "function", "function": _function(name, given)}
                for one, (name, given, _) in zip(ids, turn.calls, strict=True)
            ]
            if calls:
                message["tool_calls"] = calls
            sent += [{"role": "user", "content": turn.prompt}, message]
            sent += [
                {"role": "tool", "tool_call_id": one, "content": result}
                for one, (_, _, result) in zip(ids, turn.calls, strict=True)
            ]
        return sent

    def responses(self) -> Sent:
        sent: Sent = []
        for place, turn in enumerate(self.turns):
            sent.append({"role": "user", "content": [{"type": "input_text", "text": turn.prompt}]})
            if turn.thought:
                shown = [{"type": "reasoning_text", "text": turn.thought}]
                sent.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": shown})
            if turn.answer or not turn.calls:
                part = {"type": "output_text", "text": turn.answer, "annotations": []}
                sent.append({"type": "message", "role": "assistant", "content": [part]})
            ids = [f"call_{place}_{number}" for number, _ in enumerate(turn.calls)]
            sent += [
                {"type": "function_call", "id": "fc_1", "call_id": one, **_function(name, given)}
                for one, (name, given, _) in zip(ids, turn.calls, strict=True)
            ]
            sent += [
                {"type": "function_call_output", "call_id": one, "output": result}
                for one, (_, _, result) in zip(ids, turn.calls, strict=True)
            ]
        return sent

    def messages(self) -> Sent:
        sent: Sent = []
        results: Sent = []
        for place, turn in enumerate(self.turns):
            prompt: dict[str, object] = {"type": "text", "text": turn.prompt}
            sent.append({"role": "user", "content": [*results, prompt]})
            blocks: Sent = []
            if turn.thought:
                blocks.append({"type": "thinking", "thinking": turn.thought})
            if turn.answer or not turn.calls:
                blocks.append({"type": "text", "text": turn.answer})
            ids = [f"call_{place}_{number}" for number, _ in enumerate(turn.calls)]
            blocks += [
                {"type": "tool_use", "id": one, "name": name, "input": given}
                for one, (name, given, _) in zip(ids, turn.calls, strict=True)
            ]
            sent.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": one, "content": result}
                for one, (_, _, result) in zip(ids, turn.calls, strict=True)
            ]
        if results:
            sent.append({"role": "user", "content": results})
        return sent


def _function(name: str, given: dict[str, object]) -> dict[str, object]:
    return {"name": name, "arguments": json.dumps(given)}


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_GIVEN = st.dictionaries(
    _TEXT, st.none() | st.booleans() | st.integers(-5, 2**63) | st.floats(-1e9, 1e9) | _TEXT
)
_CALLS = st.lists(st.tuples(_TEXT, _GIVEN, _TEXT), max_size=3)
TURNS = st.builds(Turn, prompt=_TEXT.filter(bool), thought=_TEXT, answer=_TEXT, calls=_CALLS)
CONVERSATIONS = st.lists(TURNS, min_size=1, max_size=4).map(Conversation)
