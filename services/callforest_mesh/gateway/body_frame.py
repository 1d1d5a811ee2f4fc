"""A body that says again, byte for byte, what an earlier one said, and adds turns to it. Pure.

A harness sends its history with every call, and most write all the rest alike every time. Of such
a body only the turns that it adds need be parsed and judged: it is JSON exactly if they are, and
says of everything else what the earlier one said.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway.asked import begin_digest
from callforest_mesh.gateway.json_body import Body, read_values

_SPACE: Final = b" \t\n\r"
_COMMA: Final = re.compile(rb"[ \t\n\r]*,")


@dataclass(frozen=True, slots=True, eq=False)
class BodyFrame:
    """A request's body, cut where its next turn would stand.

    Attributes:
        start: what is before, up to the end of its last turn.
        end: what is behind, from the bracket that closes its turns, or white space before it.
        begun: of the digest that tells it from another request: what is up to the end of `start`.
    """

    start: bytes
    end: bytes
    begun: hashlib._Hash

    @property
    def digest(self) -> bytes:
        """Tells the request from another one, if it has no claim (`asked.digest_body`)."""
        whole = self.begun.copy()
        whole.update(self.end)
        return whole.digest()

    @property
    def size_bytes(self) -> int:
        """What it takes in memory, roughly."""
        return len(self.start) + len(self.end)

    def added(self, body: bytes) -> list[object] | None:
        """Parse the turns that a body adds to this one; None when it differs in anything else.

        Nor are turns given that readers could take in several ways: only who reads the whole body
        can say what is wrong with it.
        """
        if not (body.startswith(self.start) and body.endswith(self.end)):
            return None
        stop = len(body) - len(self.end)
        comma = _COMMA.match(body, len(self.start), stop)
        return None if comma is None else read_values(body[comma.end() : stop])

    def moved(self, body: bytes) -> BodyFrame:
        """Give the frame of a body that adds turns to this one."""
        start, begun = body[: len(body) - len(self.end)], self.begun.copy()
        begun.update(start[len(self.start) :])
        return BodyFrame(start, self.end, begun)


def frame_of(parsed: Body, dialect: Dialect, turns_name: str) -> BodyFrame | None:
    """Cut a body; None when its turns are no list, or an empty one.

    Args:
        parsed: the body.
        dialect: its API.
        turns_name: the field that holds its turns.
    """
    turns = parsed.fields.get(turns_name)
    if not isinstance(turns, list) or not turns:
        return None
    begin, end = parsed.place_of(turns_name)
    size = begin + len(parsed.body[begin : end - 1].rstrip(_SPACE))  # without its closing bracket
    start, begun = parsed.body[:size], begin_digest(dialect)
    begun.update(start)
    return BodyFrame(start, parsed.body[size:], begun)
