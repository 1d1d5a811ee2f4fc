"""Messages to the core's values and back: numpy arrays here, little-endian bytes there.

A bytes field is copied at each access, so each is read once. Arrays made from a message share its
bytes and are read-only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from google.protobuf import timestamp_pb2

from callforest.capture.v1 import (
    call_record_pb2,
    capture_admission_pb2,
    commit_coords_pb2,
    completion_pb2,
    replay_summary_pb2,
    staged_call_pb2,
)
from callforest_client.source_codec import output_summary_from_proto, output_summary_to_proto
from callforest_core.custody.call import (
    NO_FINGERPRINT_VERSION,
    CallIdentity,
    CallRecord,
    StagedCall,
    staging_key,
)
from callforest_core.custody.digests import CONTINUATION_MODE, ROOT_MODE
from callforest_core.custody.tokens import Logprobs, TokenIds

WORD_BYTES: Final = 4
_IDS: Final = np.dtype("<u4")
_FLOATS: Final = np.dtype("<f4")
_STATUS_NAMES: Final = {
    completion_pb2.COMPLETION_STATUS_COMPLETED: "completed",
    completion_pb2.COMPLETION_STATUS_INCOMPLETE: "incomplete",
}
_STATUSES: Final = {name: status for status, name in _STATUS_NAMES.items()}


class ColumnError(ValueError):
    """Columns of a message that are not whole words, or do not make up one delta."""


def ids_to_bytes(token_ids: TokenIds) -> bytes:
    """Give ids as little-endian 32-bit words."""
    return token_ids.astype(_IDS, copy=False).tobytes()


def ids_from_bytes(column: bytes) -> TokenIds:
    """Give little-endian 32-bit words as ids, without copying.

    Raises:
        ColumnError: the bytes are not whole words.
    """
    return np.frombuffer(_whole(column), dtype=_IDS).astype(np.uint32, copy=False)


def logprobs_to_bytes(logprobs: Logprobs) -> bytes:
    """Give log-probabilities as little-endian IEEE 754 words of 4 bytes."""
    return logprobs.astype(_FLOATS, copy=False).tobytes()


def logprobs_from_bytes(column: bytes) -> Logprobs:
    """Give little-endian words as log-probabilities, without copying.

    Raises:
        ColumnError: the bytes are not whole words.
    """
    return np.frombuffer(_whole(column), dtype=_FLOATS).astype(np.float32, copy=False)


def staged_call_to_proto(
    call: StagedCall,
    served_response: bytes,
    completion: completion_pb2.Completion,
    decision: capture_admission_pb2.CaptureDecision | None = None,
) -> staged_call_pb2.StagedCall:
    """Make the message that stages a call.

    Args:
        call: the call with its digests.
        served_response: the JSON bytes that the harness gets; empty in rows.
        completion: how its generation ended.
        decision: what the worker did with the admitted predecessor, of forest mode.
    """
    identity = call.identity
    message = staged_call_pb2.StagedCall(
        capture_key=identity.capture_key,
        call_id=identity.call_id,
        parent_call_id=identity.parent_call_id,
        parent_capture_key=identity.parent_capture_key,
        prev_token_count=call.prev_len,
        weight_version=call.weight_version,
        extras=call.extras,
        digest=call.digest,
        extras_digest=call.extras_digest,
        chain_hash=call.chain_hash,
        cumulative_hash=call.cumulative_hash,
        served_response=served_response,
        decision=decision,
    )
    # What is handed to the constructor whole is merged, which costs as much as all other fields.
    message.completion.CopyFrom(completion)
    columns = message.canonical
    columns.carry_token_count = call.carry_len
    columns.token_ids = ids_to_bytes(call.token_ids)
    columns.logprobs = logprobs_to_bytes(call.logprobs)
    return message


def staged_call_from_proto(message: staged_call_pb2.StagedCall) -> StagedCall:
    """Give the call of a message. Its digests are as stated, not checked.

    Raises:
        ColumnError: the columns are not those of one delta.
    """
    columns = message.canonical
    token_ids = ids_from_bytes(columns.token_ids)
    logprobs = logprobs_from_bytes(columns.logprobs)
    if columns.carry_token_count + len(logprobs) != len(token_ids):
        raise ColumnError(
            f"{columns.carry_token_count} carried and {len(logprobs)} generated tokens,"
            f" but {len(token_ids)} ids"
        )
    return StagedCall(
        CallIdentity(
            message.capture_key, message.call_id, parent_of(message), message.parent_capture_key
        ),
        message.prev_token_count,
        columns.carry_token_count,
        message.weight_version,
        token_ids,
        logprobs,
        message.extras,
        message.digest,
        message.extras_digest,
        message.chain_hash,
        message.cumulative_hash,
    )


def delta_len_of(message: staged_call_pb2.StagedCall) -> int:
    """Give the number of tokens that a staged call adds, without touching its columns' bytes."""
    columns = message.canonical
    return columns.carry_token_count + len(columns.logprobs) // WORD_BYTES


def parent_of(
    message: staged_call_pb2.StagedCall | commit_coords_pb2.CommitCoords,
) -> str | None:
    """Give the call that this one continues; None for a root."""
    return message.parent_call_id if message.HasField("parent_call_id") else None


def coords_of(call: staged_call_pb2.StagedCall | StagedCall) -> commit_coords_pb2.CommitCoords:
    """Make the commit coordinates of a call. Only Staging may hand them out."""
    if isinstance(call, StagedCall):
        identity = call.identity
        return commit_coords_pb2.CommitCoords(
            capture_key=identity.capture_key,
            call_id=identity.call_id,
            parent_call_id=identity.parent_call_id,
            parent_capture_key=identity.parent_capture_key,
            prev_token_count=call.prev_len,
            delta_token_count=call.delta_len,
            weight_version=call.weight_version,
            digest=call.digest,
            extras_digest=call.extras_digest,
            chain_hash=call.chain_hash,
            cumulative_hash=call.cumulative_hash,
        )
    return commit_coords_pb2.CommitCoords(
        capture_key=call.capture_key,
        call_id=call.call_id,
        parent_call_id=parent_of(call),
        parent_capture_key=call.parent_capture_key,
        prev_token_count=call.prev_token_count,
        delta_token_count=delta_len_of(call),
        weight_version=call.weight_version,
        digest=call.digest,
        extras_digest=call.extras_digest,
        chain_hash=call.chain_hash,
        cumulative_hash=call.cumulative_hash,
    )


def are_coords_of(
    coords: commit_coords_pb2.CommitCoords, call: staged_call_pb2.StagedCall | StagedCall
) -> bool:
    """Say whether coordinates are those of a call; a peer of a later release may say more."""
    own = coords_of(call)
    return coords == own or known_coords(coords) == own


def known_coords(coords: commit_coords_pb2.CommitCoords) -> commit_coords_pb2.CommitCoords:
    """Give coordinates without what only a later release knows of them."""
    known = commit_coords_pb2.CommitCoords()
    known.CopyFrom(coords)
    known.DiscardUnknownFields()
    return known


def coords_without_columns(
    call: staged_call_pb2.StagedCall,
) -> commit_coords_pb2.CommitCoords:
    """Make the commit coordinates of a call that was fetched without its columns.

    What it generated is counted by its completion; coordinates that are wrong in it fail when the
    call is verified.
    """
    coords = coords_of(call)
    carried = call.canonical.carry_token_count
    coords.delta_token_count = carried + call.completion.generation_token_count
    return coords


def call_record_from_proto(message: call_record_pb2.CallRecord) -> CallRecord:
    """Give the ledger row of a message, as verification takes it."""
    coords = message.coords
    prints = message.fingerprints
    parent_call_id = parent_of(coords)
    return CallRecord(
        call_id=coords.call_id,
        parent_call_id=parent_call_id,
        mode=ROOT_MODE if parent_call_id is None else CONTINUATION_MODE,
        prev_len=coords.prev_token_count,
        delta_len=coords.delta_token_count,
        cum_len=coords.prev_token_count + coords.delta_token_count,
        weight_version=coords.weight_version,
        digest=coords.digest,
        extras_digest=coords.extras_digest,
        chain_hash=coords.chain_hash,
        cumulative_hash=coords.cumulative_hash,
        staging_key=staging_key(message.source_capture_key or coords.capture_key, coords.call_id),
        response_id=message.response_id,
        admitted_at=seconds_of(message.admit_time) if message.HasField("admit_time") else None,
        intent_number=message.intent_number or None,
        output_fingerprint=prints.output or None,
        continuation_fingerprint=prints.continuation or None,
        fingerprint_version=prints.version or NO_FINGERPRINT_VERSION,
        finish_reason=message.completion.finish_reason,
        status=_STATUS_NAMES.get(message.completion.status, ""),
        output=output_summary_from_proto(message.output) if message.HasField("output") else None,
        source_capture_key=message.source_capture_key,
        parent_capture_key=coords.parent_capture_key,
    )


def call_record_to_proto(
    record: CallRecord,
    capture_key: str,
    *,
    generation_len: int,
    weight_version_count: int = 1,
    context: tuple[int, bytes] | None = None,
    replay: replay_summary_pb2.ReplaySummary | None = None,
) -> call_record_pb2.CallRecord:
    """Make the message of a ledger row.

    Args:
        record: the row.
        capture_key: its attempt.
        generation_len: sampled tokens of the call.
        weight_version_count: weight versions that sampled a part of them.
        context: number and digest of the request's items; without it the message has no
            fingerprints, since one alone cannot be matched.
        replay: the summary of the request, if there is one.

    Raises:
        KeyError: the row's status is neither "completed" nor "incomplete".
    """
    message = call_record_pb2.CallRecord(
        coords=commit_coords_pb2.CommitCoords(
            capture_key=capture_key,
            call_id=record.call_id,
            parent_call_id=record.parent_call_id,
            parent_capture_key=record.parent_capture_key,
            prev_token_count=record.prev_len,
            delta_token_count=record.delta_len,
            weight_version=record.weight_version,
            digest=record.digest,
            extras_digest=record.extras_digest,
            chain_hash=record.chain_hash,
            cumulative_hash=record.cumulative_hash,
        ),
        response_id=record.response_id,
        intent_number=record.intent_number or 0,
        completion=completion_pb2.Completion(
            status=_STATUSES[record.status],
            finish_reason=record.finish_reason,
            generation_token_count=generation_len,
            weight_version_count=weight_version_count,
        ),
        replay=replay,
        source_capture_key=record.source_capture_key,
    )
    if record.output is not None:
        message.output.CopyFrom(output_summary_to_proto(record.output))
    if record.admitted_at is not None:
        message.admit_time.CopyFrom(timestamp_of(record.admitted_at))
    if context is not None:
        message.fingerprints.CopyFrom(
            call_record_pb2.CallFingerprints(
                version=record.fingerprint_version,
                output=record.output_fingerprint or b"",
                continuation=record.continuation_fingerprint or b"",
                context_item_count=context[0],
                context_digest=context[1],
            )
        )
    return message


def timestamp_of(seconds: float) -> timestamp_pb2.Timestamp:
    """Make a timestamp of seconds since the epoch."""
    timestamp = timestamp_pb2.Timestamp()
    timestamp.FromNanoseconds(round(seconds * 1_000_000) * 1000)
    return timestamp


def seconds_of(timestamp: timestamp_pb2.Timestamp) -> float:
    """Give a timestamp as seconds since the epoch."""
    return timestamp.seconds + timestamp.nanos / 1e9


def _whole(column: bytes) -> bytes:
    if len(column) % WORD_BYTES:
        raise ColumnError(f"{len(column)} bytes are not whole words of {WORD_BYTES}")
    return column
