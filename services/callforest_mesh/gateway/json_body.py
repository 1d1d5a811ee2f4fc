"""A request's body as JSON that every reader takes alike.

A body that two parsers could read differently (keys twice, numbers out of range, more nesting than
a stack holds) is refused before anything is decided by it.
"""

from __future__ import annotations

import json
import marshal
import math
from collections.abc import Sequence
from typing import Final, NoReturn

from callforest_core.lineage.items import Item
from callforest_mesh.gateway.refusals import malformed

DEPTH_MAX: Final = 128
"""Lists and objects inside one another; no request needs more, and a parser has a stack."""
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
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise malformed(f"The body is nested more than {DEPTH_MAX} deep.") from error
    except ValueError as error:
        raise malformed(f"The body is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise malformed("The body must be a JSON object.")
    if text.count("[") + text.count("{") > DEPTH_MAX and _is_deeper(fields, DEPTH_MAX):
        raise malformed(f"The body is nested more than {DEPTH_MAX} deep.")
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


def _object(pairs: list[tuple[str, object]]) -> Item:
    """Refuse a key that appears twice: two readers could take different values for it."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _is_deeper(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        level = [inner for container in level for inner in _containers_in(container)]
        if not level:
            return False
    return True


def _containers_in(container: object) -> list[object]:
    members: list[object] = []
    if isinstance(container, dict):
        members = list(container.values())
    elif isinstance(container, list):
        members = container
    return [one for one in members if isinstance(one, list | dict)]
