"""Paths of tokens: shared memory that no continuation can see another's tokens through."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.custody.call import CallIdentity, StagedCall
from callforest_core.custody.completion import complete_call, complete_path
from callforest_core.custody.errors import PrefixMismatchError, TokenOutOfRangeError
from callforest_core.custody.path import EMPTY_PATH, TokenPath
from callforest_core.custody.tokens import encode_ids
from tests.unit.custody.chains import KEY, ids

DELTAS = st.lists(st.integers(0, 2**32 - 1), max_size=6)
PARENT_HASH = bytes(range(32))


def shows(path: TokenPath, values: list[int]) -> bool:
    expected = np.array(values, np.uint32)
    return (
        len(path) == len(values)
        and path.token_ids.tolist() == values
        and bytes(path.encoded()) == bytes(encode_ids(expected))
    )


@given(st.lists(st.tuples(st.integers(0, 20), DELTAS), max_size=25))
def test_any_tree_of_continuations_keeps_each_path_as_it_was(
    steps: list[tuple[int, list[int]]],
) -> None:
    """Each step continues one of the paths made before; the first is empty."""
    paths: list[tuple[TokenPath, list[int]]] = [(EMPTY_PATH, [])]
    for choice, delta in steps:
        path, values = paths[choice % len(paths)]
        paths.append((path.extended(np.array(delta, np.uint32)), values + delta))
        assert all(shows(kept, expected) for kept, expected in paths)


def test_a_chain_shares_memory_and_a_fork_does_not() -> None:
    parent = TokenPath.of(ids(1, 2, 3), spare=4)
    first, second = parent.extended(ids(4)), parent.extended(ids(5))
    assert np.shares_memory(parent.token_ids, first.token_ids)
    assert not np.shares_memory(parent.token_ids, second.token_ids)
    assert shows(parent, [1, 2, 3])
    assert shows(first, [1, 2, 3, 4])
    assert shows(second, [1, 2, 3, 5])


def test_growth_copies_each_token_a_bounded_number_of_times() -> None:
    path, rooms = EMPTY_PATH, set()
    for position in range(2000):
        path = path.extended(ids(position))
        rooms.add(path.room)
    assert len(rooms) <= 12
    assert path.room.size_bytes <= 2 * 12 * 2000
    assert shows(path, list(range(2000)))


def test_threads_that_continue_one_path_get_their_own_tokens() -> None:
    parent = TokenPath.of(ids(1, 2, 3), spare=100)
    with ThreadPoolExecutor(8) as pool:
        children = list(pool.map(lambda n: parent.extended(ids(n, n, n)), range(200)))
    assert all(shows(child, [1, 2, 3, n, n, n]) for n, child in enumerate(children))
    in_place = [np.shares_memory(parent.token_ids, child.token_ids) for child in children]
    assert in_place.count(True) == 1


def test_a_path_is_a_copy_and_cannot_be_written() -> None:
    given_ids = ids(1, 2, 3)
    path = TokenPath.of(given_ids)
    given_ids[:] = 0
    assert shows(path, [1, 2, 3])
    with pytest.raises(ValueError, match="read-only"):
        path.token_ids[0] = 9
    assert bytes(path.encoded(2)) == bytes(encode_ids(ids(3)))


@pytest.mark.parametrize("bad", [np.array([-1]), np.array([2**32]), np.array([1.5])])
def test_a_path_takes_only_ids(bad: np.ndarray) -> None:
    with pytest.raises(TokenOutOfRangeError):
        TokenPath.of(bad)
    with pytest.raises(TokenOutOfRangeError):
        TokenPath.of(ids(1)).extended(bad)


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [((1, 2, 3), True), ((1, 2, 3, 4), True), ((1, 2), False), ((1, 9, 3, 4), False), ((), False)],
)
def test_a_prompt_begins_with_a_path(prompt: tuple[int, ...], begins: bool) -> None:
    path = TokenPath.of(ids(1, 2, 3), spare=1)
    path.extended(ids(7))
    assert path.begins(ids(*prompt)) is begins


def completed(prefix: np.ndarray | TokenPath, prompt: np.ndarray) -> tuple[StagedCall, TokenPath]:
    return complete_path(
        CallIdentity(KEY, "c2", "c1"),
        prefix=prefix,
        parent_chain_hash=PARENT_HASH,
        prompt_ids=prompt,
        generated_ids=ids(6, 7),
        logprobs=[-0.5, -0.25],
        weight_version=7,
    )


@pytest.mark.requirement("CAP-14")
def test_a_path_and_its_plain_ids_give_one_call() -> None:
    root = complete_path(
        CallIdentity(KEY, "c1", None),
        prefix=None,
        parent_chain_hash=None,
        prompt_ids=ids(1, 2),
        generated_ids=ids(3),
        logprobs=[-1.0],
        weight_version=7,
    )
    assert shows(root[1], [1, 2, 3])
    warm, path = completed(root[1], ids(1, 2, 3, 4))
    cold, cold_path = completed(ids(1, 2, 3), ids(1, 2, 3, 4))
    assert warm.custody == cold.custody
    assert warm.token_ids.tolist() == cold.token_ids.tolist() == [4, 6, 7]
    assert shows(path, [1, 2, 3, 4, 6, 7])
    assert shows(cold_path, [1, 2, 3, 4, 6, 7])
    assert not np.shares_memory(warm.token_ids, path.token_ids)


@pytest.mark.requirement("ADM-6")
def test_a_prompt_that_leaves_the_path_is_refused_where_it_does() -> None:
    path = TokenPath.of(ids(1, 2, 3), spare=9)
    for prompt, position in ((ids(1, 9, 3, 4), 1), (ids(1, 2), 2)):
        with pytest.raises(PrefixMismatchError) as refused:
            completed(path, prompt)
        assert refused.value.position == position
    assert np.shares_memory(completed(path, ids(1, 2, 3, 4))[1].token_ids, path.token_ids)


@pytest.mark.requirement("FOR-4")
def test_two_children_of_one_parent_digest_as_if_alone() -> None:
    path = TokenPath.of(ids(1, 2, 3), spare=9)
    for carry in (4, 5):
        prompt = ids(1, 2, 3, carry)
        alone = complete_call(
            CallIdentity(KEY, "c2", "c1"),
            prefix=ids(1, 2, 3),
            parent_chain_hash=PARENT_HASH,
            prompt_ids=prompt,
            generated_ids=ids(6, 7),
            logprobs=[-0.5, -0.25],
            weight_version=7,
        )
        assert completed(path, prompt)[0].digest == alone.digest
