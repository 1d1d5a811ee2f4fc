"""`callforest conformance check` and `eval`: prove an implementation against cases."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from callforest_mesh.conformance.json_case import CaseError, Json, read_case, write_json
from callforest_mesh.conformance.suites import Suite, UnknownSuiteError, suite_named

_SHOWN_CHARACTERS = 400
_TOO_DEEP = "the case is nested deeper than it can be read"


def check(suite: str, file: str | Path, stdout: TextIO | None = None) -> int:
    """Answer every case of a file and compare with what it expects.

    Prints each failure and, last, `N passed, M failed`.

    Args:
        suite: name of the suite.
        file: one case a line.
        stdout: where to print, by default the process's.

    Returns:
        The exit status: 0 when all passed and there was one, 1 on a failure, 2 without a suite.
    """
    out = sys.stdout if stdout is None else stdout
    try:
        chosen = suite_named(suite)
    except UnknownSuiteError as error:
        print(error, file=sys.stderr)
        return 2
    passed = failed = 0
    with Path(file).open(encoding="utf-8") as lines:
        for number, line in _cases(lines):
            failure = _failure(chosen, line)
            if failure is None:
                passed += 1
            else:
                failed += 1
                print(f"line {number}: {failure}", file=out)
    print(f"{passed} passed, {failed} failed", file=out)
    return 1 if failed or not passed else 0


def evaluate(suite: str, stdin: TextIO, stdout: TextIO) -> int:
    """Answer every case read and write `{"id": ..., "answer": ...}` a line.

    A line that is no case of the suite gets the answer `{"error": reason}`.

    Args:
        suite: name of the suite.
        stdin: one case a line.
        stdout: one answer a line, in order.

    Returns:
        The exit status: 0, 1 when a line was no case, 2 without a suite.
    """
    try:
        chosen = suite_named(suite)
    except UnknownSuiteError as error:
        print(error, file=sys.stderr)
        return 2
    status = 0
    for _, line in _cases(stdin):
        case_id: Json = None
        answered: Json
        try:
            case = read_case(line)
            case_id = case["id"]
            answered = chosen.answer(case)
        except CaseError as error:
            answered, status = {"error": str(error)}, 1
        except RecursionError:
            answered, status = {"error": _TOO_DEEP}, 1
        print(write_json({"id": case_id, "answer": answered}), file=stdout, flush=True)
    return status


def _cases(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _failure(suite: Suite, line: str) -> str | None:
    """Say what is wrong with the answer to a case, or nothing."""
    try:
        case = read_case(line)
        answered = suite.answer(case)
        if suite.agrees(case, answered):
            return None
        expected = write_json(case.get("expect"))
    except CaseError as error:
        return str(error)
    except RecursionError:
        return _TOO_DEEP
    shown = write_json(answered)[:_SHOWN_CHARACTERS]
    return f"{case['id']}: answered {shown}, expected {expected[:_SHOWN_CHARACTERS]}"
