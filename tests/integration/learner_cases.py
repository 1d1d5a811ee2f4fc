"""Tiny models and rows for the tests of the learner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from callforest_mesh.trainer.batch import (
    BatchMode,
    BatchOptions,
    TrainingRow,
    plan_step,
)
from callforest_mesh.trainer.learner.learner import Learner, LearnerOptions
from callforest_mesh.trainer.learner.optimizer import OptimizerOptions

VOCABULARY = 96
RATE = OptimizerOptions(learning_rate=1e-2, weight_decay=0.1)


def write_model(directory: Path, kind: str, **changes: Any) -> Any:
    """Write a tiny random checkpoint; give transformers' own model of it."""
    import transformers

    torch.manual_seed(7)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "dtype": "float32",
    } | changes
    config, model = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[kind]
    made = model(config(**common)).float().eval()
    for name, parameter in made.named_parameters():
        if "norm" in name:  # norms begin at 1, which would hide one that is never loaded
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    made.save_pretrained(directory)
    return made


def load(model_dir: Path, **options: Any) -> Learner:
    learner = Learner(LearnerOptions(**({"optimizer": RATE} | options)))
    learner.load(model_dir)
    return learner


def make_rows(count: int = 6) -> list[TrainingRow]:
    chance = np.random.default_rng(3)
    rows = []
    for index in range(count):
        length = int(chance.integers(4, 20))
        mask = chance.random(length) < 0.6
        mask[0], mask[-1] = False, True
        rows.append(
            TrainingRow(
                row_id=f"row-{index}",
                rollout_id=f"rollout-{index // 2}",
                token_ids=chance.integers(0, VOCABULARY, length).astype(np.uint32),
                loss_mask=mask,
                logprobs=(-3 * chance.random(length)).astype(np.float32),
                advantage=float(chance.normal()),
            )
        )
    return rows


def with_own_logprobs(learner: Learner, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    result = []
    for row in rows:
        (scores,) = learner.score([row], plan_step([row], BatchOptions()))
        logprobs = np.zeros_like(row.logprobs)
        logprobs[row.loss_mask] = scores.numpy()
        result.append(replace(row, logprobs=logprobs))
    return result


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in learner.policy.weights().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


SINGLE, FOUR = BatchOptions(BatchMode.FIXED, 1), BatchOptions(BatchMode.FIXED, 4)
PACKED = BatchOptions(BatchMode.PACKED, train_microbatch_tokens=40)
