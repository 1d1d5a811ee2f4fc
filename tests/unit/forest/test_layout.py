from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.forest.layout import (
    Contribution,
    GroupLayout,
    RowPurpose,
    Segment,
    lay_out_group,
)
from callforest_core.forest.padding import padding_count


def segment(slot: int, name: str) -> Segment:
    return Segment(f"r{slot}", name, name.encode().ljust(32, b"."))


def chain(slot: int, *names: str) -> Contribution:
    return Contribution(slot, (tuple(segment(slot, name) for name in names),))


def masked(slot: int) -> Contribution:
    return Contribution(slot, ())


def names(layout: GroupLayout, row: int) -> list[str]:
    return [layout.segments[span.segment].call_id for span in layout.rows[row].spans]


def owned(layout: GroupLayout, row: int) -> list[bool]:
    return [span.owns_loss for span in layout.rows[row].spans]


@pytest.mark.requirement("FIN-2", "FIN-4")
def test_row_ids_are_fixed_by_group_slot_and_place() -> None:
    forest = Contribution(
        1, (chain(1, "a", "b").paths[0], chain(1, "a", "c").paths[0], chain(1, "d").paths[0])
    )
    layout = lay_out_group("g7", [chain(0, "x"), forest, masked(2)], 4)
    assert [row.row_id for row in layout.rows] == [
        "g7_g0_s0",
        "g7_g1_s0",
        "g7_g1_s1",
        "g7_g1_s2",
        "g7_g2_s0",
        "g7_pad0",
        "g7_pad1",
        "g7_pad2",
    ]
    assert [row.slot for row in layout.rows] == [0, 1, 1, 1, 2, None, None, None]
    again = lay_out_group("g7", [chain(0, "x"), forest, masked(2)], 4)
    assert again == layout


def test_a_shared_ancestor_is_owned_by_the_first_path_and_stands_once() -> None:
    forest = Contribution(0, (chain(0, "a", "b").paths[0], chain(0, "a", "c").paths[0]))
    layout = lay_out_group("g", [forest], 1)
    assert [part.call_id for part in layout.segments] == ["a", "b", "c"]
    assert (names(layout, 0), owned(layout, 0)) == (["a", "b"], [True, True])
    assert (names(layout, 1), owned(layout, 1)) == (["a", "c"], [False, True])


@pytest.mark.requirement("FIN-4")
def test_a_masked_rollout_borrows_the_first_valid_row_without_its_loss() -> None:
    layout = lay_out_group("g", [masked(0), chain(1, "a", "b"), masked(2)], 1)
    assert [row.purpose for row in layout.rows] == [
        RowPurpose.PLACEHOLDER,
        RowPurpose.TRAINING,
        RowPurpose.PLACEHOLDER,
    ]
    for row in (0, 2):
        assert (names(layout, row), owned(layout, row)) == (["a", "b"], [False, False])
    assert (names(layout, 1), owned(layout, 1)) == (["a", "b"], [True, True])


@pytest.mark.requirement("FIN-4")
@pytest.mark.bugcase("B27")
def test_without_a_valid_rollout_there_is_no_row_not_even_padding() -> None:
    layout = lay_out_group("g", [masked(0), masked(1)], 8)
    assert (layout.rows, layout.segments) == ((), ())
    assert lay_out_group("g", [], 8).rows == ()


@pytest.mark.bugcase("B27")
def test_six_rollouts_and_thirteen_rows_get_three_padding_rows_on_four_ranks() -> None:
    group = []
    for slot, paths in enumerate([3, 2, 2, 2, 3, 1]):
        roots = tuple((segment(slot, f"c{number}"),) for number in range(paths))
        group.append(Contribution(slot, roots))
    layout = lay_out_group("g", group, 4)
    padding = layout.rows[13:]
    assert len(layout.rows) == 16
    assert {row.purpose for row in layout.rows[:13]} == {RowPurpose.TRAINING}
    assert {row.purpose for row in padding} == {RowPurpose.PADDING}
    assert {row.slot for row in padding} == {None}
    assert not any(span.owns_loss for row in padding for span in row.spans)


@pytest.mark.parametrize(
    ("rows", "multiple", "padding"), [(13, 4, 3), (16, 4, 0), (1, 8, 7), (0, 8, 0), (5, 1, 0)]
)
def test_padding_fills_to_the_multiple(rows: int, multiple: int, padding: int) -> None:
    assert padding_count(rows, multiple) == padding


@pytest.mark.parametrize(("rows", "multiple"), [(1, 0), (1, -1), (-1, 1)])
def test_padding_refuses_what_has_no_meaning(rows: int, multiple: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        padding_count(rows, multiple)


@pytest.mark.parametrize(
    "contributions",
    [
        [chain(1, "a")],
        [chain(0, "a"), chain(0, "b")],
        [chain(1, "a"), chain(0, "b")],
        [Contribution(0, ((),))],
        [chain(0, "a", "b", "a")],
        [chain(0, "a"), Contribution(1, chain(0, "a").paths)],
    ],
    ids=["gap", "twice", "order", "empty path", "circle", "two owners"],
)
def test_a_group_that_cannot_be_owned_is_refused(contributions: list[Contribution]) -> None:
    with pytest.raises(ValueError, match="group g"):
        lay_out_group("g", contributions, 1)


@st.composite
def rollouts(draw: st.DrawFn) -> list[Contribution]:
    """Groups whose valid rollouts are random forests, some masked."""
    group = []
    for slot in range(draw(st.integers(1, 6))):
        parents = draw(st.lists(st.integers(-1, 7), max_size=8))
        trees: list[tuple[Segment, ...]] = []
        for number, parent in zip(count(), parents, strict=False):
            before = trees[parent] if 0 <= parent < number else ()
            trees.append((*before, segment(slot, f"c{number}")))
        inner = {path[:-1] for path in trees}
        group.append(Contribution(slot, tuple(path for path in trees if path not in inner)))
    return group


@given(rollouts(), st.integers(1, 9))
def test_every_segment_is_owned_by_one_training_row_of_its_rollout(
    group: list[Contribution], multiple: int
) -> None:
    layout = lay_out_group("g", group, multiple)
    if not any(one.paths for one in group):
        assert layout.rows == ()
        return
    brought = {part for one in group for path in one.paths for part in path}
    assert set(layout.segments) == brought
    assert len(layout.segments) == len(brought)
    owners = [
        (layout.segments[span.segment].capture_key, row.slot)
        for row in layout.rows
        for span in row.spans
        if span.owns_loss
    ]
    assert len(owners) == len(layout.segments)
    assert all(key == f"r{slot}" for key, slot in owners)
    assert len(layout.rows) % multiple == 0
    assert len({row.row_id for row in layout.rows}) == len(layout.rows)
    for one in group:
        rows = [row for row in layout.rows if row.slot == one.slot]
        paths = [tuple(layout.segments[span.segment] for span in row.spans) for row in rows]
        if one.paths:
            assert tuple(paths) == one.paths
            assert {row.purpose for row in rows} == {RowPurpose.TRAINING}
        else:
            assert [row.purpose for row in rows] == [RowPurpose.PLACEHOLDER]
