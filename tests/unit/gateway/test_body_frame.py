"""Of a body that says an earlier one again and adds turns, the turns alone are read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.items import Dialect
from callforest_core.lineage.strict_json import LEVELS_MAX
from callforest_mesh.gateway import core
from callforest_mesh.gateway.asked import begin_digest, digest_body
from callforest_mesh.gateway.body_frame import BodyFrame, frame_of
from callforest_mesh.gateway.conversations import Conversations
from callforest_mesh.gateway.evidence import Claim, ServedResponse
from callforest_mesh.gateway.json_body import read_body
from callforest_mesh.gateway.reading import ChainReader
from callforest_mesh.gateway.refusals import HttpRefusal

GO = {"role": "user", "content": "gö"}
SAID = {"role": "assistant", "content": "sô"}
SERVED = ServedResponse(b"", "r", [SAID], {})
HEAD, TAIL = '{"model":"m","messages":[', '],"seed":7}'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
WRITTEN = st.one_of(
    st.lists(JSON, min_size=1, max_size=3).map(lambda turns: json.dumps(turns)[1:-1]),
    st.text(alphabet='[]{},:"1a ', max_size=12),
)


def body_of(written: str) -> bytes:
    return f"{HEAD}{written}{TAIL}".encode()


def frame(body: bytes) -> BodyFrame:
    cut = frame_of(read_body(body), Dialect.CHAT, "messages")
    assert cut is not None
    return cut


def keeping_one(body: bytes) -> ChainReader:
    """Give a reader that remembers a request."""
    reader = ChainReader(Conversations())
    reader.read("k", body, Dialect.CHAT).evidence.keep("c", SERVED)
    return reader


def refusal_of(reader: ChainReader, body: bytes) -> dict[str, object]:
    with pytest.raises(HttpRefusal) as refused:
        reader.read("k", body, Dialect.CHAT)
    return refused.value.shown()


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (b'{"messages":[1,2],"n":[3]}', b'],"n":[3]}'),
        (b' { "model" : "m" , "messages" : [ 1 , "]" ] , "stop" : "]" } ', b' ] , "stop" : "]" } '),
        (
            '{"é":"é","messages":["é",{"a":[]}  \n],"user":"é"}'.encode(),
            '  \n],"user":"é"}'.encode(),
        ),
    ],
)
def test_a_frame_is_cut_behind_the_last_turn(body: bytes, end: bytes) -> None:
    cut = frame(body)
    assert (cut.start + cut.end, cut.end) == (body, end)


@pytest.mark.parametrize("body", [b'{"messages":[]}', b'{"messages":"x"}', b'{"input":[1]}'])
def test_without_turns_there_is_no_frame(body: bytes) -> None:
    assert frame_of(read_body(body), Dialect.CHAT, "messages") is None


@given(WRITTEN)
def test_turns_are_added_exactly_if_the_whole_body_adds_them(written: str) -> None:
    before = body_of("1")
    after = body_of(f"1,{written}")
    added = frame(before).added(after)
    try:
        whole = read_body(after).fields
    except HttpRefusal:
        assert not added
        return
    if set(whole) == {"model", "messages", "seed"} and whole["messages"] != [1]:
        assert [1, *(added or [])] == whole["messages"]
        moved = frame(before).moved(after)
        assert (moved.start + moved.end, moved.end) == (after, frame(before).end)
        assert moved.digest == digest_body(after, Dialect.CHAT)
    else:
        assert not added


@pytest.mark.parametrize(
    "after",
    [
        body_of("1"),
        body_of("12,3"),
        body_of("1 3"),
        body_of("1;3"),
        body_of("2,3"),
        body_of("1,3")[:-1],
        body_of("1,3").replace(b'"m"', b'"n"'),
        body_of("1,3").replace(b"7}", b"8}"),
        b'{"model":"m","messages":[1],"seed":7}'[:-1],
        body_of('1,3],"stop":["a"'),
        body_of('1,3],"messages":[4'),
        body_of("1,3],[4"),
        body_of("1,NaN"),
        body_of("1,1e999"),
        body_of('1,{"a":1,"a":2}'),
        body_of("1,'").replace(b"'", b"\xff"),
        body_of("1," + "[" * 9999 + "]" * 9999),
        b'{"model":"m","messages":[1,"],"seed":7}',
    ],
)
def test_what_differs_in_more_than_added_turns_adds_none(after: bytes) -> None:
    assert not frame(body_of("1")).added(after)


def test_ends_that_overlap_add_nothing() -> None:
    cut = BodyFrame(b'{"messages":[1', b"1,2]}", begin_digest(Dialect.CHAT))
    assert cut.added(b'{"messages":[1,2]}') is None


@pytest.mark.parametrize("levels", [LEVELS_MAX - 2, LEVELS_MAX - 1])
def test_added_turns_are_nested_as_deep_as_in_their_body(levels: int) -> None:
    written = "[" * levels + "]" * levels
    after = body_of(f"1,{written}")
    if levels + 2 <= LEVELS_MAX:
        assert frame(body_of("1")).added(after) == [json.loads(written)]
        return
    assert frame(body_of("1")).added(after) is None
    with pytest.raises(HttpRefusal, match="nested"):
        read_body(after)


@pytest.mark.requirement("CAP-3")
@pytest.mark.parametrize(
    "turns",
    [
        [None],
        ["text"],
        [SAID],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
        [SAID, {"role": "user", "content": "x", "prompt_token_ids": [1]}],
    ],
)
def test_added_turns_are_refused_as_in_a_whole_body(turns: list[object]) -> None:
    first, body = (
        json.dumps({"messages": [GO, *more], "seed": 7}).encode() for more in ([], turns)
    )
    assert refusal_of(keeping_one(first), body) == refusal_of(ChainReader(Conversations()), body)


def test_added_turns_count_towards_the_most_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    first, body = (
        json.dumps({"messages": [GO] * count, "tools": [{"type": "function"}]}).encode()
        for count in (2, 4)
    )
    reader = keeping_one(first)
    monkeypatch.setattr(core, "ITEMS_MAX", 5)
    reader.read("k", body, Dialect.CHAT)
    monkeypatch.setattr(core, "ITEMS_MAX", 4)
    assert refusal_of(reader, body)["param"] == "messages"


def test_a_body_that_adds_turns_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [
        json.dumps({"model": "m", "messages": [GO, *[SAID, GO] * count], "seed": 7}).encode()
        for count in range(4)
    ]
    reader = keeping_one(bodies[0])
    monkeypatch.setattr(core, "read_body", None)
    for body in bodies[1:]:
        request = reader.read("k", body, Dialect.CHAT)
        assert (request.body, request.body_digest) == (body, digest_body(body, Dialect.CHAT))
        request.evidence.keep("c", SERVED)


@pytest.mark.parametrize("more", [{"stream": True}, {"input": []}])
def test_a_body_that_the_engine_gets_in_another_form_has_no_frame(more: dict[str, object]) -> None:
    dialect = Dialect.RESPONSES if "input" in more else Dialect.CHAT
    name = "input" if "input" in more else "messages"
    conversations = Conversations()
    reader = ChainReader(conversations)
    for count in (1, 3):
        body = json.dumps({**more, name: [GO] * count}).encode()
        request = reader.read("k", body, dialect)
        assert request.body != body
        request.evidence.keep("c", SERVED)
        kept = conversations.get("k")
        assert kept is not None
        assert kept.frame is None


@pytest.mark.requirement("CAP-13")
def test_a_claim_counts_in_the_digest_of_a_body_that_adds_turns() -> None:
    first, body = (json.dumps({"messages": [GO] * count}).encode() for count in (1, 2))
    claim = Claim("c", history_is_whole=True)
    request = keeping_one(first).read("k", body, Dialect.CHAT, claim)
    assert request.body_digest == digest_body(body, Dialect.CHAT, claim)


def test_a_frame_is_of_its_own_api() -> None:
    first, body = (json.dumps({"messages": [GO] * count}).encode() for count in (1, 2))
    with pytest.raises(HttpRefusal):
        keeping_one(first).read("k", body, Dialect.RESPONSES)
