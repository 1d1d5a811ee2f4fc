"""The input of a Responses request as Chat messages. Pure.

One call's output items (reasoning, message, function calls) become one assistant message again, as
the engine wrote it; otherwise its turn would not end where the captured tokens end.
"""

from __future__ import annotations

from typing import Final

from callforest_core.lineage.items import Item
from callforest_mesh.gateway.refusals import malformed, unsupported

_TEXT: Final = frozenset({"input_text", "output_text", "text"})
_SYSTEM: Final = frozenset({"system", "developer"})
_ROLES: Final = _SYSTEM | {"user", "assistant"}
_STATE: Final = "No items are kept here. Send the item itself."


def messages_of(turns: object, instructions: object) -> list[Item]:
    """Translate `input` and `instructions`; the result has at least one message.

    What opens the conversation as system or developer text, the instructions first, becomes one
    system message: templates of open models know one, at the beginning.

    Raises:
        HttpRefusal: an item is malformed, or of a type that is not served.
    """
    conversation = _Conversation()
    if instructions is not None:
        if not isinstance(instructions, str):
            raise malformed("`instructions` must be text.", "instructions")
        conversation.system(instructions)
    if isinstance(turns, str):
        conversation.messages.append({"role": "user", "content": turns})
    elif isinstance(turns, list) and turns:
        for index, turn in enumerate(turns):
            conversation.take(turn, f"input[{index}]")
    else:
        raise malformed("`input` must be text or a list with at least one item.", "input")
    if not conversation.messages:
        raise malformed("`input` has no message.", "input")
    return conversation.messages


class _Conversation:
    """Chat messages as they grow.

    The assistant's turn is open while output items follow each other. Within a turn reasoning
    comes first, then the text, then the calls; an item that cannot follow opens another turn.
    """

    def __init__(self) -> None:
        self.messages: list[Item] = []

    def system(self, text: str) -> None:
        """Take system text; at the beginning it joins what is there."""
        if not text:
            return
        if self.messages and all(one["role"] == "system" for one in self.messages):
            first = self.messages[0]
            first["content"] = f"{first['content']}\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def take(self, item: object, where: str) -> None:
        """Take one input item."""
        if not isinstance(item, dict):
            raise malformed(f"`{where}` must be an object.", where)
        match item.get("type", "message"):
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(_reasoning_text(item, where))
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                call_id = _text(item, "call_id", where)
                output = _content(item.get("output"), f"{where}.output")
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "item_reference":
                raise unsupported(where, f"`{where}` refers to an item. {_STATE}")
            case kind:
                raise unsupported(
                    where,
                    f"`{where}` is an item of type {_shown(kind)}. Served are message, reasoning, "
                    "function_call and function_call_output.",
                )

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            roles = ", ".join(sorted(_ROLES))
            raise malformed(f"`{where}.role` must be one of {roles}.", f"{where}.role")
        content = _content(item.get("content"), f"{where}.content")
        if role in _SYSTEM:
            self.system(content if isinstance(content, str) else _joined(content))
        elif role == "user":
            self.messages.append({"role": role, "content": content})
        else:
            turn = self._turn()
            if turn is None or turn["content"] is not None or "tool_calls" in turn:
                turn = self._open()
            turn["content"] = content

    def _reasoning(self, text: str) -> None:
        if not text:
            return
        turn = self._turn()
        if turn is None or turn["content"] is not None or "tool_calls" in turn:
            turn = self._open()
        before = turn.get("reasoning")
        turn["reasoning"] = f"{before}\n{text}" if before else text

    def _call(self, item: Item, where: str) -> None:
        name = _text(item, "name", where)
        if item.get("namespace"):
            name = f"{_text(item, 'namespace', where)}__{name}"
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise malformed(f"`{where}.arguments` must be text.", f"{where}.arguments")
        call = {
            "id": _text(item, "call_id", where),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        turn = self._turn() or self._open()
        calls = turn.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(call)

    def _turn(self) -> Item | None:
        """Give the assistant's open turn, if there is one."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last["role"] == "assistant" else None

    def _open(self) -> Item:
        turn: Item = {"role": "assistant", "content": None}
        self.messages.append(turn)
        return turn


def _content(content: object, where: str) -> str | list[Item]:
    """Translate content: text, or parts; a single part is text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise malformed(f"`{where}` must be text or a list of parts.", where)
    texts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if len(texts) <= 1:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise malformed(f"`{where}` must be an object.", where)
    kind = part.get("type")
    if kind == "refusal":
        return _string(part, "refusal", where)
    if not isinstance(kind, str) or kind not in _TEXT:
        raise unsupported(
            where, f"`{where}` is a part of type {_shown(kind)}. Only text is served."
        )
    return _string(part, "text", where)


def _reasoning_text(item: Item, where: str) -> str:
    """Give the text that a reasoning item shows; what is encrypted cannot be read."""
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(field)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise malformed(f"`{where}.{field}` must be a list of parts.", f"{where}.{field}")
        texts = []
        for index, part in enumerate(parts):
            place = f"{where}.{field}[{index}]"
            if not isinstance(part, dict) or part.get("type") != kind:
                raise malformed(f"`{place}` must be a part of type {kind!r}.", place)
            texts.append(_string(part, "text", place))
        if texts:
            return "\n".join(texts)
    return ""


def _shown(kind: object) -> str:
    """Show the type of an item or a part, shortly."""
    return f"'{kind[:32]}'" if isinstance(kind, str) else "that is no text"


def _joined(parts: list[Item]) -> str:
    return "\n".join(str(part["text"]) for part in parts)


def _text(holder: Item, name: str, where: str) -> str:
    """Give text that must not be empty."""
    text = _string(holder, name, where)
    if not text:
        raise malformed(f"`{where}.{name}` must not be empty.", f"{where}.{name}")
    return text


def _string(holder: Item, name: str, where: str) -> str:
    text = holder.get(name)
    if not isinstance(text, str):
        raise malformed(f"`{where}.{name}` must be text.", f"{where}.{name}")
    return text
