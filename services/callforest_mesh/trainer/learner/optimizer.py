"""AdamW with Megatron's conventions, its state as named tensors.

Megatron's own optimizer and its DDP allocate on "cuda" by name in the pinned release and would
need torch patched to run on a CPU, so the optimizer is torch's: no decay on vectors (norms), the
gradient clipped by its global norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from callforest_mesh.trainer.learner.ranks import sum_gradients

_QUANTITIES = ("step", "exp_avg", "exp_avg_sq")


class NonFiniteStepError(Exception):
    """The loss or the gradient is not finite; no step was applied and the weights are unchanged.

    Attributes:
        quantity: "loss" or "gradient norm".
    """

    def __init__(self, quantity: str, value: float) -> None:
        super().__init__(f"the {quantity} is {value}")
        self.quantity = quantity


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """How gradients become steps.

    Attributes:
        learning_rate: constant; 0 changes no bit of the weights.
        weight_decay: on matrices; vectors never decay.
        clip_grad_norm: the global norm is clipped to this.
        betas: decay of the moments.
        epsilon: added to the root of the second moment.
    """

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    clip_grad_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            ValueError: naming the option.
        """
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}")
        for name in ("epsilon", "clip_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}")


class PolicyOptimizer:
    """The optimizer of one module; every parameter by its name."""

    def __init__(self, module: nn.Module, options: OptimizerOptions) -> None:
        self._options = options
        self._parameters = dict(module.named_parameters())
        parameters = self._parameters.values()
        matrices: dict[str, Any] = {"params": [p for p in parameters if p.ndim > 1]}
        vectors: dict[str, Any] = {
            "params": [p for p in parameters if p.ndim <= 1],
            "weight_decay": 0.0,
        }
        self._adam = torch.optim.AdamW(
            [matrices, vectors],
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.epsilon,
            weight_decay=options.weight_decay,
        )

    @property
    def parameter_count(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    def zero_gradients(self) -> None:
        """Forget every gradient."""
        self._adam.zero_grad(set_to_none=True)

    def apply(self, loss: float) -> float:
        """Sum the gradients over the ranks, clip them and make one step.

        Args:
            loss: of the whole step over all ranks.

        Returns:
            The global gradient norm before the clip.

        Raises:
            NonFiniteStepError: nothing changed.
        """
        if not math.isfinite(loss):
            raise NonFiniteStepError("loss", loss)
        parameters = list(self._parameters.values())
        sum_gradients(parameters)
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = float(total)
        if not math.isfinite(norm):
            raise NonFiniteStepError("gradient norm", norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, self._options.clip_grad_norm, total)
        self._adam.step()
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Adam's state by quantity and parameter, `exp_avg:decoder...`; empty before a step."""
        return {
            f"{quantity}:{name}": self._adam.state[parameter][quantity].detach()
            for name, parameter in self._parameters.items()
            if parameter in self._adam.state
            for quantity in _QUANTITIES
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse a state that is not one of these parameters.

        Raises:
            ValueError: naming the first tensor at fault.
        """
        known = {
            f"{quantity}:{name}": () if quantity == "step" else tuple(parameter.shape)
            for name, parameter in self._parameters.items()
            for quantity in _QUANTITIES
        }
        for name, tensor in tensors.items():
            if known.get(name) != tuple(tensor.shape):
                raise ValueError(f"{name} is {tuple(tensor.shape)}, not {known.get(name)}")
        stepped = {name.partition(":")[2] for name in tensors}
        if len(tensors) != len(stepped) * len(_QUANTITIES):
            raise ValueError("a parameter has only a part of its state")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the whole state; parameters without one start afresh.

        Raises:
            ValueError: as `check`; nothing changed.
        """
        self.check(tensors)
        self._adam.state.clear()
        for name, parameter in self._parameters.items():
            if f"{_QUANTITIES[0]}:{name}" in tensors:
                self._adam.state[parameter] = {
                    quantity: self._place(quantity, tensors[f"{quantity}:{name}"], parameter)
                    for quantity in _QUANTITIES
                }

    @staticmethod
    def _place(quantity: str, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """Copy to where Adam keeps it: the step count stays on the CPU."""
        return tensor.to("cpu" if quantity == "step" else parameter.device, copy=True)
