"""A request's body as JSON that every reader takes alike.

A body that two parsers could read differently (keys twice, numbers out of range, more nesting than
a stack holds) is refused before anything is decided by it.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Sequence
from typing import Final

from callforest_core.lineage.items import Item
from callforest_core.lineage.strict_json import (
    LEVELS_MAX,
    finite_number,
    is_deep,
    no_constant,
    unique_keys,
)
from callforest_mesh.gateway.refusals import malformed

_MARSHAL_VERSION: Final = 2
"""The last version in which equal values are always equal bytes, and others never: later ones write
what came before as a reference."""
_LIST_HEAD: Final = 5


def parse_body(body: bytes) -> Item:
    """Parse a request's body.

    Raises:
        HttpRefusal: it is no JSON object, or not one that every reader takes alike.
    """
    try:
        text = body.decode("utf-8")
        fields = json.loads(
            text,
            object_pairs_hook=unique_keys,
            parse_constant=no_constant,
            parse_float=finite_number,
        )
    except RecursionError as error:
        raise malformed(f"The body is nested more than {LEVELS_MAX} deep.") from error
    except ValueError as error:
        raise malformed(f"The body is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise malformed("The body must be a JSON object.")
    if is_deep(text, fields):
        raise malformed(f"The body is nested more than {LEVELS_MAX} deep.")
    return fields


def write_json(value: object) -> bytes:
    """Write JSON without white space; ASCII, since half a surrogate pair has no UTF-8 form."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def write_items(items: Sequence[object]) -> bytes:
    """Write values as they stand in a JSON list, without its brackets."""
    return write_json(items)[1:-1]


def exact_bytes(values: list[object]) -> memoryview:
    """Write parsed JSON as bytes that are equal for equal values alone; a list's without its head.

    Types and the order of keys count. The writer of the standard library's own bytes is some ten
    times as fast as that of JSON.
    """
    return memoryview(marshal.dumps(values, _MARSHAL_VERSION))[_LIST_HEAD:]
