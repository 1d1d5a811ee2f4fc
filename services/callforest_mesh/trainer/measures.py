"""What the trainer exports of its steps, and what the span of a step says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from callforest.capture.v1 import group_batch_pb2
from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.telemetry import Attributes, AttributeValue, Link, Metrics
from callforest_mesh.trainer.announcements import Announcements

_STEP_LEVELS: Final = (
    ("loss", "1", "Loss of the last step."),
    ("reward_mean", "1", "Mean reward of its rollouts."),
    ("token_mult_prob_error", "1", "How far generation and training differ; 1 is exact."),
    ("gen_kl_error", "1", "Divergence of generation from training."),
    ("grad_norm", "1", "Norm of the gradient before clipping."),
    ("step_seconds", "s", "How long the learner took."),
    ("push_seconds", "s", "How long the new weights took to serve."),
    ("row_count", "{row}", "Training rows."),
    ("masked_count", "{rollout}", "Masked rollouts."),
    ("valid_token_count", "{token}", "Tokens with loss."),
)
_STATUS_LEVELS: Final = (
    ("weight_version", "{version}", "The version that serves on every worker."),
    ("trained_cursor", "{group}", "The last group that a step used."),
    ("committed_cursor", "{group}", "The last group behind a checkpoint."),
    ("waiting_group_count", "{group}", "Groups taken for the next step."),
)


def measure_training(metrics: Metrics, announcements: Announcements) -> None:
    """Export the trainer's state and its last step's metrics."""

    def of_step(name: str) -> Callable[[], float | None]:
        def read() -> float | None:
            last = announcements.last_metrics()
            return None if last is None else float(getattr(last, name))

        return read

    def of_status(name: str) -> Callable[[], float]:
        return lambda: float(getattr(announcements.status, name))

    for name, unit, text in _STEP_LEVELS:
        metrics.gauge(Description(f"callforest.trainer.{name}", unit, text), of_step(name))
    lost = Description(
        "callforest.trainer.dropped_prompt_groups", "{group}", "Dropped groups of the last step."
    )
    metrics.gauge(lost, of_step("dropped_group_count"))
    for name, unit, text in _STATUS_LEVELS:
        metrics.gauge(Description(f"callforest.trainer.{name}", unit, text), of_status(name))
    steps = Description("callforest.trainer.step", "{step}", "Finished optimizer steps.")
    metrics.gauge(steps, of_status("step"))


def batch_links(batches: Sequence[group_batch_pb2.GroupBatch]) -> list[Link]:
    """Give links from a step to the publications of its groups."""
    return [
        Link(
            batch.traceparent,
            {"callforest.group_id": batch.group_id, "callforest.cursor": batch.cursor},
        )
        for batch in batches
        if batch.traceparent
    ]


def step_attributes(metrics: pb.StepMetrics) -> Attributes:
    """Say what a step did."""
    counted = ("step", "weight_version", "rollout_count", "dropped_group_count")
    named = (*counted, *(name for name, _, _ in _STEP_LEVELS))
    found: dict[str, AttributeValue] = {
        f"callforest.{name}": getattr(metrics, name) for name in named
    }
    return found
