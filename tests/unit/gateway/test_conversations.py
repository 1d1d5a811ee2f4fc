"""A conversation that is continued hashes to the same as one that is read anew."""

import hashlib
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest.capture.v1 import attempt_pb2, call_record_pb2
from callforest_core.lineage.fingerprint import ConversationScan
from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway.body_frame import BodyFrame
from callforest_mesh.gateway.conversations import Conversations, read_conversation
from callforest_mesh.gateway.core import NormalisedRequest
from callforest_mesh.gateway.evidence import ServedResponse
from callforest_mesh.gateway.reading import ChainReader
from callforest_mesh.gateway.unsupported import MEDIA

SERVED = ServedResponse(b"", "r", [{"role": "assistant", "content": "z"}], {})
TEXTS = st.text(max_size=6)
KINDS = TEXTS.filter(lambda kind: kind not in MEDIA)  # else it is refused, and has no hash
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
            "content": st.lists(st.fixed_dictionaries({"type": KINDS, "text": TEXTS}), max_size=2),
        }
    ),
    st.just({"type": "reasoning", "summary": []}),
    st.fixed_dictionaries({"role": st.just("user"), "n": st.sampled_from([0, 0.0, -0.0, 1, True])}),
)


def read(conversations: Conversations, items: list[object], key: str = "k") -> NormalisedRequest:
    """Read a request that ends in a user's turn."""
    body = json.dumps({"messages": [*items, {"role": "user", "content": "?"}]}).encode()
    return ChainReader(conversations).read(key, body, Dialect.CHAT)


def told(request: NormalisedRequest) -> tuple[bytes, bytes]:
    """Give everything of a request's history that reaches the ledger."""
    intent, record = attempt_pb2.CallIntent(), call_record_pb2.CallRecord()
    request.evidence.announce(intent)
    request.evidence.describe(record, SERVED)
    return intent.SerializeToString(), record.SerializeToString()


@given(st.lists(ITEMS, max_size=5), st.lists(ITEMS, max_size=5))
def test_a_known_beginning_changes_no_hash(first: list[object], added: list[object]) -> None:
    conversations = Conversations()
    for items in (first, [*first, {"role": "user", "content": "?"}, *added], added, first):
        request = read(conversations, items)
        assert told(request) == told(read(Conversations(), items))
        request.evidence.keep("c", SERVED)
        assert conversations.get("k") is not None


def test_only_what_is_new_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    extended = ConversationScan.extended

    def counted(scan: ConversationScan, items: Sequence[object]) -> ConversationScan:
        hashed.append(len(items))
        return extended(scan, items)

    monkeypatch.setattr(ConversationScan, "extended", counted)
    conversations = Conversations()
    first: list[object] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole = [*first, {"role": "user", "content": "?"}, {"role": "assistant", "content": "c"}]
    read(conversations, first).evidence.keep("c", SERVED)
    read(conversations, whole)
    read(conversations, whole, key="another attempt")
    read(conversations, whole[1:])
    assert hashed == [3, 2, 5, 4]


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, True), (1, 1.0), (0, False), (0.0, -0.0), ({"a": 1, "b": 2}, {"b": 2, "a": 1})],
)
def test_what_only_compares_equal_is_hashed_anew(before: object, after: object) -> None:
    # A role that is no text is hashed as Python prints it: the order of its keys counts too.
    first, other = (
        [{"role": value, "content": "x", "n": value}, {"role": "user", "content": "y"}]
        for value in (before, after)
    )
    assert first == other
    conversations = Conversations()
    request = read(conversations, first)
    request.evidence.keep("c", SERVED)
    assert told(read(conversations, other)) == told(read(Conversations(), other)) != told(request)


def test_a_conversation_that_was_continued_is_unchanged() -> None:
    conversations = Conversations()
    items: list[object] = [{"role": "user", "content": "a"}]
    request = read(conversations, items)
    request.evidence.keep("c", SERVED)
    before = told(request)
    read(
        conversations, [*items, {"role": "user", "content": "?"}, {"role": "user", "content": "b"}]
    )
    assert told(request) == before


def test_conversations_are_kept_within_their_bound() -> None:
    body = BodyFrame(b"c" * 9000, b"]}", hashlib.sha256())
    one, other = (read_conversation([text]) for text in "ab")
    large = read_conversation(["c"], frame=body)
    conversations = Conversations(bytes_max=one.size_bytes + other.size_bytes)
    conversations.keep("a", one)
    conversations.keep("b", other)
    assert (conversations.get("a"), conversations.get("b")) == (one, other)
    conversations.keep("a", other)
    conversations.keep("c", one)
    assert [conversations.get(key) for key in "abc"] == [other, None, one]
    conversations.keep("a", large)
    assert [conversations.get(key) for key in "abc"] == [None, None, None]


def test_a_history_is_kept_once_at_most() -> None:
    conversations = Conversations()
    items: list[object] = [{"role": "user", "content": "a" * 50_000}]
    read(conversations, items).evidence.keep("c", SERVED)
    known = conversations.get("k")
    assert known is not None
    assert 50_000 < known.size_bytes < 53_000


def last_answer_of(letters: str) -> tuple[int, int]:
    """Find the last answer by its rule: back from the last item of a model's, as far as it goes."""
    end = letters.rfind("a") + 1
    return len(letters[:end].rstrip("ar")), end


@given(st.text(alphabet="uar", max_size=9), st.text(alphabet="uar", max_size=5))
def test_the_last_answer_is_found_across_what_is_known(first: str, added: str) -> None:
    kinds: dict[str, object] = {
        "u": {"role": "user", "content": "x"},
        "a": {"role": "assistant", "content": "x"},
        "r": {"type": "reasoning", "summary": []},
    }
    known = read_conversation([kinds[letter] for letter in first])
    for base in (None, known):
        read = read_conversation([kinds[letter] for letter in first + added], base)
        assert read.answer[:2] == last_answer_of(first + added)
