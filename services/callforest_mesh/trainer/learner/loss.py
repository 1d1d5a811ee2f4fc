"""The clipped GRPO loss and what it says about the distance between engine and learner.

Everything is computed on the retained tokens alone: they are selected, not multiplied by a mask,
so that a NaN or an infinity where nothing trains cannot reach the loss or its gradient.
Formulae and names are those of NeMo RL's token-level loss.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

KL_DISTANCE_LIMIT = 20.0
KL_PENALTY_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class LossOptions:
    """The objective.

    Attributes:
        clip_low: the ratio is clipped below at 1 - this.
        clip_high: the ratio is clipped above at 1 + this.
        dual_clip: bound above 1 on the loss of negative advantages, in advantages; None for none.
        importance_correction: weigh each token by exp(learner - engine), for the engine's and the
            learner's arithmetic (and weights, when rows are old) differ.
        kl_coefficient: weight of the penalty towards a reference policy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    importance_correction: bool = True
    kl_coefficient: float = 0.0

    def __post_init__(self) -> None:
        """Refuse bounds that mean nothing.

        Raises:
            ValueError: naming the bound.
        """
        if not 0 <= self.clip_low <= 1 or not 0 <= self.clip_high < float("inf"):
            raise ValueError(f"clip bounds {self.clip_low} and {self.clip_high}")
        if self.dual_clip is not None and not 1 < self.dual_clip < float("inf"):
            raise ValueError(f"a dual clip of {self.dual_clip} does not exceed 1")
        if not 0 <= self.kl_coefficient < float("inf"):
            raise ValueError(f"a KL coefficient of {self.kl_coefficient}")


@dataclass(frozen=True, slots=True, eq=False)
class RetainedTokens:
    """The tokens that train, flat.

    Attributes:
        current: log-probability under the policy being trained, shape [n], with gradient.
        previous: the same before this optimizer step, without gradient. With one optimizer step a
            batch it is `current` detached: one forward pass gives both, the ratio is 1 in value
            and the clip never binds; the arguments stay apart so that more steps stay exact.
        generated: the engine's when it sampled, shape [n].
        advantages: shape [n].
        reference: under a reference policy, shape [n]; None without a KL penalty.
    """

    current: Tensor
    previous: Tensor
    generated: Tensor
    advantages: Tensor
    reference: Tensor | None = None


def select_logprobs(logits: Tensor, labels: Tensor, retained: Tensor) -> Tensor:
    """Log-probability of each retained label, shape [retained tokens], in row order.

    Args:
        logits: shape [b, s, vocabulary].
        labels: shape [b, s].
        retained: shape [b, s].
    """
    return -F.cross_entropy(logits[retained], labels[retained], reduction="none")


def token_losses(tokens: RetainedTokens, options: LossOptions) -> Tensor:
    """Compute the loss of each token, importance weight and KL penalty included; shape [n].

    L = w * max(-A ratio, -A clip(ratio)), with dual clip min(L, -A c) where A < 0, plus
    beta * k3 * kappa, where k3 = exp(d) - 1 - d, d = reference - current, and kappa is 1 in value
    and carries the score's gradient. A weight w that is not finite is 0.

    Raises:
        ValueError: a KL coefficient without reference log-probabilities.
    """
    ratio = (tokens.current - tokens.previous).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    losses = torch.maximum(-tokens.advantages * ratio, -tokens.advantages * clipped)
    if options.dual_clip is not None:
        bounded = torch.minimum(losses, -tokens.advantages * options.dual_clip)
        losses = torch.where(tokens.advantages < 0, bounded, losses)
    if options.importance_correction:
        losses = losses * importance_weights(tokens)
    if options.kl_coefficient == 0:
        return losses
    if tokens.reference is None:
        raise ValueError("a KL penalty needs reference log-probabilities")
    distance = (tokens.reference - tokens.current).clamp(-KL_DISTANCE_LIMIT, KL_DISTANCE_LIMIT)
    score = (tokens.current - tokens.current.detach()).exp()
    penalty = (distance.exp() - 1 - distance) * score
    return losses + options.kl_coefficient * penalty.clamp(-KL_PENALTY_LIMIT, KL_PENALTY_LIMIT)


def importance_weights(tokens: RetainedTokens) -> Tensor:
    """Weigh by exp(previous - generated), 0 where that is not finite; no gradient; shape [n]."""
    weights = (tokens.previous - tokens.generated).exp()
    return torch.where(weights.isfinite(), weights, torch.zeros_like(weights))


class Metric(enum.IntEnum):
    """Sums over retained tokens; each divided by their number is a metric."""

    TOKEN_MULT_PROB_ERROR = 0
    """exp(|generated - previous|): 1 when engine and learner agree."""
    GEN_KL_ERROR = 1
    """exp(d) - 1 - d with d = previous - generated."""
    POLICY_KL_ERROR = 2
    """exp(d) - 1 - d with d = generated - previous."""
    JS_DIVERGENCE_ERROR = 3
    """Half of each side's k3 against the mixture."""
    SAMPLING_IMPORTANCE_RATIO = 4
    """exp(previous - generated)."""
    APPROX_ENTROPY = 5
    """-exp(current - generated) * current."""
    PROBS_RATIO = 6
    """exp(current - previous)."""
    PROBS_RATIO_CLAMPED = 7
    """The same, clipped."""
    LOSS = 8
    """The loss itself."""


def metric_sums(tokens: RetainedTokens, losses: Tensor, options: LossOptions) -> Tensor:
    """Sum every `Metric` over the tokens; shape [len(Metric)], float64, no gradient."""
    current = tokens.current.detach().double()
    previous, generated = tokens.previous.double(), tokens.generated.double()
    ratio = (current - previous).exp()
    mixture = torch.logaddexp(previous, generated) - torch.log(torch.tensor(2.0).double())
    columns = {
        Metric.TOKEN_MULT_PROB_ERROR: (generated - previous).abs().exp(),
        Metric.GEN_KL_ERROR: _k3(previous - generated),
        Metric.POLICY_KL_ERROR: _k3(generated - previous),
        Metric.JS_DIVERGENCE_ERROR: (_k3(mixture - previous) + _k3(mixture - generated)) / 2,
        Metric.SAMPLING_IMPORTANCE_RATIO: (previous - generated).exp(),
        Metric.APPROX_ENTROPY: -(current - generated).exp() * current,
        Metric.PROBS_RATIO: ratio,
        Metric.PROBS_RATIO_CLAMPED: ratio.clamp(1 - options.clip_low, 1 + options.clip_high),
        Metric.LOSS: losses.detach().double(),
    }
    return torch.stack([columns[metric].sum() for metric in Metric])


def _k3(distance: Tensor) -> Tensor:
    """Schulman's non-negative estimate of a divergence from one sample."""
    return distance.exp() - 1 - distance
