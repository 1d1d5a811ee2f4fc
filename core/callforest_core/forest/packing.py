"""Token-budget bins: which sequences share a microbatch.

Modified first-fit decreasing after Johnson and Garey (1985): sequences are classed by the share
of the capacity they need, and medium and small ones are fitted into the room that large ones leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class PackingRefusedError(ValueError):
    """The sequences cannot be packed as asked.

    Attributes:
        sequence: index of the sequence at fault, or None when the fault is not one sequence's.
    """

    def __init__(self, message: str, *, sequence: int | None = None) -> None:
        super().__init__(message)
        self.sequence = sequence


@dataclass(slots=True)
class _Bin:
    """A bin in the making: the sequences in it and the room left."""

    room: int
    sequences: list[int] = field(default_factory=list)
    has_medium: bool = False

    def take(self, sequence: int, length: int) -> None:
        self.sequences.append(sequence)
        self.room -= length


def pack_bins(
    lengths: Sequence[int], capacity: int, min_bins: int = 1, multiple: int = 1
) -> list[list[int]]:
    """Pack sequences into bins of at most `capacity` tokens.

    Deterministic: equal lengths keep their order. Each sequence lands in exactly one bin and no
    bin is empty.

    Args:
        lengths: tokens of each sequence.
        capacity: most tokens of a bin.
        min_bins: fewest bins, for instance the number of data-parallel ranks.
        multiple: the number of bins is a multiple of this.

    Returns:
        Bins of indices into `lengths`.

    Raises:
        PackingRefusedError: a length is not positive or exceeds the capacity, or there are too
            few sequences for the number of bins asked for.
    """
    if capacity <= 0 or min_bins < 1 or multiple < 1:
        raise PackingRefusedError(f"{capacity=}, {min_bins=} and {multiple=} must be positive")
    for index, length in enumerate(lengths):
        if not 0 < length <= capacity:
            raise PackingRefusedError(
                f"sequence {index} has {length} tokens, bins hold 1 to {capacity}", sequence=index
            )
    if not lengths:
        return []
    bins = _first_fit(lengths, capacity)
    return _spread(bins, lengths, _round_up(max(min_bins, len(bins)), multiple))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Run the five phases; classes by share of the capacity: > 1/2, > 1/3, > 1/6, the rest."""
    shares = np.asarray(lengths, dtype=np.int64)
    descending = np.argsort(-shares, kind="stable").tolist()
    large = [i for i in descending if 2 * lengths[i] > capacity]
    medium = [i for i in descending if 2 * lengths[i] <= capacity < 3 * lengths[i]]
    small = [i for i in descending if 3 * lengths[i] <= capacity < 6 * lengths[i]]
    tiny = [i for i in descending if 6 * lengths[i] <= capacity]
    bins: list[_Bin] = []
    for index in large:
        bins.append(_Bin(room=capacity))
        bins[-1].take(index, lengths[index])
    for each in bins:
        each.has_medium = _take_largest(each, medium, lengths)
    for each in reversed(bins):
        _take_two_small(each, small, lengths)
    left = sorted(medium + small + tiny, key=lambda i: -lengths[i])
    for each in bins:
        while _take_largest(each, left, lengths):
            pass
    _open_bins(left, lengths, capacity, bins)
    return [each.sequences for each in bins]


def _take_largest(each: _Bin, pool: list[int], lengths: Sequence[int]) -> bool:
    """Move the largest of the descending pool that fits into the bin; False when none does."""
    for position, index in enumerate(pool):
        if lengths[index] <= each.room:
            each.take(index, lengths[index])
            del pool[position]
            return True
    return False


def _take_two_small(each: _Bin, small: list[int], lengths: Sequence[int]) -> None:
    """In a bin without a medium: the smallest small, then the largest small that still fits."""
    if each.has_medium or len(small) < 2:
        return
    if lengths[small[-1]] + lengths[small[-2]] > each.room:
        return
    smallest = small.pop()
    each.take(smallest, lengths[smallest])
    _take_largest(each, small, lengths)


def _open_bins(left: list[int], lengths: Sequence[int], capacity: int, bins: list[_Bin]) -> None:
    """Put what is left, longest first, into the emptiest of the new bins, else open another."""
    opened: list[_Bin] = []
    for index in left:
        emptiest = max(opened, key=lambda each: each.room, default=None)
        if emptiest is None or emptiest.room < lengths[index]:
            emptiest = _Bin(room=capacity)
            opened.append(emptiest)
        emptiest.take(index, lengths[index])
    bins.extend(opened)


def _spread(bins: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Raise the number of bins: the last sequence of the fullest bin moves into a new one."""
    if len(lengths) < count:
        raise PackingRefusedError(f"{len(lengths)} sequences cannot fill {count} bins")
    while len(bins) < count:
        fullest = max(bins, key=len)
        bins.append([fullest.pop()])
    return bins
