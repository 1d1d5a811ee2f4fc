"""Statements that the house does not use: each hides a fault, or waits without a limit."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tidy.sources import (
    dotted,
    expect_none,
    imports_of,
    name_of,
    python_files,
    text_of,
    tree_of,
)

PROJECT = ("core/", "clients/python/", "services/")
UNPROVEN_IGNORE = re.compile(r"#\s*type:\s*ignore(?!\[[\w-]+(, ?[\w-]+)*\]\s+#\s*\S)")
QUEUES = {"asyncio.Queue", "asyncio.LifoQueue", "asyncio.PriorityQueue", "queue.Queue"}
SKIPS = re.compile(r"^pytest\.(mark\.)?(skip|xfail|importorskip)$")


def _calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]


def sleeps(path: Path) -> list[int]:
    """Return the lines that block a thread to wait for something."""
    imported = [line for target, line in imports_of(path) if target == "time.sleep"]
    return imported + [c.lineno for c in _calls(path) if dotted(c.func) == "time.sleep"]


def bare_excepts(path: Path) -> list[int]:
    """Return the lines that catch everything, the end of the process included."""
    return [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or dotted(node.type) == "BaseException")
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
    ]


def unproven_ignores(path: Path) -> list[int]:
    """Return the lines that silence mypy without an error code and a reason."""
    lines = (text_of(path) or "").splitlines()
    return [number for number, line in enumerate(lines, 1) if UNPROVEN_IGNORE.search(line)]


def endless_queues(path: Path) -> list[int]:
    """Return the lines that make a queue without a limit."""
    return [
        call.lineno
        for call in _calls(path)
        if dotted(call.func) == "queue.SimpleQueue"
        or (dotted(call.func) in QUEUES and not call.args and not call.keywords)
    ]


def endless_calls(path: Path) -> list[int]:
    """Return the lines that call an RPC of a stub without a deadline.

    A stub is anything whose name ends in `stub`; its RPCs are the names in CamelCase.
    """
    found = []
    for call in _calls(path):
        name = dotted(call.func)
        receiver, _, method = name.rpartition(".")
        if not (method[:1].isupper() and receiver.lower().endswith("stub")):
            continue
        given = [word.value for word in call.keywords if word.arg == "timeout"]
        limited = given and not (isinstance(given[0], ast.Constant) and given[0].value is None)
        if not limited:
            found.append(call.lineno)
    return found


def skips(path: Path) -> list[int]:
    """Return the lines by which a test excuses itself from running or from passing."""
    return [
        node.lineno
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and SKIPS.match(dotted(node))
    ]


@pytest.mark.parametrize(
    ("rule", "folders"),
    [
        (sleeps, ()),
        (bare_excepts, ()),
        (unproven_ignores, ()),
        (endless_queues, PROJECT),
        (endless_calls, (*PROJECT, "benchmarks/")),
        (skips, ("tests/",)),
    ],
)
def test_no(rule: Callable[[Path], list[int]], folders: tuple[str, ...]) -> None:
    found = [f"{name_of(path)}:{line}" for path in python_files(*folders) for line in rule(path)]
    expect_none(found, rule.__doc__ or "")


@pytest.mark.parametrize(
    ("rule", "wrong", "right"),
    [
        (sleeps, "import time\ntime.sleep(1)", "import asyncio\nasyncio.sleep(0)"),
        (sleeps, "from time import sleep", "from time import monotonic"),
        (bare_excepts, "try: f()\nexcept: g()", "try: f()\nexcept ValueError: g()"),
        (unproven_ignores, "x = 1  # type: " + "ignore", "x = 1  # type: ignore[misc]  # why"),
        (unproven_ignores, "x = 1  # type: " + "ignore[misc]", "x = 1"),
        (endless_queues, "asyncio.Queue()", "asyncio.Queue(8)"),
        (endless_calls, "await self._stub.Stage(r)", "await self._stub.Stage(r, timeout=t)"),
        (endless_calls, "stub.Stage(r, timeout=None)", "stub.close()"),
        (skips, "@pytest.mark.skip\ndef f(): ...", "@pytest.mark.engine\ndef f(): ..."),
    ],
)
def test_rule_tells_wrong_from_right(
    rule: Callable[[Path], list[int]], wrong: str, right: str, tmp_path: Path
) -> None:
    for text, count in ((wrong, 1), (right, 0)):
        # `await` outside a function parses only inside one.
        body = "\n".join(f"    {line}" for line in text.splitlines())
        path = tmp_path / f"case{count}.py"
        path.write_text(f"async def case():\n{body}\n")
        assert len(rule(path)) == count, text
