"""Reading a request of forest mode: whole, from where it is known, or as a delta."""

from __future__ import annotations

import json
import random

import pytest

from callforest.capture.v1 import call_record_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.lineage.items import Dialect
from callforest_core.lineage.source import EMPTY_HISTORY, output_summary, source_items
from callforest_mesh.chassis.validation import check
from callforest_mesh.gateway import core
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.forest_reading import ForestReader
from callforest_mesh.gateway.histories import Histories
from callforest_mesh.gateway.refusals import HttpRefusal
from tests.unit.gateway.read_requests import CHAT, GO, RESPONSES, body_of, serve

CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}
TOOL = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
ANSWERS = {
    "text": {"content": "HAVING"},
    "empty": {"content": ""},
    "reasoned": {"content": "HAVING", "reasoning": "why", "refusal": None, "tool_calls": []},
    "calls": {"content": None, "tool_calls": [CALL]},
    "absent": {"tool_calls": [CALL]},
    "all": {"content": "so", "reasoning": "why", "tool_calls": [CALL]},
}


@pytest.fixture
def histories() -> Histories:
    return Histories(64 << 20, 10_000)


@pytest.fixture
def reader(histories: Histories) -> ForestReader:
    return ForestReader(histories)


def echo_of(dialect: Dialect, served: core.ServedResponse) -> list[object]:
    """Give the turns with which a harness echoes an answer."""
    said = json.loads(served.body)
    return [said["choices"][0]["message"]] if dialect is CHAT else said["output"]


def probe_of(request: core.NormalisedRequest) -> capture_admission_pb2.SourceProbe:
    check(request.evidence.probe)
    return request.evidence.probe


def refused(reader: ForestReader, *asked: object) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as caught:
        reader.read(*asked)
    return caught.value


@pytest.mark.requirement("ADM-2", "ADM-7")
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_the_probe_is_of_the_items_as_received(reader: ForestReader, dialect: Dialect) -> None:
    turns = [GO, {"role": "assistant", "content": "HAVING"}, GO]
    fields = {"instructions": "be brief"} if dialect is RESPONSES else {}
    request = reader.read("k", body_of(dialect, turns, **fields), dialect)
    history = EMPTY_HISTORY.extended(
        source_items({core.turns_name(dialect): turns, **fields}, dialect)
    )
    probe = probe_of(request)
    assert probe.atom_count == history.atom_count == len(turns) + len(fields)
    (boundary,) = probe.boundaries
    assert boundary.source_digest == history.boundaries[0].source_digest
    assert probe.observations_follow
    assert not probe.HasField("claimed_call_id")


@pytest.mark.requirement("API-8")
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_a_delta_is_the_whole_request(reader: ForestReader, dialect: Dialect, answer: str) -> None:
    """Digests, engine's body, record and echo are those of the request that came whole."""
    observed = OUTPUT if dialect is RESPONSES else TOOL
    observed = observed if "tool_calls" in ANSWERS[answer] and ANSWERS[answer]["tool_calls"] else GO
    fields: dict[str, object] = {"tools": [], "temperature": 1.0}
    if dialect is RESPONSES:
        fields["instructions"] = "be brief"
    turns: list[object] = [{"role": "system", "content": "rules"}, GO]
    first = reader.read("k", body_of(dialect, turns, **fields), dialect)
    served = serve(first, "c1", ANSWERS[answer])
    turns += [*echo_of(dialect, served), observed]
    for number in range(2, 6):
        delta = body_of(dialect, turns[-1:], **fields)
        by_delta = reader.read("k", delta, dialect, Claim(f"c{number - 1}", history_is_whole=False))
        whole = ForestReader(Histories(0, 0)).read("k", body_of(dialect, turns, **fields), dialect)
        assert json.loads(by_delta.body) == without_nulls(json.loads(whole.body))
        claimed = probe_of(by_delta)
        assert claimed.claimed_call_id == f"c{number - 1}"
        claimed.ClearField("claimed_call_id")
        assert claimed == probe_of(whole)
        assert by_delta.echo == whole.echo
        served = serve(by_delta, f"c{number}", {"content": f"answer {number}"})
        assert record_of(by_delta, served) == record_of(whole, served)
        turns += [*echo_of(dialect, served), GO]


def without_nulls(body: dict[str, object]) -> dict[str, object]:
    """Take out what an SDK's echo adds to an answer and what counts for nothing."""
    for message in body["messages"]:
        for name in [one for one in message if one != "content" and message[one] in (None, [])]:
            del message[name]
    return body


def record_of(
    request: core.NormalisedRequest, served: core.ServedResponse
) -> call_record_pb2.CallRecord:
    record = call_record_pb2.CallRecord()
    request.evidence.describe(record, served)
    return record


@pytest.mark.requirement("ADM-7")
def test_the_record_is_of_request_and_answer(reader: ForestReader) -> None:
    request = reader.read("k", body_of(CHAT, [GO]), CHAT)
    said = {"role": "assistant", "content": "HAVING"}
    record = record_of(request, serve(request, "c1", said))
    whole = EMPTY_HISTORY.extended([GO, said])
    assert record.replay.item_count == whole.atom_count == 2
    assert record.replay.source_digest == whole.source_digest
    assert record.output.digest == output_summary([said]).digest
    assert not record.HasField("fingerprints")
    follow_up = probe_of(reader.read("k", body_of(CHAT, [GO, said, GO]), CHAT))
    assert follow_up.boundaries[0].source_digest == record.replay.source_digest
    assert follow_up.boundaries[0].tool_content_digest == record.replay.tool_content_digest
    assert follow_up.render_digest == record.replay.render_digest


@pytest.mark.requirement("API-8")
def test_a_history_that_is_not_kept_is_required(reader: ForestReader) -> None:
    request = reader.read("k", body_of(CHAT, [GO]), CHAT)
    serve(request, "c1", ANSWERS["text"])
    for key, dialect, call_id in (("k", CHAT, "c2"), ("other", CHAT, "c1"), ("k", RESPONSES, "c1")):
        refusal = refused(
            reader, key, body_of(dialect, [GO]), dialect, Claim(call_id, history_is_whole=False)
        )
        assert refusal.reason == er.ERROR_REASON_HISTORY_REQUIRED
        assert refusal.facts == {"capture_key": key, "call_id": call_id}
        assert "history_is_whole" in refusal.message


@pytest.mark.requirement("API-8")
def test_a_delta_is_judged_like_any_request(reader: ForestReader) -> None:
    serve(reader.read("k", body_of(CHAT, [GO]), CHAT), "c1", ANSWERS["text"])
    claim = Claim("c1", history_is_whole=False)
    for turns, parameter in (([], "messages"), (["go"], "messages[0]")):
        assert refused(reader, "k", body_of(CHAT, turns), CHAT, claim).parameter == parameter
    prefill = body_of(CHAT, [{"role": "assistant", "content": "x"}])
    assert refused(reader, "k", prefill, CHAT, claim).code == "unsupported_value"
    many = body_of(CHAT, [GO] * (core.ITEMS_MAX - 1))
    assert "items" in refused(reader, "k", many, CHAT, claim).message


@pytest.mark.requirement("API-8")
def test_other_instructions_are_another_history(reader: ForestReader) -> None:
    first = body_of(RESPONSES, [GO], instructions="be brief")
    serve(reader.read("k", first, RESPONSES), "c1", ANSWERS["text"])
    claim = Claim("c1", history_is_whole=False)
    for fields in ({}, {"instructions": "be long"}):
        refusal = refused(reader, "k", body_of(RESPONSES, [GO], **fields), RESPONSES, claim)
        assert refusal.reason == er.ERROR_REASON_HISTORY_CLAIM_REFUSED
        assert refusal.facts["fault"] == "not_this_call"


def test_a_claim_with_a_whole_history_only_breaks_ties(reader: ForestReader) -> None:
    body = body_of(CHAT, [GO, {"role": "assistant", "content": "x"}, GO])
    plain = probe_of(reader.read("k", body, CHAT))
    claimed = probe_of(reader.read("k", body, CHAT, Claim("c9", history_is_whole=True)))
    assert (claimed.claimed_call_id, claimed.claim_breaks_ties) == ("c9", True)
    claimed.ClearField("claimed_call_id")
    claimed.ClearField("claim_breaks_ties")
    assert claimed == plain


@pytest.mark.requirement("ADM-7")
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_what_was_read_before_is_not_read_again(
    reader: ForestReader, histories: Histories, dialect: Dialect
) -> None:
    """A history that comes again unchanged is taken over; the digests are those of all of it."""
    turns: list[object] = [GO]
    for number in range(6):
        body = body_of(dialect, turns)
        request = reader.read("k", body, dialect)
        fresh = ForestReader(Histories(0, 0)).read("k", body, dialect)
        assert probe_of(request) == probe_of(fresh)
        assert json.loads(request.body) == json.loads(fresh.body)
        assert request.echo == fresh.echo
        assert (request.evidence.known is not None) == (number > 0)
        served = serve(request, f"c{number}", {"content": f"answer {number}", "audio": None})
        turns += [*echo_of(dialect, served), {"role": "user", "content": f"more {number}"}]
    kept = histories.get("k", "c5")
    assert kept is not None
    parts = b",".join(part.items for part in kept.request_parts())
    sent = json.loads(body)[core.turns_name(dialect)]
    assert json.loads(b"[" + parts + b"]") == sent


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize(
    ("sent", "changed"),
    [
        ({"role": "user", "content": "go", "n": 1}, {"role": "user", "content": "go", "n": 1.0}),
        ({"role": "user", "content": "go", "n": 1}, {"role": "user", "content": "go", "n": True}),
        ({"role": "user", "content": "go"}, {"role": "user", "content": "go "}),
        ({"role": "user", "content": "go"}, {"role": "user", "content": [["text", "go"]]}),
    ],
)
def test_turns_that_only_look_equal_are_read(
    reader: ForestReader, sent: object, changed: object
) -> None:
    said = {"role": "assistant", "content": "HAVING"}
    serve(reader.read("k", body_of(CHAT, [sent]), CHAT), "c1", said)
    assert reader.read("k", body_of(CHAT, [sent, said, GO]), CHAT).evidence.known is not None
    other = reader.read("k", body_of(CHAT, [changed, said, GO]), CHAT)
    assert other.evidence.known is None
    fresh = ForestReader(Histories(0, 0)).read("k", body_of(CHAT, [changed, said, GO]), CHAT)
    assert probe_of(other) == probe_of(fresh)


def test_refusals_name_the_place_in_the_whole_request(reader: ForestReader) -> None:
    said = {"role": "assistant", "content": "HAVING"}
    serve(reader.read("k", body_of(CHAT, [GO]), CHAT), "c1", said)
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    refusal = refused(reader, "k", body_of(CHAT, [GO, said, image, GO]), CHAT)
    assert refusal.parameter == "messages[2].content[0]"
    serve(reader.read("k", body_of(RESPONSES, [GO]), RESPONSES), "c2", said)
    refusal = refused(reader, "k", body_of(RESPONSES, [GO, said, image, GO]), RESPONSES)
    assert refusal.parameter == "input[2].content[0]"


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES])
def test_known_histories_never_change_a_probe(dialect: Dialect) -> None:
    """Whatever a harness does to its history, a reader that knows it gives what a new one gives."""
    chance = random.Random(7)
    reader = ForestReader(Histories(1 << 20, 50))
    odd = [{"type": "reasoning", "summary": []}, {"role": "system", "content": "rules"}]
    turns: list[dict[str, object]] = [GO]
    known = 0
    for number in range(400):
        tools = chance.choice([None, None, [{"type": "function", "name": "run"}]])
        body = body_of(dialect, turns, tools=tools if dialect is RESPONSES else None)
        request = reader.read("k", body, dialect)
        fresh = ForestReader(Histories(0, 0)).read("k", body, dialect)
        assert probe_of(request) == probe_of(fresh)
        assert json.loads(request.body) == json.loads(fresh.body)
        known += request.evidence.known is not None
        served = serve(request, f"c{number}", chance.choice(list(ANSWERS.values())))
        observed = OUTPUT if dialect is RESPONSES else TOOL
        turns = [*turns, *echo_of(dialect, served), chance.choice([GO, observed])]
        match chance.randrange(12):
            case 0:
                turns = turns[chance.randrange(len(turns)) :]
            case 1:
                place = chance.randrange(len(turns))
                turns[place] = {**turns[place], "name": f"n{number}"}
            case 2:
                turns = [GO]
            case 3:
                turns = [dict(sorted(one.items())) for one in turns]
            case 4 if dialect is RESPONSES:
                turns.insert(chance.randrange(len(turns)), chance.choice(odd))
            case 5 if dialect is RESPONSES:
                turns = [chance.choice(odd), *turns[-3:]]
        turns = turns[-12:]
        if turns[-1].get("role") == "assistant" or turns[-1].get("type") == "function_call":
            turns.append(GO)
    assert known > 100


def unreadable(reader: ForestReader) -> core.NormalisedRequest:
    said = {"role": "assistant", "content": "\ud800"}
    return reader.read("k", body_of(CHAT, [GO, said, GO]), CHAT)


@pytest.mark.requirement("ADM-2", "ADM-7")
def test_what_cannot_be_read_is_no_history(reader: ForestReader, histories: Histories) -> None:
    request = unreadable(reader)
    probe = probe_of(request)
    assert probe.has_unreadable_item
    assert not probe.boundaries
    record = record_of(request, serve(request, "c1", ANSWERS["text"]))
    assert not record.HasField("replay")
    assert not record.HasField("output")
    assert len(histories) == 0


def test_ids_that_cannot_be_sent_name_no_call(reader: ForestReader) -> None:
    ids = ["\ud800", "x" * 300, "", 5, "msg_1"]
    said = [{"role": "assistant", "content": "x", "id": one} for one in ids]
    request = reader.read("k", body_of(RESPONSES, [GO, *said, GO]), RESPONSES)
    assert list(probe_of(request).native_ids) == ["msg_1"]


def test_options_without_normal_form_match_nothing(reader: ForestReader) -> None:
    odd = {"chat_template_kwargs": {"n": 2**70}}
    one = probe_of(reader.read("k", body_of(CHAT, [GO], seed=1, **odd), CHAT))
    other = probe_of(reader.read("k", body_of(CHAT, [GO], seed=2, **odd), CHAT))
    assert one.render_digest != other.render_digest
