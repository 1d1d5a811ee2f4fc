"""The learner: load, step, export, save, restore; deterministic on one thread.

Every microbatch divides by the loss tokens of the whole step, so gradients add up over
microbatches and ranks to the gradient of one loss, however the rows were cut (TRN-5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from callforest_mesh.trainer.batch import (
    BatchPlan,
    BatchRefusal,
    BatchRefusedError,
    MicrobatchColumns,
    TrainingRow,
    check_plan,
    check_rows,
    lay_out,
)
from callforest_mesh.trainer.learner.architecture import ModelRefusedError
from callforest_mesh.trainer.learner.checkpoint import (
    Checkpoint,
    CheckpointRefusal,
    CheckpointRefusedError,
    Progress,
    RunShape,
    read_checkpoint,
    write_checkpoint,
)
from callforest_mesh.trainer.learner.loss import (
    LossOptions,
    Metric,
    RetainedTokens,
    metric_sums,
    select_logprobs,
    token_losses,
)
from callforest_mesh.trainer.learner.model import ModelOptions, PolicyModel
from callforest_mesh.trainer.learner.optimizer import OptimizerOptions, PolicyOptimizer
from callforest_mesh.trainer.learner.ranks import RankOptions, join_ranks, sum_over_ranks
from callforest_mesh.trainer.learner.weights import to_hugging_face, write_durably


class NotLoadedError(Exception):
    """No model was loaded."""


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """How to train.

    Attributes:
        optimizer: how gradients become steps.
        loss: the objective.
        model: device, attention and seed.
        ranks: which data-parallel rank this is.
        shape: what a checkpoint is bound to, and is not trained with.
        thread_count: 1 gives the same bits every time.
    """

    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    ranks: RankOptions = field(default_factory=RankOptions)
    shape: RunShape = field(default_factory=RunShape)
    thread_count: int = 1

    def __post_init__(self) -> None:
        """Refuse what this learner cannot do.

        Raises:
            ValueError: naming the option.
        """
        if self.thread_count <= 0:
            raise ValueError(f"thread_count is {self.thread_count}")
        if self.loss.kl_coefficient != 0:
            raise ValueError("the learner keeps no reference policy: kl_coefficient must be 0")


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One optimizer step; means are over retained tokens, see `Metric`.

    Attributes:
        step: its number since the model was first loaded, over restores, from 1.
        gradient_norm: before the clip.
        retained_token_count: the denominator of the loss.
        masked_token_count: loss tokens of masked rows, which weighed 0.
        microbatch_count: passes of this rank.
        means: of every metric.
    """

    step: int
    gradient_norm: float
    retained_token_count: int
    masked_token_count: int
    row_count: int
    masked_row_count: int
    microbatch_count: int
    means: dict[Metric, float]


class Learner:
    """A policy, its optimizer and its progress. Not thread-safe: one call at a time."""

    def __init__(self, options: LearnerOptions) -> None:
        self._options = options
        self._loaded: tuple[PolicyModel, PolicyOptimizer] | None = None
        self._step = 0

    @property
    def step_count(self) -> int:
        """Optimizer steps since the model was first loaded, over restores."""
        return self._step

    @property
    def policy(self) -> PolicyModel:
        """The loaded model.

        Raises:
            NotLoadedError: nothing was loaded.
        """
        return self._require()[0]

    def load(self, model_dir: Path) -> int:
        """Load a Hugging Face checkpoint and start afresh.

        Returns:
            The number of trained parameters.

        Raises:
            ModelRefusedError: it cannot be trained exactly; nothing changed.
        """
        torch.set_num_threads(self._options.thread_count)
        join_ranks(self._options.ranks)
        policy = PolicyModel(model_dir, self._options.model)
        optimizer = PolicyOptimizer(policy.module, self._options.optimizer)
        self._loaded = policy, optimizer
        self._step = 0
        return optimizer.parameter_count

    def step(self, rows: Sequence[TrainingRow], plan: BatchPlan) -> StepMetrics:
        """Make one optimizer step from all rows.

        Raises:
            BatchRefusedError: the rows or the plan do not fit; nothing changed.
            NonFiniteStepError: nothing changed.
            NotLoadedError: nothing was loaded.
        """
        _, optimizer = self._require()
        self._check(rows, plan)
        sums = torch.zeros(len(Metric), dtype=torch.float64, device=self._options.model.device)
        optimizer.zero_gradients()
        try:
            for microbatch in plan.microbatches_by_rank[self._options.ranks.rank]:
                columns = lay_out(rows, microbatch, plan.mode)
                if columns is not None:
                    sums += self._accumulate(columns, plan.retained_token_count)
            sum_over_ranks([sums])
            norm = optimizer.apply(float(sums[Metric.LOSS]))
        finally:
            optimizer.zero_gradients()
        self._step += 1
        masked = [row for row in rows if not row.valid]
        return StepMetrics(
            step=self._step,
            gradient_norm=norm,
            retained_token_count=plan.retained_token_count,
            masked_token_count=sum(int(row.loss_mask.sum()) for row in masked),
            row_count=len(rows),
            masked_row_count=len(masked),
            microbatch_count=len(plan.microbatches_by_rank[self._options.ranks.rank]),
            means={metric: float(sums[metric]) / plan.retained_token_count for metric in Metric},
        )

    def score(self, rows: Sequence[TrainingRow], plan: BatchPlan) -> list[Tensor]:
        """Give the loss tokens their log-probabilities under the present policy.

        Returns:
            One float32 tensor a non-empty microbatch of this rank, shape [its retained tokens],
            in the order of its rows.

        Raises:
            BatchRefusedError: the rows or the plan do not fit.
        """
        self._check(rows, plan)
        scores: list[Tensor] = []
        with torch.no_grad():
            for microbatch in plan.microbatches_by_rank[self._options.ranks.rank]:
                columns = lay_out(rows, microbatch, plan.mode)
                if columns is not None:
                    scores.append(self._select(columns))
        return scores

    def export(self, path: Path) -> int:
        """Write the weights for an engine: Hugging Face names and the checkpoint's own types.

        The file appears whole or not at all.

        Returns:
            Its size in bytes.
        """
        policy = self.policy
        named = to_hugging_face(policy.weights(), policy.architecture)
        write_durably(
            {name: weight.to("cpu", policy.dtypes[name]) for name, weight in named.items()}, path
        )
        return path.stat().st_size

    def save(self, directory: Path, *, trained_cursor: int, weight_version: int) -> Progress:
        """Write a checkpoint durably; saving the same progress there again does nothing.

        Args:
            directory: must not hold another checkpoint.
            trained_cursor: position in the row log that these weights include.
            weight_version: the highest ever issued.

        Returns:
            The progress that the checkpoint holds.

        Raises:
            CheckpointRefusedError: the directory exists and is not this checkpoint.
            OSError: the disk refused; no checkpoint appeared.
        """
        policy, optimizer = self._require()
        progress = Progress(self._step, trained_cursor, weight_version)
        digest, shape = policy.architecture.digest, self._options.shape
        if directory.exists():
            if read_checkpoint(directory, digest, shape).progress != progress:
                raise CheckpointRefusedError(CheckpointRefusal.EXISTS, directory.name)
            return progress
        tensors = {
            "weights": policy.weights(),
            "optimizer": optimizer.tensors(),
            "generators": {"cpu": torch.get_rng_state()},
        }
        write_checkpoint(Checkpoint(progress, digest, shape, tensors), directory)
        return progress

    def restore(self, directory: Path) -> Progress:
        """Continue from a checkpoint of the loaded model, bit for bit.

        Returns:
            Where training stands now.

        Raises:
            CheckpointRefusedError: nothing was restored.
            NotLoadedError: nothing was loaded.
        """
        policy, optimizer = self._require()
        checkpoint = read_checkpoint(directory, policy.architecture.digest, self._options.shape)
        tensors = checkpoint.tensors
        try:
            optimizer.check(tensors["optimizer"])
            policy.load(dict(tensors["weights"]))
        except (ModelRefusedError, ValueError) as error:
            raise CheckpointRefusedError(CheckpointRefusal.OTHER_MODEL, str(error)) from error
        optimizer.load(tensors["optimizer"])
        torch.set_rng_state(tensors["generators"]["cpu"])
        self._step = checkpoint.progress.step
        return checkpoint.progress

    def _require(self) -> tuple[PolicyModel, PolicyOptimizer]:
        if self._loaded is None:
            raise NotLoadedError("load a model first")
        return self._loaded

    def _check(self, rows: Sequence[TrainingRow], plan: BatchPlan) -> None:
        architecture = self.policy.architecture
        check_rows(rows)
        check_plan(rows, plan)
        if plan.retained_token_count == 0:
            raise BatchRefusedError(BatchRefusal.NO_LOSS_TOKENS)
        if len(plan.microbatches_by_rank) != self._options.ranks.rank_count:
            raise BatchRefusedError(BatchRefusal.PLAN_MISMATCH, "another number of ranks")
        for row in rows:
            if len(row.token_ids) > architecture.position_limit:
                raise BatchRefusedError(BatchRefusal.ROW_TOO_LONG, row.row_id, row_id=row.row_id)
            if int(row.token_ids.max()) >= architecture.vocabulary_size:
                raise BatchRefusedError(
                    BatchRefusal.OUT_OF_VOCABULARY, row.row_id, row_id=row.row_id
                )

    def _select(self, columns: MicrobatchColumns) -> Tensor:
        device = self._options.model.device
        return select_logprobs(
            self.policy.logits(columns),
            torch.from_numpy(columns.label_ids).to(device),
            torch.from_numpy(columns.retained).to(device),
        )

    def _accumulate(self, columns: MicrobatchColumns, retained_token_count: int) -> Tensor:
        """Run one microbatch forward and backward; give its metric sums."""
        device = self._options.model.device
        current = self._select(columns)
        tokens = RetainedTokens(
            current=current,
            previous=current.detach(),
            generated=torch.from_numpy(columns.logprobs[columns.retained]).to(device),
            advantages=torch.from_numpy(columns.advantages[columns.retained]).to(device),
        )
        losses = token_losses(tokens, self._options.loss)
        (losses.sum() / retained_token_count).backward()  # type: ignore[no-untyped-call]  # torch
        return metric_sums(tokens, losses, self._options.loss)
