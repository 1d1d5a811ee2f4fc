"""Large payloads in frames: cut by the sender, put together and checked by the receiver.

Contract: docs/protocol.md, section "Large payloads".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeAlias

from callforest.capture.v1 import frame_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal

FRAME_BYTES = (1 << 20) - 4096
"""Largest payload that travels whole, and largest content of one frame."""
PAYLOAD_BYTES = 64 << 20
"""Largest payload at all."""

Frame: TypeAlias = frame_pb2.FrameBegin | frame_pb2.FrameChunk | frame_pb2.FrameEnd

FRAME_FIELDS = {
    frame_pb2.FrameBegin: "begin",
    frame_pb2.FrameChunk: "chunk",
    frame_pb2.FrameEnd: "end",
}
"""The arm of an item's body, or of a result's outcome, that holds each frame."""


def frames_of(serialized: bytes) -> Iterator[Frame]:
    """Cut a serialized payload into its frames."""
    yield frame_pb2.FrameBegin(
        size_bytes=len(serialized), sha256=hashlib.sha256(serialized).digest()
    )
    for start in range(0, len(serialized), FRAME_BYTES):
        yield frame_pb2.FrameChunk(content=serialized[start : start + FRAME_BYTES])
    yield frame_pb2.FrameEnd()


class FrameAssembler:
    """Puts the frames of many interleaved payloads together.

    Bounded: at most `payloads_max` unfinished payloads, together at most `bytes_max`.
    """

    def __init__(self, *, payloads_max: int = 64, bytes_max: int = 4 * PAYLOAD_BYTES) -> None:
        self._payloads_max = payloads_max
        self._bytes_max = bytes_max
        self._announced_bytes = 0
        self._open: dict[int, tuple[frame_pb2.FrameBegin, bytearray]] = {}

    def begin(self, sequence: int, begin: frame_pb2.FrameBegin) -> None:
        """Take the announcement of a payload.

        Raises:
            Refusal: the payload was announced before (FRAME_BROKEN), or the bound is reached
                (OVERLOADED).
        """
        if sequence in self._open:
            raise _broken(sequence, "no second begin", "begin")
        if not 0 < begin.size_bytes <= PAYLOAD_BYTES or len(begin.sha256) != 32:
            raise _broken(sequence, f"a size of 1 to {PAYLOAD_BYTES}", str(begin.size_bytes))
        if (
            len(self._open) >= self._payloads_max
            or self._announced_bytes + begin.size_bytes > self._bytes_max
        ):
            raise Refusal(
                er.ERROR_REASON_OVERLOADED,
                "too many unfinished large payloads in this stream",
                retry_after_ms=1000,
                limit="unfinished_payloads",
                limit_value=self._payloads_max,
            )
        self._announced_bytes += begin.size_bytes
        self._open[sequence] = (begin, bytearray())

    def chunk(self, sequence: int, chunk: frame_pb2.FrameChunk) -> None:
        """Take the next part of a payload.

        Raises:
            Refusal: the payload was not announced or grows too long (FRAME_BROKEN).
        """
        entry = self._open.get(sequence)
        if entry is None:
            raise _broken(sequence, "begin", "chunk")
        begin, content = entry
        content += chunk.content
        if len(content) > begin.size_bytes:
            self.drop(sequence)
            raise _broken(sequence, f"{begin.size_bytes} bytes", f"{len(content)} bytes")

    def end(self, sequence: int) -> bytes:
        """Close a payload and give its serialized bytes.

        Raises:
            Refusal: its length or digest is not what was announced (FRAME_BROKEN).
        """
        entry = self._open.get(sequence)
        if entry is None:
            raise _broken(sequence, "begin", "end")
        self.drop(sequence)
        begin, content = entry
        serialized = bytes(content)
        if len(serialized) != begin.size_bytes:
            raise _broken(sequence, f"{begin.size_bytes} bytes", f"{len(serialized)} bytes")
        actual = hashlib.sha256(serialized).digest()
        if actual != begin.sha256:
            raise _broken(sequence, begin.sha256.hex(), actual.hex())
        return serialized

    def has(self, sequence: int) -> bool:
        """Whether a payload is unfinished."""
        return sequence in self._open

    def drop(self, sequence: int) -> None:
        """Forget a payload, if it is unfinished."""
        entry = self._open.pop(sequence, None)
        if entry is not None:
            self._announced_bytes -= entry[0].size_bytes


def _broken(sequence: int, expected: str, actual: str) -> Refusal:
    return Refusal(
        er.ERROR_REASON_FRAME_BROKEN,
        f"frames of item {sequence}: expected {expected}, got {actual}; send the item again",
        expected=expected,
        actual=actual,
    )
