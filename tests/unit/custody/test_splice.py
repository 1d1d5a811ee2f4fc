"""The prefix splice: sampled tokens survive re-rendering, and nothing is guessed (ADM-6)."""

from itertools import product

import numpy as np
import pytest

from callforest_core.custody import splice as splicing
from callforest_core.custody.call import CallIdentity, StagedCall
from callforest_core.custody.completion import complete_call
from callforest_core.custody.errors import SpliceRefusedError
from callforest_core.custody.splice import Splice, splice_prefix
from callforest_core.custody.verification import verify_and_linearize
from tests.unit.custody.chains import KEY, ids, receipt_of

USER, USER_END, MODEL, MODEL_END = 1, 2, 3, 4
GO, HI, BANG, NEWLINES, BANG_NEWLINES = 20, 40, 41, 98, 99
ENDS = frozenset({MODEL_END})


def splice(
    prefix: list[int], rendered: list[int], history: list[int], ends: frozenset[int] = ENDS
) -> Splice:
    return splice_prefix(ids(*prefix), ids(*rendered), ids(*history), ends)


def refusal(
    prefix: list[int], rendered: list[int], history: list[int], ends: frozenset[int] = ENDS
) -> str:
    with pytest.raises(SpliceRefusedError) as refused:
        splice(prefix, rendered, history, ends)
    return refused.value.reason


def two_calls(
    first_prompt: list[int], sampled: list[int], second_prompt: np.ndarray
) -> list[StagedCall]:
    """Stage a root and its continuation, which must begin with all of the root's tokens."""
    root = complete_call(
        CallIdentity(KEY, "c1", None),
        prefix=None,
        parent_chain_hash=None,
        prompt_ids=first_prompt,
        generated_ids=sampled,
        logprobs=[-0.1 * (n + 1) for n in range(len(sampled))],
        weight_version=0,
    )
    child = complete_call(
        CallIdentity(KEY, "c2", "c1"),
        prefix=ids(*first_prompt, *sampled),
        parent_chain_hash=root.chain_hash,
        prompt_ids=second_prompt,
        generated_ids=[30, MODEL_END],
        logprobs=[-1.0, -1.0],
        weight_version=0,
    )
    return [root, child]


@pytest.mark.bugcase("B01")
@pytest.mark.requirement("ADM-6")
@pytest.mark.parametrize("ends", [ENDS, frozenset({USER_END, MODEL_END})])
def test_sampled_ids_replace_their_other_tokenisation(ends: frozenset[int]) -> None:
    prompt, sampled = [USER, GO, USER_END, MODEL], [10, 11, MODEL_END]
    other = [*prompt, 12, 13, MODEL_END]
    rendered = [*other, USER, GO, USER_END, MODEL]
    spliced = splice([*prompt, *sampled], rendered, other, ends)
    assert spliced.token_ids.tolist() == [1, 20, 2, 3, 10, 11, 4, 1, 20, 2, 3]
    calls = two_calls(prompt, sampled, spliced.token_ids)
    row = verify_and_linearize(receipt_of(calls, "c2"), calls)
    assert row.token_mask[4:7].tolist() == [1, 1, 1]
    assert row.logprobs[4:7].tolist() == np.array([-0.1, -0.2, -0.3], np.float32).tolist()
    assert not set(row.token_ids.tolist()) & {12, 13}


@pytest.mark.bugcase("B02")
@pytest.mark.requirement("ADM-6")
@pytest.mark.parametrize(
    "history",
    [[1, 20, 2, 3, 50, 51, 52, 30, 4], [1, 20, 2, 3, 30, 4]],
    ids=["kept in the history", "left out of it"],
)
def test_reasoning_that_the_template_leaves_out_stays(history: list[int]) -> None:
    prompt, sampled = [1, 20, 2, 3], [50, 51, 52, 30, 4]
    rendered = [1, 20, 2, 3, 30, 4, 1, 21, 2, 3]
    spliced = splice([*prompt, *sampled], rendered, history)
    assert spliced.token_ids.tolist() == [1, 20, 2, 3, 50, 51, 52, 30, 4, 1, 21, 2, 3]
    assert (spliced.prefix_cut, spliced.render_cut) == (8, 5)
    calls = two_calls(prompt, sampled, spliced.token_ids)
    row = verify_and_linearize(receipt_of(calls, "c2"), calls)
    assert row.token_mask[4:9].tolist() == [1, 1, 1, 1, 1]


@pytest.mark.bugcase("B07")
@pytest.mark.requirement("ADM-6")
def test_a_terminator_that_was_not_sampled_comes_from_the_template_without_loss() -> None:
    prompt, sampled = [1, 20, 2, 3], [30, 31]
    history = [*prompt, 30, 31, 4]
    spliced = splice([*prompt, *sampled], [*history, 1, 21, 2, 3], history)
    assert spliced.token_ids.tolist() == [1, 20, 2, 3, 30, 31, 4, 1, 21, 2, 3]
    calls = two_calls(prompt, sampled, spliced.token_ids)
    row = verify_and_linearize(receipt_of(calls, "c2"), calls)
    assert row.token_ids[6] == 4
    assert (row.token_mask[6], row.logprobs[6]) == (0, 0)


@pytest.mark.bugcase("B07")
@pytest.mark.requirement("ADM-6")
def test_a_sampled_terminator_appears_once() -> None:
    prompt, sampled = [1, 20, 2, 3], [30, 31, 4]
    history = [*prompt, *sampled]
    spliced = splice(history, [*history, 1, 21, 2, 3], history)
    assert spliced.token_ids.tolist() == [1, 20, 2, 3, 30, 31, 4, 1, 21, 2, 3]
    calls = two_calls(prompt, sampled, spliced.token_ids)
    row = verify_and_linearize(receipt_of(calls, "c2"), calls)
    assert row.token_mask[4:8].tolist() == [1, 1, 1, 0]


@pytest.mark.bugcase("B07")
@pytest.mark.requirement("ADM-6")
def test_text_that_merges_over_the_boundary_does_not_reach_the_engine() -> None:
    prompt = [1, 20, 2, 3]
    captured = [*prompt, HI, BANG, MODEL_END]
    history = [*prompt, HI, BANG, MODEL_END, NEWLINES]
    spliced = splice(captured, [*history, 1, 21, 2, 3], history)
    assert spliced.token_ids.tolist() == [*captured, NEWLINES, 1, 21, 2, 3]

    merged = [*prompt, HI, BANG_NEWLINES, MODEL_END]
    spliced = splice([*prompt, HI, BANG], [*merged, 1, 21, 2, 3], merged)
    assert spliced.token_ids.tolist() == [*prompt, HI, BANG, MODEL_END, 1, 21, 2, 3]

    unmarked = [*prompt, HI, BANG_NEWLINES]
    assert refusal([*prompt, HI, BANG], [*unmarked, 1, 21, 2, 3], unmarked) == "boundary_not_found"


@pytest.mark.requirement("ADM-6")
@pytest.mark.parametrize("sampled", [[30], [30, 4], [50, 51, 52, 30, 4], [4]])
@pytest.mark.parametrize("shown", [[30, 4], [31, 32, 4], [4]])
def test_the_result_begins_with_the_whole_prefix(sampled: list[int], shown: list[int]) -> None:
    prefix = [1, 20, 2, 3, *sampled]
    history = [1, 20, 2, 3, *shown]
    spliced = splice(prefix, [*history, 1, 21, 2, 3], history)
    assert spliced.token_ids[: len(prefix)].tolist() == prefix
    assert spliced.token_ids[-4:].tolist() == [1, 21, 2, 3]


def test_without_a_prefix_the_render_stands() -> None:
    spliced = splice([], [1, 20, 2, 3], [])
    assert (spliced.token_ids.tolist(), spliced.prefix_cut, spliced.render_cut) == (
        [1, 20, 2, 3],
        0,
        0,
    )


def test_worked_examples_of_the_published_algorithm() -> None:
    spliced = splice(
        [11, 12, 13, 40, 41, 220, 17, 2],
        [11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41],
        [11, 12, 13, 40, 41, 1001, 2],
        frozenset({2}),
    )
    assert spliced.token_ids.tolist() == [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41]
    spliced = splice(
        [11, 12, 99, 99, 99, 55, 2],
        [11, 12, 56, 2, 70, 71, 2, 40, 41],
        [11, 12, 56, 2],
        frozenset({2}),
    )
    assert spliced.token_ids.tolist() == [11, 12, 99, 99, 99, 55, 2, 70, 71, 2, 40, 41]


def test_any_terminator_of_the_set_ends_a_turn() -> None:
    """Models whose turns end on ids other than the tokenizer's one (106 and 50 beside 1)."""
    history = [5, 30, 106, 6, 31, 50]
    prefix = [5, 30, 106, 6, 33, 34, 50]
    spliced = splice(prefix, [*history, 5, 32, 106, 6], history, frozenset({1, 106, 50}))
    assert spliced.token_ids.tolist() == [*prefix, 5, 32, 106, 6]


@pytest.mark.requirement("ADM-6")
@pytest.mark.parametrize("sampled", [[30, 31, 4], [30, 31], [50, 51, 52, 30, 31, 4]])
def test_a_turn_that_ends_only_when_another_follows_is_found(sampled: list[int]) -> None:
    """Some templates write a turn's terminator with the next turn, or have it open that one."""
    prompt = [1, 20, 2, 4, 3]
    history = [*prompt, 30, 31]
    spliced = splice([*prompt, *sampled], [*history, 4, 1, 21, 2, 4, 3], history)
    text = sampled if sampled[-1] == 4 else [*sampled, 4]
    assert spliced.token_ids.tolist() == [*prompt, *text, 1, 21, 2, 4, 3]
    assert spliced.render_cut == len(history)


@pytest.mark.requirement("ADM-6")
@pytest.mark.parametrize(
    ("reason", "prefix", "rendered", "history", "ends"),
    [
        ("no_terminators", [1, 4], [1, 4, 5], [1, 4], frozenset()),
        ("boundary_not_found", [1, 4], [1, 5], [1, 4], ENDS),
        ("boundary_not_found", [1, 4], [2, 4, 5], [1], ENDS),
        ("terminator_differs", [1, 9, 8], [1, 9, 4, 5], [1, 9, 4], frozenset({4, 8})),
        ("nothing_follows", [1, 9, 4], [1, 9, 4], [1, 9, 4], ENDS),
        # A terminator was sampled inside the turn: which one ends it is not known.
        ("turn_count_differs", [1, 9, 4, 9, 4], [1, 9, 4, 5], [1, 9, 4], ENDS),
        # The template does not end the last model turn, so the boundary would lie before it.
        ("turn_count_differs", [1, 4, 3, 9, 4], [1, 4, 3, 9, 1, 4, 3], [1, 4, 3, 9], ENDS),
        # The template drops a model turn that its own cut left empty; the boundary would lie
        # behind the next observation and swallow it.
        (
            "turn_differs",
            [1, 20, 4, 3, 50, 4, 1, 21, 4, 3, 30, 4],
            [1, 20, 4, 1, 21, 4, 3, 30, 4, 1, 22, 4, 3],
            [1, 20, 4, 3, 50, 4, 1, 21, 4, 3, 30, 4],
            ENDS,
        ),
        # The template ends no turn at the history's end, and what ends next says more than it.
        ("turn_count_differs", [1, 4, 3, 9, 4], [1, 4, 3, 9, 8, 4, 3], [1, 4, 3, 9], ENDS),
        ("turn_count_differs", [1, 4, 3, 9, 4], [1, 4, 3, 9], [1, 4, 3, 9], ENDS),
        # An earlier observation was edited.
        ("turn_differs", [1, 20, 4, 3, 30, 4], [1, 21, 4, 3, 30, 4, 5], [1, 20, 4, 3, 30, 4], ENDS),
        ("turn_differs", [1, 20, 4], [1, 20, 21, 4, 5], [1, 20, 4], ENDS),
    ],
)
def test_a_boundary_that_is_not_proven_is_refused(
    reason: str,
    prefix: list[int],
    rendered: list[int],
    history: list[int],
    ends: frozenset[int],
) -> None:
    assert refusal(prefix, rendered, history, ends) == reason


@pytest.mark.requirement("ADM-6")
def test_what_was_rendered_as_it_was_captured_is_not_copied() -> None:
    history = ids(1, 20, 4, 3, 30, 4)
    rendered = ids(*history, 1, 21, 4, 3)
    spliced = splice_prefix(history, rendered, history, ENDS)
    assert spliced.token_ids is rendered
    assert (spliced.prefix_cut, spliced.render_cut) == (5, 5)


def outcomes(ends: frozenset[int]) -> list[tuple[object, ...]]:
    """Splice all that can be made of few tokens: some that a render begins with, and others."""
    tokens = (1, 2, 4)
    found: list[tuple[object, ...]] = []
    for rendered in product(tokens, repeat=4):
        for size, prefix, tail in product((1, 2, 3), product(tokens, repeat=3), ((), (4,), (1, 4))):
            history = [*rendered[:size], *tail]
            try:
                spliced = splice(list(prefix), list(rendered), history, ends)
            except SpliceRefusedError as refused:
                found.append((refused.reason, str(refused)))
            else:
                cuts = spliced.prefix_cut, spliced.render_cut
                found.append((spliced.token_ids.tolist(), *cuts))
    return found


@pytest.mark.requirement("ADM-6")
@pytest.mark.parametrize("ends", [ENDS, frozenset({2, 4})])
def test_a_render_that_begins_with_the_tokens_decides_as_any_other(
    monkeypatch: pytest.MonkeyPatch, ends: frozenset[int]
) -> None:
    """Turns are found by comparison where that is possible; counting them finds the same."""
    compared = outcomes(ends)
    assert any(type(one[0]) is list for one in compared)
    monkeypatch.setattr(
        splicing,
        "_ends_beside",
        lambda _bytes, _ends, tokens, terminators: (
            splicing.turn_ends(tokens, terminators),
            False,
        ),
    )
    assert outcomes(ends) == compared
