"""Bodies that begin with an earlier one's bytes are read from there, and as if they were whole."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core
from callforest_mesh.gateway.body_start import (
    BodyStart,
    Prefixes,
    longest_start,
    rest_of,
    start_of,
)
from callforest_mesh.gateway.evidence import ServedResponse
from callforest_mesh.gateway.forest_reading import ForestReader
from callforest_mesh.gateway.histories import Histories
from callforest_mesh.gateway.json_body import read_body
from callforest_mesh.gateway.refusals import HttpRefusal

CHAT, RESPONSES = Dialect.CHAT, Dialect.RESPONSES
GO = {"role": "user", "content": "gö"}
SAID = {"role": "assistant", "content": "sô"}


def start(body: bytes) -> BodyStart:
    made = start_of(read_body(body), "messages", Prefixes(body))
    assert made is not None
    return made


def answer(call_id: str) -> bytes:
    choice = {"index": 0, "message": SAID, "finish_reason": "stop"}
    return json.dumps({"id": call_id, "choices": [choice]}).encode()


def serve(reader: ForestReader, body: bytes, dialect: Dialect, call_id: str) -> ServedResponse:
    request = reader.read("k", body, dialect)
    served = core.read_response(answer(call_id), request)
    request.evidence.keep(call_id, served)
    return served


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[1,2],"n":[3]}',
        b' { "model" : "m" , "messages" : [ 1 , "\\u00e9]" ] , "stop" : "]" } ',
        '{"model":"\u00e9\u00e9","messages":["\u00e9",{"a":[]}  \n],"user":"\u00e9"}'.encode(),
    ],
)
def test_a_start_ends_with_the_last_turn(body: bytes) -> None:
    begun = start(body)
    assert body[begun.turns_at - 1 : begun.turns_at] == b"["
    listed = json.loads(b"[" + body[begun.turns_at : begun.size] + b"]")
    assert listed == json.loads(body)["messages"]
    assert body[: begun.size].rstrip() == body[: begun.size]
    assert begun.digest == sha256(body[: begun.size]).digest()


@pytest.mark.parametrize("body", [b'{"messages":[]}', b'{"messages":"x"}', b'{"input":[1]}'])
def test_without_turns_there_is_no_start(body: bytes) -> None:
    assert start_of(read_body(body), "messages", Prefixes(body)) is None


def test_the_longest_start_is_found_among_those_of_other_conversations() -> None:
    bodies = [b'{"messages":[%s]}' % b",".join([b"7"] * count) for count in (1, 2, 3)]
    other = b'{"messages":[7,7,8,9,9,9]}'
    starts = [start(one) for one in (*bodies, other)]
    goes_on = b'{"messages":[7,7,7 ,9,9,9,9,9,9]}'
    prefixes = Prefixes(goes_on)
    assert longest_start(goes_on, reversed(starts), prefixes) == starts[2]
    assert prefixes.digest(3) == sha256(goes_on[:3]).digest(), "also behind what was tried"
    for body, found in (
        (b'{"messages":[7,7]}', starts[0]),  # what ends there does not go on there
        (b'{"messages":[77,7]}', None),
        (b'{"messages":[7 8]}', None),
        (b'{"messages" :[7,7]}', None),
        (b'{"messages":[7', None),
    ):
        assert longest_start(body, starts, Prefixes(body)) == found


def test_the_rest_is_the_body_without_its_start() -> None:
    begun = start(b'{"model":"m","messages":[1,2]}')
    body = b'{"model":"m","messages":[1,2 , 3],"n":1}'
    rest, left_out = rest_of(body, begun)
    assert json.loads(rest) == {"model": "m", "messages": [3], "n": 1}
    whole = start_of(read_body(body), "messages", Prefixes(body))
    assert start_of(read_body(rest), "messages", Prefixes(body), left_out) == whole
    with pytest.raises(ValueError, match="does not go on"):
        rest_of(b'{"model":"m","messages":[1,2]}', begun)


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    "tail",
    [
        b",]}",
        b", ]}",
        b",,1]}",
        b",{}}",
        b",1",
        b',{"role":"user"}]',
        b',{"role":"user","content":"a"}],"model":"x"}',  # the key stands twice
        b',{"role":"user","content":"a"}]}{}',
        b',{"role":"user","content":"a","content":"b"}]}',
        b',{"role":"user","content":NaN}]}',
        b',{"role":"user","content":"\xff"}]}',
        b',{"role":"user","content":' + b"[" * 200 + b"]" * 200 + b"}]}",
        b',"a"]}',
        b',{"role":"assistant","content":"a"}]}',
        b',{"role":"user","content":[{"type":"image_url"}]}]}',
    ],
)
def test_what_is_refused_of_a_whole_body_is_refused_behind_a_start(
    dialect: Dialect, tail: bytes
) -> None:
    name = core.turns_name(dialect)
    body = json.dumps({"model": "m", name: [GO]}).encode()
    reader = ForestReader(Histories(1 << 20, 10))
    serve(reader, body, dialect, "c1")
    refusals = []
    for one in (reader, ForestReader(Histories(0, 0))):
        with pytest.raises(HttpRefusal) as caught:
            one.read("k", body[: body.rindex(b"]")] + tail, dialect)
        refusals.append(caught.value)
    known, fresh = refusals
    assert (known.status, known.code, known.parameter, known.message) == (
        (fresh.status, fresh.code, fresh.parameter, fresh.message)
    )


@pytest.mark.requirement("ADM-2")
def test_what_stands_behind_the_turns_still_counts() -> None:
    reader = ForestReader(Histories(1 << 20, 10))
    body = json.dumps({"input": [GO], "instructions": "be brief", "temperature": 1}).encode()
    serve(reader, body, RESPONSES, "c1")
    turns = [GO, {**SAID, "type": "message"}, GO]
    for fields in (
        {"instructions": "be long", "temperature": 1},
        {"temperature": 1},
        {"instructions": "be brief", "temperature": 0.5, "tools": []},
    ):
        body = json.dumps({"input": turns, **fields}).encode()
        request = reader.read("k", body, RESPONSES)
        fresh = ForestReader(Histories(0, 0)).read("k", body, RESPONSES)
        assert request.evidence.probe == fresh.evidence.probe
        assert json.loads(request.body) == json.loads(fresh.body)
        assert request.echo == fresh.echo
        same = fields.get("instructions") == "be brief"
        assert (request.evidence.known is not None) == same


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_a_stream_is_asked_of_the_whole_history(dialect: Dialect) -> None:
    reader = ForestReader(Histories(1 << 20, 10))
    name = core.turns_name(dialect)
    serve(reader, json.dumps({name: [GO]}).encode(), dialect, "c1")
    body = json.dumps({name: [GO, {**SAID, "type": "message"}, GO], "stream": True}).encode()
    request = reader.read("k", body, dialect)
    fresh = ForestReader(Histories(0, 0)).read("k", body, dialect)
    assert request.evidence.known is not None
    assert json.loads(request.body) == json.loads(fresh.body)
    assert len(json.loads(request.body)["messages"]) == 3
    assert request.streaming == fresh.streaming


@pytest.mark.requirement("ADM-2")
def test_new_turns_that_make_no_message_are_read_with_the_whole() -> None:
    reader = ForestReader(Histories(1 << 20, 10))
    serve(reader, json.dumps({"input": [GO]}).encode(), RESPONSES, "c1")
    body = json.dumps({"input": [GO, {"type": "reasoning", "summary": []}]}).encode()
    request = reader.read("k", body, RESPONSES)
    assert request.evidence.known is None
    assert json.loads(request.body)["messages"] == [GO]


TEXTS = st.text(st.sampled_from('a\u00e9\U0001f600"\\]},[{: \n'), max_size=6)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), min_size=1, max_size=3
)
STYLES = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 0, 1]),
        "separators": st.sampled_from([None, (",", ":"), (" , ", " : ")]),
    }
)


@pytest.mark.requirement("ADM-2", "ADM-7")
@given(TURNS, TURNS, TEXTS, STYLES, STYLES, st.booleans(), st.sampled_from([CHAT, RESPONSES]))
def test_a_known_start_changes_nothing_of_what_is_read(
    first: list[object],
    more: list[object],
    user: str,
    style: dict[str, object],
    other: dict[str, object],
    turns_first: bool,
    dialect: Dialect,
) -> None:
    name = core.turns_name(dialect)

    def write(turns: list[object], how: dict[str, object]) -> bytes:
        fields = {name: turns, "user": user, "temperature": 1.0}
        names = fields if turns_first else dict(reversed(fields.items()))
        return json.dumps({one: fields[one] for one in names}, **how).encode()

    reader = ForestReader(Histories(1 << 20, 100))
    served = serve(reader, write(first, style), dialect, "c1")
    said = json.loads(served.body)
    echo = [said["choices"][0]["message"]] if dialect is CHAT else said["output"]
    for turns, how in (([*first, *echo, *more], style), ([*first, *more], other)):
        body = write(turns, how)
        request = reader.read("k", body, dialect)
        fresh = ForestReader(Histories(0, 0)).read("k", body, dialect)
        assert request.evidence.probe == fresh.evidence.probe
        assert json.loads(request.body) == json.loads(fresh.body)
        assert request.evidence.start == fresh.evidence.start
        if how is style and turns_first:
            assert request.evidence.known is not None
