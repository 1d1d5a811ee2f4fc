"""Forests: the seed's worked examples, ownership once, rows that do not depend on order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callforest_core.custody.call import CallIdentity, CallRecord, Receipt, StagedCall
from callforest_core.custody.completion import complete_call
from callforest_core.custody.tokens import TokenIds
from callforest_core.custody.verification import VerificationError
from callforest_core.forest.padding import padding_count, row_multiple
from callforest_core.forest.paths import SelectionError, selected_paths
from callforest_core.forest.reconstruction import Forest, reconstruct


@dataclass
class Rollout:
    """Stages honest calls; each adds a carry and a generation of its own tokens."""

    calls: dict[str, StagedCall] = field(default_factory=dict)
    paths: dict[str, TokenIds] = field(default_factory=dict)

    def call(self, call_id: str, parent: str | None = None, *, carry: int = 2, gen: int = 3) -> str:
        first = 1000 * (len(self.calls) + 1)
        prefix = self.paths[parent] if parent else None
        before = prefix if prefix is not None else np.empty(0, np.uint32)
        prompt = np.concatenate((before, np.arange(first, first + carry, dtype=np.uint32)))
        generated = np.arange(first + 500, first + 500 + gen, dtype=np.uint32)
        staged = complete_call(
            CallIdentity("r", call_id, parent),
            prefix=prefix,
            parent_chain_hash=self.calls[parent].chain_hash if parent else None,
            prompt_ids=prompt,
            generated_ids=generated,
            logprobs=np.full(gen, -0.5, np.float32),
            weight_version=1,
        )
        self.calls[call_id] = staged
        self.paths[call_id] = np.concatenate((prompt, generated))
        return call_id

    def chain(self, names: str, parent: str | None = None) -> list[str]:
        made = []
        for name in names.split():
            parent = self.call(name, parent)
            made.append(name)
        return made

    def forest(
        self, selection: list[str], scored: str | None = None, order: list[str] | None = None
    ) -> Forest:
        calls = [self.calls[name] for name in order or list(self.calls)]
        manifest = tuple(CallRecord.of(one, f"resp-{one.identity.call_id}") for one in calls)
        receipt = Receipt("r", manifest, scored or selection[-1], terminal_selection="declared")
        return reconstruct(receipt, calls, selection)


def _paths(forest: Forest) -> list[tuple[str, ...]]:
    return [row.line.call_ids for row in forest.rows]


def _owned(forest: Forest) -> list[int]:
    """Every token that has loss, over all rows."""
    return [int(t) for row in forest.rows for t in row.line.token_ids[row.loss_mask]]


@pytest.mark.requirement("FOR-2")
def test_twenty_calls_without_compaction_make_one_row() -> None:
    rollout = Rollout()
    names = rollout.chain(" ".join(f"c{n}" for n in range(1, 21)))
    forest = rollout.forest(names)
    assert _paths(forest) == [tuple(names)]
    assert forest.metrics.gen_tokens_per_sample == 60
    assert forest.metrics.total_tokens_per_sample == 100


@pytest.mark.requirement("FOR-2")
def test_one_compaction_after_ten_makes_two_rows() -> None:
    rollout = Rollout()
    before = rollout.chain(" ".join(f"c{n}" for n in range(1, 11)))
    after = rollout.chain(" ".join(f"c{n}" for n in range(11, 21)))
    assert _paths(rollout.forest(before + after)) == [tuple(before), tuple(after)]


@pytest.mark.requirement("FOR-1", "FOR-3")
def test_a_rejected_call_contributes_nothing() -> None:
    rollout = Rollout()
    rollout.chain("c1 c2")
    rollout.call("c3")
    rollout.call("c4", "c3")
    rollout.call("c5", "c3")
    forest = rollout.forest(["c1", "c2", "c3", "c5"])
    assert _paths(forest) == [("c1", "c2"), ("c3", "c5")]
    rejected = set(rollout.calls["c4"].token_ids.tolist())
    assert not rejected & {int(t) for row in forest.rows for t in row.line.token_ids}


@pytest.mark.requirement("FOR-1")
def test_a_call_whose_children_were_discarded_is_an_endpoint() -> None:
    rollout = Rollout()
    rollout.chain("a b")
    assert _paths(rollout.forest(["a"])) == [("a",)]


@pytest.mark.requirement("FOR-2")
def test_resuming_an_earlier_chain_adds_no_row() -> None:
    rollout = Rollout()
    rollout.call("a1")
    rollout.call("b1")
    rollout.call("a2", "a1")
    rollout.call("b2", "b1")
    forest = rollout.forest(["a1", "b1", "a2", "b2"])
    assert _paths(forest) == [("a1", "a2"), ("b1", "b2")]


@pytest.mark.requirement("FOR-3")
@pytest.mark.bugcase("B19")
def test_a_shared_ancestor_has_loss_once() -> None:
    rollout = Rollout()
    rollout.call("A", gen=2)
    rollout.call("B", "A", gen=3)
    rollout.call("C", "A", gen=1)
    forest = rollout.forest(["A", "B", "C"])
    assert _paths(forest) == [("A", "B"), ("A", "C")]
    assert [int(row.loss_mask.sum()) for row in forest.rows] == [5, 1]
    assert forest.metrics.gen_tokens_per_sample == 6
    assert forest.metrics.max_gen_tokens_per_turn == 3
    # Context is exact in both, and keeps its log-probabilities where it is not owned.
    second = forest.rows[1].line
    assert second.token_ids[:4].tolist() == rollout.paths["A"].tolist()
    assert second.logprobs[2:4].tolist() == [-0.5, -0.5]


@pytest.mark.requirement("FOR-3")
@pytest.mark.bugcase("B12")
@pytest.mark.parametrize("order", [["A", "B", "C", "D"], ["A", "C", "B", "D"]])
def test_rows_do_not_depend_on_the_order_of_commits(order: list[str]) -> None:
    rollout = Rollout()
    rollout.call("A")
    rollout.call("B", "A")
    rollout.call("C")
    rollout.call("D", "C")
    forest = rollout.forest(["A", "B", "C", "D"], order=order)
    assert _paths(forest) == [("A", "B"), ("C", "D")]
    assert forest.rows[0].first_owned == 0


@pytest.mark.requirement("FOR-3")
@pytest.mark.bugcase("B18")
def test_a_rejected_compaction_owns_nothing() -> None:
    rollout = Rollout()
    rollout.chain("A B")
    rollout.call("K1", "B")
    rollout.call("K2", "B")
    rollout.call("C")
    forest = rollout.forest(["A", "B", "K2", "C"])
    assert _paths(forest) == [("A", "B", "K2"), ("C",)]
    generated = [rollout.calls[name].token_ids[2:].tolist() for name in ("A", "B", "K2", "C")]
    assert _owned(forest) == [token for one in generated for token in one]


@pytest.mark.requirement("SEL-6")
def test_the_scored_call_need_not_be_last() -> None:
    rollout = Rollout()
    rollout.chain("a b")
    rollout.call("c")
    assert len(rollout.forest(["a", "b", "c"], scored="b").rows) == 2


@pytest.mark.parametrize(
    ("selection", "scored", "reason"),
    [
        ([], "a", "empty_selection"),
        (["a", "a"], "a", "duplicate_selection"),
        (["a", "x"], "a", "unknown_selection"),
        (["a"], "b", "terminal_not_selected"),
        (["b"], "b", "selection_not_closed"),
    ],
)
def test_a_selection_that_cannot_be_reconstructed_says_why(
    selection: list[str], scored: str, reason: str
) -> None:
    rollout = Rollout()
    rollout.chain("a b")
    with pytest.raises(SelectionError) as caught:
        rollout.forest(selection, scored=scored)
    assert caught.value.reason == reason
    named = f": {', '.join(caught.value.call_ids)}" if caught.value.call_ids else ""
    assert str(caught.value) == f"{reason}{named}"


@pytest.mark.requirement("FOR-4")
def test_a_dead_branch_is_verified_too() -> None:
    rollout = Rollout()
    rollout.chain("a b")
    rollout.call("dead", "a")
    call = rollout.calls["dead"]
    flipped = call.token_ids.copy()
    flipped[0] ^= 1
    rollout.calls["dead"] = replace(call, token_ids=flipped)
    with pytest.raises(VerificationError) as caught:
        rollout.forest(["a", "b"])
    assert (caught.value.code, caught.value.call_id) == ("corrupt_digest", "dead")


@st.composite
def _forests(draw: st.DrawFn) -> tuple[Rollout, list[str]]:
    """A random forest and a random closed selection of it in random order."""
    rollout = Rollout()
    count = draw(st.integers(1, 12))
    for number in range(count):
        parent = draw(st.sampled_from([None, *rollout.calls]))
        sizes = draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
        rollout.call(f"c{number}", parent, carry=sizes[0], gen=sizes[1])
    kept = [name for name in rollout.calls if draw(st.booleans())]
    closed: set[str] = set()
    for name in kept or ["c0"]:
        cursor: str | None = name
        while cursor is not None:
            closed.add(cursor)
            cursor = rollout.calls[cursor].identity.parent_call_id
    return rollout, draw(st.permutations(sorted(closed)))


@pytest.mark.requirement("FOR-3")
@settings(max_examples=150, deadline=None)
@given(_forests(), st.randoms(use_true_random=False))
def test_every_selected_generated_token_has_loss_exactly_once(
    made: tuple[Rollout, list[str]], random: Random
) -> None:
    rollout, selection = made
    forest = rollout.forest(selection)
    expected = sorted(
        int(token)
        for name in selection
        for token in rollout.calls[name].token_ids[rollout.calls[name].carry_len :]
    )
    assert sorted(_owned(forest)) == expected
    assert forest.metrics.gen_tokens_per_sample == len(expected)
    shuffled = list(rollout.calls)
    random.shuffle(shuffled)
    again = rollout.forest(selection, order=shuffled)
    assert _paths(again) == _paths(forest)
    for row, other in zip(forest.rows, again.rows, strict=True):
        assert row.line.token_ids.tolist() == other.line.token_ids.tolist()
        assert row.loss_mask.tolist() == other.loss_mask.tolist()


@settings(max_examples=100, deadline=None)
@given(_forests())
def test_each_endpoint_of_the_selected_graph_has_one_row(made: tuple[Rollout, list[str]]) -> None:
    rollout, selection = made
    parents = {name: call.identity.parent_call_id for name, call in rollout.calls.items()}
    inner = {parents[name] for name in selection}
    paths = selected_paths(parents, selection)
    assert sorted(path.call_ids[-1] for path in paths) == sorted(set(selection) - inner)


def test_six_rollouts_thirteen_rows_four_ranks_need_three_padding_rows() -> None:
    multiple = row_multiple(4, train_microbatch=1, logprob_microbatch=1, packing=False)
    assert padding_count(13, multiple) == 3
    assert row_multiple(4, train_microbatch=2, logprob_microbatch=3, packing=False) == 24
    assert row_multiple(4, train_microbatch=2, logprob_microbatch=3, packing=True) == 4
