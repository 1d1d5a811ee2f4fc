"""The worked examples of the design, and what holds for every forest (FOR-1 to FOR-5).

Each goes the finalizer's whole way: selection, verification, receipt, layout, batch, certificates,
the trainer's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callforest.capture.v1 import group_batch_pb2
from callforest_client.certificates import certify, verify_certificate
from callforest_mesh.trainer.core import AdvantageOptions, Baseline
from callforest_mesh.trainer.rows import StepInput, gather_step
from tests.unit.finalizer.forests import Grown, batch_of

MEAN = AdvantageOptions(baseline=Baseline.MEAN, normalise=False)
Paths = list[tuple[list[str], list[str]]]


def rows_of(batch: group_batch_pb2.GroupBatch) -> Paths:
    """The calls of each row, and those whose loss it owns."""
    return [
        (
            [batch.segments[span.segment_index].call_id for span in row.spans],
            [batch.segments[span.segment_index].call_id for span in row.spans if span.owns_loss],
        )
        for row in batch.rows
    ]


def alone(rollout: Grown, selection: Sequence[str], **asked: object) -> group_batch_pb2.GroupBatch:
    return batch_of([(rollout, rollout.finalized(selection, **asked))])


def losses(step: StepInput) -> list[int]:
    """Every token with loss, over all rows."""
    return [int(token) for row in step.rows for token in row.token_ids[row.retained_mask]]


def generated(rollout: Grown, selection: Sequence[str]) -> list[int]:
    return [
        int(token)
        for name in selection
        for token in rollout.calls[name].token_ids[rollout.calls[name].carry_len :]
    ]


def check(batch: group_batch_pb2.GroupBatch, expected: Sequence[int]) -> None:
    """Every token has loss once; every row proves itself."""
    assert sorted(losses(gather_step([batch], MEAN))) == sorted(expected)
    for certificate in certify(batch):
        verify_certificate(certificate)


@pytest.mark.requirement("FOR-2")
def test_twenty_calls_without_compaction_are_one_row() -> None:
    rollout = Grown("r0", 0)
    names = rollout.chain(*(f"c{number}" for number in range(1, 21)))
    batch = alone(rollout, names)
    assert rows_of(batch) == [(names, names)]
    (receipt,) = batch.receipts
    assert (receipt.generated_token_count, receipt.total_token_count) == (60, 100)
    check(batch, generated(rollout, names))


@pytest.mark.requirement("FOR-2")
def test_one_compaction_after_turn_ten_makes_two_rows() -> None:
    rollout = Grown("r0", 0)
    before = rollout.chain(*(f"c{number}" for number in range(1, 11)))
    after = rollout.chain(*(f"c{number}" for number in range(11, 21)))
    batch = alone(rollout, [*before, *after])
    assert rows_of(batch) == [(before, before), (after, after)]
    check(batch, generated(rollout, [*before, *after]))


@pytest.mark.requirement("FOR-1", "FOR-3")
def test_the_retry_c5_trains_and_the_rejected_c4_does_not() -> None:
    rollout = Grown("r0", 0)
    rollout.chain("c1", "c2")
    rollout.chain("c3", "c4")
    rollout.call("c5", "c3")
    accepted = ["c1", "c2", "c3", "c5"]
    batch = alone(rollout, accepted)
    assert rows_of(batch) == [(["c1", "c2"], ["c1", "c2"]), (["c3", "c5"], ["c3", "c5"])]
    reasons = {call.call_id: call.reason for call in batch.receipts[0].calls}
    assert reasons["c4"] == "not_chosen"
    check(batch, generated(rollout, accepted))


@pytest.mark.requirement("FOR-2")
def test_resuming_an_earlier_chain_adds_no_row() -> None:
    rollout = Grown("r0", 0)
    for name, parent in (("a1", None), ("b1", None), ("a2", "a1"), ("b2", "b1"), ("a3", "a2")):
        rollout.call(name, parent)
    batch = alone(rollout, ["a1", "b1", "a2", "b2", "a3"])
    assert rows_of(batch) == [(["a1", "a2", "a3"],) * 2, (["b1", "b2"],) * 2]


@pytest.mark.requirement("FOR-3")
@pytest.mark.bugcase("B19")
def test_a_shared_ancestor_is_context_in_both_rows_and_trains_in_the_first() -> None:
    """Trained tokens 2 + 3 + 1 = 6, a baseline over 2 rollouts, one advantage for both rows."""
    forked, linear = Grown("r0", 0), Grown("r1", 1)
    forked.call("A", gen=2)
    forked.call("B", "A", gen=3)
    forked.call("C", "A", gen=1)
    linear.call("only", gen=4)
    batch = batch_of(
        [
            (forked, forked.finalized(["A", "B", "C"], reward=1.0)),
            (linear, linear.finalized(["only"], reward=0.0)),
        ]
    )
    assert rows_of(batch)[:2] == [(["A", "B"], ["A", "B"]), (["A", "C"], ["C"])]
    step = gather_step([batch], MEAN)
    assert [row.advantage for row in step.rows] == [0.5, 0.5, -0.5]
    assert len(losses(step)) == 6 + 4
    (receipt, _) = batch.receipts
    assert (receipt.generated_token_count, receipt.longest_generation_token_count) == (6, 3)
    shorter = batch_of(
        [
            (forked, forked.finalized(["A", "B"], reward=1.0)),
            (linear, linear.finalized(["only"], reward=0.0)),
        ]
    )
    step = gather_step([shorter], MEAN)
    assert (len(losses(step)), [row.advantage for row in step.rows]) == (9, [0.5, -0.5])


@pytest.mark.requirement("FIN-6")
@pytest.mark.bugcase("B27")
def test_six_rollouts_make_thirteen_rows_and_three_of_padding_over_four_ranks() -> None:
    group = []
    for slot, roots in enumerate([3, 2, 2, 2, 3, 1]):
        rollout = Grown(f"r{slot}", slot)
        names = [rollout.call(f"c{number}") for number in range(roots)]
        group.append((rollout, rollout.finalized(names, reward=float(slot % 2))))
    batch = batch_of(group, row_multiple=4)
    kinds = [row.kind for row in batch.rows]
    assert (
        kinds == [group_batch_pb2.ROW_KIND_TRAINING] * 13 + [group_batch_pb2.ROW_KIND_PADDING] * 3
    )
    padded, bare = gather_step([batch], MEAN), gather_step([batch_of(group)], MEAN)
    assert losses(padded) == losses(bare)
    assert [row.advantage for row in padded.rows[:13]] == [row.advantage for row in bare.rows]
    assert padded.reward_mean == bare.reward_mean == 0.5


@pytest.mark.requirement("FOR-3")
@pytest.mark.bugcase("B12")
@pytest.mark.parametrize("order", ["ABCD", "ACBD", "CABD"])
def test_the_longest_prefix_is_the_parent_whatever_was_committed_first(order: str) -> None:
    """A, B its continuation, a rollback C, and D behind C: rows A-B and C-D, A owned once."""
    rollout = Grown("r0", 0)
    rollout.call("A")
    rollout.call("B", "A")
    rollout.call("C")
    rollout.call("D", "C")
    batch = alone(rollout, ["A", "B", "C", "D"], order=list(order))
    assert rows_of(batch) == [(["A", "B"],) * 2, (["C", "D"],) * 2]
    reference = alone(rollout, ["A", "B", "C", "D"])
    assert batch.rows == reference.rows
    assert batch.segments == reference.segments
    check(batch, generated(rollout, "ABCD"))


@pytest.mark.requirement("FOR-2")
@pytest.mark.bugcase("B13")
def test_four_calls_of_three_new_ids_are_one_row_with_four_spans_of_loss() -> None:
    rollout = Grown("r0", 0)
    parent = None
    for name in "abcd":
        parent = rollout.call(name, parent, carry=2, gen=1)
    batch = alone(rollout, list("abcd"))
    (row,) = gather_step([batch], MEAN).rows
    assert row.token_ids.tolist() == rollout.paths["d"].tolist()
    assert row.loss_mask.tolist() == [False, False, True] * 4


@pytest.mark.requirement("FOR-3")
@pytest.mark.bugcase("B18")
def test_a_rejected_compaction_contributes_nothing_and_its_retry_trains_once() -> None:
    """K1 is rejected; K2's own summary trains in its call; quoted in C's prompt it does not."""
    rollout = Grown("r0", 0)
    rollout.chain("A", "B")
    rollout.call("K1", "B")
    rollout.call("K2", "B")
    rollout.call("C")
    selection = ["A", "B", "K2", "C"]
    batch = alone(rollout, selection)
    assert rows_of(batch) == [(["A", "B", "K2"],) * 2, (["C"],) * 2]
    check(batch, generated(rollout, selection))
    shown = {call.call_id for call in batch.segments}
    assert "K1" not in shown


@st.composite
def grown(draw: st.DrawFn, slot: int) -> tuple[Grown, list[str]]:
    """A random forest and a random closed selection of it, in random order."""
    rollout = Grown(f"r{slot}", slot)
    for number in range(draw(st.integers(1, 9))):
        parent = draw(st.sampled_from([None, *rollout.calls]))
        carry, gen = draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
        rollout.call(f"c{number}", parent, carry=carry, gen=gen)
    closed: set[str] = set()
    for name in [name for name in rollout.calls if draw(st.booleans())] or ["c0"]:
        cursor: str | None = name
        while cursor is not None:
            closed.add(cursor)
            cursor = rollout.calls[cursor].identity.parent_call_id
    return rollout, draw(st.permutations(sorted(closed)))


@pytest.mark.requirement("FOR-3", "FOR-5", "SEC-3")
@settings(max_examples=100, deadline=None)
@given(grown(0), grown(1), st.integers(1, 4), st.randoms(use_true_random=False))
def test_whatever_grew_trains_every_selected_token_once_and_proves_every_row(
    first: tuple[Grown, list[str]],
    second: tuple[Grown, list[str]],
    row_multiple: int,
    random: Random,
) -> None:
    """And the rows do not depend on the order in which calls finished."""

    def publish(*, shuffled: bool) -> group_batch_pb2.GroupBatch:
        group = []
        for rollout, selection in (first, second):
            order = list(rollout.calls)
            if shuffled:
                random.shuffle(order)
            group.append((rollout, rollout.finalized(selection, order=order)))
        return batch_of(group, row_multiple=row_multiple)

    batch = publish(shuffled=False)
    expected = [token for one in (first, second) for token in generated(*one)]
    check(batch, expected)
    for receipt, (rollout, selection) in zip(batch.receipts, (first, second), strict=True):
        assert receipt.generated_token_count == len(generated(rollout, selection))
    again = publish(shuffled=True)
    assert (again.rows, again.segments) == (batch.rows, batch.segments)
    step, other = gather_step([batch], MEAN), gather_step([again], MEAN)
    for row, same in zip(step.rows, other.rows, strict=True):
        assert row.row_id == same.row_id
        assert row.token_ids.tolist() == same.token_ids.tolist()
        assert row.loss_mask.tolist() == same.loss_mask.tolist()
        assert row.logprobs.tolist() == same.logprobs.tolist()
