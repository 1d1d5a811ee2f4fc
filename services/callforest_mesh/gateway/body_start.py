"""Knowing a request by the bytes with which it begins: what was read of an earlier one, is read.

A harness sends its history with every call, and writes it alike every time. So a body that begins
with all the bytes of an earlier one up to the end of its last turn, and goes on with another turn,
has the earlier one's turns: a reader of JSON that has read those bytes is where it was before,
whatever follows. Nothing of them need be parsed, judged or digested again. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from callforest_mesh.gateway.json_body import Body

_SPACE: Final = b" \t\n\r"
_GOES_ON: Final = re.compile(rb"[ \t\n\r]*,")


@dataclass(frozen=True, slots=True)
class BodyStart:
    """What a body begins with, up to the end of its last turn.

    Attributes:
        turns_at: where its first turn may begin, behind the bracket of their list; in bytes.
        size: where its last turn ends, in bytes.
        digest: SHA-256 of the bytes up to there.
    """

    turns_at: int
    size: int
    digest: bytes


class Prefixes:
    """Digests of the beginnings of one body: in one pass, if each is as long as the one before.

    Args:
        body: as received.
    """

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)
        self._digest = hashlib.sha256()
        self._size = 0

    def digest(self, size: int) -> bytes:
        """Digest the first `size` bytes."""
        if size < self._size:
            self._digest, self._size = hashlib.sha256(), 0
        self._digest.update(self._body[self._size : size])
        self._size = size
        return self._digest.digest()


def longest_start(body: bytes, starts: Iterable[BodyStart], prefixes: Prefixes) -> BodyStart | None:
    """Give the longest of some starts with which a body begins, and goes on with a turn."""
    found = None
    for start in sorted(starts, key=lambda one: one.size):
        goes_on = start.size < len(body) and _GOES_ON.match(body, start.size)
        if goes_on and prefixes.digest(start.size) == start.digest:
            found = start
    return found


def rest_of(body: bytes, start: BodyStart) -> tuple[bytes, int]:
    """Give a body without the turns of its start, and how many bytes that leaves out.

    What is left is valid as JSON, and has a turn, exactly if the body is.

    Raises:
        ValueError: the body does not go on with a turn.
    """
    comma = _GOES_ON.match(body, start.size)
    if comma is None:
        raise ValueError("the body does not go on behind its start")
    return body[: start.turns_at] + body[comma.end() :], comma.end() - start.turns_at


def start_of(
    parsed: Body, turns_name: str, prefixes: Prefixes, left_out: int = 0
) -> BodyStart | None:
    """Give the start of a body; None when its turns are no list, or an empty one.

    Args:
        parsed: the body, or what `rest_of` left of it.
        turns_name: the field that holds its turns.
        prefixes: of the whole body.
        left_out: how many bytes `rest_of` left out.
    """
    if not isinstance(parsed.fields.get(turns_name), list) or not parsed.fields[turns_name]:
        return None
    begin, end = parsed.place_of(turns_name)
    written = parsed.body[begin : end - 1].rstrip(_SPACE)  # without its closing bracket
    size = begin + len(written) + left_out
    return BodyStart(begin + 1, size, prefixes.digest(size))
