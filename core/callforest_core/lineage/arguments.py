"""The form in which forest mode compares the arguments of tool calls (docs/lineage.md, 11).

White space, the order of keys and escapes do not count; numbers do, as they are written. Text that
two JSON parsers could read differently is compared as the text it is.
"""

import json
import math
from typing import NoReturn

from callforest_core.lineage.canonical_json import (
    MAX_INTEGER,
    MIN_INTEGER,
    canonical_json,
)

JSON_SPACE = " \t\n\r"


def source_arguments(value: object) -> str:
    """Return the comparison form of a call's arguments.

    Null is the empty text. A string is JSON in canonical form; it stays as it is, without outer
    white space, when it is no JSON (`NaN` is none), names a key twice in one object, or holds a
    number that 64 bits cannot carry, a lone surrogate, or more than 254 containers inside one
    another. Such text is never the canonical form of another. Any other value is written
    canonically.

    Raises CanonicalJsonError for a value, not text, without canonical form.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return canonical_json(value)
    try:
        return canonical_json(_DECODER.decode(value))
    except (ValueError, RecursionError):
        return value.strip(JSON_SPACE)


class _AmbiguousTextError(ValueError):
    """Text that languages read differently."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _AmbiguousTextError("a key twice")
    return members


def _integer(digits: str) -> int:
    number = int(digits)
    if not MIN_INTEGER <= number <= MAX_INTEGER:
        raise _AmbiguousTextError("an integer beyond 64 bits")
    return number


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _AmbiguousTextError("a number beyond a double")
    return number


def _no_constant(name: str) -> NoReturn:
    raise _AmbiguousTextError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_int=_integer,
    parse_float=_float,
    parse_constant=_no_constant,
)
