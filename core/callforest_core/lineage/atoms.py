"""Atoms: what the items of a conversation say, in one form for all dialects.

Forest mode recognises a history by its atoms (docs/lineage.md, section 11). An atom is bytes, a
kind and its fields, ready to be hashed; the items of one answer give the same atoms whether they
came as a Chat message, as Responses items or as the blocks of a Messages turn.

    atom = u8(kind) LP(field)...        LP(x) = u64(len x) x, u64 big-endian, fields UTF-8

Items are parsed JSON objects. What no dialect allows is unreadable: unlike in chain mode nothing
is guessed, because an unreadable history only costs a fresh root.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import NamedTuple

from callforest_core.lineage.arguments import source_arguments
from callforest_core.lineage.canonical_json import CanonicalJsonError, canonical_json
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.items import Item


class AtomKind(IntEnum):
    """What an atom is; the first byte of it."""

    MESSAGE = 1
    REASONING = 2
    TEXT = 3
    CALL = 4
    RESULT = 5
    ABSENT = 6
    REMAINDER = 7


class Spelling(IntEnum):
    """How a message that only calls tools spells the text that it does not have."""

    ABSENT = 1
    NULL = 2
    EMPTY = 3


ANSWER_KINDS = frozenset(
    {
        AtomKind.REASONING,
        AtomKind.TEXT,
        AtomKind.CALL,
        AtomKind.ABSENT,
        AtomKind.REMAINDER,
    }
)
"""The kinds of which a model's answer consists."""

_UNCOUNTED = frozenset(
    {"type", "id", "status", "annotations", "logprobs", "phase", "cache_control"}
)
_TEXT_TYPES = frozenset({"", "text", "input_text", "output_text"})
_TOOL_TYPES = frozenset({"tool_use", "tool_result"})
_THINKING_TYPES = frozenset({"thinking", "redacted_thinking"})
_REST = "rest"
_LENGTH = 8


class ItemAtoms(NamedTuple):
    """The atoms of one item.

    `spelling` is that of a Chat message that calls tools and says nothing, else None.
    """

    atoms: list[bytes]
    spelling: Spelling | None


def atoms_of(items: Iterable[object]) -> Iterator[bytes]:
    """Yield the atoms of items in order; raises UnreadableItemError at the first that has none."""
    for item in items:
        plain = plain_atom(item)
        if plain is not None:
            yield plain
        else:
            yield from item_atoms(item).atoms


def plain_atom(item: object) -> bytes | None:
    """Return the atom of an item that has a role and a text alone, else None.

    Nearly every item of a conversation is one, and a request brings all of them again.
    """
    if type(item) is not dict or len(item) != 2:
        return None
    role, text = item.get("role"), item.get("content")
    if type(role) is not str or type(text) is not str or not text:
        return None
    head = _PLAIN_HEADS.get(role)
    if head is None:
        return None
    try:
        payload = text.encode()
    except UnicodeEncodeError:
        return None
    return head + len(payload).to_bytes(_LENGTH, "big") + payload + _NO_REST


def item_atoms(item: object) -> ItemAtoms:
    """Return the atoms of any item; raises UnreadableItemError."""
    if not isinstance(item, dict):
        raise UnreadableItemError(f"{type(item).__name__} where an object belongs")
    try:
        return _read(item)
    except CanonicalJsonError as error:
        raise UnreadableItemError(error.fact) from error


def fields_of(atom: bytes) -> tuple[AtomKind, list[str]]:
    """Return the kind and the fields of an atom."""
    fields: list[str] = []
    position = 1
    while position < len(atom):
        start = position + _LENGTH
        position = start + int.from_bytes(atom[position:start], "big")
        fields.append(atom[start:position].decode())
    return AtomKind(atom[0]), fields


def is_user_message(atom: bytes) -> bool:
    """Say whether the atom is a message of the user."""
    return atom.startswith(_USER)


def _read(item: Item) -> ItemAtoms:
    kind = item.get("type")
    if kind == "function_call":
        return ItemAtoms([_function_call(item)], None)
    if kind == "function_call_output":
        call_id = item.get("call_id") or item.get("id")
        rest = _rest(item, {"call_id", "output"})
        return ItemAtoms([_result(call_id, item.get("output"), rest)], None)
    if kind == "reasoning":
        text = _joined(item.get("content")) or _joined(item.get("summary"))
        rest = _rest(item, {"content", "summary"})
        return ItemAtoms(_reasoning(text, rest), None)
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise UnreadableItemError("an item without a role")
    if role == "assistant":
        return _assistant(item)
    if role == "tool":
        rest = _rest(item, {"role", "tool_call_id", "content"})
        return ItemAtoms([_result(item.get("tool_call_id"), item.get("content"), rest)], None)
    return ItemAtoms(_message(item, "system" if role == "developer" else role), None)


def _message(item: Item, role: str) -> list[bytes]:
    content = item.get("content")
    if _blocks(content, {"tool_use"}):
        raise UnreadableItemError(f"a tool call of the role {role}")
    results = [
        _result(
            block.get("tool_use_id") or block.get("id"),
            block.get("content"),
            _rest(block, {"tool_use_id", "content"}),
        )
        for block in _blocks(content, {"tool_result"})
    ]
    fields = _flat(_parts(content))
    rest = _rest(item, {"role", "content"})
    if fields or rest or not results:
        results.append(_atom(AtomKind.MESSAGE, role, *fields, rest))
    return results


def _assistant(item: Item) -> ItemAtoms:
    content = item.get("content")
    if _blocks(content, {"tool_result"}):
        raise UnreadableItemError("a tool result of the assistant")
    atoms, read = _reasoning_of(item, content)
    texts = [_atom(AtomKind.TEXT, *part) for part in _parts(_without_thinking(content))]
    refusal = item.get("refusal")
    if isinstance(refusal, str) and refusal:
        read.add("refusal")
        texts.append(_atom(AtomKind.TEXT, "refusal", refusal, ""))
    uses = _blocks(content, {"tool_use"})
    calls = [_tool_use(block) for block in uses] + _tool_calls(item.get("tool_calls"))
    how = _spelling(item, content)
    if not texts and not calls:
        texts = [_NO_TEXT[how]]
    atoms += texts
    atoms += calls
    rest = _rest(item, {"role", "content", "tool_calls"} | read)
    if rest:
        atoms.append(_atom(AtomKind.REMAINDER, rest))
    if texts:
        return ItemAtoms(atoms, None)
    # The Messages dialect has no place for a text that is missing.
    return ItemAtoms(atoms, Spelling.ABSENT if uses else how)


def _spelling(item: Item, content: object) -> Spelling:
    """Say how a message without text spells that."""
    if content is not None:
        return Spelling.EMPTY
    return Spelling.NULL if "content" in item else Spelling.ABSENT


def _reasoning_of(item: Item, content: object) -> tuple[list[bytes], set[str]]:
    """Return the reasoning of an assistant message, and the names under which it stood."""
    shown = item.get("reasoning")
    other = item.get("reasoning_content")
    read = {"reasoning"}
    if not shown or other == shown:
        shown = shown or other
        read.add("reasoning_content")
    atoms: list[bytes] = []
    if shown:
        atoms += _reasoning(shown if isinstance(shown, str) else canonical_json(shown), "")
    for block in _blocks(content, _THINKING_TYPES):
        text = block.get("thinking")
        thought = text if isinstance(text, str) else ""
        atoms += _reasoning(thought, _rest(block, {"thinking"} if thought else set()))
    return atoms, read


def _reasoning(text: str, rest: str) -> list[bytes]:
    return [_atom(AtomKind.REASONING, text, rest)] if text or rest else []


def _joined(parts: object) -> str:
    """Return the text of a reasoning item's parts."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    if not isinstance(parts, list):
        raise UnreadableItemError(f"reasoning of type {type(parts).__name__}")
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UnreadableItemError("a part of reasoning without text")
        texts.append(text)
    return "\n".join(texts)


def _function_call(item: Item) -> bytes:
    name = _text(item.get("name"))
    namespace = item.get("namespace")
    if namespace:
        name = f"{_text(namespace)}__{name}"
    call_id = item.get("call_id") or item.get("id")
    rest = _rest(item, {"call_id", "name", "namespace", "arguments"})
    return _call(call_id, name, item.get("arguments"), rest)


def _tool_use(block: Item) -> bytes:
    rest = _rest(block, {"name", "input"})
    return _call(block.get("id"), block.get("name"), block.get("input"), rest)


def _tool_calls(value: object) -> list[bytes]:
    if not value:
        return []
    if not isinstance(value, list):
        raise UnreadableItemError(f"tool_calls of type {type(value).__name__}")
    calls: list[bytes] = []
    for entry in value:
        function = entry.get("function", {}) if isinstance(entry, dict) else None
        if not isinstance(function, dict):
            raise UnreadableItemError("a tool call without a function")
        others = _remainder(entry, {"function"})
        unknown = _remainder(function, {"name", "arguments"})
        if unknown:
            others["function"] = unknown
        rest = canonical_json(others) if others else ""
        calls.append(_call(entry.get("id"), function.get("name"), function.get("arguments"), rest))
    return calls


def _call(call_id: object, name: object, arguments: object, rest: str) -> bytes:
    text = source_arguments(arguments)
    return _atom(AtomKind.CALL, _text(call_id), _text(name), text, rest)


def _result(call_id: object, content: object, rest: str) -> bytes:
    """Make the atom of a tool's result; what is no content of a message counts as its JSON."""
    if isinstance(content, str):
        fields = ["text", content] if content else []
    else:
        try:
            fields = ["", "null"] if content is None else _flat(_parts(content))
        except UnreadableItemError:
            fields = ["", canonical_json(content)]
    return _atom(AtomKind.RESULT, _text(call_id), *fields, rest)


def _parts(content: object) -> list[tuple[str, str, str]]:
    """Return type, payload and rest of each part of a content; tools' blocks are none."""
    if isinstance(content, str):
        return [("text", content, "")] if content else []
    if content is None:
        return []
    if not isinstance(content, list):
        raise UnreadableItemError(f"content of type {type(content).__name__}")
    parts: list[tuple[str, str, str]] = []
    for piece in content:
        block = {"text": piece} if isinstance(piece, str) else piece
        if not isinstance(block, dict):
            raise UnreadableItemError(f"a content block of type {type(block).__name__}")
        kind = _text(block.get("type"))
        if kind in _TOOL_TYPES:
            continue
        name = "refusal" if kind == "refusal" else "text"
        text = block.get(name)
        if (kind == name or kind in _TEXT_TYPES) and isinstance(text, str):
            rest = _rest(block, {name})
            if text or rest:
                parts.append((name, text, rest))
            continue
        if not kind:
            raise UnreadableItemError("a content block without a type")
        parts.append((kind, canonical_json(block), ""))
    return parts


def _flat(parts: list[tuple[str, str, str]]) -> list[str]:
    """Return the parts as fields; the JSON of a block of type `rest` would name its type."""
    fields: list[str] = []
    for kind, payload, rest in parts:
        fields += (kind, payload, _REST, rest) if rest else (kind, payload)
    return fields


def _blocks(content: object, kinds: AbstractSet[str]) -> list[Item]:
    if not isinstance(content, list):
        return []
    return [block for block in content if isinstance(block, dict) and block.get("type") in kinds]


def _without_thinking(content: object) -> object:
    if not isinstance(content, list):
        return content
    return [
        block
        for block in content
        if not (isinstance(block, dict) and block.get("type") in _THINKING_TYPES)
    ]


def _rest(item: Item, read: AbstractSet[str]) -> str:
    """Return the canonical JSON of what counts of an item besides the names that were read."""
    remainder = _remainder(item, read)
    return canonical_json(remainder) if remainder else ""


def _remainder(item: Item, read: AbstractSet[str]) -> Item:
    return {
        name: value
        for name, value in item.items()
        if name not in read and name not in _UNCOUNTED and value not in _NOTHING
    }


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    raise UnreadableItemError(f"{type(value).__name__} where text belongs")


def _atom(kind: AtomKind, *fields: str) -> bytes:
    pieces = [_KIND_BYTES[kind]]
    try:
        for field in fields:
            payload = field.encode()
            pieces += (len(payload).to_bytes(_LENGTH, "big"), payload)
    except UnicodeEncodeError as error:
        raise UnreadableItemError("a lone surrogate") from error
    return b"".join(pieces)


_NOTHING: tuple[object, ...] = (None, "", [], {})
_KIND_BYTES = {kind: bytes([kind]) for kind in AtomKind}
_NO_REST = bytes(_LENGTH)
_NO_TEXT = {
    Spelling.ABSENT: _atom(AtomKind.ABSENT, "missing"),
    Spelling.NULL: _atom(AtomKind.ABSENT, "null"),
    Spelling.EMPTY: _atom(AtomKind.TEXT, "text", "", ""),
}
_PLAIN_HEADS = {
    "system": _atom(AtomKind.MESSAGE, "system", "text"),
    "developer": _atom(AtomKind.MESSAGE, "system", "text"),
    "user": _atom(AtomKind.MESSAGE, "user", "text"),
    "assistant": _atom(AtomKind.TEXT, "text"),
}
_USER = _atom(AtomKind.MESSAGE, "user")
