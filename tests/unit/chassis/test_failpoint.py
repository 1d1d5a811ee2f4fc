"""Failpoints: armed by the environment alone, they end the process where they stand."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from callforest_mesh.chassis.configuration import load
from callforest_mesh.chassis.failpoint import DIARY_VARIABLE, POINTS, VARIABLE, read_traps

PASSING = """
import sys
from callforest_mesh.chassis.failpoint import failpoint, is_armed
print(is_armed("gateway.after_append"), is_armed("gateway.after_engine"), flush=True)
for number in range(4):
    failpoint("gateway.after_engine")
    failpoint("gateway.after_append")
    print(number, flush=True)
"""


def run(armed: str, diary: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PASSING],
        env=os.environ | {VARIABLE: armed, DIARY_VARIABLE: str(diary)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_unarmed_point_does_nothing(tmp_path: Path) -> None:
    ended = run("", tmp_path / "diary")
    assert (ended.returncode, ended.stdout.split()) == (0, ["False", "False", *"0123"])
    assert not (tmp_path / "diary").exists()


def test_an_armed_point_kills_its_process_at_the_passing_that_was_said(tmp_path: Path) -> None:
    first = run("gateway.after_append=exit", tmp_path / "diary")
    assert (first.returncode, first.stdout.split()) == (-signal.SIGKILL, ["True", "False"])
    third = run("gateway.after_append=exit@3,gateway.before_engine=exit", tmp_path / "diary")
    assert (third.returncode, third.stdout.split()[2:]) == (-signal.SIGKILL, ["0", "1"])
    lines = (tmp_path / "diary").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["gateway.after_append"] * 2


@pytest.mark.parametrize(
    "armed",
    [
        "gateway.after_nothing=exit",
        "gateway.after_append",
        "gateway.after_append=raise",
        "gateway.after_append=exit@0",
        "gateway.after_append=exit,gateway.after_append=exit@2",
    ],
)
def test_what_cannot_be_armed_ends_the_start(armed: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not arm a point"):
        read_traps(armed)
    ended = run(armed, tmp_path / "diary")
    assert ended.returncode == 1
    assert VARIABLE in ended.stderr


def test_traps_say_where_they_stand() -> None:
    traps = read_traps("gateway.after_append=exit@7,gateway.before_engine=exit,")
    assert {name: trap.nth for name, trap in traps.items()} == {
        "gateway.after_append": 7,
        "gateway.before_engine": 1,
    }
    assert set(traps) < set(POINTS)


def test_what_arms_points_is_no_configuration() -> None:
    armed = {VARIABLE: "gateway.after_append=exit", DIARY_VARIABLE: "/nowhere"}
    assert load(environment=armed) == load(environment={})
