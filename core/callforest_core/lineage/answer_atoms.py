"""The atoms of what the model's side wrote, whatever the dialect (docs/lineage.md, section 11).

Captured tokens stand for the whole answer, so every key of it counts: one that the model did not
write, but that a template could show it, must not vanish behind them. Left out are only the keys
named here, which SDKs and servers add and no template reads.
"""

from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import NamedTuple

from callforest_core.lineage.arguments import source_arguments
from callforest_core.lineage.atom import AtomKind, atom
from callforest_core.lineage.content_parts import blocks, parts, rest, text_of, without
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.items import TOKEN_FIELDS, Item

_ADDED = TOKEN_FIELDS | {"provider_specific_fields"}
"""Of every item: token columns, and what a client library copies of fields it does not know."""
_MESSAGE_KEYS = _ADDED | {
    *("role", "name", "content", "reasoning", "reasoning_content", "refusal", "tool_calls"),
    *("annotations", "parsed"),
}
_PART_KEYS = frozenset({"text", "annotations", "logprobs", "parsed"})
_ENTRY_KEYS = frozenset({"function", "index", "provider_specific_fields"})
_FUNCTION_KEYS = frozenset({"name", "arguments", "parsed_arguments"})
_CALL_KEYS = _ADDED | {"call_id", "name", "namespace", "arguments", "parsed_arguments"}
_REASONING_KEYS = _ADDED | {"content", "summary", "encrypted_content"}
_USE_KEYS = frozenset({"name", "input"})
_REFUSAL_KEYS = frozenset({"refusal"})
_THINKING_FIELDS = {"thinking": "thinking", "redacted_thinking": "data"}
_THINKING_TYPES = frozenset(_THINKING_FIELDS)
_NO_PARTS = _THINKING_TYPES | {"refusal"}
_NO_FIELD_TYPES = _THINKING_TYPES | {"tool_use"}


class Spelling(IntEnum):
    """How the first item of an answer spells the text that the answer does not have."""

    ABSENT = 1
    NULL = 2
    EMPTY = 3


class ItemAtoms(NamedTuple):
    """The atoms of one item.

    `spelling` is None of an item that is not the model's; of one that is, how it spells that it
    has no text, which counts when it begins an answer that has none.
    """

    atoms: list[bytes]
    spelling: Spelling | None


def answer_message(item: Item) -> ItemAtoms:
    """Read an assistant message; raises UnreadableItemError, CanonicalJsonError."""
    content = item.get("content")
    if blocks(content, {"tool_result"}):
        raise UnreadableItemError("a tool result of the assistant")
    name = text_of(item.get("name"))
    atoms = [atom(AtomKind.NAME, name)] if name else []
    thought, other = item.get("reasoning"), item.get("reasoning_content")
    atoms += _reasoning(thought or other)
    for block in blocks(content, _THINKING_TYPES):
        field = _THINKING_FIELDS[text_of(block.get("type"))]
        atoms += _reasoning(block.get(field)) + _rest(block, {field, "signature"})
    for part in parts(without(content, _NO_PARTS)):
        if part.payload:
            atoms.append(atom(AtomKind.TEXT, part.kind, part.payload))
        if part.text_block:
            atoms += _rest(part.text_block, _PART_KEYS)
    for block in blocks(content, {"refusal"}):
        atoms += _refusal(block) + _rest(block, _REFUSAL_KEYS)
    atoms += _refusal(item)
    for block in blocks(content, {"tool_use"}):
        atoms.append(_call(block.get("id"), text_of(block.get("name")), block.get("input")))
        atoms += _rest(block, _USE_KEYS)
    atoms += _tool_calls(item.get("tool_calls"))
    # Templates read the one name or the other.
    is_twofold = bool(thought) and thought != other
    atoms += _rest(item, _MESSAGE_KEYS - {"reasoning_content"} if is_twofold else _MESSAGE_KEYS)
    return ItemAtoms(atoms, _spelling(item, content))


def answer_call(item: Item) -> ItemAtoms:
    """Read a `function_call` item; raises UnreadableItemError, CanonicalJsonError."""
    name = text_of(item.get("name"))
    namespace = item.get("namespace")
    if namespace:
        name = f"{text_of(namespace)}__{name}"
    call = _call(item.get("call_id") or item.get("id"), name, item.get("arguments"))
    return ItemAtoms([call, *_rest(item, _CALL_KEYS)], Spelling.ABSENT)


def answer_reasoning(item: Item) -> ItemAtoms:
    """Read a `reasoning` item; raises UnreadableItemError, CanonicalJsonError."""
    shown = _joined(item.get("content")) or _joined(item.get("summary"))
    atoms = _reasoning(shown or item.get("encrypted_content"))
    return ItemAtoms([*atoms, *_rest(item, _REASONING_KEYS)], Spelling.ABSENT)


def _spelling(item: Item, content: object) -> Spelling:
    """Say how a message without text spells that; blocks of calls have no place for a text."""
    if content is None:
        return Spelling.NULL if "content" in item else Spelling.ABSENT
    return Spelling.ABSENT if blocks(content, _NO_FIELD_TYPES) else Spelling.EMPTY


def _rest(holder: Item, read: AbstractSet[str]) -> list[bytes]:
    """Return the atom of the keys that count and that no rule read, if there are any."""
    more = rest(holder, read)
    return [atom(AtomKind.REST, more)] if more else []


def _reasoning(text: object) -> list[bytes]:
    thought = text_of(text)
    return [atom(AtomKind.REASONING, thought)] if thought else []


def _refusal(holder: Item) -> list[bytes]:
    refusal = text_of(holder.get("refusal"))
    return [atom(AtomKind.TEXT, "refusal", refusal)] if refusal else []


def _joined(pieces: object) -> str:
    """Return the text of a reasoning item's parts."""
    if pieces is None or isinstance(pieces, str):
        return pieces or ""
    if not isinstance(pieces, list):
        raise UnreadableItemError(f"reasoning of type {type(pieces).__name__}")
    texts: list[str] = []
    for piece in pieces:
        text = piece.get("text") if isinstance(piece, dict) else piece
        if not isinstance(text, str):
            raise UnreadableItemError("a part of reasoning without text")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(value: object) -> list[bytes]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UnreadableItemError(f"tool_calls of type {type(value).__name__}")
    calls: list[bytes] = []
    for entry in value:
        function = entry.get("function") if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            raise UnreadableItemError("a tool call without a function")
        name = text_of(function.get("name"))
        calls.append(_call(entry.get("id"), name, function.get("arguments")))
        calls += _rest(entry, _ENTRY_KEYS) + _rest(function, _FUNCTION_KEYS)
    return calls


def _call(call_id: object, name: str, arguments: object) -> bytes:
    return atom(AtomKind.CALL, text_of(call_id), name, source_arguments(arguments))
