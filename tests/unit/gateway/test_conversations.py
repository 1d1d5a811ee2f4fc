"""A conversation that is continued hashes to the same as one that is read anew."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core
from callforest_mesh.gateway.conversations import Conversations, read_conversation

TEXTS = st.text(max_size=6)
ITEMS = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.none(),
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"id": TEXTS, "function": st.fixed_dictionaries({"name": TEXTS})}
                ),
                max_size=2,
            ),
        }
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "content": st.lists(st.fixed_dictionaries({"type": TEXTS, "text": TEXTS}), max_size=2),
        }
    ),
    st.fixed_dictionaries({"role": st.just("user"), "n": st.sampled_from([0, 0.0, -0.0, 1, True])}),
)


def hashes(body: bytes, known: core.Conversation | None = None) -> tuple[object, ...]:
    """Give everything of a request that its items decide."""
    request = core.read_request(body, Dialect.CHAT, known)
    scan = request.conversation.scan
    continued = None if scan is None else scan.continued([{"role": "assistant", "content": "z"}])
    return request.probe, request.replay, continued


def body_of(items: list[object]) -> bytes:
    """Make a request that ends in a user's turn."""
    return json.dumps({"messages": [*items, {"role": "user", "content": "?"}]}).encode()


@given(st.lists(ITEMS, max_size=5), st.lists(ITEMS, max_size=5))
def test_a_known_beginning_changes_no_hash(first: list[object], added: list[object]) -> None:
    known = core.read_request(body_of(first)).conversation
    behind = [*first, {"role": "user", "content": "?"}, *added]
    assert hashes(body_of(behind), known) == hashes(body_of(behind))
    assert hashes(body_of(added), known) == hashes(body_of(added))


@pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0), (0, False), (0.0, -0.0)])
def test_what_only_compares_equal_is_hashed_anew(before: object, after: object) -> None:
    first, other = ([{"role": "user", "content": "", "n": value}] for value in (before, after))
    known = read_conversation(first)
    assert first == other
    assert read_conversation(other, known).source_digest == read_conversation(other).source_digest
    assert read_conversation(other, known).source_digest != known.source_digest


def test_a_scan_that_was_continued_is_unchanged() -> None:
    known = read_conversation([{"role": "user", "content": "a"}])
    assert known.scan is not None
    before = copy.copy(known.scan)
    read_conversation([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], known)
    assert known.scan.context_digest == before.context_digest
    assert known.scan.item_count == 1


def test_conversations_are_kept_within_their_bound() -> None:
    conversations = Conversations(bytes_max=100)
    one, other = (read_conversation([{"role": "user", "content": text}]) for text in "ab")
    conversations.keep("a", one, 60)
    conversations.keep("b", other, 40)
    assert (conversations.get("a"), conversations.get("b")) == (one, other)
    conversations.keep("a", other, 61)
    assert (conversations.get("a"), conversations.get("b")) == (other, None)
    conversations.keep("c", one, 101)
    assert [conversations.get(key) for key in "abc"] == [None, None, None]
