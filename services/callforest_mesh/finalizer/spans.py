"""What the finalizer's spans link to and say, and what it counts.

A rollout's span links to the spans of its calls, a group's to those of its rollouts, each with the
rows that the rollout became.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from callforest.capture.v1 import attempt_pb2, call_record_pb2, group_batch_pb2, receipt_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.forest.selection import SelectionFault
from callforest_mesh.chassis.call_attributes import CALL_ID, CAPTURE_KEY
from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.telemetry import Attributes, AttributeValue, Link, Metrics

TRAINS: Final = "none"
"""The mask reason of a rollout that trains."""
SELECTION_NOT_CLOSED: Final = "selection_not_closed"
ENVIRONMENT_MASKED: Final = "environment_masked"
GROUP_ID: Final = "callforest.group_id"
ROLLOUT_ID: Final = "callforest.rollout_id"
ROW_IDS: Final = "callforest.row_ids"

_COMPARED: Final = (
    *("parent_call_id", "mode", "prev_len", "delta_len", "cum_len", "weight_version", "digest"),
    *("extras_digest", "chain_hash", "cumulative_hash", "schema_version", "digest_version"),
    *("extras_digest_version", "rollout", "source"),
)
MASK_REASONS: Final = frozenset(
    {
        *(TRAINS, "attempt_not_captured", "pending_call", "capture_poisoned"),
        *("terminal_not_attributed", "staged_call_missing", "staged_call_corrupt"),
        *("sampling_mismatch", "selected_call_incomplete", "selection_refused"),
        *(SELECTION_NOT_CLOSED, ENVIRONMENT_MASKED),
        *("unsupported_schema", "unsupported_digest", "unsupported_extras_digest"),
        *("rollout_failed", "empty_manifest", "duplicate_manifest_row", "duplicate_staging_key"),
        *("row_count_mismatch", "duplicate_snapshot", "snapshot_identity_mismatch"),
        *("snapshot_order_mismatch", "invalid_snapshot", "corrupt_digest", "missing_parent"),
        *("parent_length_mismatch", "lineage_cycle", "missing_terminal", "chain_hash_mismatch"),
        *("invalid_mask_order", "empty_generation", "cumulative_hash_mismatch"),
        *(f"wrong_{name}" for name in _COMPARED),
    }
)
"""Every reason to mask (docs/protocol.md, "Mask reasons"; docs/lineage.md, "Verification")."""
_ROW_KINDS: Final = {
    group_batch_pb2.ROW_KIND_TRAINING: "training",
    group_batch_pb2.ROW_KIND_PLACEHOLDER: "placeholder",
    group_batch_pb2.ROW_KIND_PADDING: "padding",
}
_DROPPED: Final = "dropped"
TOKENS: Final = tuple(float(1 << power) for power in range(4, 21))
"""Upper bounds of the buckets of lengths."""
_MODES: Final = {
    attempt_pb2.CAPTURE_MODE_UNSPECIFIED: "chain",
    attempt_pb2.CAPTURE_MODE_CHAIN: "chain",
    attempt_pb2.CAPTURE_MODE_FOREST: "forest",
}
_LENGTHS: Final = {
    "generated_token_count": (
        "gen_tokens_per_sample",
        "Sampled tokens that have loss, of all rows of a logical rollout.",
    ),
    "longest_generation_token_count": (
        "max_gen_tokens_per_turn",
        "Tokens of the longest generation of a logical rollout.",
    ),
    "total_token_count": (
        "total_tokens_per_sample",
        "Tokens of the longest verified context of a logical rollout.",
    ),
}


def call_links(records: Iterable[call_record_pb2.CallRecord]) -> list[Link]:
    """Give links to the calls of an attempt that were sampled."""
    return [
        Link(record.traceparent, {CALL_ID: record.coords.call_id})
        for record in records
        if record.traceparent
    ]


def rollout_links(
    logged: row_log_pb2.LoggedGroup, rollouts: Sequence[row_log_pb2.FinalizedRollout]
) -> list[Link]:
    """Give links to the rollouts of a group that have spans, each with its rows."""
    links = []
    for rollout in rollouts:
        receipt = rollout.receipt
        if receipt.traceparent:
            own = (one for one in logged.rows if one.HasField("slot") and one.slot == receipt.slot)
            rows = tuple(row.row_id for row in own)
            named: dict[str, AttributeValue] = {ROLLOUT_ID: receipt.rollout_id, ROW_IDS: rows}
            links.append(Link(receipt.traceparent, named))
    return links


def receipt_attributes(receipt: receipt_pb2.Receipt) -> Attributes:
    """Say what a rollout contributes."""
    return {
        ROLLOUT_ID: receipt.rollout_id,
        GROUP_ID: receipt.group_id,
        CAPTURE_KEY: receipt.capture_key,
        "callforest.mask_reason": receipt.mask_reason if receipt.masked else TRAINS,
        "callforest.terminal_selection": receipt.terminal_selection,
        "callforest.calls": len(receipt.calls),
        "callforest.reward": receipt.reward,
    }


def group_attributes(logged: row_log_pb2.LoggedGroup) -> Attributes:
    """Say what was published."""
    return {
        GROUP_ID: logged.group_id,
        "callforest.rollouts": len(logged.rollout_ids),
        "callforest.rows": len(logged.rows),
        "callforest.segments": len(logged.segments),
        "callforest.drop_reason": logged.drop_reason or "none",
        "callforest.cursor": logged.cursor,
    }


class Finalized:
    """Measures logical rollouts, each once (FOR-7): one that cannot be verified contributes 0."""

    def __init__(self, metrics: Metrics) -> None:
        self._rollouts = metrics.counter(
            Description(
                "callforest.finalizer.rollouts",
                "{rollout}",
                "Finalized rollouts by why they are masked, or none.",
            ),
            {"mask_reason": MASK_REASONS},
        )
        self._not_closed = metrics.counter(
            Description(
                "callforest.finalizer.selection_not_closed_rollouts",
                "{rollout}",
                "Rollouts masked since a selected call's parent was not selected"
                " (finalize/selection_not_closed_rollouts).",
            )
        )
        self._environment = metrics.counter(
            Description(
                "callforest.finalizer.environment_masked_rollouts",
                "{rollout}",
                "Rollouts that their environment keeps from training.",
            )
        )
        self._salvaged = metrics.counter(
            Description(
                "callforest.finalizer.salvaged_rollouts",
                "{rollout}",
                "Rollouts whose verified paths train although their capture is incomplete.",
            )
        )
        self._lengths = {
            field: metrics.histogram(
                Description(f"callforest.finalizer.{name}", "{token}", text),
                {"mode": tuple(_MODES.values())},
                bounds=TOKENS,
            )
            for field, (name, text) in _LENGTHS.items()
        }

    def count(self, receipt: receipt_pb2.Receipt) -> None:
        """Count a rollout whose receipt was just fixed."""
        reason = receipt.mask_reason if receipt.masked else TRAINS
        self._rollouts.add(1, reason)
        if reason == SELECTION_NOT_CLOSED:
            self._not_closed.add(1)
        if receipt.salvaged_from:
            self._salvaged.add(1)
        if receipt.environment_masked:
            self._environment.add(1)
        for field, histogram in self._lengths.items():
            histogram.record(getattr(receipt, field), _MODES.get(receipt.mode, ""))


class Refused:
    """Counts selections that could not be taken, whether their owner had them masked or not."""

    def __init__(self, metrics: Metrics) -> None:
        self._selections = metrics.counter(
            Description(
                "callforest.finalizer.selection_refused",
                "{selection}",
                "Selections whose evidence could not be taken, by fault.",
            ),
            {"fault": tuple(SelectionFault)},
        )

    def count(self, fault: SelectionFault) -> None:
        """Count a refusal."""
        self._selections.add(1, fault)


class Published:
    """Counts what becomes visible to trainers."""

    def __init__(self, metrics: Metrics) -> None:
        self._rows = metrics.counter(
            Description("callforest.finalizer.rows", "{row}", "Published rows by kind."),
            {"kind": tuple(_ROW_KINDS.values())},
        )
        self._groups = metrics.counter(
            Description("callforest.finalizer.groups", "{group}", "Published groups."),
            {"outcome": ("published", _DROPPED)},
        )

    def count(self, logged: row_log_pb2.LoggedGroup) -> None:
        """Count a group and its rows."""
        self._groups.add(1, _DROPPED if logged.drop_reason else "published")
        for row in logged.rows:
            self._rows.add(1, _ROW_KINDS.get(row.kind, ""))
