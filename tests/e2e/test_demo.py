"""The main job: `callforest demo` on real parts learns, and without a learning rate does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

_STEPS = 10
_ROW = re.compile(r"^ +(\d+) +32 +(\d+) +(\d+) +(\d\.\d{4}) ", re.MULTILINE)
_DEMO_S = 280.0


def _demo(folder: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    """Run the demo as a user does; give what it printed and its RESULT."""
    command = [sys.executable, "-m", "callforest_mesh.cli", "demo"]
    command += ["--state", str(folder / "state"), "--out", str(folder / "out"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEMO_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))


@pytest.mark.requirement("CAP-1", "CAP-5", "TRN-1", "TRN-5", "TRN-10", "LED-5", "FIN-4", "API-2")
@pytest.mark.timeout(300)
def test_the_demo_learns_exactly_what_it_sampled(tmp_path: Path) -> None:
    printed, result = _demo(tmp_path)
    rows = _ROW.findall(printed)
    assert [int(step) for step, *_ in rows] == list(range(1, _STEPS + 1))
    assert result["rollouts"] == _STEPS * 32
    # A masked rollout trains nothing and says why; the others have one row each.
    assert result["rows"] + sum(result["masked"].values()) == result["rollouts"]
    assert all(reason for reason in result["masked"])
    # What the trainer scores is what the engine sampled, on every step.
    assert result["max_tmpe"] < 1.05
    assert result["max_gen_kl_error"] < 0.01
    assert result["reward_gain"] >= 0.1
    for name in ("reward.svg", "rollout.svg"):
        assert (tmp_path / "out" / name).read_text().startswith("<svg")


@pytest.mark.requirement("TRN-5")
@pytest.mark.timeout(300)
def test_without_a_learning_rate_nothing_is_learnt(tmp_path: Path) -> None:
    _, result = _demo(tmp_path, "--learning-rate", "0")
    assert result["steps"] == _STEPS
    assert abs(result["reward_gain"]) < 0.03
