"""The core's own tests notice small faults in it: a part of them here, more in `make mutants`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.run import (
    DRAWN,
    EQUIVALENT,
    drawn,
    equivalents,
    every_mutant,
    modules,
    quick_tests_of,
)
from tests.mutation.trial import ROOT

DEPTH = int(os.environ.get("DEPTH", "1"))
SEED = int(os.environ.get("SEED", "1"))
PATCHED = """
import sys
from pathlib import Path
from tests.mutation.mutants import mutants_of
from tests.mutation.trial import Trial, run_trials

file, tests = map(Path, sys.argv[1:])
mutants = mutants_of("weighed", file)
trials = [Trial(one.name, "weighed", file, one.source, [[tests]]) for one in mutants]
print(sum(one.survived for one in run_trials(trials, jobs=2)))
"""
WEIGHED = '''"""A module."""

def heavier(one: int, other: int) -> int:
    """Give the heavier."""
    if one > other:
        return one
    return other
'''


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the project's folder: trials fork, which a test session's process must not."""
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.timeout(300 * DEPTH)
def test_the_core_s_tests_notice_small_faults() -> None:
    """Row 30: at most a tenth of the mutants survives."""
    ended = run("-m", "tests.mutation.run", "--depth", str(DEPTH), "--seed", str(SEED))
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = ended.stdout.splitlines()[-1]
    assert result.startswith("RESULT ")
    figures = json.loads(result.removeprefix("RESULT "))
    assert figures["mutants"] == DRAWN * DEPTH
    assert figures["killed"] + figures["survivors"] == figures["mutants"]
    assert figures["score"] >= 0.9


@pytest.mark.parametrize(
    ("test", "survivors"),
    [
        ("assert heavier(1, 1) == 1", 3),
        ("assert (heavier(2, 1), heavier(1, 2)) == (2, 2)", 1),
    ],
)
def test_a_weak_test_lets_mutants_live(tmp_path: Path, test: str, survivors: int) -> None:
    """What no test could tell stays: of equals either is the heavier one."""
    file, tests = tmp_path / "weighed.py", tmp_path / "test_weighed.py"
    file.write_text(WEIGHED)
    tests.write_text(f"from weighed import heavier\n\ndef test_it():\n    {test}\n")
    ended = run("-c", PATCHED, str(file), str(tests))
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == survivors


def test_mutants_are_named_once_and_differ() -> None:
    mutants = every_mutant()
    assert len({one.name for one in mutants}) == len(mutants) > 3000
    changed = drawn(20, seed=1)
    assert all(one.source() != one.file.read_text() for one in changed)
    assert drawn(20, seed=1) == changed != drawn(20, seed=2)


def test_equivalent_mutants_exist_and_say_why() -> None:
    names = {one.name for one in every_mutant()}
    for name, reason in equivalents().items():
        assert name in names, f"{EQUIVALENT.name} names a mutant that there is no more: {name}"
        assert len(reason) > 10, name


def test_what_says_nothing_to_a_test_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Told."""\n'
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class A:\n"
        '    """Told."""\n'
        "    size: 'int | None'\n"
        "def f(a: 'b') -> 'c':\n"
        "    assert a == 1\n"
        "    for _ in zip(a, a, strict=True):\n"
        '        raise ValueError("a text")\n'
    )
    assert [(one.before, one.after) for one in mutants_of("m", file)] == [
        ("raise ValueError('a text')", "pass")
    ]


def test_every_module_has_tests() -> None:
    for module in modules():
        rounds = quick_tests_of(module)
        assert rounds
        assert all(file.exists() for files in rounds for file in files)


def test_a_name_outlives_the_lines_around_it(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    names = []
    for text in ("def f(a):\n    return a + 1\n", "X = 'y z'\n\n\ndef f(a):\n    return a + 1\n"):
        file.write_text(text)
        names.append([Mutant.name.fget(one) for one in mutants_of("m", file)])
    assert names[0] == names[1]
