"""How many rows a group is padded with so that its rows deal evenly (FIN-6)."""

from __future__ import annotations

import math


def padding_count(row_count: int, row_multiple: int) -> int:
    """Give the number of padding rows that make `row_count` a multiple of `row_multiple`.

    Raises:
        ValueError: the multiple is not positive, or the count is negative.
    """
    if row_multiple < 1 or row_count < 0:
        raise ValueError(f"{row_count} rows cannot be padded to a multiple of {row_multiple}")
    return -row_count % row_multiple


def row_multiple(
    ranks: int, *, train_microbatch: int, logprob_microbatch: int, packing: bool
) -> int:
    """Give what the rows of every group are padded to a multiple of.

    With packing, rows only need to deal evenly over the data-parallel ranks; fixed batches must
    also fill both kinds of microbatch on each.

    Args:
        ranks: data-parallel size.
        train_microbatch: rows of a training microbatch.
        logprob_microbatch: rows of a log-probability microbatch.
        packing: whether rows are packed into token-budget bins.

    Raises:
        ValueError: a size is not positive.
    """
    if min(ranks, train_microbatch, logprob_microbatch) < 1:
        raise ValueError("sizes must be positive")
    if packing:
        return ranks
    return math.lcm(ranks * train_microbatch, ranks * logprob_microbatch)
