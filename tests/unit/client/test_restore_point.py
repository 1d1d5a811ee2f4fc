"""Restore points: what is written is read, and what is none is named."""

import json

import pytest
from google.protobuf import json_format

from callforest.capture.v1 import attempt_pb2, restore_point_pb2
from callforest_client.restore_point import (
    RestorePointError,
    check_restore_point,
    read_restore_point,
    restore_point,
)

pytestmark = pytest.mark.requirement("TRN-12", "LED-10")

ATTEMPT = attempt_pb2.Attempt(rollout_id="r1", attempt_number=1, capture_key="r1-a1")
POINT = restore_point_pb2.RestorePoint(capture_schema=3, capture_key="r1-a1", call_ids=["a", "b"])
V2_CALL = {"schema_version": 2, "model_call_id": "a", "token_ids": [1, 2]}


def test_a_point_names_each_answer_once() -> None:
    assert restore_point(ATTEMPT, ["b", "a", "b"]) == POINT


def test_a_point_is_read_as_it_was_written() -> None:
    assert read_restore_point(POINT.SerializeToString()) == POINT
    assert read_restore_point(json_format.MessageToJson(POINT).encode()) == POINT
    with_names = json_format.MessageToJson(POINT, preserving_proto_field_name=True)
    assert read_restore_point(with_names.encode()) == POINT


@pytest.mark.parametrize("schema", [0, 2, 4])
def test_a_point_of_another_schema_is_refused(schema: int) -> None:
    point = restore_point_pb2.RestorePoint(capture_schema=schema, capture_key="r1", call_ids=["a"])
    with pytest.raises(RestorePointError) as refused:
        check_restore_point(point)
    assert refused.value.found.endswith(f"schema {schema}" if schema else "no capture schema")
    with pytest.raises(RestorePointError):
        read_restore_point(point.SerializeToString())


@pytest.mark.parametrize(
    "stored",
    [
        V2_CALL,
        [V2_CALL, V2_CALL],
        {"rollout_id": "r1", "snapshots": [V2_CALL]},
        {"checkpoint": {"staged": {"r1/a": V2_CALL}}},
    ],
)
def test_staged_checkpoints_of_version_2_are_named(stored: object) -> None:
    with pytest.raises(RestorePointError) as refused:
        read_restore_point(b"\n " + json.dumps(stored).encode())
    assert refused.value.found == "staged calls of capture schema 2"
    said = str(refused.value)
    assert "restores from points of capture schema 3" in said
    assert "begin anew, with a new attempt and with the episode from its beginning" in said


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (b"{", "a file that is no JSON"),
        (b"[" * 5000, "a file that is no JSON"),
        (b"[1]", "a JSON list"),
        (b'{"callIds": [1]}', "a JSON object that is no restore point"),
        (b'{"tokens": []}', "a JSON object that is no restore point"),
        (b"\xff\xff", "a file that is no restore point"),
        (b"", "a restore point of no capture schema"),
        (b'{"captureSchema": 3, "captureKey": "r"}', "a restore point that names no call"),
    ],
)
def test_what_is_no_point_is_refused(stored: bytes, found: str) -> None:
    with pytest.raises(RestorePointError) as refused:
        read_restore_point(stored)
    assert refused.value.found == found
