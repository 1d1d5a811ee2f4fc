"""Every error reason has the status and the metadata keys that its comment states."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import (
    DOMAIN,
    STATUS_CODES,
    RefusedError,
    UnavailableError,
    error_of,
    reason_name,
    status_of,
)
from callforest_core.refusal import Refusal

_SCHEMA = Path(__file__).parents[2] / "proto/callforest/error/v1/error_reason.proto"
_VALUE = re.compile(r"((?:  //.*\n)+)  (ERROR_REASON_\w+) = \d+;")


def _comments() -> dict[str, str]:
    return {name: comment for comment, name in _VALUE.findall(_SCHEMA.read_text())}


@pytest.mark.requirement("API-6")
def test_each_reason_has_the_status_that_its_comment_states() -> None:
    stated = {}
    for name, comment in _comments().items():
        words = re.sub(r"\s*//\s*", " ", comment)
        if name != "ERROR_REASON_UNSPECIFIED":
            found = re.search(r"Status\s+([A-Z_]+)", words)
            assert found, f"{name}: its comment states no status"
            stated[er.ErrorReason.Value(name)] = grpc.StatusCode[found.group(1)]
    assert stated == dict(STATUS_CODES)


@pytest.mark.requirement("API-6")
@pytest.mark.parametrize("reason", sorted(STATUS_CODES))
def test_a_refusal_survives_the_wire(reason: er.ErrorReason.ValueType) -> None:
    refusal = Refusal(
        reason, "what to do", retry_after_ms=250, violations=[("a.b", "is odd")], capture_key="k"
    )
    error = error_of(status_of(refusal))
    assert (error.reason, error.code, error.message) == (reason, STATUS_CODES[reason], "what to do")
    assert (error.metadata, error.retry_after_ms) == ({"capture_key": "k"}, 250)
    transient = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert isinstance(error, UnavailableError if error.code in transient else RefusedError)


def test_facts_that_are_unknown_are_left_out() -> None:
    refusal = Refusal(er.ERROR_REASON_CALL_NOT_FOUND, "gone", capture_key="", call_id=None)
    assert refusal.facts == {}
    assert reason_name(refusal.reason) == "CALL_NOT_FOUND"
    assert DOMAIN == "callforest"
