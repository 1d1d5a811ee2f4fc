"""The manifest of an attempt as peers read it (capture contract 1.8, 1.10, 4.6)."""

from __future__ import annotations

import json

from callforest.capture.v1 import attempt_pb2, call_record_pb2
from callforest_client.codec import call_record_from_proto
from callforest_client.ledger import Manifest
from callforest_core.custody.call import CallRecord
from callforest_core.custody.digests import FORMAT_VERSIONS


def manifest_json(capture_key: str, manifest: Manifest | None) -> bytes:
    """Write a manifest; an attempt that was never opened has empty lists, as with the peer."""
    records = manifest.records if manifest else []
    failures = manifest.failures if manifest else []
    fields = {
        "schema_version": FORMAT_VERSIONS.schema,
        "rollout_id": capture_key,
        "records": [_record(record) for record in records],
        "failures": [_failure(failure) for failure in failures],
    }
    return json.dumps(fields).encode("ascii")


def _record(message: call_record_pb2.CallRecord) -> dict[str, object]:
    record = call_record_from_proto(message)
    return {
        "schema_version": record.versions.schema,
        "digest_version": record.versions.digest,
        "extras_digest_version": record.versions.extras_digest,
        "model_call_id": record.call_id,
        "parent_call_id": record.parent_call_id,
        "mode": record.mode,
        "prev_len": record.prev_len,
        "delta_len": record.delta_len,
        "cum_len": record.cum_len,
        "weight_version": record.weight_version,
        "staging_key": record.staging_key,
        "response_id": record.response_id,
        "admitted_at": record.admitted_at,
        "fingerprint_version": record.fingerprint_version,
        **_digests(record),
        # Only here: a peer that knows no restored calls must not take one for the attempt's own.
        **({"source_capture_key": source} if (source := record.source_capture_key) else {}),
    }


def _digests(record: CallRecord) -> dict[str, str | None]:
    """Write what is bytes here as the peer's lower-case hexadecimal."""
    output, continuation = record.output_fingerprint, record.continuation_fingerprint
    return {
        "digest": record.digest.hex(),
        "extras_digest": record.extras_digest.hex(),
        "chain_hash": record.chain_hash.hex(),
        "cumulative_hash": record.cumulative_hash.hex(),
        "output_fingerprint": output.hex() if output else None,
        "continuation_fingerprint": continuation.hex() if continuation else None,
    }


def _failure(failure: attempt_pb2.CallFailure) -> dict[str, object]:
    return {
        "schema_version": FORMAT_VERSIONS.schema,
        "model_call_id": failure.call_id,
        "reason": failure.reason,
    }
