"""The span of one generation, in the words of OpenTelemetry's conventions for generative AI.

It has counts, settings and names; never a token, a prompt or an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from callforest.worker.v1 import worker_service_pb2 as pb
from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.telemetry import AttributeValue, Metrics, Span, Tracer
from callforest_mesh.worker.engine import Engine, EngineResult, EngineUnavailableError

CAPTURE_REASONS: Final = (
    *("prefix_unavailable", "prefix_mismatch", "count_mismatch", "non_finite_logprob"),
    *("empty_generation", "stage_failed", "stage_timeout", "token_out_of_range"),
    "text_ends_early",
)
"""The worker's own reasons (docs/protocol.md, "Failure reasons")."""
_OPERATION: Final = "chat"
_PROVIDER: Final = "callforest"
_NAME_CHARACTERS: Final = 128
_NUMBERS: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}


class GenerationSpan:
    """The span of one generation, or none. A context, as spans are."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def describe_result(self, result: EngineResult) -> None:
        """Say what the engine did; the body is read only when someone records it."""
        if self._span.recording:
            self._span.describe(_result_attributes(result))

    def __enter__(self) -> GenerationSpan:  # noqa: PYI034 - subclasses are not foreseen
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._span.__exit__(kind, error, trace)


def generation_span(tracer: Tracer, parent: str, call: pb.GenerateCall) -> GenerationSpan:
    """Begin the span of a generation below that of its item.

    Args:
        tracer: the worker's.
        parent: the item's trace context.
        call: what is asked; its request is read only when the item is sampled.
    """
    span = tracer.child(_OPERATION, parent, "client")
    if span.recording:
        span.describe(_request_attributes(call.chat_request))
    return GenerationSpan(span)


class CaptureMeasures:
    """Counts tokens, and captures that failed."""

    def __init__(self, metrics: Metrics) -> None:
        self._tokens = metrics.counter(
            Description("callforest.worker.tokens", "{token}", "Prompt and sampled tokens."),
            {"gen_ai.token.type": ("input", "output")},
        )
        self._failures = metrics.counter(
            Description("callforest.worker.capture_failures", "{call}", "Failed captures."),
            {"reason": CAPTURE_REASONS},
        )

    def count(self, result: EngineResult) -> None:
        """Count a generation."""
        self._tokens.add(len(result.prompt_ids), "input")
        self._tokens.add(len(result.generated_ids), "output")

    def count_failure(self, reason: str) -> None:
        """Count a call that is served without capture."""
        self._failures.add(1, reason)


def measure_engine(metrics: Metrics, engine: Engine) -> None:
    """Export the weight version that serves."""

    def version() -> float | None:
        try:
            return engine.describe().weight_version
        except EngineUnavailableError:
            return None

    text = "The weight version that serves."
    metrics.gauge(Description("callforest.worker.weight_version", "{version}", text), version)


def _request_attributes(body: bytes) -> dict[str, AttributeValue]:
    request = _object(body)
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.output.type": "text",
    }
    if isinstance(model := request.get("model"), str):
        found["gen_ai.request.model"] = model[:_NAME_CHARACTERS]
    for key, name in _NUMBERS.items():
        value = request.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


def _result_attributes(result: EngineResult) -> dict[str, AttributeValue]:
    response = _object(result.response)
    found: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": len(result.prompt_ids),
        "gen_ai.usage.output_tokens": len(result.generated_ids),
        "gen_ai.response.finish_reasons": (result.finish_reason[:_NAME_CHARACTERS],),
        "callforest.weight_version": result.weight_version,
    }
    for key in ("id", "model"):
        if isinstance(value := response.get(key), str):
            found[f"gen_ai.response.{key}"] = value[:_NAME_CHARACTERS]
    return found


def _object(body: bytes) -> Mapping[str, object]:
    """Read a JSON object; whatever is none has nothing to say here."""
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
