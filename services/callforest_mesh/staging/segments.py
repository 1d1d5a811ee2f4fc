"""Segments: the calls of one commit, stored as one value.

LMDB gives a value of more than half a page pages of its own, so a value a call wastes half a page a
call and fragments the file; a segment wastes half a page a commit. A segment is never changed, and
goes when its last call goes.
"""

from __future__ import annotations

import struct
from typing import Final

from callforest_mesh.chassis.lmdb_store import ReadTxn, WriteTxn

SEGMENT_BYTES: Final = 1 << 20
"""Longest segment, unless one call alone is longer."""
SEGMENTS: Final = "segments"
LIVES: Final = "lives"
TOTALS: Final = "totals"
DATABASES: Final = (SEGMENTS, LIVES, TOTALS)
_NUMBER: Final = struct.Struct(">Q")
_COUNT: Final = struct.Struct(">I")
_TOTAL: Final = struct.Struct(">QQ")


def segment_key(number: int) -> bytes:
    """Give the key of a segment."""
    return _NUMBER.pack(number)


def total_of(txn: ReadTxn, tenant: bytes) -> tuple[int, int]:
    """Give how many calls a tenant has staged, and the bytes of their stored records."""
    stored = txn.get(TOTALS, tenant)
    calls, size = (0, 0) if stored is None else _TOTAL.unpack(stored)
    return calls, size


class SegmentCollector:
    """What the writes of one commit add to segments and take from them."""

    def __init__(self) -> None:
        self._open: dict[int, bytearray] = {}
        self._number = 0
        self._lives: dict[int, int] = {}
        self._totals: dict[bytes, tuple[int, int]] = {}

    def add(self, txn: WriteTxn, tenant: bytes, payload: bytes) -> tuple[int, int]:
        """Take a call's bytes; give the number of their segment and their offset in it."""
        segment = self._open.get(self._number)
        if segment is None or len(segment) + len(payload) > SEGMENT_BYTES:
            self._number = self._number + 1 if self._open else _next_number(txn)
            segment = self._open[self._number] = bytearray()
        offset = len(segment)
        segment += payload
        self._count(self._number, tenant, 1, len(payload))
        return self._number, offset

    def read(self, number: int, offset: int, size: int) -> bytes | None:
        """Give bytes that this commit added, or None when they are not of it."""
        segment = self._open.get(number)
        return None if segment is None else bytes(segment[offset : offset + size])

    def remove(self, number: int, tenant: bytes, size: int) -> None:
        """Take note that a call of a segment is gone."""
        self._count(number, tenant, -1, -size)

    def finish(self, txn: WriteTxn) -> None:
        """Write the segments and counts; delete the segments without a call."""
        for number, change in self._lives.items():
            key = segment_key(number)
            stored = txn.get(LIVES, key)
            live = change + (0 if stored is None else _COUNT.unpack(stored)[0])
            if live:
                txn.put(LIVES, key, _COUNT.pack(live))
                if (segment := self._open.get(number)) is not None:
                    txn.put(SEGMENTS, key, bytes(segment))
            elif stored is not None:
                txn.delete(LIVES, key)
                txn.delete(SEGMENTS, key)
        for tenant, (calls, size) in self._totals.items():
            known_calls, known_size = total_of(txn, tenant)
            txn.put(TOTALS, tenant, _TOTAL.pack(known_calls + calls, known_size + size))

    def _count(self, number: int, tenant: bytes, calls: int, size: int) -> None:
        self._lives[number] = self._lives.get(number, 0) + calls
        known_calls, known_size = self._totals.get(tenant, (0, 0))
        self._totals[tenant] = (known_calls + calls, known_size + size)


def _next_number(txn: WriteTxn) -> int:
    found = txn.last(LIVES, b"")
    last: int = 0 if found is None else _NUMBER.unpack(found[0])[0]
    return last + 1
