"""How a request's history was taken, for its harness. Pure."""

from __future__ import annotations

from callforest.capture.v1 import call_record_pb2, capture_admission_pb2
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest.worker.v1 import worker_service_pb2 as worker_pb

_ORDINARY = "no_model_items"
"""A root that needs no reason: the conversation begins."""


def context_report(
    verdict: capture_admission_pb2.Verdict,
    decision: capture_admission_pb2.CaptureDecision | None,
    difference: call_record_pb2.HistoryDifference | None,
    failure: str = "",
) -> pb.ContextReport:
    """Say whether captured tokens head the prompt, and why not.

    Args:
        verdict: what was admitted, in forest mode a root or a continuation.
        decision: what the worker did; None when its capture failed before.
        difference: where the history differs from a recorded one, when that is known.
        failure: why the capture failed, "" when it did not.
    """
    if verdict.WhichOneof("verdict") == "root":
        name = capture_admission_pb2.RootReason.Name(verdict.root.reason)
        reason = name.removeprefix("ROOT_REASON_").lower()
        return pb.ContextReport(reason=reason, difference=difference)
    if decision is None:
        return pb.ContextReport(reason=failure)
    spliced = decision.input == capture_admission_pb2.CAPTURE_INPUT_SPLICED
    return pb.ContextReport(is_continuation=spliced, reason="" if spliced else decision.reason)


def context_of_call(
    verdict: capture_admission_pb2.Verdict,
    generated: worker_pb.GeneratedCall,
    difference: call_record_pb2.HistoryDifference | None,
) -> pb.ContextReport:
    """Say how the history of a served call was taken."""
    decision = generated.decision if generated.HasField("decision") else None
    return context_report(verdict, decision, difference, generated.failed.reason)


def context_header(report: pb.ContextReport) -> str:
    """Write a report as the value of a header."""
    if report.is_continuation:
        return "continuation"
    parts = ["root"]
    if report.reason and report.reason != _ORDINARY:
        parts.append(f"reason={report.reason}")
    if report.HasField("difference"):
        name = call_record_pb2.DifferenceClass.Name(report.difference.kind)
        parts.append(f"difference={name.removeprefix('DIFFERENCE_CLASS_').lower()}")
    return "; ".join(parts)
