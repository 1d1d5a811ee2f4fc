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
LEVELS_MAX = 128
"""Most containers inside one another of text that is read as JSON."""


def source_arguments(value: object) -> str:
    """Return the comparison form of a call's arguments.

    Null and the empty text are `{}`. A string is JSON (RFC 8259) in canonical form; it stays as
    it is, without outer white space, when it is no JSON (`NaN` is none), names a key twice in one
    object, or holds a number that 64 bits cannot carry, a lone surrogate, or more than LEVELS_MAX
    levels. Such text is never the canonical form of another. Any other value is written
    canonically.

    Raises CanonicalJsonError for a value, not text, without canonical form.
    """
    if value is None or value == "":
        return "{}"
    if not isinstance(value, str):
        return canonical_json(value)
    try:
        parsed = _DECODER.decode(value)
        if _is_deep(value, parsed):
            raise _AmbiguousTextError("more levels than every parser takes")
        return canonical_json(parsed)
    except (ValueError, RecursionError):
        return value.strip(JSON_SPACE)


def _is_deep(text: str, parsed: object) -> bool:
    """Say whether more than LEVELS_MAX containers stand inside one another."""
    if text.count("[") + text.count("{") <= LEVELS_MAX:
        return False
    layer, levels = [parsed], 0
    while layer := [one for one in layer if isinstance(one, list | dict)]:
        levels += 1
        if levels > LEVELS_MAX:
            return True
        inner: list[object] = []
        for one in layer:
            inner += one.values() if isinstance(one, dict) else one
        layer = inner
    return False


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
