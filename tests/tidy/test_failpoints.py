"""Every failpoint has one name, one place and one line in the table."""

import ast
from collections import Counter
from pathlib import Path

from callforest_mesh.chassis.failpoint import POINTS
from tests.tidy.sources import dotted, expect_none, name_of, python_files, tree_of

SHARED = {"store", "stream"}
"""Owners of points that several services pass: a store, an item stream."""
TABLE = "services/callforest_mesh/chassis/failpoint.py"


def passings(path: Path) -> list[tuple[str | None, int]]:
    """Give the name of each point that a file passes, with its line; None for no plain name."""
    return [
        (_plain(node), node.lineno)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and dotted(node.func) == "failpoint"
    ]


def _plain(node: ast.Call) -> str | None:
    first = node.args[0] if len(node.args) == 1 else None
    named = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return first.value if named else None


def test_every_point_of_the_table_is_passed_at_one_place_and_no_other_is() -> None:
    found = [
        (name, f"{name_of(path)}:{line}")
        for path in python_files("services/", "core/", "clients/python/")
        if name_of(path) != TABLE
        for name, line in passings(path)
    ]
    times = Counter(name for name, _ in found)
    expect_none(
        [
            *(
                f"{place} passes {name!r}, which the table has not"
                for name, place in found
                if name not in POINTS
            ),
            *(f"{name} is passed {times[name]} times" for name in POINTS if times[name] != 1),
        ]
    )


def test_a_point_says_whose_it_is_and_what_is_true_there() -> None:
    places = {
        name: name_of(path).removeprefix("services/callforest_mesh/").split("/")[0]
        for path in python_files("services/")
        for name, _ in passings(path)
        if name is not None and name_of(path) != TABLE
    }
    owners = {name: name.partition(".")[0] for name in POINTS}
    expect_none(
        [
            f"{name} stands in {places[name]}"
            for name, owner in owners.items()
            if places[name] != ("chassis" if owner in SHARED else owner)
        ]
    )
    expect_none([name for name, truth in POINTS.items() if not truth])
