"""Data-parallel ranks make the step of one rank; one rank alone opens no socket."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from callforest_mesh.trainer.learner.ranks import RankOptions, join_ranks
from tests.integration.learner_cases import write_model

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


def run_ranks(model_dir: Path, scratch: Path, count: int) -> list[tuple[int, float]]:
    """Run every rank to its end; give the sockets it held and its gradient norm."""
    paths = [str(ROOT), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integration.learner_rank", str(model_dir)),
                *(str(scratch / f"{rank}-of-{count}.safetensors"), str(rank), str(count)),
                str(scratch / f"meeting-{count}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        for rank in range(count)
    ]
    answers = []
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        sockets, norm = output.split()
        answers.append((int(sockets), float(norm)))
    return answers


@pytest.mark.requirement("TRN-1", "TRN-5")
def test_two_ranks_make_the_step_of_one(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3")
    ((sockets, norm),) = run_ranks(tmp_path / "model", tmp_path, 1)
    assert sockets == 0
    both = run_ranks(tmp_path / "model", tmp_path, 2)
    assert [each for _, each in both] == pytest.approx([norm, norm], rel=1e-4)

    alone = load_file(tmp_path / "0-of-1.safetensors")
    first, second = (load_file(tmp_path / f"{rank}-of-2.safetensors") for rank in (0, 1))
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name])
        # Adam divides by the root of the square: rounding shows where a gradient is almost 0.
        difference = (first[name] - weight).abs()
        assert float(difference.mean()) < 1e-5
        assert float(difference.max()) < 1e-2


def test_several_ranks_need_a_place_to_meet() -> None:
    with pytest.raises(ValueError, match=r"rendezvous|another rank"):
        join_ranks(RankOptions(rank=0, rank_count=2))
