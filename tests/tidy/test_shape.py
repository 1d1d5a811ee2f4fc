"""Sizes: a line fits a window, a function a screen, a file a sitting."""

import ast

from tests.tidy.sources import expect_none, name_of, own_files, python_files, text_of, tree_of

COLUMNS = 100
# A schema is prose beside rules, and buf format never breaks a line.
SCHEMA_COLUMNS = 110
FUNCTION_LINES = 60
FILE_LINES = 400
MEASURED = {".py", ".proto", ".ts", ".sh"}
TEXT = [
    path
    for path in own_files()
    if path.suffix in MEASURED
    or (path.suffix == "" and (text_of(path) or "").startswith("#!"))
    or path.name == "Makefile"
]


def test_lines() -> None:
    expect_none(
        [
            f"{name_of(path)}:{number}"
            for path in TEXT
            for number, line in enumerate((text_of(path) or "").splitlines(), 1)
            if len(line) > (SCHEMA_COLUMNS if path.suffix == ".proto" else COLUMNS)
        ]
    )


def test_files() -> None:
    expect_none(
        [
            f"{name_of(path)}: {count} lines"
            for path in TEXT
            if (count := len((text_of(path) or "").splitlines())) > FILE_LINES
        ]
    )


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring: explaining is never too long."""
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    explained = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (node.end_lineno or 0) - node.lineno + 1 - explained


def test_functions() -> None:
    expect_none(
        [
            f"{name_of(path)}:{node.lineno} {node.name}: {body_lines(node)} lines"
            for path in python_files()
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and body_lines(node) > FUNCTION_LINES
        ]
    )
