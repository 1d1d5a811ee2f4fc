"""The functional run of forest mode: a harness that compacts its history, on real parts (TRN-9)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

_STEPS = 10
_ROLLOUTS = 8


@pytest.mark.requirement("TRN-9", "CFG-2", "FOR-2")
@pytest.mark.timeout(300)
def test_a_compacting_harness_trains_all_that_it_accepted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "callforest_mesh.cli", "demo", "--harness", "recency"]
    command += ["--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["steps"] == _STEPS
    assert result["rollouts"] == _STEPS * _ROLLOUTS
    # Without a context boundary there would be a row a rollout, and the run would prove nothing.
    assert result["context_boundaries"] > 0
    assert result["max_rows"] > _ROLLOUTS
    assert result["masked"] == {}
    assert result["finalized_groups"] == _STEPS * 2
    assert result["max_reward"] > 0
    assert result["max_gen_kl_error"] < 0.05
    assert result["max_tmpe"] < 1.05
