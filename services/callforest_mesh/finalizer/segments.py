"""Reads staged calls as rows need them, and tells what is lost from what is only away."""

from __future__ import annotations

from collections.abc import Sequence

from callforest.capture.v1 import staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, RefusedError
from callforest_client.staging import StagingClient
from callforest_core.refusal import Refusal

_LOST = {
    er.ERROR_REASON_CALL_NOT_FOUND: "staged_call_missing",
    er.ERROR_REASON_STORE_CORRUPT: "staged_call_corrupt",
}


class LostCallError(Exception):
    """A staged call cannot be read any more; a repeat fails alike.

    Attributes:
        reason: `staged_call_missing` or `staged_call_corrupt`.
        call_id: the call.
    """

    def __init__(self, reason: str, capture_key: str, call_id: str) -> None:
        super().__init__(f"{reason}: {capture_key}/{call_id}")
        self.reason = reason
        self.call_id = call_id


async def read_segments(
    staging: StagingClient, capture_key: str, call_ids: Sequence[str]
) -> list[staged_call_pb2.StagedCall]:
    """Read staged calls in the asked order, without their served responses.

    Raises:
        LostCallError: one is missing or damaged, for good.
        Refusal: PEER_UNAVAILABLE, Staging did not give an answer that means anything; repeat.
    """
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
    return calls


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
