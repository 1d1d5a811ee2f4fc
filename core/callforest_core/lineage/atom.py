"""One atom: a kind and its fields, as bytes that are ready to be hashed (docs/lineage.md, 11).

atom = u8(kind) LP(field)...        LP(x) = u64(len x) x, u64 big-endian, fields UTF-8
"""

from enum import IntEnum

from callforest_core.lineage.fingerprint import UnreadableItemError


class AtomKind(IntEnum):
    """What an atom is; the first byte of it."""

    MESSAGE = 1
    REASONING = 2
    TEXT = 3
    CALL = 4
    RESULT = 5
    ABSENT = 6
    NAME = 7
    REST = 8


LENGTH_BYTES = 8
"""What a field's length takes, before the field."""


def atom(kind: AtomKind, *fields: str) -> bytes:
    """Return the atom of a kind with these fields; raises UnreadableItemError."""
    pieces = [_KIND_BYTES[kind]]
    try:
        for field in fields:
            payload = field.encode()
            pieces += (len(payload).to_bytes(LENGTH_BYTES, "big"), payload)
    except UnicodeEncodeError as error:
        raise UnreadableItemError("a lone surrogate") from error
    return b"".join(pieces)


def fields_of(atom_bytes: bytes) -> tuple[AtomKind, list[str]]:
    """Return the kind and the fields of an atom."""
    fields: list[str] = []
    position = 1
    while position < len(atom_bytes):
        start = position + LENGTH_BYTES
        position = start + int.from_bytes(atom_bytes[position:start], "big")
        fields.append(atom_bytes[start:position].decode())
    return AtomKind(atom_bytes[0]), fields


_KIND_BYTES = {kind: bytes([kind]) for kind in AtomKind}
SAYING_KINDS = frozenset({AtomKind.TEXT, AtomKind.CALL})
"""The kinds of which an answer that says or does something has one."""
NOTHING_SAID = atom(AtomKind.ABSENT)
"""The last atom of an answer that has none of SAYING_KINDS."""
