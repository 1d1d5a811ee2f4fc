"""Reads staged calls as rows need them, and tells what is lost from what is only away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from callforest.capture.v1 import group_batch_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.codec import ColumnError, staged_call_from_proto
from callforest_client.errors import CallforestError, RefusedError
from callforest_client.frames import FRAME_BYTES, FRAME_FIELDS, Frame, frames_of
from callforest_client.staging import StagingClient, by_owner
from callforest_core.refusal import Refusal
from callforest_mesh.finalizer.groups import altered_call

ResponseT = TypeVar("ResponseT", pb.SubscribeRowsResponse, pb.GetGroupResponse)
_MISSING: Final = "staged_call_missing"
_LOST = {
    er.ERROR_REASON_CALL_NOT_FOUND: _MISSING,
    er.ERROR_REASON_STORE_CORRUPT: "staged_call_corrupt",
}


class LostCallError(Exception):
    """A staged call cannot be read any more; a repeat fails alike.

    Attributes:
        reason: `staged_call_missing` or `staged_call_corrupt`.
        capture_key: the attempt under which it is staged.
        call_id: the call.
    """

    def __init__(self, reason: str, capture_key: str, call_id: str) -> None:
        super().__init__(f"{reason}: {capture_key}/{call_id}")
        self.reason = reason
        self.capture_key = capture_key
        self.call_id = call_id

    @property
    def is_gone(self) -> bool:
        """Whether the call is not there, rather than damaged or another."""
        return self.reason == _MISSING


async def read_segments(
    staging: StagingClient, names: Sequence[tuple[str, str]]
) -> list[staged_call_pb2.StagedCall]:
    """Read staged calls in the asked order, without what serves repeats: responses, decisions.

    Args:
        staging: holds them.
        names: of each call the attempt under which it is staged, and the call.

    Raises:
        LostCallError: one is missing or damaged, for good.
        Refusal: PEER_UNAVAILABLE, Staging did not give an answer that means anything; repeat.
    """
    asked = by_owner(names)
    read = {owner: await _read(staging, owner, call_ids) for owner, call_ids in asked.items()}
    if any(len(read[owner]) != len(call_ids) for owner, call_ids in asked.items()):
        # Not what was asked for: whoever holds it against the ledger says so.
        return [call for calls in read.values() for call in calls]
    following = {owner: iter(calls) for owner, calls in read.items()}
    return [next(following[owner]) for owner, _ in names]


async def _read(
    staging: StagingClient, capture_key: str, call_ids: Sequence[str]
) -> list[staged_call_pb2.StagedCall]:
    try:
        calls = await _fetch(staging, capture_key, call_ids)
    except RefusedError as error:
        reason = _LOST.get(error.reason)
        if reason is None:
            raise _away() from error
        call_id = await _lost_call(staging, capture_key, call_ids, error)
        raise LostCallError(reason, capture_key, call_id) from error
    for call in calls:
        call.ClearField("served_response")
        call.ClearField("decision")
    return calls


async def read_proven(
    staging: StagingClient, references: Sequence[row_log_pb2.SegmentReference]
) -> list[staged_call_pb2.StagedCall]:
    """Read calls of a group, each proven to be the one that was verified (B20).

    Raises:
        LostCallError: one is missing, damaged or another.
        Refusal: PEER_UNAVAILABLE.
    """
    names = [(reference.capture_key, reference.call_id) for reference in references]
    segments = await read_segments(staging, names)
    if len(segments) != len(names):
        found = {(call.capture_key, call.call_id) for call in segments}
        missing = next((name for name in names if name not in found), None)
        if missing is None:
            raise _away()  # an answer that means nothing
        raise LostCallError(_MISSING, *missing)
    altered = await asyncio.to_thread(_altered, references, segments)
    if altered is not None:
        raise LostCallError("staged_call_altered", altered.capture_key, altered.call_id)
    return segments


def parts_of(
    batch: group_batch_pb2.GroupBatch, response: Callable[..., ResponseT]
) -> Iterator[ResponseT]:
    """Give a group whole or in frames; nothing may come between its frames.

    Args:
        batch: the group.
        response: the message that carries `batch`, `begin`, `chunk` or `end`.
    """
    if batch.ByteSize() <= FRAME_BYTES:
        yield response(batch=batch)
        return
    for frame in frames_of(batch.SerializeToString(deterministic=True)):
        yield framed(frame, response)


def framed(frame: Frame, response: Callable[..., ResponseT]) -> ResponseT:
    """Put a frame into the message that carries it."""
    return response(**{FRAME_FIELDS[type(frame)]: frame})


def _altered(
    references: Sequence[row_log_pb2.SegmentReference], segments: list[staged_call_pb2.StagedCall]
) -> row_log_pb2.SegmentReference | None:
    calls = []
    for reference, segment in zip(references, segments, strict=True):
        try:
            calls.append(staged_call_from_proto(segment))
        except ColumnError:
            return reference
    return altered_call(references, calls)


async def _fetch(
    staging: StagingClient, capture_key: str, call_ids: Sequence[str]
) -> list[staged_call_pb2.StagedCall]:
    try:
        return await staging.fetch(capture_key, call_ids)
    except RefusedError:
        raise
    except (CallforestError, Refusal) as error:  # a Refusal: frames that broke on their way
        raise _away() from error


async def _lost_call(
    staging: StagingClient, capture_key: str, call_ids: Sequence[str], error: RefusedError
) -> str:
    """Name the call at fault: Staging may know only the record that holds several."""
    named = error.metadata.get("call_id", "")
    if named in call_ids:
        return named
    for call_id in call_ids:
        try:
            await _fetch(staging, capture_key, [call_id])
        except RefusedError as again:
            if again.reason in _LOST:
                return call_id
            raise _away() from again
    return "unknown"


def _away() -> Refusal:
    return Refusal(
        er.ERROR_REASON_PEER_UNAVAILABLE,
        "the staging service gave no answer; repeat",
        peer="staging",
    )
