"""Matches and decisions of forest mode: messages to the core's values and back."""

from __future__ import annotations

from typing import Final

from callforest.capture.v1 import capture_admission_pb2 as pb
from callforest_core.custody.capture_input import CaptureDecision, HistoryMatch

_MATCHES: Final[dict[pb.HistoryMatch.ValueType, HistoryMatch]] = {
    pb.HISTORY_MATCH_EXACT: HistoryMatch.EXACT,
    pb.HISTORY_MATCH_TOOL_CONTENT_EQUIVALENT: HistoryMatch.TOOL_CONTENT_EQUIVALENT,
}
_MESSAGES: Final = {match: value for value, match in _MATCHES.items()}


def match_from_proto(value: pb.HistoryMatch.ValueType) -> HistoryMatch:
    """Read a match; one that is not known proves nothing."""
    return _MATCHES.get(value, HistoryMatch.UNPROVEN)


def match_to_proto(match: HistoryMatch) -> pb.HistoryMatch.ValueType:
    """Write a match."""
    return _MESSAGES.get(match, pb.HISTORY_MATCH_UNSPECIFIED)


def decision_from_proto(message: pb.CaptureDecision) -> CaptureDecision:
    """Read a decision."""
    return CaptureDecision(
        is_spliced=message.input == pb.CAPTURE_INPUT_SPLICED,
        reason=message.reason,
        prefix_cut=message.prefix_cut,
        render_cut=message.render_cut,
        proof=message.proof,
        notes=tuple(message.notes),
    )


def decision_to_proto(decision: CaptureDecision) -> pb.CaptureDecision:
    """Write a decision."""
    return pb.CaptureDecision(
        input=pb.CAPTURE_INPUT_SPLICED if decision.is_spliced else pb.CAPTURE_INPUT_ROOT,
        reason=decision.reason,
        prefix_cut=decision.prefix_cut,
        render_cut=decision.render_cut,
        proof=decision.proof,
        notes=decision.notes,
    )
