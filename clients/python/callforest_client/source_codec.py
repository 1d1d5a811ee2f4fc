"""Messages of forest mode to the core's values and back: probes and summaries."""

from __future__ import annotations

from callforest.capture.v1 import call_record_pb2, capture_admission_pb2, replay_summary_pb2
from callforest_core.lineage.source import (
    OutputSummary,
    SourceBoundary,
    SourceProbe,
    SourceSummary,
)


def source_probe_to_proto(probe: SourceProbe) -> capture_admission_pb2.SourceProbe:
    """Make the message of a probe."""
    return capture_admission_pb2.SourceProbe(
        normalization_version=probe.normalization_version,
        atom_count=probe.atom_count,
        boundaries=[
            capture_admission_pb2.SourceBoundary(
                atom_count=end.atom_count,
                source_digest=end.source_digest,
                tool_content_digest=end.tool_content_digest,
            )
            for end in probe.boundaries
        ],
        observations_follow=probe.observations_follow,
        render_digest=probe.render_digest,
        native_ids=probe.native_ids,
        claimed_call_id=probe.claimed_call_id,
        claim_breaks_ties=probe.claim_breaks_ties,
        has_unreadable_item=probe.has_unreadable_item,
    )


def source_probe_from_proto(message: capture_admission_pb2.SourceProbe) -> SourceProbe:
    """Give the probe of a message."""
    boundaries = tuple(
        SourceBoundary(end.atom_count, end.source_digest, end.tool_content_digest)
        for end in message.boundaries
    )
    claimed = message.claimed_call_id if message.HasField("claimed_call_id") else None
    return SourceProbe(
        atom_count=message.atom_count,
        boundaries=boundaries,
        observations_follow=message.observations_follow,
        render_digest=message.render_digest,
        native_ids=tuple(message.native_ids),
        claimed_call_id=claimed,
        normalization_version=message.normalization_version,
        claim_breaks_ties=message.claim_breaks_ties,
        has_unreadable_item=message.has_unreadable_item,
    )


def source_summary_to_proto(summary: SourceSummary) -> replay_summary_pb2.ReplaySummary:
    """Make the message of what a record keeps of its history."""
    return replay_summary_pb2.ReplaySummary(
        normalization_version=summary.normalization_version,
        item_count=summary.atom_count,
        source_digest=summary.source_digest,
        render_digest=summary.render_digest,
        tool_content_digest=summary.tool_content_digest,
    )


def source_summary_from_proto(
    message: replay_summary_pb2.ReplaySummary,
) -> SourceSummary | None:
    """Give the history that a record keeps; None for a summary of chain mode."""
    spelling = message.tool_content_digest
    if not spelling:
        return None
    return SourceSummary(
        atom_count=message.item_count,
        source_digest=message.source_digest,
        tool_content_digest=spelling,
        render_digest=message.render_digest,
        normalization_version=message.normalization_version,
    )


def output_summary_to_proto(output: OutputSummary) -> call_record_pb2.OutputSummary:
    """Make the message of what identifies an answer."""
    return call_record_pb2.OutputSummary(
        atom_count=output.atom_count,
        digest=output.digest,
        normalization_version=output.normalization_version,
    )


def output_summary_from_proto(message: call_record_pb2.OutputSummary) -> OutputSummary:
    """Give what identifies an answer."""
    return OutputSummary(message.atom_count, message.digest, message.normalization_version)
