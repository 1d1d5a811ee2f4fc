"""What counts of an answer, and what SDKs add to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callforest_core.lineage.atom import AtomKind
from callforest_core.lineage.canonical_json import canonical_json
from tests.unit.lineage.written_items import Sent, answer, call, read

TOKEN_COLUMNS: Sent = {
    "prompt_token_ids": [1],
    "generation_token_ids": [2],
    "generation_log_probs": [0.5],
    "routed_experts": [[1]],
}


@pytest.mark.requirement("ADM-2")
def test_what_an_sdk_adds_to_an_answer_does_not_count() -> None:
    plain = answer(content="a")
    kept = answer(
        content="a", id="msg_1", status="completed", tool_calls=[], audio=None, type="message",
        function_call=None, annotations=[{"x": 1}], phase=None, parsed={"a": 1}, refusal=None,
        provider_specific_fields={"x": 1}, cache_control={"type": "ephemeral"}, **TOKEN_COLUMNS,
    )  # fmt: skip
    assert read(kept) == read(plain)
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [1], "parsed": 1}
    assert read(answer(content=[part])) == read(plain)
    function = {"name": "run", "arguments": "{}", "parsed_arguments": {"a": 1}}
    added = call(index=0, function=function, provider_specific_fields={"x": 1})
    assert read(answer(tool_calls=[added])) == read(answer(tool_calls=[call()]))
    item: Sent = {"type": "function_call", "call_id": "c1", "name": "run", "arguments": "{}"}
    assert read({**item, **TOKEN_COLUMNS, "id": "fc_1", "caller": None, "async": None}) == (
        read(item)
    )
    assert read(answer(content="a", name="n"))[0] == (AtomKind.NAME, ["n"])
    assert read(answer(content="a", name="")) == read(plain)


WRITTEN: dict[str, tuple[Sent, Callable[[Sent], Sent]]] = {
    "message": (answer(content="a"), lambda more: answer(content="a", **more)),
    "silent message": (answer(content=None), lambda more: answer(content=None, **more)),
    "text": (
        answer(content="a"),
        lambda more: answer(content=[{"type": "text", "text": "a", **more}]),
    ),
    "empty text": (
        answer(content="a"),
        lambda more: answer(content=["a", {"type": "text", "text": "", **more}]),
    ),
    "refusal": (
        answer(refusal="no"),
        lambda more: answer(content=[{"type": "refusal", "refusal": "no", **more}]),
    ),
    "thinking": (
        answer(reasoning="t", content="a"),
        lambda more: answer(content=[{"type": "thinking", "thinking": "t", **more}, "a"]),
    ),
    "call": (answer(tool_calls=[call()]), lambda more: answer(tool_calls=[call(**more)])),
    "function": (
        answer(tool_calls=[call()]),
        lambda more: answer(tool_calls=[call(function={"name": "run", "arguments": "{}", **more})]),
    ),
    "use": (
        answer(tool_calls=[call()]),
        lambda more: answer(
            content=[{"type": "tool_use", "id": "c1", "name": "run", "input": {}, **more}]
        ),
    ),
    "function_call": (
        answer(tool_calls=[call()]),
        lambda more: {
            "type": "function_call",
            "call_id": "c1",
            "name": "run",
            "arguments": "{}",
            **more,
        },
    ),
    "reasoning": (
        {"type": "reasoning", "content": [{"text": "t"}]},
        lambda more: {"type": "reasoning", "content": [{"text": "t"}], **more},
    ),
}


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize("place", WRITTEN)
def test_every_other_key_of_an_answer_counts(place: str) -> None:
    """Bug case B05's kind: what a template could show the model never hides behind its tokens."""
    plain, written = WRITTEN[place]
    for nothing in (None, "", [], {}):
        assert read(written({"thought": nothing})) == read(plain)
    for value in ("x", False, 0, {"a": None}):
        more = (AtomKind.REST, [canonical_json({"thought": value})])
        changed = read(written({"thought": value}))
        assert changed != read(plain)
        assert [one for one in changed if one != more] == read(plain)
        assert len(changed) == len(read(plain)) + 1


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize(
    "more",
    [
        {"function_call": {"name": "rm", "arguments": "{}"}},
        {"thinking": "x"},
        {"reasoning_details": [{"text": "x"}]},
        {"tool_plan": "delete it"},
        {"prefix": True},
        {"audio": {"id": "x"}},
        {"phase": "commentary"},
        {"recipient": "browser"},
        {"weight": 0},
        {"end_turn": False},
    ],
    ids=str,
)
def test_fields_of_other_providers_are_changes_of_an_answer(more: Sent) -> None:
    assert read(answer(content="a", **more)) != read(answer(content="a"))


@pytest.mark.requirement("ADM-2")
def test_reasoning_that_two_names_tell_differently_counts_twice() -> None:
    """Templates read the one or the other."""
    twice = answer(reasoning="t", reasoning_content="t", content="a")
    assert read(twice) == read(answer(reasoning="t", content="a"))
    assert read({**twice, "reasoning_content": "other"}) != read(twice)


def test_reasoning_is_one_whatever_it_is_called() -> None:
    expected = (AtomKind.REASONING, ["a\nb"])
    text = "a\nb"
    parts = [{"type": "summary_text", "text": one} for one in "ab"]
    thinking = [{"type": "text", "text": "c"}, {"type": "thinking", "thinking": text}]
    for item in (
        answer(reasoning=text, content="c"),
        answer(reasoning_content=text, content="c"),
        answer(reasoning=text, reasoning_content=text, content="c"),
        answer(reasoning="", reasoning_content=text, content="c"),
        answer(content=thinking),
        answer(content=[{"type": "redacted_thinking", "data": text}]),
        {"type": "reasoning", "content": parts, "encrypted_content": "x"},
        {"type": "reasoning", "content": [], "summary": parts, "encrypted_content": None},
        {"type": "reasoning", "summary": [], "encrypted_content": text},
    ):
        assert read(item)[0] == expected
    assert read(answer(content=[{"type": "thinking", "thinking": "", "signature": "s"}])) == [
        (AtomKind.ABSENT, [])
    ]
