"""Answers of lost calls stand in their places: whoever tells the history must agree on them."""

from __future__ import annotations

from itertools import permutations

import pytest

from callforest_core.forest.history import read_history
from callforest_core.forest.returned import Returned, returned_calls
from callforest_core.forest.selection import SelectionRefusedError
from tests.unit.forest.captured import Item, asked, record, said

pytestmark = pytest.mark.requirement("SEL-2", "FIN-8")

A = record("a", [said("one")], intent=1)
B = record("b", [said("two")], A, intent=2)
RECORDS = [A, B]
FIRST, SECOND = [said("one")], [said("two")]
Z, Y = [said("lost")], [said("gone")]


def responses(*answers: list[Item]) -> dict[str, object]:
    return {"responses": [{"output": answer} for answer in answers]}


def transitions(*answers: list[Item]) -> dict[str, object]:
    return {"transitions": [{"response": {"output": answer}} for answer in answers]}


def output(*answers: list[Item]) -> dict[str, object]:
    return {"output": [item for answer in answers for item in (*answer, asked())]}


def as_chat(*texts: str) -> dict[str, object]:
    told = [[{"message": {"role": "assistant", "content": text}}] for text in texts]
    return {"responses": [{"choices": one} for one in told]}


def named(*calls: str) -> dict[str, object]:
    return {"ng_trajectory": {"turns": [{"model_calls": [*calls]}]}}


def own(*names: str) -> list[dict[str, object]]:
    """Transitions whose responses say the same and have ids."""
    return [{"response": {"output": SECOND, "id": f"chatcmpl-{name}"}} for name in names]


def select(*told: dict[str, object], lost: str = "z") -> Returned:
    result = {name: value for one in told for name, value in one.items()}
    return returned_calls(RECORDS, read_history(result), frozenset(lost))


def refused(*told: dict[str, object], lost: str = "z") -> str:
    with pytest.raises(SelectionRefusedError) as caught:
        select(*told, lost=lost)
    return caught.value.fault


@pytest.mark.parametrize("lost", ["z", "yz"])
def test_lost_answers_in_other_places_are_a_contradiction(lost: str) -> None:
    for one, other in permutations(
        [(FIRST, SECOND), (FIRST, SECOND, Z), (FIRST, Z, SECOND), (Z, FIRST, SECOND)], 2
    ):
        for history in (transitions, output):
            fault = refused(responses(*one), history(*other), lost=lost)
            assert fault == "history_contradicts_references"
    for history in (transitions, output):
        fault = refused(responses(Z, SECOND), history(SECOND, Y), lost=lost)
        assert fault == "history_contradicts_references"


@pytest.mark.parametrize("lost", ["z", "yz"])
def test_other_lost_answers_in_the_same_place_are_a_contradiction(lost: str) -> None:
    for history in (transitions, output):
        fault = refused(responses(FIRST, Z, SECOND), history(FIRST, Y, SECOND), lost=lost)
        assert fault == "history_contradicts_references"
        fault = refused(
            responses(FIRST, [said("lost", "z")], SECOND),
            history(FIRST, [said("lost", "y")], SECOND),
            lost="yz",
        )
        assert fault == "history_contradicts_references"


def test_ids_of_lost_answers_are_compared_between_all_tellings() -> None:
    """The first has no id, and agrees with both of the others."""
    fault = refused(
        responses(FIRST, Z),
        transitions(FIRST, [said("lost", "z")]),
        output(FIRST, [said("lost", "y")]),
        lost="yz",
    )
    assert fault == "history_contradicts_references"


def test_lost_answers_in_the_same_place_agree() -> None:
    for other in (Z, [said("lost", "z")]):
        told = [responses(FIRST, other, SECOND), transitions(FIRST, Z, SECOND)]
        assert select(*told, output(FIRST, Z, SECOND)).call_ids == ("a", "b")
    assert select(as_chat("one", "lost", "two"), output(FIRST, Z, SECOND)).call_ids == ("a", "b")
    ids = ([said("lost", "z"), said("gone", "y")], Z, Y)
    told = [output(FIRST, ids[0], SECOND), responses(FIRST, *ids[1:], SECOND)]
    assert select(*told, lost="yz").call_ids == ("a", "b"), "their ids cut them apart"
    assert refused(responses(FIRST, Z, Y), transitions(FIRST, Z, Y)) == "answer_not_captured"


def test_references_to_lost_calls_stand_in_their_places() -> None:
    for history in (responses, transitions, output):
        agreed = select(named("a", "z", "b"), history(FIRST, Z, SECOND))
        assert agreed.call_ids == ("a", "b")
        for other in ((FIRST, SECOND), (Z, FIRST, SECOND), (FIRST, SECOND, Z)):
            fault = refused(named("a", "z", "b"), history(*other))
            assert fault == "history_contradicts_references"
        fault = refused(named("a", "b"), history(FIRST, Z, SECOND))
        assert fault == "history_contradicts_references"
        fault = refused(named("a", "y"), history(FIRST, [said("lost", "z")]), lost="yz")
        assert fault == "history_contradicts_references"
    fault = refused(named("a", "z"), responses(FIRST, Z), transitions(FIRST, Y))
    assert fault == "history_contradicts_references"
    assert select(named("a", "z", "b")).call_ids == ("a", "b")


def test_the_response_shows_no_lost_answer_that_the_history_does_not() -> None:
    history = responses(FIRST, Z, SECOND)
    whole = {"response": {"output": [*FIRST, asked(), *Z, asked(), *SECOND]}}
    assert select(history, whole) == Returned(("a", "b"), "b")
    assert select(named("a", "z", "b"), {"responses": []}, whole) == Returned(("a", "b"), "b")
    twice = [{"output": [*Z, asked(), *SECOND]}, [*Z, asked(), *Z, asked(), *SECOND]]
    assert select(history, {"response": twice[0]}) == Returned(("a", "b"), "b")
    other = {"output": [*Y, asked(), *SECOND]}
    for response in (twice[1], other):
        for lost in ("z", "yz"):
            assert refused(history, {"response": response}, lost=lost) in (
                "history_contradicts_references",
                "answer_not_captured",
            )
    for lost in ("z", "yz"):
        fault = refused(responses(FIRST, SECOND), {"response": other}, lost=lost)
        assert fault == "history_contradicts_references"


def test_a_response_that_is_told_twice_tells_the_same_lost_answers() -> None:
    history = responses(FIRST, Z, Y, SECOND)
    told: dict[str, object] = {"output": [*Z, asked(), *SECOND]}
    both = {"response": {**told, "choices": [{"message": one} for one in (*Z, *SECOND)]}}
    ids = {**told, "choices": [{"message": said("lost", "z")}, {"message": SECOND[0]}]}
    assert select(history, {"response": ids}, lost="yz") == Returned(("a", "b"), "b")
    assert refused(history, both, lost="yz") == "terminal_missing", "its run cannot be cut"
    ids["choices"] = [{"message": said("gone", "y")}, {"message": SECOND[0]}]
    assert refused(history, {"response": ids}, lost="yz") == "history_contradicts_references"


def test_a_snapshot_that_is_shown_again_under_a_lost_call_s_id_is_its_answer() -> None:
    told = {"transitions": [{"response": {"output": FIRST}}, *own("b", "z")]}
    assert select(told).call_ids == ("a", "b")
    assert select(told, responses(FIRST, SECOND, [said("two", "z")])).call_ids == ("a", "b")
    assert select(told, named("a", "b", "z")).call_ids == ("a", "b")
    assert refused(told, responses(FIRST, SECOND)) == "history_contradicts_references"
    again = {"transitions": [*own("b", "z", "z")]}
    assert select(again, responses(SECOND, [said("two", "z")])).call_ids == ("b",)
    unnamed = {"transitions": [FIRST, Z, {"response": {"output": Z, "id": "chatcmpl-z"}}]}
    assert select(unnamed, responses(FIRST, Z)).call_ids == ("a",)
    apart = {"transitions": [FIRST, [said("lost", "z")], [asked("so"), said("lost", "z")]]}
    assert select(apart, responses(FIRST, Z)).call_ids == ("a",)
    other = {"transitions": [FIRST, [said("lost", "z")], [asked("so"), said("gone", "z")]]}
    assert refused(other) == "answer_not_captured", "the same id, but not the same answer"


def test_the_id_of_a_response_names_the_one_lost_answer_that_it_shows() -> None:
    def whole(name: str, *answers: list[Item]) -> dict[str, object]:
        return {"responses": [{**output(*answers), "id": f"chatcmpl-{name}"}]}

    named_z = transitions([said("lost", "z")], SECOND)
    assert select(whole("z", Z, SECOND), named_z, lost="yz").call_ids == ("b",)
    fault = refused(whole("z", FIRST, Z), transitions(FIRST, [said("lost", "y")]), lost="yz")
    assert fault == "history_contradicts_references"
    fault = refused(whole("y", Z, SECOND), named_z, lost="yz")
    assert fault == "history_contradicts_references"
    both = transitions(FIRST, [said("lost", "z")], [said("gone", "y")])
    for name in "yz":
        assert select(whole(name, FIRST, Z, Y), both, lost="yz").call_ids == ("a",), "or the other"
    by_item = [said("lost", "y")]
    told = [whole("z", FIRST, by_item), transitions(FIRST, by_item)]
    assert select(*told, lost="yz").call_ids == ("a",), "an item's own id counts before"
