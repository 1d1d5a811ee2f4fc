"""A response that a result tells twice: both tellings are evidence, and must agree (SEL-2)."""

from __future__ import annotations

import json

import pytest

from callforest_core.forest.history import read_history
from callforest_core.forest.returned import Returned, returned_calls
from callforest_core.forest.selection import SelectionRefusedError
from callforest_mesh.finalizer import forest
from callforest_mesh.finalizer.policies import resolve_policy
from tests.unit.finalizer.rollouts import request
from tests.unit.forest.captured import Item, asked, record, said

A = record("a", [said("one")], intent=1)
B = record("b", [said("two")], A, intent=2)
C = record("c", [said("three")], A, intent=3)
TWIN = record("d", [said("two")], A, intent=4)
RECORDS = [A, B, C]
X = [said("one"), asked(), said("two")]
Y = [said("one"), asked(), said("three")]
ALL = resolve_policy("all_captured")


def choices(*texts: str) -> list[Item]:
    return [{"message": {"role": "assistant", "content": text}} for text in texts]


def select(result: object) -> Returned:
    return returned_calls(RECORDS, read_history(result))


def refused(result: object) -> SelectionRefusedError:
    with pytest.raises(SelectionRefusedError) as caught:
        select(result)
    return caught.value


@pytest.mark.requirement("SEL-2")
@pytest.mark.parametrize(
    "result",
    [
        {"response": {"output": X}, "output": Y},
        {"response": {"output": Y}, "output": X},
        {"response": {"output": X}, "output": []},
        {"response": {"output": []}, "output": X},
        {"response": {"output": X, "choices": choices("one", "three")}},
        {"response": {"output": X, "choices": choices("one")}},
        {"response": {"output": [], "choices": choices("one")}},
        {"response": {"output": X}, "choices": choices("one", "three")},
        {"output": X, "choices": choices("one", "three")},
        {"response": X, "output": Y},
        {"response": {"output": X}, "output": [X[:1], Y]},
        {"responses": [{"output": X, "choices": choices("one", "three")}]},
        {"responses": [{"output": X[:1]}, {"output": X[2:], "choices": choices("three")}]},
        {"transitions": [{"response": {"output": X}, "output": Y}]},
        {"transitions": [{"response": {"output": X}, "choices": choices("one", "three")}]},
        {"transitions": [{"responses": [{"output": X, "choices": choices("one", "three")}]}]},
        {"responses": [{"output": [*X, *Y[2:]]}], "response": {"output": X}, "output": Y},
        {"responses": [{"output": X}], "response": {"output": X[2:]}, "output": X[:1]},
        {"responses": [{"output": X}], "response": {"output": X[2:]}, "output": X[2:]},
        {"responses": [{"output": X}], "output": X[:1]},
        {"responses": [{"output": X}], "choices": choices("one")},
        {"responses": [{"output": X[:1]}], "output": X},
        {"responses": [], "output": X},
        {"responses": [{"output": X}], "output": []},
        {"responses": [{"output": X}], "output": [X[:1], Y]},
        {"transitions": [{"response": {"output": X}}], "output": X[:1]},
        {"transitions": [X[:1], X], "choices": choices("one", "three")},
        {"response": {"output": X}, "output": Y, "ng_trajectory": {"turns": [{}]}},
    ],
)
def test_two_tellings_that_differ_are_a_contradiction(result: object) -> None:
    assert refused(result).fault == "history_contradicts_references"


@pytest.mark.requirement("SEL-2")
def test_references_are_held_against_every_telling() -> None:
    named = {"ng_trajectory": {"turns": [{"model_calls": ["a", "b"]}]}}
    assert select({**named, "response": {"output": X}, "output": X}).call_ids == ("a", "b")
    for result in (
        {**named, "response": {"output": X}, "output": Y},
        {**named, "response": {"output": Y}, "output": X},
        {**named, "response": {"output": X, "choices": choices("one", "three")}},
    ):
        assert refused(result).fault == "history_contradicts_references"


@pytest.mark.requirement("SEL-2")
@pytest.mark.parametrize(
    "result",
    [
        {"response": {"output": X}, "output": X},
        {"response": {"output": X, "choices": choices("one", "two")}},
        {"response": {"output": X, "choices": None}, "output": None},
        {"response": {"id": "chatcmpl-b"}, "output": X},
        {"response": {"id": "chatcmpl-b", "output": X}, "output": [X[:1], X]},
        {"response": X, "choices": choices("one", "two")},
        {"responses": [{"output": X, "choices": choices("one", "two")}]},
        {"responses": [{"output": X[:1]}, {"output": X[2:], "choices": choices("two")}]},
        {"transitions": [{"response": {"output": X}, "output": X}]},
        {"transitions": [{"choices": choices("one")}, {"choices": choices("two")}]},
        {"responses": [{"output": X}], "response": {"output": X[2:]}, "output": X},
        {"responses": [{"output": X[:1]}, {"output": X[2:]}], "output": X},
        {"responses": [{"output": X}], "choices": choices("one", "two")},
        {"transitions": [X[:1], X], "output": [X[:1], X]},
    ],
)
def test_two_tellings_that_agree_are_one(result: object) -> None:
    assert select(result).call_ids == ("a", "b")


@pytest.mark.requirement("SEL-2", "SEL-6")
@pytest.mark.parametrize(
    ("result", "last"),
    [
        ({"responses": [{"output": X[:1]}, {"output": X[2:]}], "response": {"output": X[:1]}}, "a"),
        ({"responses": [{"output": X[:1]}, {"output": X[2:]}], "response": {"output": X[2:]}}, "b"),
        ({"responses": [{"output": X[:1]}, {"output": X[2:]}], "response": {"output": X}}, "b"),
        ({"transitions": [X, X[:1]], "response": {"output": X[:1]}}, "a"),
        ({"output": [X, X[:1]]}, "a"),
        ({"output": [X[:1], X]}, "b"),
        ({"responses": [{"output": X}]}, None),
        ({"responses": [{"output": X}], "output": X}, None),
        ({"transitions": [X], "choices": choices("one", "two")}, None),
        ({"responses": [{"output": X}], "response": {"output": X[:1]}, "output": X}, "a"),
    ],
)
def test_the_response_is_scored_by_what_it_shows_itself(result: object, last: str | None) -> None:
    """Not by what the history ends with: the scored call need not be last."""
    assert select(result) == Returned(("a", "b"), last)


@pytest.mark.requirement("SEL-2")
def test_ids_of_either_telling_choose_among_equals_and_must_not_differ() -> None:
    records = [A, B, TWIN]
    shown = [said("one"), said("two", "d")]
    told = {"response": {"output": shown}, "output": shown}
    assert returned_calls(records, read_history(told)).call_ids == ("a", "d")
    other = {**told, "output": [said("one"), said("two", "b")]}
    with pytest.raises(SelectionRefusedError) as caught:
        returned_calls(records, read_history(other))
    assert caught.value.fault == "history_contradicts_references"


FOREIGN = [
    {"output": "the final text"},
    {"output": ["one", "two"]},
    {"output": {"score": 1}},
    {"output": [["one"], ["two"]]},
    {"output": [*X[:1], "two"]},
    {"choices": "A"},
    {"choices": ["A", "B"]},
    {"choices": [{"text": "A"}, {"text": "B"}]},
    {"choices": [*choices("one"), {"text": "B"}]},
    {"choices": [{"message": "A"}]},
]
"""Members of a task that only have the names of answers."""


@pytest.mark.requirement("SEL-2")
@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_only_has_the_name_of_answers_is_no_telling_beside_them(foreign: Item) -> None:
    named = {"turns": [{"model_calls": ["a", "b"]}]}
    for beside in (
        {"response": {"output": X}},
        {"response": X},
        {"responses": [{"output": X[:1]}, {"output": X[2:]}]},
        {"transitions": [X[:1], X]},
        {"transitions": [{"response": {"output": X}, **foreign}]},
        {"transitions": [{"responses": [{"output": X}], **foreign}]},
        {"ng_trajectory": named},
    ):
        assert select({**foreign, **beside}).call_ids == ("a", "b")
    answers = {"choices": choices("one", "two")} if "output" in foreign else {"output": X}
    assert select({**foreign, **answers}).call_ids == ("a", "b")
    assert select({"responses": [{**foreign, **answers}]}).call_ids == ("a", "b")


@pytest.mark.requirement("SEL-2")
@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_only_has_the_name_of_answers_cannot_be_read_where_it_stands_alone(
    foreign: Item,
) -> None:
    for result in (
        foreign,
        {"response": foreign},
        {"response": foreign, "output": X},
        {"responses": [foreign]},
        {"transitions": [foreign]},
        {"output": "text", "choices": ["A"]},
    ):
        assert refused(result).fault == "history_unreadable"


@pytest.mark.requirement("SEL-2")
def test_answers_that_cannot_be_read_are_not_passed_over() -> None:
    broken = {"role": "assistant", "content": 5}
    carriers = [{"message": {"content": "A", "generation_token_ids": [1]}}] * 2
    for member in (
        {"output": [broken]},
        {"choices": [{"message": broken}]},
        {"choices": carriers},
    ):
        for beside in ({"response": {"output": X}}, {"responses": [{"output": X}]}):
            assert refused({**beside, **member}).fault == "history_unreadable"


@pytest.mark.requirement("SEL-2")
def test_a_choice_without_a_message_s_content_is_an_answer_that_says_nothing() -> None:
    silent = record("s", [{"type": "message", "role": "assistant"}], intent=1)
    history = read_history({"response": {"choices": [{"message": None}]}})
    assert returned_calls([silent], history) == Returned(("s",), "s")


def scored(result: object, declared: str | None = None, shown: object = None) -> str:
    asking = request(result=json.dumps(result).encode())
    if declared is not None:
        asking.declared_response_id = declared
    if shown is not None:
        asking.scored_response = json.dumps(shown).encode()
    return forest.choose(asking, RECORDS, ALL).scored.call_id


@pytest.mark.requirement("SEL-3")
def test_every_telling_is_a_witness_of_the_scored_call() -> None:
    assert scored({"response": {"output": X}, "output": X}) == "b"
    assert scored({"output": Y}) == "c"
    for result in (
        {"response": {"output": X}, "output": Y},
        {"response": {"output": X, "choices": choices("three")}},
        {"response": {"id": "chatcmpl-b", "output": []}, "choices": choices("three")},
        {"response": {"id": "chatcmpl-a"}, "output": X},
    ):
        with pytest.raises(SelectionRefusedError) as caught:
            scored(result)
        assert caught.value.fault == "terminal_ambiguous"


@pytest.mark.requirement("SEL-3")
def test_a_response_that_cannot_be_read_is_no_witness() -> None:
    for response in ({"output": [{"role": "assistant", "content": 5}]}, "done", {"choices": 5}):
        with pytest.raises(SelectionRefusedError) as caught:
            scored({"response": response})
        assert caught.value.fault == "terminal_missing"


UNREADABLE: list[Item] = [
    *FOREIGN,
    {"output": [{"role": "assistant", "content": 5}]},
    {"output": [X[:1], [{"role": "assistant", "content": 5}]]},
    {"choices": [{"message": {"role": "assistant", "content": 5}}]},
]


@pytest.mark.requirement("SEL-3")
@pytest.mark.parametrize("member", UNREADABLE)
def test_a_member_that_cannot_be_read_silences_no_other_witness(member: Item) -> None:
    other = {"choices": choices("one", "two")} if "output" in member else {"output": X}
    for result in (
        {"response": {"id": "chatcmpl-b", "output": X}, **member},
        {"response": {"output": X}, **member},
        {"response": X, **member},
        {"response": {"id": "chatcmpl-b"}, **member},
        {"response": {"id": "chatcmpl-b", **member}},
        {"response": {**other, **member}},
        {"response": member, **other},
        {"response": "done", **other, **member},
        {**other, **member},
    ):
        assert scored(result) == "b"
        with pytest.raises(SelectionRefusedError) as caught:
            scored(result, "chatcmpl-a")
        assert caught.value.fault == "terminal_ambiguous"
    for shown in ({**other, **member}, {"id": "chatcmpl-b", **member}):
        assert scored({}, shown=shown) == "b"
        with pytest.raises(SelectionRefusedError) as caught:
            scored({}, "chatcmpl-a", shown)
        assert caught.value.fault == "terminal_ambiguous"
    assert scored(member, "chatcmpl-a") == "a"


@pytest.mark.requirement("SEL-3")
def test_a_history_beside_a_response_is_no_witness_of_the_scored_call() -> None:
    history = {"responses": [{"output": X}], "output": X}
    assert scored({**history, "response": {"output": X[:1]}}) == "a"
    assert scored(history, "chatcmpl-a") == "a"
    with pytest.raises(SelectionRefusedError) as caught:
        scored(history)
    assert caught.value.fault == "terminal_missing"
