"""Made-up attempts for the reports: a few records, no tokens."""

from callforest.capture.v1 import attempt_pb2, call_record_pb2, receipt_pb2
from callforest_client.ledger import Manifest


def record(
    call_id: str, parent: str | None = None, *, prev: int = 0, carry: int = 3, generated: int = 5
) -> call_record_pb2.CallRecord:
    made = call_record_pb2.CallRecord()
    made.coords.call_id = call_id
    if parent is not None:
        made.coords.parent_call_id = parent
        made.coords.prev_token_count = prev or 8
    made.coords.delta_token_count = carry + generated
    made.coords.weight_version = 2
    made.completion.finish_reason = "stop"
    made.completion.generation_token_count = generated
    return made


def manifest(*records: call_record_pb2.CallRecord) -> Manifest:
    attempt = attempt_pb2.Attempt(
        capture_key="r1",
        state=attempt_pb2.ATTEMPT_STATE_SEALED,
        epoch=4,
        revision=9,
        record_count=len(records),
    )
    return Manifest(attempt, tuple(attempt_pb2.ManifestEntry(record=one) for one in records))


def receipt(*selected: str, **fields: object) -> receipt_pb2.Receipt:
    made = receipt_pb2.Receipt(capture_key="r1", group_id="g", reward=0.5, **fields)
    for call_id in selected:
        made.calls.add(call_id=call_id, selected=True)
    return made
