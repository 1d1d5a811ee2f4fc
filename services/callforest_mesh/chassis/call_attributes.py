"""What spans say of a call: its names, what became of it, counts. Never a token, never a text.

The names are one vocabulary for all services, so that one query finds a call everywhere.
"""

from __future__ import annotations

from typing import Final

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2, staged_call_pb2
from callforest.ledger.v1 import ledger_service_pb2 as ledger_pb
from callforest.staging.v1 import staging_service_pb2 as staging_pb
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_mesh.chassis.telemetry import AttributeValue

CAPTURE_KEY: Final = "callforest.capture_key"
CALL_ID: Final = "callforest.call_id"
PARENT_CALL_ID: Final = "callforest.parent_call_id"
VERDICT: Final = "callforest.verdict"
DISPOSITION: Final = "callforest.disposition"
REASON: Final = "callforest.reason"
WEIGHT_VERSION: Final = "callforest.weight_version"

Found = dict[str, AttributeValue]


def verdict_attributes(verdict: capture_admission_pb2.Verdict) -> Found:
    """Say what was decided of a call."""
    which = verdict.WhichOneof("verdict") or "none"
    found: Found = {VERDICT: which}
    if which == "continuation":
        found[PARENT_CALL_ID] = verdict.continuation.parent_call_id
    elif which == "uncaptured":
        found[REASON] = verdict.uncaptured.reason
    return found


def intent_attributes(
    intent: attempt_pb2.CallIntent, verdict: capture_admission_pb2.Verdict | None
) -> Found:
    """Say which call was announced, and the verdict."""
    named = _named(intent.capture_key, intent.call_id)
    return named if verdict is None else named | verdict_attributes(verdict)


def entry_attributes(
    entry: attempt_pb2.ManifestEntry, committed: ledger_pb.CommittedEntry | None
) -> Found:
    """Say which row of the ledger was written."""
    del committed  # a revision says nothing of the call
    which = entry.WhichOneof("entry")
    if which in ("failure", "withdrawal"):
        ended = entry.failure if which == "failure" else entry.withdrawal
        return {
            **_named(ended.capture_key, ended.call_id),
            DISPOSITION: "failed" if which == "failure" else "withdrawn",
            REASON: ended.reason,
        }
    coords = entry.record.coords
    found = _named(coords.capture_key, coords.call_id)
    if coords.parent_call_id:
        found[PARENT_CALL_ID] = coords.parent_call_id
    return {**found, DISPOSITION: "committed", WEIGHT_VERSION: coords.weight_version}


def stage_attributes(
    call: staged_call_pb2.StagedCall, receipt: staging_pb.StagedReceipt | None
) -> Found:
    """Say which call was staged, and whether it was the first of its id."""
    found = _named(call.capture_key, call.call_id)
    if call.HasField("parent_call_id"):
        found[PARENT_CALL_ID] = call.parent_call_id
    if receipt is not None:
        found[DISPOSITION] = "superseded" if receipt.HasField("winner") else "staged"
    return {
        **found,
        WEIGHT_VERSION: call.weight_version,
        "callforest.inherited_tokens": call.prev_token_count,
        "callforest.carried_tokens": call.canonical.carry_token_count,
    }


def prefix_attributes(query: staging_pb.PrefixQuery, prefix: staging_pb.Prefix | None) -> Found:
    """Say whose tokens were read."""
    found = _named(query.capture_key, query.call_id)
    return found if prefix is None else {**found, "callforest.deltas": len(prefix.deltas)}


def generate_attributes(
    call: worker_pb.GenerateCall, generated: worker_pb.GeneratedCall | None
) -> Found:
    """Say what became of a generation's capture."""
    found = _named(call.capture_key, call.call_id)
    if call.admission.WhichOneof("position") == "continuation":
        found[PARENT_CALL_ID] = call.admission.continuation.parent_call_id
    if generated is None:
        return found
    which = generated.WhichOneof("capture") or "uncaptured"
    found[DISPOSITION] = which
    if which == "staged":
        found[WEIGHT_VERSION] = generated.staged.weight_version
    elif which == "failed":
        found[REASON] = generated.failed.reason
    return found


def measure_attributes(
    call: worker_pb.GenerateCall, measured: worker_pb.MeasuredCall | None
) -> Found:
    """Say which call was measured, and how large it would be."""
    found = _named(call.capture_key, call.call_id)
    if measured is None:
        return found
    return {**found, "callforest.prompt_tokens": measured.prompt_token_count}


def _named(capture_key: str, call_id: str) -> Found:
    return {CAPTURE_KEY: capture_key, CALL_ID: call_id}
