"""The manifest as peers parse it."""

import json

import pytest
from google.protobuf import timestamp_pb2

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    commit_coords_pb2,
    completion_pb2,
)
from callforest_client.ledger import Manifest
from callforest_mesh.conformance.peer_json import parse_record
from callforest_mesh.gateway.manifest_json import manifest_json

RECORD = call_record_pb2.CallRecord(
    coords=commit_coords_pb2.CommitCoords(
        capture_key="rollout-a1",
        call_id="c2",
        parent_call_id="c1",
        prev_token_count=7,
        delta_token_count=5,
        weight_version=3,
        digest=b"d" * 32,
        extras_digest=b"e" * 32,
        chain_hash=b"c" * 32,
        cumulative_hash=b"u" * 32,
    ),
    response_id="chatcmpl-c2",
    admit_time=timestamp_pb2.Timestamp(seconds=1_700_000_000, nanos=123_456_000),
    fingerprints=call_record_pb2.CallFingerprints(
        version=2, output=b"", continuation=b"f" * 32, context_digest=b"x" * 32
    ),
    completion=completion_pb2.Completion(
        status=completion_pb2.COMPLETION_STATUS_COMPLETED, finish_reason="stop"
    ),
)
FAILURE = attempt_pb2.CallFailure(
    capture_key="rollout-a1", call_id="c3", reason="unresolved_parent", detail="no_match"
)

WITHDRAWAL = attempt_pb2.CallWithdrawal(
    capture_key="rollout-a1", call_id="c4", reason="REQUEST_REFUSED"
)


@pytest.mark.requirement("LED-3")
def test_records_parse_as_the_peer_parses_them() -> None:
    entries = (
        attempt_pb2.ManifestEntry(record=RECORD),
        attempt_pb2.ManifestEntry(failure=FAILURE),
        attempt_pb2.ManifestEntry(withdrawal=WITHDRAWAL),
    )
    manifest = json.loads(manifest_json("rollout-a1", Manifest(attempt_pb2.Attempt(), entries)))
    assert manifest.keys() == {"schema_version", "rollout_id", "records", "failures"}
    assert manifest["rollout_id"] == "rollout-a1"
    assert manifest["failures"] == [
        {"schema_version": 2, "model_call_id": "c3", "reason": "unresolved_parent"}
    ]
    (shown,) = manifest["records"]
    record = parse_record(shown)
    assert (record.call_id, record.parent_call_id, record.mode) == ("c2", "c1", "token_in")
    assert (record.prev_len, record.delta_len, record.cum_len) == (7, 5, 12)
    assert record.staging_key == "rollout-a1/c2"
    assert record.admitted_at == 1_700_000_000.123456
    assert record.output_fingerprint is None
    assert record.continuation_fingerprint == b"f" * 32
    assert (record.digest, record.chain_hash) == (b"d" * 32, b"c" * 32)


def test_unknown_attempt_is_empty() -> None:
    manifest = json.loads(manifest_json("nobody", None))
    assert (manifest["records"], manifest["failures"]) == ([], [])
