"""The item streams of the mesh, by name."""

from __future__ import annotations

from callforest.admission.v1 import admission_service_pb2 as admission
from callforest.capture.v1 import attempt_pb2, capture_admission_pb2, staged_call_pb2
from callforest.gateway.v1 import gateway_service_pb2 as gateway
from callforest.ledger.v1 import ledger_service_pb2 as ledger
from callforest.staging.v1 import staging_service_pb2 as staging
from callforest.worker.v1 import worker_service_pb2 as worker
from callforest_client.stream_spec import StreamSpec

ADMIT_CALLS = StreamSpec(
    name="AdmitCalls",
    request=admission.AdmitCallsRequest,
    item=admission.AdmitCallsItem,
    payload_field="intent",
    payload=attempt_pb2.CallIntent,
    response=admission.AdmitCallsResponse,
    result=admission.AdmitCallsResult,
    answer_field="verdict",
    answer=capture_admission_pb2.Verdict,
    repeatable=True,
)
RECORD_INTENTS = StreamSpec(
    name="RecordIntents",
    request=ledger.RecordIntentsRequest,
    item=ledger.RecordIntentsItem,
    payload_field="intent",
    payload=attempt_pb2.CallIntent,
    response=ledger.RecordIntentsResponse,
    result=ledger.RecordIntentsResult,
    answer_field="verdict",
    answer=capture_admission_pb2.Verdict,
    repeatable=True,
)
COMMIT_CALLS = StreamSpec(
    name="CommitCalls",
    request=ledger.CommitCallsRequest,
    item=ledger.CommitCallsItem,
    payload_field="entry",
    payload=attempt_pb2.ManifestEntry,
    response=ledger.CommitCallsResponse,
    result=ledger.CommitCallsResult,
    answer_field="committed",
    answer=ledger.CommittedEntry,
    repeatable=True,
)
STAGE = StreamSpec(
    name="Stage",
    request=staging.StageRequest,
    item=staging.StageItem,
    payload_field="call",
    payload=staged_call_pb2.StagedCall,
    response=staging.StageResponse,
    result=staging.StageResult,
    answer_field="receipt",
    answer=staging.StagedReceipt,
    repeatable=True,
)
FETCH_PREFIX = StreamSpec(
    name="FetchPrefix",
    request=staging.FetchPrefixRequest,
    item=staging.FetchPrefixItem,
    payload_field="query",
    payload=staging.PrefixQuery,
    response=staging.FetchPrefixResponse,
    result=staging.FetchPrefixResult,
    answer_field="prefix",
    answer=staging.Prefix,
    repeatable=True,
)
GENERATE = StreamSpec(
    name="Generate",
    request=worker.GenerateRequest,
    item=worker.GenerateItem,
    payload_field="call",
    payload=worker.GenerateCall,
    response=worker.GenerateResponse,
    result=worker.GenerateResult,
    answer_field="generated",
    answer=worker.GeneratedCall,
    repeatable=True,
)
MEASURE = StreamSpec(
    name="Measure",
    request=worker.MeasureRequest,
    item=worker.MeasureItem,
    payload_field="call",
    payload=worker.GenerateCall,
    response=worker.MeasureResponse,
    result=worker.MeasureResult,
    answer_field="measured",
    answer=worker.MeasuredCall,
    repeatable=True,
)
COMPLETE = StreamSpec(
    name="Complete",
    request=gateway.CompleteRequest,
    item=gateway.CompleteItem,
    payload_field="call",
    payload=gateway.CompletionCall,
    response=gateway.CompleteResponse,
    result=gateway.CompleteResult,
    answer_field="completion",
    answer=gateway.ServedCompletion,
    repeatable=False,
)
MEASURE_CONTEXT = StreamSpec(
    name="Measure",
    request=gateway.MeasureRequest,
    item=gateway.MeasureItem,
    payload_field="call",
    payload=gateway.CompletionCall,
    response=gateway.MeasureResponse,
    result=gateway.MeasureResult,
    answer_field="measured",
    answer=gateway.MeasuredContext,
    repeatable=True,
)
