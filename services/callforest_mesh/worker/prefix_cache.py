"""Whole sequences of calls that were captured here, so that a continuation need not fetch them."""

from __future__ import annotations

from collections import OrderedDict

from callforest_core.custody.path import Room
from callforest_mesh.worker.core import Sequence

_ENTRY_BYTES = 512
"""What an entry costs beside its tokens, roughly: keys, hashes, the array's own object."""


class PrefixCache:
    """Keeps the sequences that were used last, within a bound in bytes.

    The tenant is part of every key: a call of one tenant is never found for another.

    Args:
        bytes_max: what all sequences together may take; one that is larger alone is not kept.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._sequences: OrderedDict[tuple[str, str, str], Sequence] = OrderedDict()
        self._calls: dict[tuple[str, str], dict[str, None]] = {}
        self._rooms: dict[Room, int] = {}

    @property
    def size_bytes(self) -> int:
        """What the sequences take now."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, tenant: str, capture_key: str, call_id: str) -> Sequence | None:
        """Give a call's sequence, and count it as used."""
        key = (tenant, capture_key, call_id)
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._sequences.move_to_end(key)
        return sequence

    def put(self, tenant: str, capture_key: str, call_id: str, sequence: Sequence) -> None:
        """Keep a call's sequence; those used longest ago make room."""
        key = (tenant, capture_key, call_id)
        if key in self._sequences:
            self.drop(tenant, capture_key, call_id)
        room = sequence.path.room
        if room.size_bytes + _ENTRY_BYTES > self._bytes_max:
            return
        # Asked anew each time: the last sequence in this room may be among those that go.
        while self._bytes + (added := self._added_by(room)) > self._bytes_max:
            self.drop(*next(iter(self._sequences)))
        self._bytes += added
        self._rooms[room] = self._rooms.get(room, 0) + 1
        self._sequences[key] = sequence
        calls = self._calls.get((tenant, capture_key))
        if calls is None:
            calls = self._calls[tenant, capture_key] = {}
        calls[call_id] = None

    def drop(self, tenant: str, capture_key: str, call_id: str) -> None:
        """Forget a call's sequence, if it is kept."""
        sequence = self._sequences.pop((tenant, capture_key, call_id), None)
        if sequence is None:
            return
        room = sequence.path.room
        self._rooms[room] -= 1
        if not self._rooms[room]:
            del self._rooms[room]
        self._bytes -= self._added_by(room)
        calls = self._calls[tenant, capture_key]
        del calls[call_id]
        if not calls:
            del self._calls[tenant, capture_key]

    def _added_by(self, room: Room) -> int:
        """Say what one more sequence in a room takes: sequences share rooms."""
        return _ENTRY_BYTES + (0 if room in self._rooms else room.size_bytes)

    def held(self, tenant: str, capture_key: str, most: int) -> dict[str, Sequence]:
        """Give the sequences of an attempt that were kept last, at most `most`, newest first.

        They are given as they are, since one may be dropped while its prefix is being fetched.
        """
        calls = self._calls.get((tenant, capture_key), {})
        newest = [call_id for call_id, _ in zip(reversed(calls), range(most), strict=False)]
        return {call_id: self._sequences[tenant, capture_key, call_id] for call_id in newest}
