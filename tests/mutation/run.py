"""The mutation score of the core: how many small faults its own tests would not notice.

Mutants are drawn by a seed from all of custody, lineage and forest. Of a survivor either a test is
missing or code is dead, unless it is equivalent: those are named, with the reason, in
`equivalent.txt`, and are not drawn.

Usage: python -m tests.mutation.run [--depth 1] [--seed 1] [--jobs 2] [--only WORD] [--again FILE]
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.trial import ROOT, Outcome, Trial, TrialError, run_trials

CORE: Final = ROOT / "core" / "callforest_core"
PACKAGES: Final = ("custody", "lineage", "forest")
GOLDEN: Final = {
    "custody": ("test_custody_vectors.py", "test_conformance_command.py"),
    "lineage": ("test_lineage_vectors.py", "test_lineage_page.py"),
    "forest": ("test_forest_cases.py", "test_forest_walkthrough.py"),
}
NEIGHBOURS: Final = {
    "custody": ("worker/test_core.py", "staging/test_core.py", "client/test_codec.py"),
    "lineage": ("ledger/test_core.py", "ledger/test_forest.py", "gateway/test_core.py"),
    "forest": ("finalizer/test_salvage.py", "finalizer/test_forest.py", "finalizer/test_groups.py"),
}
"""Unit tests of what is decided by a package elsewhere."""
QUICK: Final = ("tests/unit", "tests/golden")
EQUIVALENT: Final = Path(__file__).parent / "equivalent.txt"
SURVIVED: Final = "survived: "
DRAWN: Final = 40
"""Mutants of one depth."""
SURVIVORS_MOST: Final = 0.1


def modules() -> dict[str, Path]:
    """Give the mutated modules' files by their names."""
    return {
        f"callforest_core.{package}.{file.stem}": file
        for package in PACKAGES
        for file in sorted((CORE / package).glob("*.py"))
        if file.stem != "__init__"
    }


def equivalents() -> dict[str, str]:
    """Give the reason of each mutant that is none, by its name."""
    known = {}
    for line in EQUIVALENT.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, reason = line.partition(" :: ")
            known[name] = reason
    return known


def every_mutant() -> list[Mutant]:
    """Name every mutant, the equivalent ones too."""
    return [one for module, file in modules().items() for one in mutants_of(module, file)]


def drawn(count: int, seed: int, only: str = "", named: str = "") -> list[Mutant]:
    """Draw mutants that are not known to be equivalent.

    Args:
        count: how many.
        seed: which.
        only: a part of their names.
        named: lines of an earlier run's survivors, to try these again; "" for any.
    """
    known, lines = equivalents(), named.splitlines()
    pool = [
        one
        for one in every_mutant()
        if one.name not in known
        and only in one.name
        and (not named or f"{SURVIVED}{one.name}" in lines)
    ]
    return random.Random(seed).sample(pool, min(count, len(pool)))


@functools.cache
def quick_tests_of(module: str) -> list[list[Path]]:
    """Give the quick tests of a module in rounds, the likeliest to notice a mutant first."""
    package, stem = module.split(".")[1:]
    own = sorted((ROOT / "tests" / "unit" / package).glob("test_*.py"))
    golden = [ROOT / "tests" / "golden" / name for name in GOLDEN[package]]
    users = [file for file in _quick_tests() if module in _imported(file)]
    rounds = [
        [one for one in own if one.stem == f"test_{stem}"],
        [one for one in own if one in users],
        own,
        golden,
        users,
        [ROOT / "tests" / "unit" / name for name in NEIGHBOURS[package]],
    ]
    seen: set[Path] = set()
    fresh = []
    for files in rounds:
        fresh.append([one for one in files if one not in seen])
        seen.update(files)
    return [files for files in fresh if files]


@functools.cache
def _quick_tests() -> list[Path]:
    return [one for folder in QUICK for one in sorted((ROOT / folder).rglob("test_*.py"))]


@functools.cache
def _imported(file: Path) -> set[str]:
    return {
        node.module
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    }


def trials(mutants: Sequence[Mutant]) -> list[Trial]:
    """Make the trials of mutants, and one of all their tests without any."""
    every = {file for one in mutants for files in quick_tests_of(one.module) for file in files}
    unchanged = Trial("unchanged", "", CORE, str, [sorted(every)])
    return [
        unchanged,
        *(
            Trial(one.name, one.module, one.file, one.source, quick_tests_of(one.module))
            for one in mutants
        ),
    ]


def run(mutants: Sequence[Mutant], jobs: int) -> dict[str, object]:
    """Try mutants; print the survivors, give the figures of the RESULT line.

    Raises:
        TrialError: the tests fail without any mutant.
    """
    began = time.monotonic()
    outcomes = run_trials(trials(mutants), jobs=jobs, told=_say)
    if not all(one.survived for one in outcomes if not one.trial.module):
        raise TrialError("the tests fail without any mutant")
    tried = [one for one in outcomes if one.trial.module]
    survivors = sum(one.survived for one in tried)
    return {
        "mutants": len(tried),
        "killed": len(tried) - survivors,
        "survivors": survivors,
        "score": round(1 - survivors / max(1, len(tried)), 3),
        "s_a_mutant": round(sum(one.took_s for one in tried) / max(1, len(tried)), 2),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _say(outcome: Outcome) -> None:
    if outcome.trial.module and outcome.survived:
        print(f"{SURVIVED}{outcome.trial.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=int(os.environ.get("DEPTH", "1")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "1")))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="a part of the mutants' names")
    parser.add_argument("--again", type=Path, help="an earlier run's output: try its survivors")
    chosen = parser.parse_args()
    named = chosen.again.read_text("utf-8") if chosen.again else ""
    mutants = drawn(DRAWN * chosen.depth, chosen.seed, chosen.only, named)
    figures = {"seed": chosen.seed} | run(mutants, chosen.jobs)
    print("RESULT " + json.dumps(figures))
    sys.exit(figures["survivors"] > SURVIVORS_MOST * figures["mutants"])


if __name__ == "__main__":
    main()
