import math

import pytest
import torch
from torch import Tensor

from callforest_mesh.trainer.learner.loss import (
    LossOptions,
    Metric,
    RetainedTokens,
    importance_weights,
    metric_sums,
    select_logprobs,
    token_losses,
)

PLAIN = LossOptions(importance_correction=False)


def make_tokens(
    current: list[float],
    previous: list[float] | None = None,
    generated: list[float] | None = None,
    advantages: list[float] | None = None,
    reference: list[float] | None = None,
) -> RetainedTokens:
    return RetainedTokens(
        current=torch.tensor(current, requires_grad=True),
        previous=torch.tensor(previous or current),
        generated=torch.tensor(generated or current),
        advantages=torch.tensor(advantages or [1.0] * len(current)),
        reference=None if reference is None else torch.tensor(reference),
    )


def means(tokens: RetainedTokens) -> dict[Metric, float]:
    losses = token_losses(tokens, LossOptions())
    sums = metric_sums(tokens, losses, LossOptions())
    return {metric: float(sums[metric]) / len(tokens.current) for metric in Metric}


def gradient(tokens: RetainedTokens, options: LossOptions) -> list[float]:
    token_losses(tokens, options).sum().backward()  # type: ignore[no-untyped-call]  # torch
    assert tokens.current.grad is not None
    return tokens.current.grad.tolist()


def test_on_policy_the_loss_is_minus_the_advantage_and_its_gradient_the_score() -> None:
    tokens = make_tokens([-1.0, -2.0], advantages=[0.5, -1.5])
    assert token_losses(tokens, PLAIN).tolist() == [-0.5, 1.5]
    assert gradient(tokens, PLAIN) == [-0.5, 1.5]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 1.0, -1.2, 0.0),  # above the clip a good token gains no more
        (0.5, 1.0, -0.5, -0.5),  # below it, it still pulls back
        (1.5, -1.0, 1.5, 1.5),  # a bad token that grew is still pushed down
        (0.5, -1.0, 0.8, 0.0),  # one that shrank enough is left alone
    ],
)
def test_the_clip_is_pessimistic(ratio: float, advantage: float, loss: float, slope: float) -> None:
    tokens = make_tokens([math.log(ratio) - 3], previous=[-3.0], advantages=[advantage])
    assert token_losses(tokens, PLAIN).item() == pytest.approx(loss, rel=1e-5)
    assert gradient(tokens, PLAIN)[0] == pytest.approx(slope, rel=1e-5)


def test_clip_bounds_may_differ() -> None:
    tokens = make_tokens([math.log(1.5) - 3], previous=[-3.0])
    wide = LossOptions(clip_high=0.28, importance_correction=False)
    assert token_losses(tokens, wide).item() == pytest.approx(-1.28, rel=1e-5)


def test_the_dual_clip_bounds_negative_advantages_only() -> None:
    dual = LossOptions(dual_clip=3.0, importance_correction=False)
    grown = make_tokens([math.log(10) - 5] * 2, previous=[-5.0] * 2, advantages=[-1.0, 1.0])
    assert token_losses(grown, dual).tolist() == pytest.approx([3.0, -1.2], rel=1e-5)


def test_the_importance_weight_is_learner_over_engine_and_has_no_gradient() -> None:
    tokens = make_tokens([-1.0], generated=[-1.0 - math.log(2)])
    assert importance_weights(tokens).item() == pytest.approx(2.0, rel=1e-6)
    assert token_losses(tokens, LossOptions()).item() == pytest.approx(-2.0, rel=1e-6)
    assert gradient(tokens, LossOptions()) == pytest.approx([-2.0], rel=1e-6)
    assert token_losses(tokens, PLAIN).item() == -1.0


def test_a_weight_that_is_not_finite_is_zero() -> None:
    tokens = make_tokens([-1.0, -1.0, -1.0], generated=[-200.0, float("nan"), -1.0])
    assert importance_weights(tokens).tolist() == [0.0, 0.0, 1.0]
    assert gradient(tokens, LossOptions()) == [0.0, 0.0, -1.0]


def test_the_kl_penalty_is_k3_with_the_gradient_of_the_score() -> None:
    penalised = LossOptions(importance_correction=False, kl_coefficient=0.1)
    tokens = make_tokens([-1.0], advantages=[0.0], reference=[-1.5])
    k3 = math.exp(-0.5) - 1 + 0.5
    assert token_losses(tokens, penalised).item() == pytest.approx(0.1 * k3, rel=1e-5)
    # d(k3)/d(current) = 1 - exp(d), plus k3 itself through the score.
    assert gradient(tokens, penalised)[0] == pytest.approx(
        0.1 * (1 - math.exp(-0.5) + k3), rel=1e-4
    )
    with pytest.raises(ValueError, match="reference"):
        token_losses(make_tokens([-1.0]), penalised)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_low": -0.1},
        {"clip_low": 1.1},
        {"clip_high": math.nan},
        {"dual_clip": 1.0},
        {"kl_coefficient": -1.0},
    ],
)
def test_bounds_that_mean_nothing_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"clip|coefficient"):
        LossOptions(**options)  # type: ignore[arg-type]  # one bound at a time


def test_metrics_are_ideal_when_engine_and_learner_agree() -> None:
    exact = means(make_tokens([-1.0, -2.0, -0.5]))
    assert exact[Metric.TOKEN_MULT_PROB_ERROR] == 1.0
    assert exact[Metric.GEN_KL_ERROR] == 0.0
    assert exact[Metric.POLICY_KL_ERROR] == 0.0
    assert exact[Metric.JS_DIVERGENCE_ERROR] == pytest.approx(0.0, abs=1e-15)
    assert exact[Metric.SAMPLING_IMPORTANCE_RATIO] == 1.0
    assert exact[Metric.PROBS_RATIO] == 1.0
    assert exact[Metric.APPROX_ENTROPY] == pytest.approx(3.5 / 3)


@pytest.mark.requirement("TRN-9")
@pytest.mark.parametrize(
    ("gap", "error", "divergence"), [(0.05, 1.0513, 0.00127), (0.1, 1.1052, 0.0052)]
)
def test_metrics_scale_with_the_gap(gap: float, error: float, divergence: float) -> None:
    apart = means(make_tokens([-1.0, -2.0], generated=[-1.0 - gap, -2.0 - gap]))
    assert apart[Metric.TOKEN_MULT_PROB_ERROR] == pytest.approx(error, abs=1e-4)
    assert apart[Metric.GEN_KL_ERROR] == pytest.approx(divergence, abs=1e-4)
    assert apart[Metric.SAMPLING_IMPORTANCE_RATIO] == pytest.approx(math.exp(gap), rel=1e-5)
    assert 0 < apart[Metric.JS_DIVERGENCE_ERROR] < apart[Metric.GEN_KL_ERROR]


def test_selection_keeps_poison_where_nothing_trains_out_of_loss_and_gradient() -> None:
    values: Tensor = torch.tensor([[[0.5, 1.5], [math.nan, math.inf]]], requires_grad=True)
    retained = torch.tensor([[True, False]])
    current = select_logprobs(values, torch.tensor([[1, 0]]), retained)
    assert current.tolist() == pytest.approx([-math.log(1 + math.exp(-1))])
    current.sum().backward()  # type: ignore[no-untyped-call]  # torch
    assert values.grad is not None
    assert values.grad[0, 1].tolist() == [0.0, 0.0]
    assert bool(values.grad.isfinite().all())
