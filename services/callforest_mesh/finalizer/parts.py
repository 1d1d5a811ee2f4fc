"""A group that is larger than one payload: cut into parts, which are read as they are sent.

Contract: docs/protocol.md, section 8, "Large groups". The cuts are made from the log alone, so that
their number is known before a call is read; the calls of one part at a time are in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic

from callforest.capture.v1 import frame_pb2, group_batch_pb2, group_part_pb2, receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.frames import frames_of
from callforest_client.staging import StagingClient
from callforest_core.refusal import Refusal
from callforest_mesh.finalizer.groups import make_batch
from callforest_mesh.finalizer.segments import ResponseT, framed, read_proven

PART_BYTES: Final = 4 << 20
"""What a part holds, unless one receipt or one call alone is larger."""


def cuts(sizes: Iterable[int]) -> list[slice]:
    """Cut a list into runs of at most PART_BYTES; what is larger, or of unknown size, is alone.

    Args:
        sizes: of each element, in bytes; 0 when it is not known.
    """
    runs: list[slice] = []
    start = held = number = 0
    for number, size in enumerate(sizes, 1):
        taken = size or PART_BYTES
        if held and held + taken > PART_BYTES:
            runs.append(slice(start, number - 1))
            start, held = number - 1, 0
        held += taken
    return [*runs, slice(start, number)] if held else runs


class PartedGroup(Generic[ResponseT]):
    """One delivery of a group in parts.

    Args:
        logged: the group, which was not dropped.
        receipts: of its rollouts, in slot order.
        staging: holds its calls, as their owner's.
        response: makes the messages that carry it.
    """

    def __init__(
        self,
        logged: row_log_pb2.LoggedGroup,
        receipts: Sequence[receipt_pb2.Receipt],
        staging: StagingClient,
        response: Callable[..., ResponseT],
    ) -> None:
        self.logged = logged
        self._receipts = receipts
        self._staging = staging
        self._response: Callable[..., ResponseT] = response
        self._digest = hashlib.sha256()
        self._sent = 0
        self._begun = False
        self.has_ended = False
        self._receipt_cuts = cuts(one.ByteSize() for one in receipts)
        self._row_cuts = cuts(row.ByteSize() for row in logged.rows)
        self._call_cuts = cuts(reference.size_bytes for reference in logged.segments)

    @property
    def part_count(self) -> int:
        """How many parts there are, the head among them."""
        return 1 + len(self._receipt_cuts) + len(self._row_cuts) + len(self._call_cuts)

    async def next_payload(self) -> Iterator[ResponseT]:
        """Give the messages of what comes next: begin, a part, or end. Nothing may part them.

        Raises:
            LostCallError: a call cannot be read any more; the group must be dropped.
            Refusal: PEER_UNAVAILABLE.
        """
        if not self._begun:
            self._begun = True
            return iter([self._response(group_begin=self._begin())])
        if self._sent == self.part_count:
            self.has_ended = True
            end = group_part_pb2.GroupEnd(sha256=self._digest.digest())
            return iter([self._response(group_end=end)])
        content = await self._content(self._sent)
        part = group_part_pb2.GroupPart(number=self._sent, content=content)
        self._sent += 1
        return self._framed(part.SerializeToString(deterministic=True))

    def _framed(self, serialized: bytes) -> Iterator[ResponseT]:
        for frame in frames_of(serialized):
            if isinstance(frame, frame_pb2.FrameBegin):
                self._digest.update(frame.sha256)
            yield framed(frame, self._response)

    def _begin(self) -> group_part_pb2.GroupBegin:
        return group_part_pb2.GroupBegin(
            cursor=self.logged.cursor,
            group_id=self.logged.group_id,
            part_count=self.part_count,
            size_bytes=self.logged.size_bytes,
        )

    async def _content(self, number: int) -> group_batch_pb2.GroupBatch:
        """Make the content of a part; reads its calls."""
        if number == 0:
            head = make_batch(self.logged, (), ())
            head.ClearField("rows")
            return head
        number -= 1
        if number < len(self._receipt_cuts):
            receipts = self._receipts[self._receipt_cuts[number]]
            return group_batch_pb2.GroupBatch(receipts=receipts)
        number -= len(self._receipt_cuts)
        if number < len(self._row_cuts):
            return group_batch_pb2.GroupBatch(rows=self.logged.rows[self._row_cuts[number]])
        number -= len(self._row_cuts)
        references = self.logged.segments[self._call_cuts[number]]
        calls = await read_proven(self._staging, references)
        return group_batch_pb2.GroupBatch(segments=calls)


def needs_parts(logged: row_log_pb2.LoggedGroup) -> Refusal:
    """Make the refusal of a group to a reader that does not take parts."""
    return Refusal(
        er.ERROR_REASON_GROUP_NEEDS_PARTS,
        f"group {logged.group_id} at cursor {logged.cursor} has up to {logged.size_bytes} bytes and"
        " comes in parts: read it with a client that sets takes_parts, or subscribe with"
        f" after_cursor {logged.cursor} to leave it out",
        group_id=logged.group_id,
        cursor=logged.cursor,
        size_bytes=logged.size_bytes,
    )
