"""What is said of two histories that part."""

from __future__ import annotations

import pytest

from callforest.capture.v1 import call_record_pb2 as pb
from callforest_core.lineage.atoms import atoms_of
from callforest_core.lineage.difference import certainty, difference, option_difference


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, object]:
    return {"role": "system", "content": text}


def said(text: str | None = None, arguments: str | None = None, call_id: str = "c1") -> object:
    message: dict[str, object] = {"role": "assistant", "content": text}
    if arguments is not None:
        function = {"name": "run", "arguments": arguments}
        message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return message


HEX = "0a1b2c3d4e5f"
CASES: dict[str, tuple[object, object, str]] = {
    "other system text": (system("Be brief."), system("Be long."), "SYSTEM_TEXT"),
    "developer is system": (system("a"), {"role": "developer", "content": "b"}, "SYSTEM_TEXT"),
    "system message gone": (system("a"), user("hi"), "SYSTEM_TEXT"),
    "system message spaced": (system("a  b"), system("a b\n"), "WHITESPACE"),
    "text spaced": (said("a b"), said(" a\tb "), "WHITESPACE"),
    "a clock": (user("now 10:30:01, Mon 5 May"), user("now 9:05:59, Tue 6 Jun"), "VOLATILE_HEADER"),
    "an id": (system(f"run {HEX}"), system("run ffee00112233"), "VOLATILE_HEADER"),
    "another word": (user("face"), user("dead"), "REWRITTEN_HISTORY"),
    "another role": (user("a"), said("a"), "REWRITTEN_HISTORY"),
    "numbers by value": (said(None, '{"a":1.0}'), said(None, '{"a":1}'), "JSON"),
    "repeated key": (said(None, '{"a":1}'), said(None, '{"a":2,"a":1}'), "JSON"),
    "truth is no number": (said(None, '{"a":1}'), said(None, '{"a":true}'), "REWRITTEN_HISTORY"),
    "other argument": (said(None, '{"a":1}'), said(None, '{"a":2}'), "REWRITTEN_HISTORY"),
    "no arguments' JSON": (said(None, "a b"), said(None, "a c"), "REWRITTEN_HISTORY"),
    "other call id": (said(None, "{}", "c1"), said(None, "{}", "c2"), "REWRITTEN_HISTORY"),
    "another name": ({"role": "user", "content": "a", "name": "n"}, user("a"), "EXTRA_KEYS"),
    "cleared call": (said(None, "{}"), said(None), "REWRITTEN_HISTORY"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_difference_is_named_with_its_place(name: str) -> None:
    known, other, expected = CASES[name]
    before = [user("same"), said("same")]
    kind = pb.DifferenceClass.Value(f"DIFFERENCE_CLASS_{expected}")
    for one, two in ((known, other), (other, known)):
        recorded = list(atoms_of([*before, one, said("end")]))
        sent = list(atoms_of([*before, two, said("end"), user("next")]))
        assert difference(recorded, sent) == (kind, 2)


def test_keys_that_an_answer_did_not_have_are_named() -> None:
    plain = {"role": "assistant", "content": "b"}
    more, other = {**plain, "thinking": "x"}, {**plain, "thinking": "y"}
    ending, extra = [user("c"), said("d")], pb.DIFFERENCE_CLASS_EXTRA_KEYS
    for one, two in ((plain, more), (more, plain), (more, other)):
        for end in ([], ending):
            recorded = list(atoms_of([user("a"), one, *end]))
            sent = list(atoms_of([user("a"), two, *end, user("e")]))
            assert difference(recorded, sent) == (extra, 2)
    emptied = list(atoms_of([user("a"), {**more, "content": None}, *ending]))
    recorded = list(atoms_of([user("a"), plain, *ending]))
    assert difference(recorded, emptied) == (pb.DIFFERENCE_CLASS_REWRITTEN_HISTORY, 1)


def test_a_history_that_is_there_whole_does_not_differ() -> None:
    recorded = list(atoms_of([user("a"), said("b")]))
    assert difference(recorded, recorded) is None
    assert difference(recorded, [*recorded, *atoms_of([user("c")])]) is None
    assert difference(recorded, recorded[:1]) == (pb.DIFFERENCE_CLASS_REWRITTEN_HISTORY, 1)
    assert difference([], recorded) is None


def test_reasoning_that_is_left_out_is_named() -> None:
    def thought(text: str) -> dict[str, object]:
        return {"role": "assistant", "content": text, "reasoning": f"about {text}"}

    recorded = list(atoms_of([user("u"), thought("a"), user("v"), thought("b"), user("w")]))
    sent = list(atoms_of([user("u"), said("a"), user("v"), said("b"), user("w"), said("c")]))
    partly = list(atoms_of([user("u"), said("a"), user("v"), thought("b"), user("w")]))
    other = list(atoms_of([user("u"), said("a"), user("v"), said("c"), user("w")]))
    missing = (pb.DIFFERENCE_CLASS_REASONING_MISSING, 1)
    assert difference(recorded, sent) == difference(recorded, partly) == missing
    rewritten = (pb.DIFFERENCE_CLASS_REWRITTEN_HISTORY, 1)
    assert difference(recorded, other) == rewritten
    assert difference(sent, recorded) == rewritten, "added, not left out"


def test_what_no_accident_makes_is_surer_than_what_any_two_histories_may_show() -> None:
    order = [
        "REWRITTEN_HISTORY", "SYSTEM_TEXT", "VOLATILE_HEADER", "EXTRA_KEYS", "JSON", "WHITESPACE",
        "REASONING_MISSING",
    ]  # fmt: skip
    named = {one: pb.DifferenceClass.Value(f"DIFFERENCE_CLASS_{one}") for one in order}
    assert sorted(order, key=lambda one: certainty(named[one])) == order
    assert len({certainty(kind) for kind in named.values()}) == len(order)


def test_changed_options_are_tools_or_template() -> None:
    tools = {"tools": [{"name": "run"}], "model": "m"}
    assert option_difference(tools, {**tools, "tool_choice": "x", "temperature": 1}) is None
    assert option_difference(tools, {**tools, "add_generation_prompt": True}) is None
    assert option_difference(tools, {"model": "m"}) == (pb.DIFFERENCE_CLASS_TOOL_SET, "tools")
    assert option_difference(tools, {**tools, "model": "n"}) == (
        pb.DIFFERENCE_CLASS_TEMPLATE,
        "model",
    )
