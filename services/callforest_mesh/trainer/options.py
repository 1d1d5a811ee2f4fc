"""How the trainer runs, checked before anything else (TRN-1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from callforest.trainer.v1 import learner_service_pb2 as pb
from callforest_client.group_assembly import GROUP_BYTES_MAX, check_bytes_max
from callforest_core.forest.step_floor import check_fraction
from callforest_mesh.trainer.batch import BatchOptions
from callforest_mesh.trainer.core import AdvantageOptions

GROUPS_PER_STEP_MAX = 4096
"""Twice as many wait in the trainer: what was sent ahead while a step runs."""


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How the trainer runs.

    Attributes:
        path: the trainer's state directory: checkpoints, weights, issued versions.
        model_path: a directory with a Hugging Face checkpoint.
        groups_per_step: groups of one optimizer step; constant over a run.
        min_step_batch_fraction: the part of a step's groups that must be kept; dropped ones count
            against the step, and below it training stops. None: dropped groups fill no step, and
            the step waits for others in their place.
        checkpoint_interval_steps: a checkpoint after every so many steps.
        checkpoints_kept: older ones are removed.
        consumer: the name under which the row log keeps the cursor.
        group_bytes_max: the most that one group may have in memory as it comes; a larger one stops
            training with its name. Up to twice `groups_per_step` groups wait here.
        learning_rate: constant; 0 trains nothing.
        weight_decay: AdamW's.
        clip_grad_norm: bounds the gradient's norm.
        ratio_clip_low: lower clip distance of the probability ratio.
        ratio_clip_high: upper clip distance of the probability ratio.
        importance_correction: weigh tokens by exp(training logprob - generation logprob).
        seed: starts the learner's random states.
        batch: how rows become microbatches.
        advantages: how rewards become advantages.
        outage_s: how long a peer may be away before training stops.
        learner_restarts: how often in a row a lost learner is started again from the last
            checkpoint; a new checkpoint ends the row.
        forest: the mesh captures in forest mode. A checkpoint keeps it and what groups are padded
            to, and training does not go on from one that was written otherwise (TRN-7).
        row_multiple: what groups are padded to a multiple of.
    """

    path: Path
    model_path: Path
    groups_per_step: int = 4
    min_step_batch_fraction: float | None = None
    checkpoint_interval_steps: int = 5
    checkpoints_kept: int = 2
    consumer: str = "trainer"
    group_bytes_max: int = GROUP_BYTES_MAX
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    clip_grad_norm: float = 1.0
    ratio_clip_low: float = 0.2
    ratio_clip_high: float = 0.2
    importance_correction: bool = True
    seed: int = 0
    batch: BatchOptions = field(default_factory=BatchOptions)
    advantages: AdvantageOptions = field(default_factory=AdvantageOptions)
    outage_s: float = 600.0
    learner_restarts: int = 3
    forest: bool = False
    row_multiple: int = 1

    def __post_init__(self) -> None:
        """Refuse counts that are not positive, limits that are negative, and ranks beyond one.

        Groups may be padded for the ranks of a trainer elsewhere; the learner here is one process.

        Raises:
            ValueError: naming the option.
        """
        for name in ("groups_per_step", "checkpoint_interval_steps", "checkpoints_kept"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.groups_per_step > GROUPS_PER_STEP_MAX:
            raise ValueError(f"groups_per_step must be at most {GROUPS_PER_STEP_MAX}")
        if self.batch.rank_count != 1:
            raise ValueError(
                f"batch.rank_count is {self.batch.rank_count}, but this trainer has one rank; "
                "more are for the groups of a mesh whose trainer runs elsewhere"
            )
        check_bytes_max(self.group_bytes_max)
        check_fraction("min_step_batch_fraction", self.min_step_batch_fraction)
        if self.outage_s < 0 or self.learner_restarts < 0:
            raise ValueError("outage_s and learner_restarts must not be negative")

    def learner(self) -> pb.LearnerOptions:
        """Give the learner's part as its message."""
        return pb.LearnerOptions(
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            clip_grad_norm=self.clip_grad_norm,
            ratio_clip_low=self.ratio_clip_low,
            ratio_clip_high=self.ratio_clip_high,
            importance_correction=self.importance_correction,
            seed=self.seed,
            forest=self.forest,
            row_multiple=self.row_multiple,
        )
