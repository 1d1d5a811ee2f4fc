"""How many rows a group is padded with so that its rows deal evenly (FIN-6)."""

from __future__ import annotations


def padding_count(row_count: int, row_multiple: int) -> int:
    """Give the number of padding rows that make `row_count` a multiple of `row_multiple`.

    Raises:
        ValueError: the multiple is not positive, or the count is negative.
    """
    if row_multiple < 1 or row_count < 0:
        raise ValueError(f"{row_count} rows cannot be padded to a multiple of {row_multiple}")
    return -row_count % row_multiple
