"""Selections stand in the order of intents, whatever finished first (SEL-2, SEL-3)."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from callforest_core.custody.call import CallRecord
from callforest_core.forest.history import read_history
from callforest_core.forest.returned import Returned, returned_calls
from callforest_core.forest.selection import SelectionRefusedError
from tests.unit.forest.captured import asked, record, said

A = record("a", [said("hm")], intent=1)
TWINS = [A, record("t1", [said("ok")], A, intent=2), record("t2", [said("ok")], A, intent=3)]
TRIPLETS = [*TWINS, record("t3", [said("ok")], A, intent=4)]


def select(result: object, records: list[CallRecord]) -> Returned:
    return returned_calls(records, read_history(result))


def refused(result: object, records: list[CallRecord]) -> SelectionRefusedError:
    with pytest.raises(SelectionRefusedError) as caught:
        select(result, records)
    return caught.value


@pytest.mark.requirement("SEL-2")
def test_equal_answers_that_are_all_shown_are_all_selected() -> None:
    """Siblings too; they stand as they were announced, whatever was committed first."""
    shown = {"output": [said("ok"), asked(), said("ok")]}
    for committed in permutations(TWINS):
        assert select(shown, [*committed]).call_ids == ("t1", "t2")
    swapped = [TWINS[0], replace(TWINS[1], intent_number=3), replace(TWINS[2], intent_number=2)]
    for committed in permutations(swapped):
        assert select(shown, [*committed]).call_ids == ("t2", "t1"), "names do not count"
    assert select({"output": [said("ok")] * 3}, TRIPLETS).call_ids == ("t1", "t2", "t3")
    named = {"output": [said("ok"), asked(), said("ok", "t1"), said("ok")]}
    assert select(named, TRIPLETS).call_ids == ("t2", "t1", "t3")
    child = record("t0", [said("ok")], TWINS[2], intent=4)
    for committed in permutations([child, *TWINS]):
        expected = ("t1", "t2", "t0")
        assert select({"output": [said("ok")] * 3}, [*committed]).call_ids == expected


@pytest.mark.requirement("SEL-2")
def test_cuts_that_select_the_same_calls_are_one_reading() -> None:
    """Three times the same item: one answer of one, one of two, in either order."""
    one = record("one", [said("a")], intent=2)
    two = record("two", [said("a"), said("a")], one, intent=3)
    items = {"output": [said("a")] * 3}
    for committed in ([one, two], [two, one]):
        assert select(items, committed).call_ids == ("one", "two"), "a parent comes first"
    alone = record("lone", [said("a"), said("a")], intent=1)
    for committed in ([one, alone], [alone, one]):
        assert select(items, committed).call_ids == ("lone", "one"), "as they were announced"
    later = replace(alone, intent_number=4)
    for committed in ([one, later], [later, one]):
        assert select(items, committed).call_ids == ("one", "lone"), "as they were announced"
    third = record("third", [said("a")], intent=5)
    assert refused(items, [one, two, third]).fault == "answer_ambiguous", "one, two or three ones"
    many = {"output": [said("a"), said("b")] * 40}
    pairs = [record(f"p{number}", [said("a"), said("b")]) for number in range(40)]
    assert len(select(many, pairs).call_ids) == 40
    halves = [record(f"h{number}", [said("a"), said("b")] * 2) for number in range(20)]
    assert refused(many, pairs + halves).fault == "answer_ambiguous"
