"""The form in which forest mode compares the arguments of tool calls (docs/lineage.md, 11).

White space, the order of keys and escapes do not count; numbers do, as they are written. Text that
two JSON parsers could read differently is compared as the text it is.
"""

import json

from callforest_core.lineage.canonical_json import (
    MAX_INTEGER,
    MIN_INTEGER,
    canonical_json,
)
from callforest_core.lineage.strict_json import (
    AmbiguousJsonError,
    finite_number,
    is_deep,
    no_constant,
    unique_keys,
)

JSON_SPACE = " \t\n\r"


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
        if is_deep(value, parsed):
            raise AmbiguousJsonError("more levels than every parser takes")
        return canonical_json(parsed)
    except (ValueError, RecursionError):
        return value.strip(JSON_SPACE)


def _integer(digits: str) -> int:
    number = int(digits)
    if not MIN_INTEGER <= number <= MAX_INTEGER:
        raise AmbiguousJsonError("an integer beyond 64 bits")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_keys,
    parse_int=_integer,
    parse_float=finite_number,
    parse_constant=no_constant,
)
