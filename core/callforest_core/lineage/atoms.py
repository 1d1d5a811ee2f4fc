"""Atoms: what the items of a conversation say, in one form for all dialects.

Forest mode recognises a history by its atoms (docs/lineage.md, section 11). The items of one answer
give the same atoms whether they came as a Chat message, as Responses items or as the blocks of a
Messages turn.

Items are parsed JSON objects. What no dialect allows is unreadable: unlike in chain mode nothing
is guessed, because an unreadable history only costs a fresh root.
"""

from collections.abc import Iterable, Iterator

from callforest_core.lineage.answer_atoms import (
    ItemAtoms,
    Spelling,
    answer_call,
    answer_message,
    answer_reasoning,
)
from callforest_core.lineage.atom import (
    LENGTH_BYTES,
    NOTHING_SAID,
    SAYING_KINDS,
    AtomKind,
    atom,
)
from callforest_core.lineage.canonical_json import CanonicalJsonError
from callforest_core.lineage.content_parts import (
    NOTHING,
    TOOL_TYPES,
    Part,
    blocks,
    parts,
    rest,
    text_of,
    written,
)
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.items import Item

_RESPONSES_TYPES = ("function_call", "function_call_output", "reasoning")
_TEXT_KEYS = frozenset({"type", "text", "cache_control"})


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
            says = any(one[0] in SAYING_KINDS for one in read.atoms)
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
    return ends[0] + len(payload).to_bytes(LENGTH_BYTES, "big") + payload + ends[1]


def item_atoms(item: object) -> ItemAtoms:
    """Return the atoms of any item; raises UnreadableItemError."""
    if not isinstance(item, dict):
        raise UnreadableItemError(f"{type(item).__name__} where an object belongs")
    try:
        return _read(item)
    except CanonicalJsonError as error:
        raise UnreadableItemError(error.fact) from error


def is_user_message(atom_bytes: bytes) -> bool:
    """Say whether the atom is a message of the user."""
    return atom_bytes.startswith(_USER)


def _read(item: Item) -> ItemAtoms:
    kind, role = item.get("type"), item.get("role")
    if role is not None and kind in _RESPONSES_TYPES:
        # Chat shows the model its content, Responses what its type says.
        raise UnreadableItemError("an item with both a role and a type that has none")
    if kind == "function_call":
        return answer_call(item)
    if kind == "function_call_output":
        call_id = item.get("call_id") or item.get("id")
        more = rest(item, {"call_id", "output"})
        return ItemAtoms([_result(call_id, item.get("output"), more)], None)
    if kind == "reasoning":
        return answer_reasoning(item)
    if not isinstance(role, str) or not role:
        raise UnreadableItemError("an item without a role")
    if role == "assistant":
        return answer_message(item)
    if role == "tool":
        more = rest(item, {"role", "tool_call_id", "content"})
        return ItemAtoms([_result(item.get("tool_call_id"), item.get("content"), more)], None)
    return ItemAtoms(_message(item, "system" if role == "developer" else role), None)


def _message(item: Item, role: str) -> list[bytes]:
    content = item.get("content")
    if blocks(content, {"tool_use"}):
        raise UnreadableItemError(f"a tool call of the role {role}")
    results = [
        _result(
            block.get("tool_use_id") or block.get("id"),
            block.get("content"),
            rest(block, {"tool_use_id", "content"}),
        )
        for block in blocks(content, {"tool_result"})
    ]
    fields = _shown_fields(content)
    more = rest(item, {"role", "content"})
    if fields or more or not results:
        results.append(atom(AtomKind.MESSAGE, role, *fields, more))
    return results


def _result(call_id: object, content: object, more: str) -> bytes:
    """Make the atom of a tool's result; what is no content of a message counts as its JSON."""
    if isinstance(content, str):
        fields = ["text", content] if content else []
    elif content is None or blocks(content, TOOL_TYPES):
        fields = ["", written(content)]
    else:
        try:
            fields = _shown_fields(content)
        except UnreadableItemError:
            fields = ["", written(content)]
    return atom(AtomKind.RESULT, text_of(call_id), *fields, more)


def _shown_fields(content: object) -> list[str]:
    """Return type and payload of each part of what the model is shown, as a template may see it.

    A text with other keys counts as the block that it is. An empty one counts among others, since
    templates put separators between parts.
    """
    all_parts = [_as_shown(part) for part in parts(content)]
    shown = all_parts if len(all_parts) > 1 else [part for part in all_parts if part[1]]
    return [field for part in shown for field in part]


def _as_shown(part: Part) -> tuple[str, str]:
    block = part.text_block or {}
    more = any(name not in _TEXT_KEYS and value not in NOTHING for name, value in block.items())
    return ("block", written(block)) if more else (part.kind, part.payload)


_NO_REST = bytes(LENGTH_BYTES)
_PLAIN_ENDS = {
    "system": (atom(AtomKind.MESSAGE, "system", "text"), _NO_REST),
    "developer": (atom(AtomKind.MESSAGE, "system", "text"), _NO_REST),
    "user": (atom(AtomKind.MESSAGE, "user", "text"), _NO_REST),
    "assistant": (atom(AtomKind.TEXT, "text"), b""),
}
_USER = atom(AtomKind.MESSAGE, "user")
