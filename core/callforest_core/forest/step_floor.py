"""How few prompt groups an optimizer step may keep (FIN-7)."""

from __future__ import annotations

import math
from typing import Final

_DIGITS: Final = 9
"""Decimal places that count of a fraction times a number of groups: 0.7 of 10 is 7, not 8."""


def check_fraction(name: str, fraction: float | None) -> None:
    """Refuse what is no part of a whole.

    Raises:
        ValueError: it is not above 0 and at most 1; None is no fraction and may stand.
    """
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, not {fraction}")


def step_floor(group_count: int, fraction: float) -> int:
    """Give how many of a step's groups must be kept: the fraction, rounded up.

    Args:
        group_count: groups of a whole step, 1 or more.
        fraction: above 0 and at most 1.
    """
    return math.ceil(round(group_count * fraction, _DIGITS))
