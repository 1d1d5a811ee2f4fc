"""Fingerprints: what they cover, what they ignore, and one walk equal to many."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.fingerprint import (
    DIGEST_SIZE,
    ConversationScan,
    UnreadableItemError,
    assistant_fingerprint,
    conversation_digest,
)

TEXTS = st.sampled_from(["", "a", "ok", "résumé", "\U0001f642", "\ud800"])
ARGUMENTS = st.sampled_from(
    [None, "", "{}", '{"b":1,"a":1e-5}', "not json", '{"n":18446744073709551616}', {"a": [1]}, 5]
)
BLOCKS = st.one_of(
    TEXTS,
    st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "X"]), "text": TEXTS}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": TEXTS, "input": ARGUMENTS}),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": TEXTS, "content": ARGUMENTS}
    ),
    st.sampled_from([{"text": 1}, 5, {"type": None}]),
)
CONTENTS = st.one_of(TEXTS, st.none(), st.lists(BLOCKS, max_size=3), st.just(7))
CALLS = st.lists(
    st.fixed_dictionaries(
        {"id": TEXTS, "function": st.fixed_dictionaries({"name": TEXTS, "arguments": ARGUMENTS})}
    ),
    max_size=2,
)
ITEMS = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": CONTENTS, "tool_calls": CALLS}),
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", 5]), "content": CONTENTS}),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": TEXTS, "content": CONTENTS}),
    st.fixed_dictionaries(
        {"type": st.just("function_call"), "call_id": TEXTS, "name": TEXTS, "arguments": ARGUMENTS}
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": TEXTS, "output": ARGUMENTS}
    ),
    st.just({"type": "reasoning", "summary": []}),
)


def attempt(digest: object, items: list[object]) -> bytes | None:
    try:
        return digest(items)
    except UnreadableItemError:
        return None


@given(st.lists(ITEMS, max_size=6))
def test_one_walk_gives_the_digest_of_every_prefix(items: list[object]) -> None:
    fingerprint = attempt(assistant_fingerprint, items)
    if fingerprint is None:
        with pytest.raises(UnreadableItemError):
            ConversationScan(items)
        return
    scan = ConversationScan(items)
    assert scan.assistant_fingerprint == fingerprint
    assert scan.item_count == len(items)
    readable = len(scan.context_digests) // DIGEST_SIZE
    for length in range(len(items) + 1):
        expected = attempt(conversation_digest, items[:length])
        start = DIGEST_SIZE * length
        assert (scan.context_digests[start : start + DIGEST_SIZE] or None) == expected
        assert (length < readable) == (expected is not None)


@given(st.lists(ITEMS, max_size=4), st.lists(ITEMS, max_size=3))
def test_a_scan_continues_with_the_response(
    request_items: list[object], response: list[object]
) -> None:
    whole = attempt(assistant_fingerprint, [*request_items, *response])
    if attempt(assistant_fingerprint, request_items) is None:
        return
    scan = ConversationScan(request_items)
    if whole is None:
        with pytest.raises(UnreadableItemError):
            scan.continued(response)
        return
    continuation = scan.continued(response)
    assert continuation.fingerprint == whole
    assert continuation.output_fingerprint == assistant_fingerprint(response)
    assert scan.assistant_fingerprint == assistant_fingerprint(request_items)
    assert scan.continued([]).fingerprint == scan.assistant_fingerprint


CHAT_CALL = {
    "role": "assistant",
    "content": "let me see",
    "tool_calls": [
        {"id": "c1", "function": {"name": "run", "arguments": '{"q": "x", "n": 1.0}'}},
    ],
}
RESPONSES_CALL = [
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let "}]},
    {"role": "assistant", "content": "me see"},
    {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"n":1.0,"q":"x"}'},
]
MESSAGES_CALL = {
    "role": "assistant",
    "content": [
        {"type": "tool_use", "id": "c1", "name": "run", "input": {"q": "x", "n": 1.0}},
        {"type": "text", "text": "let me see"},
    ],
}


def test_the_same_call_in_three_dialects_has_one_fingerprint() -> None:
    whole_text = [{"role": "assistant", "content": "let me see"}, RESPONSES_CALL[2]]
    fingerprints = {
        assistant_fingerprint([CHAT_CALL]),
        assistant_fingerprint(whole_text),
        assistant_fingerprint([MESSAGES_CALL]),
    }
    assert len(fingerprints) == 1
    assert assistant_fingerprint(RESPONSES_CALL) not in fingerprints  # the split of the text counts


@pytest.mark.parametrize(
    "other",
    [
        {**CHAT_CALL, "content": "let me see "},
        {**CHAT_CALL, "tool_calls": []},
        {**CHAT_CALL, "tool_calls": [{**CHAT_CALL["tool_calls"][0], "id": "c2"}]},
        {**CHAT_CALL, "tool_calls": CHAT_CALL["tool_calls"] * 2},
    ],
    ids=["text", "no call", "call id", "call twice"],
)
def test_what_the_model_wrote_counts(other: object) -> None:
    assert assistant_fingerprint([other]) != assistant_fingerprint([CHAT_CALL])


def test_what_others_wrote_and_reasoning_do_not_count_for_the_assistant() -> None:
    noise = [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": ["x"]}]
    assert assistant_fingerprint([*noise, CHAT_CALL]) == assistant_fingerprint([CHAT_CALL])
    assert assistant_fingerprint(noise) == b""
    assert conversation_digest([*noise, CHAT_CALL]) != conversation_digest([CHAT_CALL])


def test_an_empty_answer_counts_as_an_answer() -> None:
    empty = assistant_fingerprint([{"role": "assistant", "content": ""}])
    assert empty == hashlib.sha256(b"nemo-gym-lineage").digest()


@pytest.mark.parametrize(
    "item",
    [
        7,
        {"role": "assistant", "content": 5},
        {"role": "assistant", "content": [{"text": 5}]},
        {"role": "assistant", "content": [None]},
        {"role": "assistant", "content": "\ud800"},
        {"role": "assistant", "tool_calls": "abc"},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"function": "f"}]},
        {"type": "function_call", "name": 10**5000},
        {"type": "function_call", "arguments": '{"n":18446744073709551616}'},
    ],
    ids=[
        *("number", "content number", "untyped block", "null block", "surrogate"),
        *("calls text", "call number", "function text", "long number", "wide integer"),
    ],
)
def test_an_unreadable_item_is_an_error_that_says_what_it_is(item: object) -> None:
    for digest in (assistant_fingerprint, conversation_digest, ConversationScan):
        with pytest.raises(UnreadableItemError) as caught:
            digest([item])
        assert caught.value.fact


def test_an_unreadable_context_item_ends_the_context_only() -> None:
    items = [{"role": "user", "content": "hi"}, CHAT_CALL, {"role": "user", "content": 5}]
    scan = ConversationScan([*items, CHAT_CALL])
    assert scan.assistant_fingerprint == assistant_fingerprint([CHAT_CALL, CHAT_CALL])
    assert len(scan.context_digests) == 3 * DIGEST_SIZE
    with pytest.raises(UnreadableItemError, match="from item 2 on"):
        _ = scan.context_digest
    assert ConversationScan(items[:2]).context_digest == conversation_digest(items[:2])


@pytest.mark.parametrize("text", ["a", "", "\u00e9", None, [{"type": "text", "text": "a"}]])
@pytest.mark.parametrize(
    "more",
    [
        {"role": "assistant"},
        {"type": "message", "role": "assistant", "refusal": None, "tool_calls": []},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"type": "function_call", "name": "f", "arguments": "{}"},
    ],
)
def test_what_a_response_adds_is_hashed_as_in_a_request(
    text: object, more: dict[str, object]
) -> None:
    items = [{**more, "content": text}]
    before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    continuation = ConversationScan(before).continued(items)
    assert continuation.output_fingerprint == assistant_fingerprint(items)
    assert continuation.fingerprint == assistant_fingerprint([*before, *items])
