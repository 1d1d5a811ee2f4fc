"""Conversations that were read, so that a request costs what it adds and not what it repeats.

A harness sends the whole history with every call. What a conversation's items hash to can be
continued from where an earlier request of the attempt left it, if it really begins with the same
items: that is compared, never assumed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from callforest_core.lineage.canonical_json import CanonicalJsonError
from callforest_core.lineage.fingerprint import ConversationScan, UnreadableItemError
from callforest_core.lineage.replay import EMPTY_SOURCE_DIGEST, source_digests

REMEMBERED_BYTES: Final = 64 << 20
"""Request bodies whose conversations are remembered, all attempts together."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """The items of a request, and what they hash to.

    Attributes:
        items: as they were received.
        scan: their fingerprints; None when one that a model wrote cannot be read.
        source_digest: of their replay summary; None when one has no canonical form.
        is_exact: whether only equal items compare equal to them. Python takes 1, 1.0 and True for
            the same, and their hashes differ.
    """

    items: Sequence[object]
    scan: ConversationScan | None
    source_digest: bytes | None
    is_exact: bool


_EMPTY: Final = Conversation((), ConversationScan(), EMPTY_SOURCE_DIGEST, is_exact=True)


def read_conversation(items: list[object], known: Conversation | None = None) -> Conversation:
    """Hash the items of a request; only those behind `known`, where they begin with its items."""
    base = _EMPTY
    if known is not None and known.is_exact and items[: len(known.items)] == known.items:
        base = known
    added = items[len(base.items) :]
    exact = base.is_exact and all(map(_is_exact, added))
    return Conversation(items, _scan(base, added), _source_digest(base, added), exact)


class Conversations:
    """The last conversation of each attempt; those used longest ago are forgotten.

    Args:
        bytes_max: most bytes of request bodies that are kept, roughly.
    """

    def __init__(self, bytes_max: int = REMEMBERED_BYTES) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[str, tuple[Conversation, int]] = OrderedDict()

    def get(self, capture_key: str) -> Conversation | None:
        """Give the last conversation of an attempt, if it is known."""
        known = self._known.get(capture_key)
        return None if known is None else known[0]

    def keep(self, capture_key: str, conversation: Conversation, size: int) -> None:
        """Remember a conversation that came in a body of `size` bytes."""
        self._forget(capture_key)
        if not conversation.is_exact:
            return
        self._known[capture_key] = (conversation, size)
        self._bytes += size
        while self._bytes > self._bytes_max:
            self._forget(next(iter(self._known)))

    def _forget(self, capture_key: str) -> None:
        _, size = self._known.pop(capture_key, (None, 0))
        self._bytes -= size


def _scan(base: Conversation, added: list[object]) -> ConversationScan | None:
    try:
        return None if base.scan is None else base.scan.extended(added)
    except UnreadableItemError:
        return None


def _source_digest(base: Conversation, added: list[object]) -> bytes | None:
    if base.source_digest is None or not added:
        return base.source_digest
    try:
        return source_digests(added, base.source_digest)[-1]
    except CanonicalJsonError:
        return None


def _is_exact(value: object) -> bool:
    if isinstance(value, str) or value is None:
        return True
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    return isinstance(value, list) and all(map(_is_exact, value))
