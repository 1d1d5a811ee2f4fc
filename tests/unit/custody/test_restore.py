"""Which calls a restore takes over: the named ones and all that they continue, nothing else."""

import hashlib
import random

import pytest

from callforest_core.custody.restore import restore_digest, with_ancestors

pytestmark = pytest.mark.requirement("TRN-12")


def naive(parents: dict[str, str | None], named: set[str]) -> set[str]:
    """The smallest set that holds the named calls and with each call its parent."""
    taken = set(named)
    while True:
        more = {parent for call_id in taken if (parent := parents[call_id])} - taken
        if not more:
            return taken
        taken |= more


@pytest.mark.parametrize("seed", range(40))
def test_the_calls_are_the_closure_in_the_order_of_their_records(seed: int) -> None:
    chance = random.Random(seed)
    parents: dict[str, str | None] = {}
    for number in range(chance.randint(1, 40)):
        known = [None, *parents]
        parents[f"c{number}"] = chance.choice(known)
    named = set(chance.sample(sorted(parents), chance.randint(1, len(parents))))
    taken = with_ancestors(parents, named)
    assert set(taken) == naive(parents, named)
    assert list(taken) == [call_id for call_id in parents if call_id in set(taken)]


def test_a_long_chain_is_walked_once() -> None:
    parents: dict[str, str | None] = {"c0": None}
    parents.update((f"c{n}", f"c{n - 1}") for n in range(1, 16_384))
    assert len(with_ancestors(parents, list(parents))) == 16_384


def test_a_call_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="c9"):
        with_ancestors({"c1": None}, ["c9"])


def test_the_digest_has_the_written_layout() -> None:
    layout = (
        b"callforest-restore-v1"
        b"\x00\x00\x00\x00\x00\x00\x00\x03"
        b"\x00\x00\x00\x00\x00\x00\x00\x05r1-a1"
        b"\x00\x00\x00\x00\x00\x00\x00\x02"
        b"\x00\x00\x00\x00\x00\x00\x00\x02c1"
        b"\x00\x00\x00\x00\x00\x00\x00\x03c22"
    )
    assert restore_digest(3, "r1-a1", ["c1", "c22"]) == hashlib.sha256(layout).digest()
