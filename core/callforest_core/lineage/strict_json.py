"""JSON that every parser takes alike: what two of them could read differently is refused.

The standard library's decoder takes more than RFC 8259: a key twice in one object, `NaN`, numbers
that no double holds. These hooks refuse that.
"""

import math
from typing import Final, NoReturn

LEVELS_MAX: Final = 128
"""Most containers inside one another; no request needs more, and a parser has a stack."""


class AmbiguousJsonError(ValueError):
    """Text that languages read differently."""


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make an object (`object_pairs_hook`); raises AmbiguousJsonError for a key twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise AmbiguousJsonError("a key appears twice in one object")
    return members


def finite_number(digits: str) -> float:
    """Make a float (`parse_float`); raises AmbiguousJsonError for one beyond a double."""
    number = float(digits)
    if not math.isfinite(number):
        raise AmbiguousJsonError("a number is out of range")
    return number


def no_constant(name: str) -> NoReturn:
    """Refuse `NaN` and the infinities (`parse_constant`); raises AmbiguousJsonError."""
    raise AmbiguousJsonError(f"{name} is not a number")


def is_deep(text: str, parsed: object) -> bool:
    """Say whether more than LEVELS_MAX containers stand inside one another.

    Args:
        text: that was parsed; with few brackets it needs no walk.
        parsed: what it holds.
    """
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
