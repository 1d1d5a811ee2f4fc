"""Restore points: what the owner of a rollout keeps in one file with its harness's checkpoint.

A point is written as protobuf JSON or binary, as the owner likes; `read_restore_point` takes both.
What it was given instead of a point it names: checkpoints of version 2 hold staged calls, tokens
and all, and cannot be restored (docs/protocol.md, "Restored attempts" and "Compatibility").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from callforest.capture.v1 import attempt_pb2, restore_point_pb2
from callforest_core.custody.restore import CAPTURE_SCHEMA

_ANEW: Final = (
    f"this release restores from points of capture schema {CAPTURE_SCHEMA} and migrates nothing:"
    " begin anew, with a new attempt and with the episode from its beginning"
)
_VERSION: Final = "schema_version"


class RestorePointError(ValueError):
    """What was given is no restore point of this capture schema.

    Attributes:
        found: what it is, for a person.
    """

    def __init__(self, found: str) -> None:
        super().__init__(f"no attempt can be restored from {found}; {_ANEW}")
        self.found = found


def restore_point(
    attempt: attempt_pb2.Attempt, call_ids: Iterable[str]
) -> restore_point_pb2.RestorePoint:
    """Make the point that a later attempt can be restored from.

    Args:
        attempt: the one that made or restored the calls.
        call_ids: EVERY accepted answer of the conversations that go on or may be selected, by
            what `x-callforest-call-id` said; in any order. What they continue comes along.
    """
    return restore_point_pb2.RestorePoint(
        capture_schema=CAPTURE_SCHEMA,
        capture_key=attempt.capture_key,
        call_ids=sorted(set(call_ids)),
    )


def read_restore_point(stored: bytes) -> restore_point_pb2.RestorePoint:
    """Read a stored point, binary or JSON.

    Raises:
        RestorePointError: it is none of this capture schema; the message says what was found, what
            is read and what to do.
    """
    text = stored.lstrip()
    point = _from_json(text) if text[:1] in (b"{", b"[") else _from_bytes(stored)
    check_restore_point(point)
    return point


def check_restore_point(point: restore_point_pb2.RestorePoint) -> None:
    """Refuse a point of another capture schema before any service is asked.

    Raises:
        RestorePointError: it is.
    """
    if point.capture_schema != CAPTURE_SCHEMA:
        schema = point.capture_schema
        raise RestorePointError(
            f"a restore point of {f'capture schema {schema}' if schema else 'no capture schema'}"
        )
    if not (point.capture_key and point.call_ids):
        raise RestorePointError("a restore point that names no call")


def _from_json(text: bytes) -> restore_point_pb2.RestorePoint:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RestorePointError("a file that is no JSON") from error
    version = _peer_version(value)
    if version is not None:
        raise RestorePointError(f"staged calls of capture schema {version}")
    if not isinstance(value, dict):
        raise RestorePointError("a JSON list")
    try:
        return json_format.ParseDict(value, restore_point_pb2.RestorePoint())
    except json_format.ParseError as error:
        raise RestorePointError("a JSON object that is no restore point") from error


def _peer_version(value: object) -> object:
    """Give the version that a peer's records state, alone, in a list or under some name.

    None when nothing in it states one.
    """
    waiting = [value]
    for one in waiting:
        if isinstance(one, Mapping):
            if _VERSION in one:
                return one[_VERSION]
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
    return None


def _from_bytes(stored: bytes) -> restore_point_pb2.RestorePoint:
    try:
        return restore_point_pb2.RestorePoint.FromString(stored)
    except DecodeError as error:
        raise RestorePointError("a file that is no restore point") from error
