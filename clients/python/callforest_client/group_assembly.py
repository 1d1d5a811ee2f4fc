"""Groups as they come over a stream: one message, the frames of one, or parts.

Contract: docs/protocol.md, section 8, "Large groups". A group is given whole or not at all.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeAlias

import grpc

from callforest.capture.v1 import group_batch_pb2, group_part_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.errors import RefusedError
from callforest_client.frames import FrameAssembler
from callforest_core.refusal import Refusal

GROUP_BYTES_MAX: Final = 4 << 30
"""Largest group that a client puts together unless it is told otherwise."""
GROUP_BYTES_LEAST: Final = 64 << 20
"""Least that may be allowed: what one payload holds comes anyway."""

GroupMessage: TypeAlias = pb.SubscribeRowsResponse | pb.GetGroupResponse
"""What carries a group, or a piece of one."""


class GroupTooLargeError(RefusedError):
    """A group is larger than this client may put together; nothing of it was kept.

    Allow more with `group_bytes_max`. Metadata: group_id, cursor, size_bytes, limit_bytes.
    """

    def __init__(self, begin: group_part_pb2.GroupBegin, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"group {begin.group_id} is larger than this client puts together; allow more with"
            " group_bytes_max (of a trainer: trainer.group_bytes_max)",
            metadata={
                "group_id": begin.group_id,
                "cursor": str(begin.cursor),
                "size_bytes": str(size_bytes),
                "limit_bytes": str(limit_bytes),
            },
        )


class GroupAssembler:
    """Puts the groups of one stream together, one after the other.

    Args:
        bytes_max: the most that the parts of one group may have.

    Raises:
        ValueError: less than GROUP_BYTES_LEAST.
    """

    def __init__(self, bytes_max: int = GROUP_BYTES_MAX) -> None:
        check_bytes_max(bytes_max)
        self._bytes_max = bytes_max
        self._frames = FrameAssembler(payloads_max=1)
        self._sha256 = b""
        self._parts: _Parts | None = None

    def take(self, message: GroupMessage) -> group_batch_pb2.GroupBatch | None:
        """Take the next message of the stream; give the group that it completes, if it does.

        Raises:
            Refusal: FRAME_BROKEN, something is missing, doubled, changed or out of place.
            GroupTooLargeError: the group would have more than `bytes_max`.
            DecodeError: a payload is no message.
        """
        if message.HasField("begin"):
            if self._parts is not None:
                self._parts.make_room(message.begin.size_bytes)
            self._frames.begin(0, message.begin)
            self._sha256 = message.begin.sha256
        elif message.HasField("chunk"):
            self._frames.chunk(0, message.chunk)
        elif message.HasField("end"):
            return self._payload(self._frames.end(0))
        elif message.HasField("batch"):
            return self._whole(message.batch)
        elif message.HasField("group_begin"):
            if self._parts is not None or self._frames.has(0):
                raise _broken("the end of a group", "group_begin")
            self._parts = _Parts(message.group_begin, self._bytes_max)
        elif message.HasField("group_end"):
            parts, self._parts = self._parts, None
            if parts is None or self._frames.has(0):
                raise _broken("group_begin, or the end of a part", "group_end")
            return parts.closed(message.group_end)
        return None

    def _payload(self, serialized: bytes) -> group_batch_pb2.GroupBatch | None:
        if self._parts is None:
            return group_batch_pb2.GroupBatch.FromString(serialized)
        self._parts.add(serialized, self._sha256)
        return None

    def _whole(self, batch: group_batch_pb2.GroupBatch) -> group_batch_pb2.GroupBatch:
        """Take a group that came at once: within parts the dropped one that stands there now."""
        if self._frames.has(0):
            raise _broken("the end of a payload", "batch")
        if self._parts is not None:
            self._parts.check_void(batch)
            self._parts = None
        return batch


class _Parts:
    """The parts of one group, as far as they came.

    Args:
        begin: announces it.
        bytes_max: the most that they may have.
    """

    def __init__(self, begin: group_part_pb2.GroupBegin, bytes_max: int) -> None:
        self._begin = begin
        self._bytes_max = bytes_max
        self._bytes = 0
        self._count = 0
        self._digest = hashlib.sha256()
        self._batch = group_batch_pb2.GroupBatch()
        if begin.size_bytes > bytes_max:
            raise GroupTooLargeError(begin, begin.size_bytes, bytes_max)

    def make_room(self, size_bytes: int) -> None:
        """Refuse a part, before it comes, that would make the group too large."""
        self._bytes += size_bytes
        if self._bytes > self._bytes_max:
            raise GroupTooLargeError(self._begin, self._bytes, self._bytes_max)

    def add(self, serialized: bytes, sha256: bytes) -> None:
        """Take the next part, whose digest its frames were held against."""
        part = group_part_pb2.GroupPart.FromString(serialized)
        if part.number != self._count:
            raise _broken(f"part {self._count}", f"part {part.number}")
        self._count += 1
        self._digest.update(sha256)
        self._batch.MergeFrom(part.content)

    def closed(self, end: group_part_pb2.GroupEnd) -> group_batch_pb2.GroupBatch:
        """Give the group, all of whose parts came as they were sent."""
        if not self._count or self._count != self._begin.part_count:
            raise _broken(f"{self._begin.part_count} parts", str(self._count))
        if self._digest.digest() != end.sha256:
            raise _broken(end.sha256.hex(), self._digest.hexdigest())
        self._check_named(self._batch)
        return self._batch

    def check_void(self, batch: group_batch_pb2.GroupBatch) -> None:
        """See that a group in place of a part is this one, dropped."""
        self._check_named(batch)
        if not batch.drop_reason:
            raise _broken("a part, or a dropped group", "a group")

    def _check_named(self, batch: group_batch_pb2.GroupBatch) -> None:
        begin = self._begin
        if (batch.cursor, batch.group_id) != (begin.cursor, begin.group_id):
            expected = f"group {begin.group_id} at {begin.cursor}"
            raise _broken(expected, f"group {batch.group_id} at {batch.cursor}")


def check_bytes_max(bytes_max: int) -> None:
    """Refuse a limit below what one payload holds.

    Raises:
        ValueError: naming it.
    """
    if bytes_max < GROUP_BYTES_LEAST:
        raise ValueError(f"group_bytes_max must be at least {GROUP_BYTES_LEAST}, not {bytes_max}")


def _broken(expected: str, actual: str) -> Refusal:
    return Refusal(
        er.ERROR_REASON_FRAME_BROKEN,
        f"parts of a group: expected {expected}, got {actual}; read the group again",
        expected=expected,
        actual=actual,
    )
