"""The real learner: Megatron-core on a CPU against transformers' Qwen3 and Llama."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from callforest_mesh.trainer.batch import (
    BatchOptions,
    BatchRefusal,
    BatchRefusedError,
    TrainingRow,
    plan_step,
)
from callforest_mesh.trainer.learner.learner import Learner, LearnerOptions
from callforest_mesh.trainer.learner.loss import LossOptions, Metric
from callforest_mesh.trainer.learner.optimizer import NonFiniteStepError, OptimizerOptions
from callforest_mesh.trainer.learner.weights import to_hugging_face
from tests.integration.learner_cases import (
    FOUR,
    PACKED,
    SINGLE,
    VOCABULARY,
    assert_same,
    load,
    make_rows,
    weights,
    with_own_logprobs,
    write_model,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_model(directory, "qwen3")
    return directory


def accumulate(learner: Learner, rows: list[TrainingRow], options: BatchOptions) -> Any:
    """The gradient of one step, Hugging Face names; seen before it is clipped and applied."""
    seen: dict[str, Tensor] = {}
    policy, optimizer = learner._require()
    apply = optimizer.apply

    def spy(loss: float) -> float:
        seen.update(
            {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}
        )
        return apply(loss)

    optimizer.apply = spy  # type: ignore[method-assign]  # a spy
    metrics = learner.step(rows, plan_step(rows, options))
    return to_hugging_face(seen, policy.architecture), metrics


@pytest.mark.requirement("TRN-1")
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("qwen3", True), ("llama", False)])
def test_logits_and_gradients_are_those_of_transformers(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    reference = write_model(tmp_path, kind, tie_word_embeddings=tied)
    learner = load(tmp_path)
    rows = make_rows()
    count = sum(int(row.loss_mask.sum()) for row in rows)
    loss = torch.zeros(())
    expected_scores = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logits = reference(ids[None]).logits[0, :-1]
        scores = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        scores = scores[torch.from_numpy(row.loss_mask[1:])]
        expected_scores.append(scores.detach())
        sampled = torch.from_numpy(row.logprobs[row.loss_mask])
        weight = (scores.detach() - sampled).exp()
        loss = loss - (row.advantage * weight * (scores - scores.detach()).exp()).sum() / count
    loss.backward()  # type: ignore[no-untyped-call]  # torch

    for row, expected in zip(rows, expected_scores, strict=True):
        (scores,) = learner.score([row], plan_step([row], SINGLE))
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)
    gradients, metrics = accumulate(learner, rows, FOUR)

    assert metrics.means[Metric.LOSS] == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-2


@pytest.mark.requirement("TRN-1", "TRN-5")
def test_the_gradient_does_not_depend_on_the_cut(model_dir: Path) -> None:
    rows = make_rows(8)
    single, one = accumulate(load(model_dir), rows, SINGLE)
    for options in (FOUR, PACKED):
        gradients, metrics = accumulate(load(model_dir), rows, options)
        assert metrics.microbatch_count < one.microbatch_count
        for metric in Metric:
            assert metrics.means[metric] == pytest.approx(one.means[metric], rel=1e-5, abs=1e-7)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, single[name], atol=2e-6, rtol=1e-4)


@pytest.mark.requirement("TRN-5")
def test_a_masked_row_weighs_nothing_and_changes_only_the_denominator(model_dir: Path) -> None:
    rows = make_rows(4)
    masked = [*rows[:3], replace(rows[3], valid=False)]
    whole, _ = accumulate(load(model_dir), masked, FOUR)
    without, _ = accumulate(load(model_dir), rows[:3], FOUR)
    all_rows, full = accumulate(load(model_dir), rows, FOUR)
    only, alone = accumulate(load(model_dir), rows[3:], FOUR)

    metrics = load(model_dir).step(masked, plan_step(masked, FOUR))
    assert (metrics.step, metrics.row_count, metrics.masked_row_count) == (1, 4, 1)
    assert metrics.masked_token_count == alone.retained_token_count
    kept = metrics.retained_token_count
    assert kept + alone.retained_token_count == full.retained_token_count
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, without[name], atol=1e-6, rtol=1e-4)
        joined = gradient * kept + only[name] * alone.retained_token_count
        torch.testing.assert_close(
            all_rows[name] * full.retained_token_count, joined, atol=1e-4, rtol=1e-4
        )


@pytest.mark.requirement("TRN-9")
def test_metrics_are_ideal_on_the_learners_own_logprobs(model_dir: Path) -> None:
    learner = load(model_dir)
    rows = with_own_logprobs(learner, make_rows())
    means = learner.step(rows, plan_step(rows, SINGLE)).means
    assert means[Metric.TOKEN_MULT_PROB_ERROR] == 1.0
    assert means[Metric.GEN_KL_ERROR] == 0.0
    assert means[Metric.POLICY_KL_ERROR] == 0.0
    assert means[Metric.SAMPLING_IMPORTANCE_RATIO] == 1.0
    assert means[Metric.PROBS_RATIO] == 1.0


def test_a_step_raises_what_earned_and_lowers_what_did_not(model_dir: Path) -> None:
    learner = load(model_dir)
    rows = with_own_logprobs(learner, make_rows(2))
    rows = [replace(rows[0], advantage=1.0), replace(rows[1], advantage=-1.0)]
    plan = plan_step(rows, SINGLE)
    before = [float(scores.sum()) for scores in learner.score(rows, plan)]
    for _ in range(3):
        learner.step(rows, plan)
    after = [float(scores.sum()) for scores in learner.score(rows, plan)]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert learner.step_count == 3


def test_a_learning_rate_of_zero_changes_no_bit(model_dir: Path) -> None:
    learner = load(model_dir, optimizer=OptimizerOptions(learning_rate=0.0, weight_decay=0.1))
    before = weights(learner)
    metrics = learner.step(rows := make_rows(), plan_step(rows, FOUR))
    assert metrics.gradient_norm > 0
    assert_same(weights(learner), before)


def test_what_a_row_does_not_train_cannot_poison_the_step(model_dir: Path) -> None:
    rows = make_rows(3)
    poisoned = [
        replace(row, logprobs=np.where(row.loss_mask, row.logprobs, np.float32(np.nan)))
        for row in rows
    ]
    clean, dirty = load(model_dir), load(model_dir)
    clean.step(rows, plan_step(rows, FOUR))
    dirty.step(poisoned, plan_step(poisoned, FOUR))
    assert_same(weights(dirty), weights(clean))


@pytest.mark.parametrize(("quantity", "huge"), [("loss", 3e38), ("gradient norm", 1e30)])
def test_a_step_that_is_not_finite_is_not_made(model_dir: Path, quantity: str, huge: float) -> None:
    learner = load(model_dir)
    rows = make_rows(3)
    plan = plan_step(rows, FOUR)
    learner.step(rows, plan)
    before, state = weights(learner), learner._require()[1].tensors()
    state = {name: tensor.clone() for name, tensor in state.items()}
    broken = [replace(row, advantage=huge) for row in rows]
    with pytest.raises(NonFiniteStepError) as refusal:
        learner.step(broken, plan)
    assert refusal.value.quantity == quantity
    assert learner.step_count == 1
    assert_same(weights(learner), before)
    assert_same(learner._require()[1].tensors(), state)
    learner.step(rows, plan)
    undisturbed = load(model_dir)
    undisturbed.step(rows, plan)
    undisturbed.step(rows, plan)
    assert_same(weights(learner), weights(undisturbed))


def test_rows_the_model_cannot_take_are_refused_by_name(model_dir: Path) -> None:
    learner = load(model_dir)
    row = make_rows(1)[0]
    alien = replace(row, token_ids=np.full_like(row.token_ids, VOCABULARY))
    long = replace(
        row,
        token_ids=np.zeros(65, np.uint32),
        loss_mask=np.arange(65) > 0,
        logprobs=np.zeros(65, np.float32),
    )
    for refused, expected in (
        (alien, BatchRefusal.OUT_OF_VOCABULARY),
        (long, BatchRefusal.ROW_TOO_LONG),
    ):
        with pytest.raises(BatchRefusedError) as refusal:
            learner.step([refused], plan_step([refused], SINGLE))
        assert (refusal.value.refusal, refusal.value.row_id) == (expected, row.row_id)
    with pytest.raises(BatchRefusedError) as refusal:
        learner.step([row], plan_step([row], BatchOptions(rank_count=2)))
    assert refusal.value.refusal is BatchRefusal.PLAN_MISMATCH


def test_options_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        LearnerOptions(loss=LossOptions(kl_coefficient=0.1))
    for wrong in ({"learning_rate": -1.0}, {"clip_grad_norm": 0.0}, {"betas": (1.0, 0.9)}):
        with pytest.raises(ValueError, match=r"is|are"):
            OptimizerOptions(**wrong)
