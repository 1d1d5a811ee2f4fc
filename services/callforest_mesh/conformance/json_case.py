"""Read and compare JSON exactly: 1 and 1.0 differ, -0.0 keeps its sign, integers have no bound."""

from __future__ import annotations

import json
import math
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Case: TypeAlias = dict[str, Json]


class CaseError(ValueError):
    """A line is not a case of the suite that was named."""


def read_case(line: str) -> Case:
    """Parse one line of a case file: an object with an `id`.

    Raises:
        CaseError: it is not.
    """
    try:
        case: object = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CaseError(f"not JSON: {error}") from error
    if not isinstance(case, dict) or "id" not in case:
        raise CaseError("not an object with an id")
    return case


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def write_json(value: Json) -> str:
    """Serialise on one line; floats in their shortest exact form."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def same(left: Json, right: Json) -> bool:
    """Whether two values are the same JSON, types and signs of zeros included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float) and isinstance(right, float):
        return left == right and math.copysign(1.0, left) == math.copysign(1.0, right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left == right


def member(case: Case, name: str) -> Json:
    """Return a member that the suite needs.

    Raises:
        CaseError: the case has none.
    """
    if name not in case:
        raise CaseError(f"the case has no {name!r}")
    return case[name]
