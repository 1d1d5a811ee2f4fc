"""What a trainer wrote down over all its lives, and the training that survived them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.robustness.history import Faults


class Diary:
    """The writing side: a line a deed, appended in one write, which kill -9 does not undo."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def loaded(self) -> None:
        """The model was loaded afresh: nothing is trained."""
        self._append({"deed": "loaded"})

    def restored(self, step: int) -> None:
        """A checkpoint was restored: what came after its step is gone."""
        self._append({"deed": "restored", "step": step})

    def trained(self, step: int, row_ids: Sequence[str]) -> None:
        """A step was made of these rows."""
        self._append({"deed": "trained", "step": step, "rows": list(row_ids)})

    def issued(self, version: int) -> None:
        """A weight version was issued."""
        self._append({"deed": "issued", "version": version})

    def _append(self, deed: Mapping[str, object]) -> None:
        os.write(self._descriptor, json.dumps(deed).encode() + b"\n")


@dataclass(slots=True)
class Lineage:
    """What is in the weights at the end, and what was issued on the way.

    Attributes:
        steps: (number, rows) of each surviving step, in order.
        versions: issued weight versions in order.
        lives: how often a model was loaded.
        undone: steps that a death undid.
    """

    steps: list[tuple[int, list[str]]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    lives: int = 0
    undone: int = 0


def read_diary(lines: Iterable[str]) -> Lineage:
    """Follow the deeds: a life without a checkpoint begins with nothing."""
    lineage = Lineage()
    before: list[tuple[int, list[str]]] = []
    made = 0
    for line in lines:
        deed = json.loads(line)
        if deed["deed"] == "loaded":
            # A life that died before its first step leaves what the one before it made.
            before, lineage.steps = lineage.steps or before, []
            lineage.lives += 1
        elif deed["deed"] == "restored":
            lineage.steps = [one for one in before if one[0] <= deed["step"]]
        elif deed["deed"] == "trained":
            made += 1
            lineage.steps.append((deed["step"], deed["rows"]))
        else:
            lineage.versions.append(deed["version"])
    lineage.undone = made - len(lineage.steps)
    return lineage


def training_faults(lineage: Lineage, published: Iterable[str]) -> Faults:
    """Say what is wrong: a row not trained, trained twice or unknown, a gap, a version again.

    Args:
        lineage: what survived.
        published: the ids of all rows that were published.
    """
    faults = Faults()
    numbers = [number for number, _ in lineage.steps]
    if numbers != list(range(1, len(numbers) + 1)):
        faults.changed.append(f"the surviving steps are {numbers}")
    trained = Counter(row_id for _, rows in lineage.steps for row_id in rows)
    wanted = Counter(published)
    faults.lost += [f"the training of row {row_id}" for row_id in wanted - trained]
    faults.duplicated += [f"the training of row {row_id}" for row_id in trained - wanted]
    if lineage.versions != sorted(set(lineage.versions)):
        faults.duplicated.append(f"weight versions, issued as {lineage.versions}")
    return faults
