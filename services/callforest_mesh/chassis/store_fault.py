"""What the verification of a store found wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreFault:
    """One thing that a store must not hold, or lacks.

    Attributes:
        key: names the record: `database/key in hexadecimal`, the file, or an attempt and its call.
        text: what is wrong.
    """

    key: str
    text: str
