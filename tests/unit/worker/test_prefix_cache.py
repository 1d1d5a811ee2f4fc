"""Sequences in memory: bounded, newest kept, no tenant sees another's."""

import numpy as np

from callforest_core.custody.path import EMPTY_PATH, TokenPath
from callforest_mesh.worker.core import Sequence
from callforest_mesh.worker.prefix_cache import PrefixCache


def sequence(tokens: int, mark: int = 0) -> Sequence:
    return Sequence(TokenPath.of(np.full(tokens, mark, np.uint32)), bytes([mark] * 32))


def test_the_longest_unused_makes_room() -> None:
    cache = PrefixCache(3 * (1200 + 512))
    for mark, call_id in enumerate("abc"):
        cache.put("t", "k", call_id, sequence(100, mark))
    assert cache.get("t", "k", "a") is not None
    cache.put("t", "k", "d", sequence(100))
    assert cache.get("t", "k", "b") is None
    assert [call_id for call_id in "acd" if cache.get("t", "k", call_id)] == ["a", "c", "d"]
    assert cache.size_bytes <= 3 * (1200 + 512)


def test_a_large_one_displaces_many_and_one_too_large_none() -> None:
    cache = PrefixCache(10_000)
    for call_id in "abcdef":
        cache.put("t", "k", call_id, sequence(100))
    cache.put("t", "k", "large", sequence(700))
    assert cache.get("t", "k", "large") is not None
    assert cache.size_bytes <= 10_000
    before = len(cache)
    cache.put("t", "k", "huge", sequence(900))
    assert cache.get("t", "k", "huge") is None
    assert len(cache) == before


def test_put_again_replaces_and_does_not_count_twice() -> None:
    cache = PrefixCache(10_000)
    cache.put("t", "k", "a", sequence(100, 1))
    size = cache.size_bytes
    cache.put("t", "k", "a", sequence(100, 2))
    found = cache.get("t", "k", "a")
    assert found is not None
    assert found.chain_hash == bytes([2] * 32)
    assert (cache.size_bytes, len(cache)) == (size, 1)
    cache.drop("t", "k", "a")
    assert (cache.size_bytes, len(cache)) == (0, 0)


def test_tenants_and_attempts_are_apart() -> None:
    cache = PrefixCache(10_000)
    cache.put("t", "k", "a", sequence(1))
    assert cache.get("u", "k", "a") is None
    assert cache.get("t", "k2", "a") is None
    assert not cache.held("u", "k", 64)


def test_held_are_the_newest_of_the_attempt() -> None:
    cache = PrefixCache(100_000)
    for number in range(5):
        cache.put("t", "k", f"c{number}", sequence(1))
    cache.put("t", "other", "x", sequence(1))
    assert list(cache.held("t", "k", 3)) == ["c4", "c3", "c2"]
    assert len(cache.held("t", "k", 64)) == 5


def test_sequences_in_one_room_take_it_once() -> None:
    cache = PrefixCache(40_000)
    path = EMPTY_PATH.extended(np.zeros(1000, np.uint32))
    grown = path.extended(np.ones(10, np.uint32))
    assert grown.room is path.room
    cache.put("t", "k", "a", Sequence(path, bytes(32)))
    cache.put("t", "k", "b", Sequence(grown, bytes(32)))
    assert cache.size_bytes == path.room.size_bytes + 2 * 512
    cache.drop("t", "k", "a")
    assert cache.size_bytes == path.room.size_bytes + 512
    cache.drop("t", "k", "b")
    assert cache.size_bytes == 0
