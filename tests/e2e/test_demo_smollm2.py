"""`callforest demo --model smollm2`: the same loop on a real model of 135 million parameters."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from callforest_mesh.demo.smollm2 import make_smollm2
from callforest_mesh.trainer.batch import BatchOptions, TrainingRow, plan_step
from callforest_mesh.trainer.learner.learner import Learner, LearnerOptions
from callforest_mesh.trainer.learner.weights import read_checkpoint
from tests.integration.reference_model import Reference

pytestmark = pytest.mark.engine

_STEPS = 2
_ROLLOUTS = 8
_ROW = re.compile(r"^ +(\d+) +8 +8 +0 +(\d\.\d{4}) +([+-]\d+\.\d{4}) ", re.MULTILINE)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory in which the checkpoint is made already, as after an earlier demo."""
    folder = tmp_path_factory.mktemp("state")
    make_smollm2(folder / "smollm2")
    return folder


@pytest.mark.requirement("TRN-1", "TRN-10")
@pytest.mark.timeout(300)
def test_the_learner_is_the_model_and_gives_it_back(state: Path, tmp_path: Path) -> None:
    checkpoint = state / "smollm2"
    reference = Reference(checkpoint)
    text = "The capital of France is"
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = reference.tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=False
    )
    answer = reference.greedy(np.array(prompt, np.uint32), 7)
    assert reference.tokenizer.decode(answer) == f"{text} Paris."

    learner = Learner(LearnerOptions())
    learner.load(checkpoint)
    ids = np.array([*prompt, *answer], np.uint32)
    mask = np.arange(len(ids)) >= len(prompt)
    row = TrainingRow("row", "rollout", ids, mask, np.zeros(len(ids), np.float32), 1.0)
    (scores,) = learner.score([row], plan_step([row], BatchOptions()))
    expected = reference.logprobs(ids[: len(prompt)], ids[len(prompt) :])
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-4, rtol=0)

    learner.export(tmp_path / "model.safetensors")
    before, after = read_checkpoint(checkpoint), read_checkpoint(tmp_path)
    assert before.keys() == after.keys(), "the output layer is the embedding, and comes once"
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.requirement("CAP-5", "TRN-1", "TRN-10")
@pytest.mark.timeout(600)
def test_the_real_model_is_trained_on_exactly_what_it_sampled(state: Path, tmp_path: Path) -> None:
    made = (state / "smollm2" / "model.safetensors").stat().st_mtime_ns
    command = [sys.executable, "-m", "callforest_mesh.cli", "demo", "--model", "smollm2"]
    command += ["--steps", str(_STEPS), "--state", str(state), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert (state / "smollm2" / "model.safetensors").stat().st_mtime_ns == made, "made once"

    rows = _ROW.findall(done.stdout)
    assert [int(step) for step, *_ in rows] == list(range(1, _STEPS + 1))
    assert all(0 <= float(reward) <= 1 and math.isfinite(float(loss)) for _, reward, loss in rows)
    assert result["rollouts"] == result["rows"] == _STEPS * _ROLLOUTS
    assert result["masked"] == {}
    # Both in float32: step 2 shows that every layer of the engine has step 1's weights.
    assert result["max_tmpe"] < 1.001
    assert result["max_gen_kl_error"] < 1e-6
    assert f"{_STEPS} steps in " in done.stdout
