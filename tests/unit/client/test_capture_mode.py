"""An attempt of another mode than the one that was asked for is never used."""

from __future__ import annotations

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.capture_mode import of_mode
from callforest_client.errors import RefusedError

UNSPECIFIED = attempt_pb2.CAPTURE_MODE_UNSPECIFIED
CHAIN = attempt_pb2.CAPTURE_MODE_CHAIN
FOREST = attempt_pb2.CAPTURE_MODE_FOREST


@pytest.mark.requirement("CFG-1")
@pytest.mark.parametrize("asked", [UNSPECIFIED, CHAIN, FOREST])
@pytest.mark.parametrize("opened", [UNSPECIFIED, CHAIN, FOREST])
def test_the_answered_mode_is_held_against_the_one_asked_for(
    asked: attempt_pb2.CaptureMode.ValueType, opened: attempt_pb2.CaptureMode.ValueType
) -> None:
    attempt = attempt_pb2.Attempt(capture_key="r1", mode=opened)
    if asked in {UNSPECIFIED, opened or CHAIN}:
        assert of_mode(attempt, asked) is attempt
        return
    with pytest.raises(RefusedError) as caught:
        of_mode(attempt, asked)
    assert caught.value.reason == er.ERROR_REASON_MODE_MISMATCH
    assert set(caught.value.metadata) == {"capture_key", "expected", "actual"}
