"""What counts of an item, and what does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.answer_atoms import Spelling
from callforest_core.lineage.arguments import source_arguments
from callforest_core.lineage.atom import AtomKind
from callforest_core.lineage.atoms import atoms_of, item_atoms, plain_atom
from callforest_core.lineage.canonical_json import canonical_json
from callforest_core.lineage.fingerprint import UnreadableItemError
from tests.unit.lineage.written_items import Sent, answer, call, read

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(-1e300, 1e300)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)


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
        ("", "{}", True),
        (" ", "{}", False),
        ('{"a":-0}', '{"a":0}', True),
        ('{"a":-0.0}', '{"a":0.0}', False),
        ('{"a":"\t"}', '{"a":"\\t"}', False),
        ('{"a":01}', '{"a":1}', False),
        ('{"a":1,"\\u0061":1}', '{"a":1}', False),
        ("\ufeff{}", "{}", False),
        ("\u00a0{}", "{}", False),
        ("[" * 128 + "]" * 128, " [" + "[" * 127 + "]" * 128, True),
        ("[" * 129 + "]" * 129, " [" + " [" * 128 + "]" * 129, False),
        ("[" + "[]," * 200 + "[]]", "[" + "[] ," * 200 + "[]]", True),
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
def test_missing_text_is_spelt_and_is_no_atom_of_its_own(emitted: str, echoed: str) -> None:
    """Bug case B06: all nine are equal in atoms, with calls and without."""
    for more in ({"tool_calls": [call()]}, {}):
        one, two = (answer(**more, **CONTENTS[name]) for name in (emitted, echoed))
        assert read(one) == read(two)
        assert (item_atoms(one).spelling == item_atoms(two).spelling) == (emitted == echoed)


def test_spellings() -> None:
    uses: Sent = {"type": "tool_use", "id": "c1", "name": "run", "input": {}}
    for content, spelling in (
        ({}, Spelling.ABSENT),
        ({"content": None}, Spelling.NULL),
        ({"content": ""}, Spelling.EMPTY),
        ({"content": []}, Spelling.EMPTY),
        ({"content": [{"type": "text", "text": ""}]}, Spelling.EMPTY),
        ({"content": [uses]}, Spelling.ABSENT),
        ({"content": [{"type": "thinking", "thinking": "t"}, uses]}, Spelling.ABSENT),
    ):
        assert item_atoms(answer(tool_calls=[call()], **content)).spelling is spelling
    assert item_atoms({"type": "function_call", "call_id": "c"}).spelling is Spelling.ABSENT
    assert item_atoms({"type": "reasoning", "summary": []}).spelling is Spelling.ABSENT
    for other in ({"role": "user", "content": ""}, {"role": "tool", "content": "r"}):
        assert item_atoms(other).spelling is None


@pytest.mark.requirement("ADM-2")
def test_a_cleared_call_is_another_history() -> None:
    """Bug case B05: `tool_calls: null` beside a result that is still there."""
    made = answer(content=None, tool_calls=[call()])
    cleared = answer(content=None, tool_calls=None)
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    assert read(made, result) != read(cleared, result)
    assert read(cleared) == [(AtomKind.ABSENT, [])]


@pytest.mark.requirement("ADM-2")
def test_an_answer_that_says_nothing_ends_with_that() -> None:
    thought: Sent = {"type": "reasoning", "content": [{"text": "t"}]}
    silent = [(AtomKind.REASONING, ["t"]), (AtomKind.ABSENT, [])]
    user: Sent = {"role": "user", "content": "u"}
    asked = (AtomKind.MESSAGE, ["user", "text", "u", ""])
    assert read(thought, answer(content=None)) == silent
    assert read(thought, user, answer(content="")) == [*silent, asked, (AtomKind.ABSENT, [])]
    assert read(answer(content=""), answer(content="a")) == [(AtomKind.TEXT, ["text", "a"])]
    assert read(answer(content="a"), answer(content="")) == [(AtomKind.TEXT, ["text", "a"])]
    assert read(answer(reasoning="t", content="a")) == [silent[0], (AtomKind.TEXT, ["text", "a"])]
    assert read({"type": "reasoning", "summary": []}) == [(AtomKind.ABSENT, [])]


@pytest.mark.requirement("ADM-2")
def test_every_other_key_of_what_is_not_the_models_counts() -> None:
    assert read({"role": "user", "content": "a", "name": "n"}) == [
        (AtomKind.MESSAGE, ["user", "text", "a", '{"name":"n"}'])
    ]
    assert read({"role": "user", "content": "a", "name": "", "id": "x", "status": "s"}) == read(
        {"role": "user", "content": "a"}
    )
    result = {"type": "function_call_output", "call_id": "c", "output": "r"}
    assert read({**result, "is_error": True}) != read(result)


def test_marks_for_caches_do_not_count_at_any_depth() -> None:
    mark = {"type": "ephemeral"}
    marked = {"type": "text", "text": "a", "cache_control": mark}
    assert read({"role": "user", "content": [marked]}) == read({"role": "user", "content": "a"})
    for role in ("user", "tool", "assistant"):
        plain: Sent = {"type": "image", "source": {"data": "x"}}
        deep: Sent = {"type": "image", "source": {"data": "x", "cache_control": mark}}
        assert read({"role": role, "content": [deep]}) == read({"role": role, "content": [plain]})
    extra: Sent = {"role": "user", "content": "a", "x": {"cache_control": mark}}
    assert read(extra) == read({"role": "user", "content": "a"})
    kept: Sent = {"role": "user", "content": "a", "x": [{"cache_control": mark}]}
    assert read(kept) == [(AtomKind.MESSAGE, ["user", "text", "a", '{"x":[{}]}'])]
    argument = {"cache_control": "mine"}
    assert read(answer(tool_calls=[call(argument)])) != read(answer(tool_calls=[call({})]))


def test_nothing_that_differs_is_written_alike() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    text = json.dumps(image, separators=(",", ":"), sort_keys=True)
    assert read({"role": "user", "content": [image]}) != read({"role": "user", "content": text})
    for role in ("user", "tool"):
        for one, two in (
            (["a", "b"], "ab"),
            (["a", {"type": "x", "x": 1}], ["a", '{"type":"x","x":1}']),
        ):
            assert read({"role": role, "content": one}) != read({"role": role, "content": two})
    inner = [{"type": "tool_result", "tool_use_id": "c"}]
    results = (None, "null", "", [{"x": 1}], {"x": 1}, '[{"x":1}]', 5, "5", inner)
    seen = {tuple(atoms_of([{"role": "tool", "content": one}])) for one in results}
    assert len(seen) == len(results)


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
    text = (AtomKind.TEXT, ["text", "a"])
    refused = (AtomKind.TEXT, ["refusal", "no"])
    assert read(answer(content=[block, {"type": "text", "text": "a"}])) == [text, refused]
    assert read(answer(content="no")) != read(answer(content=[block]))


def test_a_text_with_more_to_it_counts_as_its_block() -> None:
    block = {"type": "text", "text": "a", "citations": ["b"]}
    read_block = (AtomKind.MESSAGE, ["user", "block", canonical_json(block), ""])
    assert read({"role": "user", "content": [block]}) == [read_block]


SHOWN: list[Callable[[object], dict[str, object]]] = [
    lambda content: {"role": "user", "content": content},
    lambda content: {"role": "system", "content": content},
    lambda content: {"role": "tool", "tool_call_id": "c", "content": content},
    lambda content: {"type": "function_call_output", "call_id": "c", "output": content},
]


@pytest.mark.parametrize("item", SHOWN, ids=["user", "system", "tool", "output"])
def test_a_part_counts_as_a_template_may_see_it(item: Callable[[object], object]) -> None:
    """Renderers join parts with line feeds, empty ones too, and hand on what else a part holds."""
    part = {"type": "text", "text": "a"}
    empty = {"type": "text", "text": ""}
    more = {**part, "priority": "high"}
    shown = [read(item(content)) for content in ([part], [empty, part], [part, empty], [more])]
    shown.append(read(item([{**part, "priority": "low"}])))
    shown.append(read(item(canonical_json(more))))
    assert all(one != other for one, other in combinations(shown, 2))
    for same in ("a", ["a"], [{**part, "cache_control": {"type": "ephemeral"}, "note": None}]):
        assert read(item(same)) == shown[0]
    assert read(item([empty])) == read(item(""))
    assert read(answer(content=[part, empty])) == read(answer(content="a"))


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
        answer(content="a", name=5),
        answer(content="a", reasoning=["t"]),
        answer(content="a", refusal=True),
        answer(tool_calls=[{"id": "c", "type": "custom", "custom": {"name": "n"}}]),
        answer(tool_calls=[call("\ud800")]),
        answer(tool_calls=["text"]),
        answer(tool_calls=[call({"a": 2**64})]),
        answer(tool_calls=[call(), {"id": 5, "function": {}}]),
        {"type": "reasoning", "content": [{"type": "x"}]},
        {"type": "reasoning", "content": 5},
        {"role": "user", "type": "function_call", "name": "n", "content": "a"},
        {"role": "user", "type": "function_call_output", "content": "a"},
        {"role": "assistant", "type": "reasoning", "content": "a"},
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
        assert (item_atoms(item).spelling is None) == (role != "assistant")


def test_deep_arguments_are_compared_as_text() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert source_arguments(f" {deep} ") == deep
