"""The engine port's values as messages of `EngineService`, and back."""

from __future__ import annotations

import numpy as np

from callforest.worker.v1 import engine_service_pb2 as pb
from callforest_client.capture_decision import (
    decision_from_proto,
    decision_to_proto,
    match_from_proto,
    match_to_proto,
)
from callforest_core.custody.capture_input import HistoryMatch
from callforest_core.custody.extras import decode_extras, encode_extras
from callforest_mesh.worker.engine import (
    EngineDescription,
    EngineMeasure,
    EngineRequest,
    EngineResult,
    Logprobs,
    PrefixEvidence,
    Scalar,
    TokenIds,
    WeightVersionSpan,
)

_IDS = np.dtype("<u4")
_LOGPROBS = np.dtype("<f4")


def describe_to_message(description: EngineDescription) -> pb.DescribeEngineResponse:
    """Write what the engine is."""
    return pb.DescribeEngineResponse(
        engine=description.engine,
        model=description.model,
        context_token_count=description.context_token_count,
        weight_version=description.weight_version,
        configuration_digest=description.configuration_digest,
    )


def describe_from_message(message: pb.DescribeEngineResponse) -> EngineDescription:
    """Read what the engine is."""
    return EngineDescription(
        engine=message.engine,
        model=message.model,
        context_token_count=message.context_token_count,
        weight_version=message.weight_version,
        configuration_digest=message.configuration_digest,
    )


def request_to_message(request: EngineRequest) -> pb.RunEngineRequest:
    """Write one generation's request."""
    evidence = request.evidence
    return pb.RunEngineRequest(
        call_id=request.call_id,
        created_s=request.created,
        chat_request=request.body,
        prefix_token_ids=b"" if request.prefix is None else _ids_to_bytes(request.prefix),
        history_match=match_to_proto(evidence.match if evidence else HistoryMatch.UNPROVEN),
        parent_chain_hash=evidence.chain_hash if evidence else b"",
    )


def request_from_message(message: pb.RunEngineRequest) -> EngineRequest:
    """Read one generation's request.

    Raises:
        ValueError: the prefix is not a whole number of ids.
    """
    prefix = message.prefix_token_ids
    evidence = None
    if message.parent_chain_hash:
        match = match_from_proto(message.history_match)
        evidence = PrefixEvidence(match, message.parent_chain_hash)
    return EngineRequest(
        call_id=message.call_id,
        created=message.created_s,
        body=message.chat_request,
        prefix=_ids_from_bytes(prefix) if prefix else None,
        evidence=evidence,
    )


def result_to_message(result: EngineResult) -> pb.RunEngineResponse:
    """Write what the engine saw and said.

    Raises:
        ExtrasError: a sampling parameter has no canonical encoding.
    """
    return pb.RunEngineResponse(
        prompt_token_ids=_ids_to_bytes(result.prompt_ids),
        generated_token_ids=_ids_to_bytes(result.generated_ids),
        logprobs=result.logprobs.astype(_LOGPROBS, copy=False).tobytes(),
        chat_response=result.response,
        finish_reason=result.finish_reason,
        reported_completion_token_count=result.reported_completion_tokens,
        weight_version=result.weight_version,
        weight_version_spans=[
            pb.WeightVersionSpan(
                start_token=span.start, end_token=span.end, weight_version=span.version
            )
            for span in result.weight_version_spans
        ],
        sampling=encode_extras(result.sampling),
        logprobs_mode=result.logprobs_mode,
        prefix_refused=result.prefix_refused,
        decision=decision_to_proto(result.decision) if result.decision else None,
        text_ends_early=result.text_ends_early,
    )


def result_from_message(message: pb.RunEngineResponse) -> EngineResult:
    """Read what the engine saw and said.

    Raises:
        ExtrasError: the sampling parameters are not encoded canonically.
        ValueError: a column is not a whole number of words.
    """
    logprobs: Logprobs = np.frombuffer(message.logprobs, _LOGPROBS).astype(np.float32, copy=False)
    return EngineResult(
        prompt_ids=_ids_from_bytes(message.prompt_token_ids),
        generated_ids=_ids_from_bytes(message.generated_token_ids),
        logprobs=logprobs,
        response=message.chat_response,
        finish_reason=message.finish_reason,
        reported_completion_tokens=message.reported_completion_token_count,
        weight_version=message.weight_version,
        weight_version_spans=tuple(
            WeightVersionSpan(span.start_token, span.end_token, span.weight_version)
            for span in message.weight_version_spans
        ),
        sampling=_read_scalars(message.sampling),
        logprobs_mode=message.logprobs_mode,
        prefix_refused=message.prefix_refused,
        decision=decision_from_proto(message.decision) if message.HasField("decision") else None,
        text_ends_early=message.text_ends_early,
    )


def measure_to_message(measure: EngineMeasure) -> pb.MeasureEngineResponse:
    """Write the size of a prompt."""
    return pb.MeasureEngineResponse(
        prompt_token_count=measure.prompt_token_count,
        decision=decision_to_proto(measure.decision) if measure.decision else None,
    )


def measure_from_message(message: pb.MeasureEngineResponse) -> EngineMeasure:
    """Read the size of a prompt."""
    return EngineMeasure(
        prompt_token_count=message.prompt_token_count,
        decision=decision_from_proto(message.decision) if message.HasField("decision") else None,
    )


def _read_scalars(encoded: bytes) -> dict[str, Scalar]:
    scalars: dict[str, Scalar] = {}
    for name, value in (decode_extras(encoded) or {}).items():
        if isinstance(value, list | dict):
            raise ValueError(f"sampling parameter {name} is no scalar")  # noqa: TRY004
        scalars[name] = value
    return scalars


def _ids_to_bytes(token_ids: TokenIds) -> bytes:
    return token_ids.astype(_IDS, copy=False).tobytes()


def _ids_from_bytes(column: bytes) -> TokenIds:
    return np.frombuffer(column, _IDS).astype(np.uint32, copy=False)
