"""What items hold: the parts of a content, and keys that no rule reads (docs/lineage.md, 11)."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from callforest_core.lineage.canonical_json import canonical_json
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.items import Item

NOTHING: tuple[object, ...] = (None, "", [], {})
"""Values that are as absent."""
TOOL_TYPES = frozenset({"tool_use", "tool_result"})

_TEXT_TYPES = frozenset({"", "text", "input_text", "output_text"})
_UNCOUNTED = frozenset({"type", "id", "status", "cache_control"})
_CACHE_MARK = "cache_control"


class Part(NamedTuple):
    """One part of a content: its type and payload; of a text the block that holds it."""

    kind: str
    payload: str
    text_block: Item | None


def parts(content: object) -> Iterator[Part]:
    """Yield the parts of a content, empty ones too; tools' blocks are none.

    Raises UnreadableItemError.
    """
    if isinstance(content, str):
        yield Part("text", content, {})
        return
    if content is None:
        return
    if not isinstance(content, list):
        raise UnreadableItemError(f"content of type {type(content).__name__}")
    for piece in content:
        block = {"text": piece} if isinstance(piece, str) else piece
        if not isinstance(block, dict):
            raise UnreadableItemError(f"a content block of type {type(block).__name__}")
        kind = text_of(block.get("type"))
        if kind in TOOL_TYPES:
            continue
        text = block.get("text")
        if kind in _TEXT_TYPES and isinstance(text, str):
            yield Part("text", text, block)
        elif kind:
            yield Part(kind, written(block), None)
        else:
            raise UnreadableItemError("a content block without a type")


def blocks(content: object, kinds: AbstractSet[str]) -> list[Item]:
    """Return the blocks of these types."""
    if not isinstance(content, list):
        return []
    return [block for block in content if _is_of(block, kinds)]


def without(content: object, kinds: AbstractSet[str]) -> object:
    """Return a content without its blocks of these types."""
    if not isinstance(content, list):
        return content
    return [block for block in content if not _is_of(block, kinds)]


def rest(item: Item, read: AbstractSet[str]) -> str:
    """Return the canonical JSON of what counts of an item besides the names that were read."""
    kept = {
        name: value
        for name, value in item.items()
        if name not in read and name not in _UNCOUNTED and value not in NOTHING
    }
    if not kept:
        return ""
    text = canonical_json(kept)
    if _CACHE_MARK not in text:
        return text
    marked = {name: _unmarked(value) for name, value in kept.items()}
    kept = {name: value for name, value in marked.items() if value not in NOTHING}
    return canonical_json(kept) if kept else ""


def written(value: object) -> str:
    """Return the canonical JSON of a value, without marks for caches at any depth."""
    text = canonical_json(value)
    # The canonical form proves that the depth is bounded.
    return canonical_json(_unmarked(value)) if _CACHE_MARK in text else text


def text_of(value: object) -> str:
    """Return a text; null is the empty one. Raises UnreadableItemError for any other value."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    raise UnreadableItemError(f"{type(value).__name__} where text belongs")


def _unmarked(value: object) -> object:
    if isinstance(value, dict):
        return {name: _unmarked(one) for name, one in value.items() if name != _CACHE_MARK}
    return [_unmarked(one) for one in value] if isinstance(value, list) else value


def _is_of(block: object, kinds: AbstractSet[str]) -> bool:
    if not isinstance(block, dict):
        return False
    kind = block.get("type")
    return isinstance(kind, str) and kind in kinds
