"""Atoms: what the items of a conversation say, in one form for all dialects.

Forest mode recognises a history by its atoms (docs/lineage.md, section 11). An atom is bytes, a
kind and its fields, ready to be hashed; the items of one answer give the same atoms whether they
came as a Chat message, as Responses items or as the blocks of a Messages turn.

    atom = u8(kind) LP(field)...        LP(x) = u64(len x) x, u64 big-endian, fields UTF-8

Items are parsed JSON objects. What no dialect allows is unreadable: unlike in chain mode nothing
is guessed, because an unreadable history only costs a fresh root.
"""

from collections.abc import Callable, Iterable, Iterator
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
    NAME = 7


class Spelling(IntEnum):
    """How the first item of an answer spells the text that the answer does not have."""

    ABSENT = 1
    NULL = 2
    EMPTY = 3


_RESPONSES_TYPES = ("function_call", "function_call_output", "reasoning")
_UNCOUNTED = frozenset({"type", "id", "status", "cache_control"})
_TEXT_TYPES = frozenset({"", "text", "input_text", "output_text"})
_TEXT_KEYS = frozenset({"type", "text", "cache_control"})
_TOOL_TYPES = frozenset({"tool_use", "tool_result"})
_THINKING_FIELDS = {"thinking": "thinking", "redacted_thinking": "data"}
_THINKING_TYPES = frozenset(_THINKING_FIELDS)
_NO_PARTS = _THINKING_TYPES | {"refusal"}
_NO_FIELD_TYPES = _THINKING_TYPES | {"tool_use"}
_CACHE_MARK = "cache_control"
_LENGTH = 8


class ItemAtoms(NamedTuple):
    """The atoms of one item.

    `spelling` is None of an item that is not the model's; of one that is, how it spells that it
    has no text, which counts when it begins an answer that has none.
    """

    atoms: list[bytes]
    spelling: Spelling | None


def atoms_of(items: Iterable[object]) -> Iterator[bytes]:
    """Yield the atoms of items in order; raises UnreadableItemError at the first that has none."""
    in_answer = is_bare = False
    for item in items:
        plain = plain_atom(item)
        if plain is None:
            read = item_atoms(item)
        else:
            read = ItemAtoms([plain], Spelling.EMPTY if plain[0] == AtomKind.TEXT else None)
        if read.spelling is None:
            if is_bare:
                yield NOTHING_SAID
            in_answer = is_bare = False
        else:
            says = any(atom[0] in SAYING_KINDS for atom in read.atoms)
            is_bare = not says and (is_bare or not in_answer)
            in_answer = True
        yield from read.atoms
    if is_bare:
        yield NOTHING_SAID


def plain_atom(item: object) -> bytes | None:
    """Return the atom of an item that has a role and a text alone, else None.

    Nearly every item of a conversation is one, and a request brings all of them again.
    """
    if type(item) is not dict or len(item) != 2:
        return None
    role, text = item.get("role"), item.get("content")
    if type(role) is not str or type(text) is not str or not text:
        return None
    ends = _PLAIN_ENDS.get(role)
    if ends is None:
        return None
    try:
        payload = text.encode()
    except UnicodeEncodeError:
        return None
    return ends[0] + len(payload).to_bytes(_LENGTH, "big") + payload + ends[1]


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
    kind, role = item.get("type"), item.get("role")
    if role is not None and kind in _RESPONSES_TYPES:
        # Chat shows the model its content, Responses what its type says.
        raise UnreadableItemError("an item with both a role and a type that has none")
    if kind == "function_call":
        return ItemAtoms([_function_call(item)], Spelling.ABSENT)
    if kind == "function_call_output":
        call_id = item.get("call_id") or item.get("id")
        rest = _rest(item, {"call_id", "output"})
        return ItemAtoms([_result(call_id, item.get("output"), rest)], None)
    if kind == "reasoning":
        shown = _joined(item.get("content")) or _joined(item.get("summary"))
        return ItemAtoms(_reasoning(shown or item.get("encrypted_content")), Spelling.ABSENT)
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
    fields = _shown_fields(content)
    rest = _rest(item, {"role", "content"})
    if fields or rest or not results:
        results.append(_atom(AtomKind.MESSAGE, role, *fields, rest))
    return results


def _assistant(item: Item) -> ItemAtoms:
    """Read an answer; what an SDK adds to one does not count, since its tokens are captured."""
    content = item.get("content")
    if _blocks(content, {"tool_result"}):
        raise UnreadableItemError("a tool result of the assistant")
    name = _text(item.get("name"))
    atoms = [_atom(AtomKind.NAME, name)] if name else []
    atoms += _reasoning(item.get("reasoning") or item.get("reasoning_content"))
    for block in _blocks(content, _THINKING_TYPES):
        atoms += _reasoning(block.get(_THINKING_FIELDS[_text(block.get("type"))]))
    atoms += [_atom(AtomKind.TEXT, *part) for part in _parts(_without(content, _NO_PARTS))]
    for holder in (*_blocks(content, {"refusal"}), item):
        refusal = _text(holder.get("refusal"))
        if refusal:
            atoms.append(_atom(AtomKind.TEXT, "refusal", refusal))
    for block in _blocks(content, {"tool_use"}):
        atoms.append(_call(block.get("id"), _text(block.get("name")), block.get("input")))
    atoms += _tool_calls(item.get("tool_calls"))
    return ItemAtoms(atoms, _spelling(item, content))


def _spelling(item: Item, content: object) -> Spelling:
    """Say how a message without text spells that; blocks of calls have no place for a text."""
    if content is None:
        return Spelling.NULL if "content" in item else Spelling.ABSENT
    return Spelling.ABSENT if _blocks(content, _NO_FIELD_TYPES) else Spelling.EMPTY


def _reasoning(text: object) -> list[bytes]:
    thought = _text(text)
    return [_atom(AtomKind.REASONING, thought)] if thought else []


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
    return _call(item.get("call_id") or item.get("id"), name, item.get("arguments"))


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
        calls.append(_call(entry.get("id"), _text(function.get("name")), function.get("arguments")))
    return calls


def _call(call_id: object, name: str, arguments: object) -> bytes:
    return _atom(AtomKind.CALL, _text(call_id), name, source_arguments(arguments))


def _result(call_id: object, content: object, rest: str) -> bytes:
    """Make the atom of a tool's result; what is no content of a message counts as its JSON."""
    if isinstance(content, str):
        fields = ["text", content] if content else []
    elif content is None or _blocks(content, _TOOL_TYPES):
        fields = ["", _written(content)]
    else:
        try:
            fields = _shown_fields(content)
        except UnreadableItemError:
            fields = ["", _written(content)]
    return _atom(AtomKind.RESULT, _text(call_id), *fields, rest)


def _shown_fields(content: object) -> list[str]:
    """Return type and payload of each part of what the model is shown, as a template may see it.

    A text with other keys counts as the block that it is. An empty one counts among others, since
    templates put separators between parts.
    """
    parts = _parts(content, _as_shown)
    shown = parts if len(parts) > 1 else [part for part in parts if part[1]]
    return [field for part in shown for field in part]


def _parts(
    content: object, read: Callable[[Item, str], tuple[str, str]] | None = None
) -> list[tuple[str, str]]:
    """Return type and payload of each part of a content; tools' blocks are none.

    Args:
        content: as received.
        read: reads a block of text, given that; None to take what is not empty as its text.
    """
    if isinstance(content, str):
        return [("text", content)] if content else []
    if content is None:
        return []
    if not isinstance(content, list):
        raise UnreadableItemError(f"content of type {type(content).__name__}")
    parts: list[tuple[str, str]] = []
    for piece in content:
        block = {"text": piece} if isinstance(piece, str) else piece
        if not isinstance(block, dict):
            raise UnreadableItemError(f"a content block of type {type(block).__name__}")
        kind = _text(block.get("type"))
        if kind in _TOOL_TYPES:
            continue
        text = block.get("text")
        if kind in _TEXT_TYPES and isinstance(text, str):
            if read is not None:
                parts.append(read(block, text))
            elif text:
                parts.append(("text", text))
            continue
        if not kind:
            raise UnreadableItemError("a content block without a type")
        parts.append((kind, _written(block)))
    return parts


def _as_shown(block: Item, text: str) -> tuple[str, str]:
    more = any(name not in _TEXT_KEYS and value not in _NOTHING for name, value in block.items())
    return ("block", _written(block)) if more else ("text", text)


def _blocks(content: object, kinds: AbstractSet[str]) -> list[Item]:
    if not isinstance(content, list):
        return []
    return [block for block in content if _is_of(block, kinds)]


def _without(content: object, kinds: AbstractSet[str]) -> object:
    if not isinstance(content, list):
        return content
    return [block for block in content if not _is_of(block, kinds)]


def _is_of(block: object, kinds: AbstractSet[str]) -> bool:
    if not isinstance(block, dict):
        return False
    kind = block.get("type")
    return isinstance(kind, str) and kind in kinds


def _rest(item: Item, read: AbstractSet[str]) -> str:
    """Return the canonical JSON of what counts of an item besides the names that were read."""
    kept = {
        name: value
        for name, value in item.items()
        if name not in read and name not in _UNCOUNTED and value not in _NOTHING
    }
    if not kept:
        return ""
    text = canonical_json(kept)
    if _CACHE_MARK not in text:
        return text
    marked = {name: _unmarked(value) for name, value in kept.items()}
    kept = {name: value for name, value in marked.items() if value not in _NOTHING}
    return canonical_json(kept) if kept else ""


def _written(value: object) -> str:
    """Return the canonical JSON of a value, without marks for caches at any depth."""
    text = canonical_json(value)
    # The canonical form proves that the depth is bounded.
    return canonical_json(_unmarked(value)) if _CACHE_MARK in text else text


def _unmarked(value: object) -> object:
    if isinstance(value, dict):
        return {name: _unmarked(one) for name, one in value.items() if name != _CACHE_MARK}
    return [_unmarked(one) for one in value] if isinstance(value, list) else value


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
_PLAIN_ENDS = {
    "system": (_atom(AtomKind.MESSAGE, "system", "text"), _NO_REST),
    "developer": (_atom(AtomKind.MESSAGE, "system", "text"), _NO_REST),
    "user": (_atom(AtomKind.MESSAGE, "user", "text"), _NO_REST),
    "assistant": (_atom(AtomKind.TEXT, "text"), b""),
}
_USER = _atom(AtomKind.MESSAGE, "user")
SAYING_KINDS = frozenset({AtomKind.TEXT, AtomKind.CALL})
"""The kinds of which an answer that says or does something has one."""
NOTHING_SAID = _atom(AtomKind.ABSENT)
"""The last atom of an answer that has none of SAYING_KINDS."""
