"""The models that the demo can train, each with what makes it learn in a few minutes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from callforest.capture.v1 import attempt_pb2
from callforest_mesh.demo.compacting_harness import CompactingHarness
from callforest_mesh.demo.harness import CountingHarness, GameOptions
from callforest_mesh.demo.loop import LoopOptions
from callforest_mesh.demo.smollm2 import make_smollm2
from callforest_mesh.worker.tiny_model import make_tiny_model

_SERVED: Final = "policy"
_SMOLLM2_DIRECTORY: Final = "smollm2"
_Maker: TypeAlias = Callable[[Path, int], Path]
"""(state directory, seed) -> directory of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A model and how it is trained here.

    Attributes:
        make: writes the checkpoint.
        kept: the entry of the state directory that the next demo uses again; "" for none.
        context_token_count: most tokens a prompt and its generation may have together.
        learning_rate: constant.
        loop: how much is played.
        note: said before anything else.
        has_bars: whether the run fails when its figures miss the bars of TRN-9.
    """

    make: _Maker
    kept: str
    context_token_count: int
    learning_rate: float
    loop: LoopOptions
    note: str = ""
    has_bars: bool = False


def _make_tiny(state: Path, seed: int) -> Path:
    return make_tiny_model(state / "model", seed=seed)


def _make_smollm2(state: Path, seed: int) -> Path:
    del seed  # nothing about it is random
    return make_smollm2(state / _SMOLLM2_DIRECTORY)


TINY: Final = Policy(
    make=_make_tiny,
    kept="",
    context_token_count=2048,
    learning_rate=0.015,
    loop=LoopOptions(run="demo", model=_SERVED),
)
SMOLLM2: Final = Policy(
    make=_make_smollm2,
    kept=_SMOLLM2_DIRECTORY,
    context_token_count=1024,
    learning_rate=5e-5,
    loop=LoopOptions(
        run="demo",
        model=_SERVED,
        steps=4,
        groups_per_step=2,
        rollouts_per_group=4,
        openings=("Count from 1 to 20.", "1, 2, 3, 4,"),
        harness=CountingHarness(GameOptions(turns=2)),
        step_timeout_s=600.0,
    ),
    note="SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), in float32 on the processor",
)
POLICIES: Final[Mapping[str, Policy]] = {"tiny": TINY, "smollm2": SMOLLM2}


def compacting(policy: Policy) -> Policy:
    """Give the policy under a harness that compacts its history: eight rollouts a step (TRN-9)."""
    loop = replace(
        policy.loop,
        run="recency",
        groups_per_step=2,
        rollouts_per_group=4,
        harness=CompactingHarness(),
        mode=attempt_pb2.CAPTURE_MODE_FOREST,
    )
    return replace(policy, loop=loop, has_bars=True)
