"""What counts of an item, and what does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.arguments import source_arguments
from callforest_core.lineage.atoms import (
    AtomKind,
    Spelling,
    atoms_of,
    fields_of,
    item_atoms,
    plain_atom,
)
from callforest_core.lineage.fingerprint import UnreadableItemError

Sent = dict[str, object]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(-1e300, 1e300)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)


def read(*items: object) -> list[tuple[AtomKind, list[str]]]:
    return [fields_of(atom) for atom in atoms_of(items)]


def call(arguments: object = "{}", **entry: object) -> Sent:
    function = {"name": "run", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function, **entry}


def answer(**fields: object) -> Sent:
    return {"role": "assistant", **fields}


@pytest.mark.requirement("ADM-2")
@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_spacing_order_and_escapes_of_arguments_do_not_count(
    value: object, escaped: bool, indent: int | str | None
) -> None:
    plain = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    spelt = json.dumps(_reversed(value), ensure_ascii=escaped, indent=indent)
    assert source_arguments(f" {spelt}\n") == source_arguments(plain)
    if isinstance(value, dict | list):
        assert source_arguments(value) == source_arguments(plain)


def _reversed(value: object) -> object:
    if isinstance(value, dict):
        return {name: _reversed(value[name]) for name in reversed(value)}
    return [_reversed(one) for one in value] if isinstance(value, list) else value


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize(
    ("emitted", "echoed", "equal"),
    [
        ('{"b":2,"a":1}', '{"a": 1, "b": 2}', True),
        ('{"a":"\u00e9"}', '{"a":"\\u00e9"}', True),
        ('{"b":2,"a":1}', '{"a":1,"b":3}', False),
        ('{"a":1,"b":2}', '{"a":1,"a":1,"b":2}', False),
        ('{"a":1,"a":1}', ' {"a":1,"a":1}\n', True),
        ('{"a":1,"b":2}', '{"a":1.0,"b":2}', False),
        ('{"a":9007199254740993}', '{"a":9007199254740992}', False),
        ('{"a":9007199254740993}', '{ "a" : 9007199254740993 }', True),
        ('{"a":18446744073709551616}', '{"a":18446744073709551617}', False),
        ('{"a":18446744073709551616}', '{"a": 18446744073709551616}', False),
        ('{"a":1e400}', '{"a":null}', False),
        ('{"a":NaN}', '{"a":null}', False),
        ('{"a":"\\ud800"}', '{"a":"\\udc00"}', False),
        ("no json", " no json ", True),
        ("[" * 400, "[" * 401, False),
        ("1" * 5000, "1" * 5001, False),
    ],
)
def test_one_rule_says_which_echo_of_arguments_is_the_same(
    emitted: str, echoed: str, equal: bool
) -> None:
    """Bug case B04: nothing integer passes through a double, and doubt is never equality."""
    assert (source_arguments(emitted) == source_arguments(echoed)) is equal


CONTENTS: dict[str, Sent] = {"null": {"content": None}, "empty": {"content": ""}, "absent": {}}


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize("emitted", CONTENTS)
@pytest.mark.parametrize("echoed", CONTENTS)
def test_missing_text_is_spelt_beside_calls_and_said_without(emitted: str, echoed: str) -> None:
    """Bug case B06: with calls all nine are equal in atoms, alone only what is the same."""
    one, two = (answer(tool_calls=[call()], **CONTENTS[name]) for name in (emitted, echoed))
    assert item_atoms(one).atoms == item_atoms(two).atoms
    assert (item_atoms(one).spelling == item_atoms(two).spelling) == (emitted == echoed)
    one, two = (answer(**CONTENTS[name]) for name in (emitted, echoed))
    assert (item_atoms(one).atoms == item_atoms(two).atoms) == (emitted == echoed)


def test_spellings() -> None:
    for content, spelling in (
        ({}, Spelling.ABSENT),
        ({"content": None}, Spelling.NULL),
        ({"content": ""}, Spelling.EMPTY),
        ({"content": []}, Spelling.EMPTY),
        ({"content": [{"type": "text", "text": ""}]}, Spelling.EMPTY),
        ({"content": "text"}, None),
    ):
        assert item_atoms(answer(tool_calls=[call()], **content)).spelling is spelling
    uses = [{"type": "tool_use", "id": "c1", "name": "run", "input": {}}]
    assert item_atoms(answer(content=uses)).spelling is Spelling.ABSENT
    assert item_atoms(answer(content="plain")).spelling is None
    assert item_atoms(answer(content=None)).spelling is None


@pytest.mark.requirement("ADM-2")
def test_a_cleared_call_is_another_history() -> None:
    """Bug case B05: `tool_calls: null` beside a result that is still there."""
    made = answer(content=None, tool_calls=[call()])
    cleared = answer(content=None, tool_calls=None)
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    assert read(made, result) != read(cleared, result)
    assert read(cleared) == [(AtomKind.ABSENT, ["null"])]


def test_bookkeeping_does_not_count_and_every_other_key_does() -> None:
    plain = answer(content="a")
    kept = answer(
        content="a", id="msg_1", status="completed", tool_calls=[], audio=None, refusal=None,
        function_call=None, annotations=[{"x": 1}], phase="final", type="message",
    )  # fmt: skip
    assert read(kept) == read(plain)
    assert read(answer(content="a", name="n"))[1] == (AtomKind.REMAINDER, ['{"name":"n"}'])
    assert read(answer(content=None, prefix=False)) != read(answer(content=None))
    assert read({"role": "user", "content": "a", "name": "n"}) == [
        (AtomKind.MESSAGE, ["user", "text", "a", '{"name":"n"}'])
    ]
    assert read(answer(tool_calls=[call(index=0)])) != read(answer(tool_calls=[call()]))
    assert read(answer(tool_calls=[call(custom={"x": 1})])) != read(answer(tool_calls=[call()]))
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert read({"role": "user", "content": [marked]}) == read({"role": "user", "content": "a"})


def test_nothing_that_differs_is_written_alike() -> None:
    block = {"type": "text", "text": "x", "name": "n"}
    assert read(answer(content=[block])) != read(answer(content="x", name="n"))
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    text = json.dumps(image, separators=(",", ":"), sort_keys=True)
    assert read({"role": "user", "content": [image]}) != read({"role": "user", "content": text})
    for role in ("user", "tool"):
        for one, two in (
            (["a", "b"], "ab"),
            ([{"text": "a", "x": 1}], ["a", {"type": "rest", "x": 1}]),
        ):
            assert read({"role": role, "content": one}) != read({"role": role, "content": two})
    results = (None, "null", "", [{"x": 1}], {"x": 1}, '[{"x":1}]', 5, "5")
    seen = {tuple(atoms_of([{"role": "tool", "content": one}])) for one in results}
    assert len(seen) == len(results)
    hidden = {"type": "reasoning", "encrypted_content": "x"}
    shown = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}
    assert read(hidden) != read(shown)


def test_reasoning_is_one_whatever_it_is_called() -> None:
    expected = (AtomKind.REASONING, ["a\nb", ""])
    text = "a\nb"
    parts = [{"type": "summary_text", "text": one} for one in "ab"]
    thinking = [{"type": "thinking", "thinking": text}, {"type": "text", "text": "c"}]
    for item in (
        answer(reasoning=text, content="c"),
        answer(reasoning_content=text, content="c"),
        answer(reasoning=text, reasoning_content=text, content="c"),
        answer(content=thinking),
        {"type": "reasoning", "content": parts},
        {"type": "reasoning", "content": [], "summary": parts, "encrypted_content": None},
    ):
        assert read(item)[0] == expected
    assert read(answer(reasoning="a", reasoning_content="b", content="c")) != read(
        answer(reasoning="a", content="c")
    )
    assert read({"type": "reasoning", "summary": []}) == []
    redacted = [{"type": "redacted_thinking", "data": "x"}]
    assert read(answer(content=redacted))[0] == (AtomKind.REASONING, ["", '{"data":"x"}'])


def test_results_stand_before_the_message_that_brings_them() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "done", "is_error": True}
    both = {"role": "user", "content": ["and", result]}
    assert [kind for kind, _ in read(both)] == [AtomKind.RESULT, AtomKind.MESSAGE]
    assert read({"role": "user", "content": [result]}) == [
        (AtomKind.RESULT, ["c1", "text", "done", '{"is_error":true}'])
    ]
    assert read({"role": "user", "content": ""}) == [(AtomKind.MESSAGE, ["user", ""])]


def test_a_refusal_is_a_text_of_its_own_type() -> None:
    block = {"type": "refusal", "refusal": "no"}
    assert read(answer(content=None, refusal="no")) == read(answer(content=[block]))
    assert read(answer(content="no")) != read(answer(content=[block]))


@pytest.mark.parametrize(
    "item",
    [
        None,
        "text",
        {},
        {"role": 5, "content": "a"},
        {"type": "web_search_call", "id": "ws_1"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"no": "type"}]},
        {"role": "user", "content": [{"type": "tool_use", "id": "c", "name": "n"}]},
        {"role": "user", "content": "\ud800", "name": "n"},
        {"role": "user", "content": "a", "number": 2**64},
        answer(content=[{"type": "tool_result", "tool_use_id": "c"}]),
        answer(tool_calls="text"),
        answer(tool_calls=["text"]),
        answer(tool_calls=[call({"a": 2**64})]),
        answer(tool_calls=[call(), {"id": 5, "function": {}}]),
        {"type": "reasoning", "content": [{"type": "x"}]},
        {"type": "reasoning", "content": 5},
    ],
)
def test_what_no_dialect_allows_is_unreadable(item: object) -> None:
    with pytest.raises(UnreadableItemError):
        list(atoms_of([item]))


@given(st.sampled_from(["user", "system", "developer", "assistant", "tool"]), st.text())
def test_the_short_way_gives_what_the_long_way_gives(role: str, text: str) -> None:
    item = {"role": role, "content": text}
    plain = plain_atom(item)
    if plain is not None:
        assert item_atoms(item).atoms == [plain]


def test_deep_arguments_are_compared_as_text() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert source_arguments(f" {deep} ") == deep
