"""The mode of an attempt: what was answered must be what was asked for.

A service of an older release knows no modes and opens a chain, of which it says nothing: good for
who asked for a chain, while another's rollout would train on what it was not meant to.
"""

from __future__ import annotations

import grpc

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError


def of_mode(
    attempt: attempt_pb2.Attempt, asked: attempt_pb2.CaptureMode.ValueType
) -> attempt_pb2.Attempt:
    """Give the attempt, if it is of the mode that was asked for; unspecified asks for any.

    Raises:
        RefusedError: MODE_MISMATCH.
    """
    opened = attempt.mode or attempt_pb2.CAPTURE_MODE_CHAIN
    if asked in {attempt_pb2.CAPTURE_MODE_UNSPECIFIED, opened}:
        return attempt
    expected, actual = mode_name(asked), mode_name(attempt.mode)
    raise RefusedError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"the attempt was opened in {actual} mode, but {expected} mode was asked for",
        reason=er.ERROR_REASON_MODE_MISMATCH,
        metadata={
            "capture_key": attempt.capture_key,
            "expected": expected,
            "actual": actual,
        },
    )


def mode_name(mode: attempt_pb2.CaptureMode.ValueType) -> str:
    """Name a mode for a person."""
    known = mode in attempt_pb2.CaptureMode.values()
    name = attempt_pb2.CaptureMode.Name(mode) if known else str(mode)
    return name.removeprefix("CAPTURE_MODE_").lower()
