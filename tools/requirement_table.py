"""Which test proves which requirement, read from the tests' own markers.

A test names what it proves with `@pytest.mark.requirement("CAP-3")` on the function, on its class,
or in the module's `pytestmark`. The table in `docs/requirements.md` is written from these.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/requirements.md"
IDS = ROOT / "tests/tidy/requirement_ids.txt"
PREAMBLE = """# Requirements

Each requirement, and the tests that prove it. `make requirements` writes this page from the
markers of the tests; `make test` fails when a test named here did not run and pass.

| ID | What | Proof |
|---|---|---|
"""


def requirements() -> dict[str, str]:
    """Return the frozen list: each requirement's id and what it asks, in order."""
    rows = (line.partition(" ") for line in IDS.read_text("utf-8").splitlines())
    return {identity: what for identity, _, what in rows}


def _marked(expressions: list[ast.expr]) -> Iterator[str]:
    """Yield the ids given to `requirement(...)` in decorators or in a `pytestmark`."""
    for expression in expressions:
        if isinstance(expression, ast.List | ast.Tuple):
            yield from _marked(expression.elts)
        elif (
            isinstance(expression, ast.Call)
            and isinstance(expression.func, ast.Attribute)
            and expression.func.attr == "requirement"
        ):
            yield from (ast.literal_eval(argument) for argument in expression.args)


def _proofs_in(body: list[ast.stmt], above: set[str], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (requirement, test) for the tests of a module or class body."""
    for node in body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
        ):
            above = above | set(_marked([node.value]))
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            ids = above | set(_marked(node.decorator_list))
            yield from _proofs_in(node.body, ids, f"{prefix}::{node.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
            "test"
        ):
            ids = above | set(_marked(node.decorator_list))
            yield from ((identity, f"{prefix}::{node.name}") for identity in ids)


def proofs() -> dict[str, list[str]]:
    """Return the tests (`path::name`) that carry each requirement's marker."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        prefix = path.relative_to(ROOT).as_posix()
        for identity, test in _proofs_in(ast.parse(path.read_text("utf-8")).body, set(), prefix):
            found[identity].append(test)
    return {identity: sorted(tests) for identity, tests in found.items()}


def table() -> str:
    """Return the text of `docs/requirements.md` as the markers have it now."""
    found = proofs()
    rows = (
        f"| {identity} | {what} | "
        + ("<br>".join(f"`{test}`" for test in found.get(identity, ())) or "planned")
        + " |\n"
        for identity, what in requirements().items()
    )
    return PREAMBLE + "".join(rows)
