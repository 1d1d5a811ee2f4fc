"""Conversations that were read, so that a request of chain mode costs what it adds, not repeats.

A harness sends the whole history with every call. What a conversation's items hash to can be
continued from where an earlier request of the attempt left it, if it really begins with the same
items: their exact bytes are compared by SHA-256, types and order of keys included, never assumed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

from callforest_core.lineage.canonical_json import CanonicalJsonError
from callforest_core.lineage.fingerprint import (
    ConversationScan,
    UnreadableItemError,
    is_model_authored,
)
from callforest_core.lineage.replay import EMPTY_SOURCE_DIGEST, source_digests
from callforest_mesh.gateway.body_frame import BodyFrame
from callforest_mesh.gateway.json_body import exact_bytes

REMEMBERED_BYTES: Final = 64 << 20
"""Conversations that are remembered, all attempts together."""
_OVERHEAD_BYTES: Final = 1024
"""What an attempt's conversation takes beside its items and their digests, roughly."""


class LastAnswer(NamedTuple):
    """Where the last answer is: what models wrote, its reasoning included.

    Attributes:
        begin: its first item; 0 when there is none.
        end: the item behind its last; 0 when there is none.
        next: where an answer begins whose next item comes behind all of these.
    """

    begin: int
    end: int
    next: int


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """The items of a request, and what they hash to.

    Attributes:
        item_count: how many they are.
        written: SHA-256 of their exact bytes, not ended: more items go on from it, and the history
            itself is kept once at most, in the frame.
        scan: their fingerprints; None when one that a model wrote cannot be read.
        source_digest: of their replay summary; None when one has no canonical form.
        answer: where the last answer is among them.
        render_digest: of the options beside them; None when one has no canonical form.
        frame: the request's body; None when the engine gets another one, made of it.
    """

    item_count: int
    written: hashlib._Hash
    scan: ConversationScan | None
    source_digest: bytes | None
    answer: LastAnswer
    render_digest: bytes | None
    frame: BodyFrame | None

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        digests = b"" if self.scan is None else self.scan.context_digests
        framed = 0 if self.frame is None else self.frame.size_bytes
        return len(digests) + framed + _OVERHEAD_BYTES


_EMPTY: Final = Conversation(
    0, hashlib.sha256(), ConversationScan(), EMPTY_SOURCE_DIGEST, LastAnswer(0, 0, 0), None, None
)


def read_conversation(
    items: list[object],
    known: Conversation | None = None,
    *,
    render_digest: bytes | None = None,
    frame: BodyFrame | None = None,
) -> Conversation:
    """Hash the items of a request; only those behind `known`, where they begin with its items."""
    base = _EMPTY
    if known is not None:
        beginning = hashlib.sha256(exact_bytes(items[: known.item_count]))
        base = known if beginning.digest() == known.written.digest() else _EMPTY
    return continued(base, items[base.item_count :], render_digest, frame)


def continued(
    base: Conversation, added: list[object], render_digest: bytes | None, frame: BodyFrame | None
) -> Conversation:
    """Hash a request that brings the items of an earlier one and, behind them, some of its own."""
    written = base.written.copy()
    written.update(exact_bytes(added))
    return Conversation(
        base.item_count + len(added),
        written,
        _scan(base, added),
        _source_digest(base, added),
        _last_answer(base, added),
        render_digest,
        frame,
    )


class Conversations:
    """The last conversation of each attempt; those used longest ago are forgotten.

    Args:
        bytes_max: most bytes that are kept, roughly.
    """

    def __init__(self, bytes_max: int = REMEMBERED_BYTES) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[str, Conversation] = OrderedDict()

    def of(self, capture_key: str) -> ChainMemory:
        """Give the place of an attempt's conversation."""
        return ChainMemory(self, capture_key)

    def get(self, capture_key: str) -> Conversation | None:
        """Give the last conversation of an attempt, if it is known."""
        return self._known.get(capture_key)

    def keep(self, capture_key: str, conversation: Conversation) -> None:
        """Remember a conversation in the place of the attempt's last one."""
        self._forget(capture_key)
        self._known[capture_key] = conversation
        self._bytes += conversation.size_bytes
        while self._bytes > self._bytes_max:
            self._forget(next(iter(self._known)))

    def _forget(self, capture_key: str) -> None:
        known = self._known.pop(capture_key, None)
        if known is not None:
            self._bytes -= known.size_bytes


@dataclass(frozen=True, slots=True, eq=False)
class ChainMemory:
    """The place of one attempt's conversation.

    Attributes:
        conversations: those of all attempts.
        capture_key: the attempt.
    """

    conversations: Conversations
    capture_key: str

    def get(self) -> Conversation | None:
        """Give the attempt's last conversation, if it is known."""
        return self.conversations.get(self.capture_key)

    def keep(self, conversation: Conversation) -> None:
        """Remember a conversation in the place of the last one."""
        self.conversations.keep(self.capture_key, conversation)


def _scan(base: Conversation, added: list[object]) -> ConversationScan | None:
    try:
        return None if base.scan is None else base.scan.extended(added)
    except UnreadableItemError:
        return None


def _last_answer(base: Conversation, added: list[object]) -> LastAnswer:
    begin, end, start = base.answer
    for place, item in enumerate(added, base.item_count):
        fields = item if isinstance(item, dict) else {}
        if is_model_authored(fields):
            begin, end = start, place + 1
        elif fields.get("type") != "reasoning":
            start = place + 1
    return LastAnswer(begin, end, start)


def _source_digest(base: Conversation, added: list[object]) -> bytes | None:
    if base.source_digest is None or not added:
        return base.source_digest
    try:
        return source_digests(added, base.source_digest)[-1]
    except CanonicalJsonError:
        return None
