"""The table of requirements is complete, current, and read from markers that exist."""

import ast
import re

import pytest

from tests.tidy.sources import dotted, expect_none, name_of, python_files, tree_of
from tools.check_requirements import complaints
from tools.requirement_table import TABLE, proofs, requirements, table


def test_markers_name_known_requirements() -> None:
    assert proofs().keys() - requirements().keys() == set()


def test_markers_stand_where_the_table_reads_them() -> None:
    """As decorators or in `pytestmark`; a mark given to one case of many would not be seen."""
    hidden = []
    for path in python_files("tests/"):
        tree = tree_of(path)
        seen: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                seen |= {id(inner) for inner in node.decorator_list}
            elif isinstance(node, ast.Assign) and "pytestmark" in map(dotted, node.targets):
                seen |= {id(inner) for inner in ast.walk(node.value)}
        hidden += [
            f"{name_of(path)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and dotted(node.func).endswith("mark.requirement")
            and id(node) not in seen
        ]
    expect_none(hidden)


def test_table_is_current() -> None:
    assert TABLE.read_text("utf-8") == table(), "run `make requirements`"


def test_table_has_every_requirement_once() -> None:
    listed = re.findall(r"^\| ([A-Z]+-\d+) \|", TABLE.read_text("utf-8"), re.MULTILINE)
    assert listed == list(requirements())
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize(
    ("outcomes", "count"),
    [
        ({"tests/a.py::test_b": "passed"}, 0),
        ({"tests/a.py::test_b": "skipped"}, 1),
        ({"tests/a.py::test_b": "failed"}, 1),
        ({}, 1),
    ],
)
def test_only_a_pass_is_a_proof(outcomes: dict[str, str], count: int) -> None:
    page = "| API-1 | schemas | `tests/a.py::test_b` |\n| API-2 | services | planned |\n"
    assert len(complaints(page, outcomes)) == count
