"""Chaos in forest mode finds rows that are not those of their selection: each is made here."""

from collections.abc import Callable

import pytest

from callforest.capture.v1 import group_batch_pb2, receipt_pb2
from tests.robustness.forest_judge import check_rows, rows_of
from tests.unit.finalizer.forests import Grown, batch_of


def group() -> group_batch_pb2.GroupBatch:
    """Give a group of two rollouts: a forest of two roots with a branch, and a masked one."""
    first, second = Grown("r1", 0), Grown("r2", 1)
    first.chain("a", "b", "c")
    first.call("d", "a")
    first.call("e")
    second.chain("x", "y")
    chosen = ["a", "b", "c", "d", "e"]
    return batch_of(
        [
            (first, first.finalized(chosen, scored="c")),
            (second, second.finalized(["x", "y"], mask="capture_poisoned")),
        ]
    )


def rows(batch: group_batch_pb2.GroupBatch, **receipts: receipt_pb2.Receipt) -> list[str]:
    kept = {one.rollout_id: one for one in group().receipts} | receipts
    return check_rows({1: batch}, kept, {}).all()


def test_honest_rows_have_no_faults() -> None:
    assert rows(group()) == []
    assert list(rows_of(group().receipts[0])) == [
        [("a", True), ("b", True), ("c", True)],
        [("a", False), ("d", True)],
        [("e", True)],
    ]


def own_twice(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[1].spans[0].owns_loss = True


def own_never(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[0].spans[1].owns_loss = False


def lose_a_row(batch: group_batch_pb2.GroupBatch) -> None:
    del batch.rows[1]


def double_a_row(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows.append(batch.rows[2])


def train_the_masked(batch: group_batch_pb2.GroupBatch) -> None:
    for span in batch.rows[-1].spans:
        span.owns_loss = True


def move_the_loss(batch: group_batch_pb2.GroupBatch) -> None:
    batch.rows[0].spans[0].owns_loss = False
    batch.rows[1].spans[0].owns_loss = True


def cut_a_row(batch: group_batch_pb2.GroupBatch) -> None:
    del batch.rows[0].spans[-1]


def leave_the_masked_out(batch: group_batch_pb2.GroupBatch) -> None:
    del batch.rows[-1]


def miscount(batch: group_batch_pb2.GroupBatch) -> None:
    batch.receipts[0].generated_token_count += 1


def change_a_token(batch: group_batch_pb2.GroupBatch) -> None:
    column = batch.segments[0].canonical
    column.token_ids = column.token_ids[:-4] + b"\x07\0\0\0"


def change_a_receipt(batch: group_batch_pb2.GroupBatch) -> None:
    batch.receipts[0].reward = 0.25


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (own_twice, "duplicated: the loss of r1/a"),
        (own_never, "lost: the loss of r1/b"),
        (lose_a_row, "lost: the loss of r1/d"),
        (double_a_row, "duplicated: the loss of r1/e"),
        (train_the_masked, "has loss and does not train"),
        (move_the_loss, "r1 has not the rows of its selection"),
        (leave_the_masked_out, "r2 has 0 placeholders"),
        (miscount, "r1 trains 15 tokens of what it generated"),
        (cut_a_row, "lost: the loss of r1/c"),
        (change_a_token, "they are not what their digests say"),
        (change_a_receipt, "the receipt of r1 in its group"),
    ],
)
def test_rows_that_are_spoilt_are_found(
    spoil: Callable[[group_batch_pb2.GroupBatch], None], fault: str
) -> None:
    batch = group()
    spoil(batch)
    assert [found for found in rows(batch) if fault in found], rows(batch)


def test_rows_are_what_harnesses_got_at_dense_positions() -> None:
    batch = group()
    kept = {one.rollout_id: one for one in batch.receipts}
    assert check_rows({1: batch}, kept, {("r1", "a"): ""}).all() == [], "its ids have no text"
    [found] = check_rows({1: batch}, kept, {("r1", "a"): "something else"}).all()
    assert found == "changed: the rows of g: r1/a was answered otherwise"
    assert check_rows({2: batch}, kept, {}).lost == ["positions between [2] and [2]"]
    twice = check_rows({1: batch, 2: batch}, kept, {}).duplicated
    assert "the loss of r1/a" in twice
