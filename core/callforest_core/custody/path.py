"""All tokens from a root to the end of one call, kept together with their encoding.

A call hashes its whole sequence, so a conversation that encoded it anew at every call would pay
for the square of its length. The count of tokens opens the pre-image, hence no hash state can be
carried from call to call; the encoded bytes can.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from callforest_core.custody.tokens import ID_TYPE, TokenIds, as_bytes, as_token_ids

_ID_BYTES: Final = 4
_ENCODED_BYTES: Final = 8


class Room:
    """Memory for a path and those that continue it; what is written once is never changed.

    Paths share rooms, so a cache counts each room once; rooms compare by identity.
    """

    __slots__ = (
        *("capacity", "continued", "encoded", "encoded_bytes", "id_bytes"),
        *("shown_ids", "token_ids"),
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.id_bytes = bytearray(_ID_BYTES * capacity)
        self.token_ids: TokenIds = np.frombuffer(self.id_bytes, dtype=np.uint32)
        self.shown_ids = self.token_ids.view()
        self.shown_ids.flags.writeable = False
        self.encoded = np.empty(capacity, dtype=ID_TYPE)
        self.encoded_bytes = as_bytes(self.encoded)
        self.continued: dict[int, object] = {}

    @property
    def size_bytes(self) -> int:
        """Memory that this takes, spare tokens included."""
        return (_ID_BYTES + _ENCODED_BYTES) * self.capacity

    def take(self, start: int, end: int) -> bool:
        """Take the tokens behind a path that ends at `start`, unless taken or too few.

        Paths end where others of the room start, so whoever comes first at a start has the tokens
        behind it alone. `setdefault` decides that at once, for threads too.
        """
        mine = object()
        return end <= self.capacity and self.continued.setdefault(start, mine) is mine

    def write(self, start: int, token_ids: TokenIds) -> None:
        """Write tokens, and encoded ones (capture contract 2.2), where they were taken."""
        end = start + len(token_ids)
        self.token_ids[start:end] = token_ids
        self.encoded[start:end] = token_ids


class TokenPath:
    """The tokens of a path, immutable, with the bytes that hashes cover.

    Paths that continue each other share memory: the first continuation of a path is written behind
    it, any further one (a fork, a retry) gets a copy. Threads may share a path.

    Attributes:
        room: the memory, kept alive whole by any path in it.

    """

    __slots__ = ("_size", "room")

    def __init__(self, room: Room, size: int) -> None:
        """Show the first `size` tokens of a room; use `of` and `extended` to make paths."""
        self.room = room
        self._size = size

    @classmethod
    def of(cls, token_ids: TokenIds, spare: int = 0) -> TokenPath:
        """Copy ids, shape [tokens]; `spare` more tokens will fit behind them.

        Raises:
            TokenOutOfRangeError: they are not ids.

        """
        token_ids = as_token_ids(token_ids)
        size = len(token_ids)
        room = Room(size + spare)
        room.write(0, token_ids)
        return cls(room, size)

    def extended(self, token_ids: TokenIds) -> TokenPath:
        """Return the path that goes on with `token_ids`; this one stays as it is.

        Raises:
            TokenOutOfRangeError: they are not ids.

        """
        return self.continued_by(as_token_ids(token_ids))

    def continued_by(self, token_ids: TokenIds) -> TokenPath:
        """`extended` for ids that `as_token_ids` gave."""
        size = self._size
        end = size + len(token_ids)
        room = self.room
        if not room.take(size, end):
            room = Room(2 * end)
            room.token_ids[:size] = self.room.token_ids[:size]
            room.encoded[:size] = self.room.encoded[:size]
        room.write(size, token_ids)
        return TokenPath(room, end)

    def __len__(self) -> int:
        """Tokens."""
        return self._size

    @property
    def token_ids(self) -> TokenIds:
        """The ids, shape [tokens], read-only and not copied."""
        return self.room.shown_ids[: self._size]

    def encoded(self, start: int = 0) -> memoryview:
        """Give the encoded ids from token `start` on, not copied."""
        return self.room.encoded_bytes[_ENCODED_BYTES * start : _ENCODED_BYTES * self._size]

    def begins(self, token_ids: TokenIds) -> bool:
        """Whether contiguous ids begin with this path."""
        size = self._size
        return len(token_ids) >= size and self.room.id_bytes.startswith(token_ids.data[:size])


EMPTY_PATH: Final = TokenPath(Room(0), 0)
"""The path before a root."""
