"""Which calls a restored attempt takes over (docs/protocol.md, "Restored attempts")."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Final

CAPTURE_SCHEMA: Final = 3
"""The capture schema of this release: its wire, its stores, its restore points."""
RESTORED_MAX: Final = 2048
"""Most calls that an attempt takes over; they are copied in one transaction."""
_DOMAIN: Final = b"callforest-restore-v1"


def with_ancestors(parents: Mapping[str, str | None], named: Collection[str]) -> tuple[str, ...]:
    """Give the named calls and all that they continue, in the order of `parents`.

    Args:
        parents: the committed calls, each with the call that it continues or None.
        named: of these calls.

    Raises:
        KeyError: a call is not among them.
    """
    taken: set[str] = set()
    for call_id in named:
        cursor: str | None = call_id
        while cursor is not None and cursor not in taken:
            taken.add(cursor)
            cursor = parents[cursor]
    return tuple(call_id for call_id in parents if call_id in taken)


def restore_digest(capture_schema: int, capture_key: str, call_ids: Sequence[str]) -> bytes:
    """Give the SHA-256 of a restore point, 32 bytes.

    Args:
        capture_schema: the point's.
        capture_key: the attempt that it names.
        call_ids: sorted, each once.
    """
    hashed = hashlib.sha256(_DOMAIN + struct.pack(">Q", capture_schema) + _text(capture_key))
    hashed.update(struct.pack(">Q", len(call_ids)))
    for call_id in call_ids:
        hashed.update(_text(call_id))
    return hashed.digest()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">Q", len(encoded)) + encoded
