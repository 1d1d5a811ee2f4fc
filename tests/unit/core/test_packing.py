import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.forest.packing import PackingRefusedError, pack_bins

pytestmark = pytest.mark.requirement("TRN-1")


def test_room_of_large_sequences_takes_a_medium_and_smalls() -> None:
    lengths = [60, 55, 40, 20, 20, 17, 5]

    bins = pack_bins(lengths, 100)

    # 60 takes the medium 40; the bin of 55 has none and takes the smallest small, then the largest
    # that fits; the greedy pass adds the tiny one; one small is left for a bin of its own.
    assert bins == [[0, 2], [1, 5, 3, 6], [4]]


def test_room_is_filled_as_long_as_anything_fits() -> None:
    assert pack_bins([55, 5, 20], 100) == [[0, 2, 1]]


def test_leftovers_go_to_the_emptiest_new_bin() -> None:
    # Nothing is large: three mediums need two bins, the smaller sequences level them.
    assert pack_bins([40, 38, 36, 10, 9], 100) == [[0, 1], [2, 3, 4]]


def test_bins_are_raised_to_the_minimum_and_the_multiple() -> None:
    assert pack_bins([1, 1, 1, 1], 10) == [[0, 1, 2, 3]]
    assert pack_bins([1, 1, 1, 1], 10, min_bins=2) == [[0, 1, 2], [3]]
    assert pack_bins([1, 1, 1, 1], 10, min_bins=3, multiple=2) == [[0], [3], [2], [1]]


def test_no_sequence_needs_no_bin() -> None:
    assert pack_bins([], 10, min_bins=4) == []


@pytest.mark.parametrize("lengths", [[0], [-1], [11], [3, 11]])
def test_a_sequence_no_bin_can_hold_is_refused(lengths: list[int]) -> None:
    with pytest.raises(PackingRefusedError) as refusal:
        pack_bins(lengths, 10)
    assert refusal.value.sequence == len(lengths) - 1


def test_too_few_sequences_for_the_bins_are_refused() -> None:
    with pytest.raises(PackingRefusedError) as refusal:
        pack_bins([1, 2, 3], 10, min_bins=4)
    assert refusal.value.sequence is None


@pytest.mark.parametrize(("capacity", "bins", "multiple"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_must_be_positive(capacity: int, bins: int, multiple: int) -> None:
    for lengths in ([1], []):
        with pytest.raises(PackingRefusedError, match="must be positive"):
            pack_bins(lengths, capacity, bins, multiple)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_every_sequence_lands_once_within_the_budget(
    lengths: list[int], min_bins: int, multiple: int
) -> None:
    capacity = 60
    try:
        bins = pack_bins(lengths, capacity, min_bins, multiple)
    except PackingRefusedError:
        assert len(lengths) < min_bins + multiple + 2 * sum(lengths) // capacity
        return
    assert sorted(i for each in bins for i in each) == list(range(len(lengths)))
    assert all(each and sum(lengths[i] for i in each) <= capacity for each in bins)
    assert len(bins) >= min_bins
    assert len(bins) % multiple == 0


@given(st.lists(st.integers(1, 100), min_size=1, max_size=80))
def test_never_worse_than_one_bin_over_a_half_full_average(lengths: list[int]) -> None:
    # All but one of the bins are more than half full, or the packer left room it could use.
    assert len(pack_bins(lengths, 100)) <= 1 + 2 * int(np.sum(lengths)) // 100
