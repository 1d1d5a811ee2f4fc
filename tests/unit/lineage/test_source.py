"""Source histories: chained, resumable, of constant size, equal across the dialects."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.atoms import atoms_of
from callforest_core.lineage.fingerprint import UnreadableItemError
from callforest_core.lineage.items import Dialect
from callforest_core.lineage.replay import RENDER_OPTIONS
from callforest_core.lineage.source import (
    BOUNDARIES_MAX,
    EMPTY_HISTORY,
    NATIVE_IDS_MAX,
    SOURCE_VERSION,
    SourceHistory,
    SourceSummary,
    output_summary,
    source_items,
    source_render_digest,
)
from tests.unit.lineage.conversations import CONVERSATIONS, Conversation, Turn

RENDER = source_render_digest({})


def facts(history: SourceHistory) -> tuple[object, ...]:
    return (
        history.atom_count,
        history.source_digest,
        history.tool_content_digest,
        history.boundaries,
        history.observations_follow,
    )


@pytest.mark.requirement("ADM-2")
@given(CONVERSATIONS)
def test_the_dialects_of_one_conversation_have_one_history(talk: Conversation) -> None:
    """Spellings too, but of a silent answer: only Chat tells `""` beside reasoning."""
    chat = EMPTY_HISTORY.extended(talk.chat())
    said = all(turn.answer or turn.calls for turn in talk.turns)
    for items in (talk.responses(), talk.messages()):
        other = EMPTY_HISTORY.extended(items)
        assert (other.atom_count, other.source_digest) == (chat.atom_count, chat.source_digest)
        assert other.observations_follow == chat.observations_follow
        for one, two in zip(other.boundaries, chat.boundaries, strict=True):
            assert (one.atom_count, one.source_digest) == (two.atom_count, two.source_digest)
        if said:
            assert facts(other) == facts(chat)


@pytest.mark.requirement("ADM-2")
@given(CONVERSATIONS, st.sampled_from(["chat", "responses", "messages"]))
def test_a_history_is_chained_over_the_atoms(talk: Conversation, dialect: str) -> None:
    items = getattr(talk, dialect)()
    digest = hashlib.sha256(b"callforest-source-v3").digest()
    atoms = list(atoms_of(items))
    for atom in atoms:
        piece = digest + len(atom).to_bytes(8, "big") + atom
        digest = hashlib.sha256(b"callforest-source-v3" + piece).digest()
    history = EMPTY_HISTORY.extended(items)
    assert (history.atom_count, history.source_digest) == (len(atoms), digest)


@pytest.mark.requirement("ADM-7")
@given(CONVERSATIONS, st.integers(0, 30), st.sampled_from(["chat", "responses", "messages"]))
def test_a_history_that_resumes_is_that_of_one_pass(
    talk: Conversation, cut: int, dialect: str
) -> None:
    items = getattr(talk, dialect)()
    before = EMPTY_HISTORY.extended(items[:cut])
    seen = facts(before)
    assert facts(before.extended(items[cut:])) == facts(EMPTY_HISTORY.extended(items))
    assert before.extended(items[cut:]).native_ids == EMPTY_HISTORY.extended(items).native_ids
    assert facts(before) == seen, "what it was extended from is as it was"


@pytest.mark.requirement("ADM-2")
@given(CONVERSATIONS, st.data())
def test_any_other_turn_is_another_history(talk: Conversation, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(talk.turns) - 1))
    other = data.draw(CONVERSATIONS).turns[0]
    turns = list(talk.turns)
    turns[place] = other
    history = EMPTY_HISTORY.extended(talk.chat())
    changed = EMPTY_HISTORY.extended(Conversation(turns).chat())
    same = list(atoms_of(Conversation(turns).chat())) == list(atoms_of(talk.chat()))
    assert (changed.source_digest == history.source_digest) == same
    shorter = EMPTY_HISTORY.extended(Conversation(talk.turns[:-1]).chat())
    assert shorter.source_digest != history.source_digest


@pytest.mark.requirement("ADM-7")
def test_a_summary_is_of_constant_size_and_holds_no_items() -> None:
    assert [field.name for field in fields(SourceSummary)] == [
        "atom_count",
        "source_digest",
        "tool_content_digest",
        "render_digest",
        "normalization_version",
    ]
    for count in (0, 1, 500):
        talk = Conversation([Turn("u", answer="a")] * count)
        history = EMPTY_HISTORY.extended(talk.chat())
        summary = history.summary(RENDER)
        assert summary.normalization_version == SOURCE_VERSION == 3
        assert summary.key == (2 * count, history.source_digest)
        assert len(history.boundaries) == min(count, BOUNDARIES_MAX)
        ends = [end.atom_count for end in history.boundaries]
        assert ends == [2 * (count - back) for back in range(len(ends))]


@pytest.mark.requirement("ADM-7")
def test_the_written_layout_is_what_is_hashed() -> None:
    def chained(domain: bytes, *pieces: bytes) -> bytes:
        return hashlib.sha256(domain + b"".join(pieces)).digest()

    def field(text: bytes) -> bytes:
        return len(text).to_bytes(8, "big") + text

    source, spelling = b"callforest-source-v3", b"callforest-tool-content-v1"
    first = b"\1" + field(b"user") + field(b"text") + field(b"\xc3\xa9") + field(b"")
    second = b"\4" + field(b"c1") + field(b"run") + field(b'{"a":1.0}')
    arguments = '{ "a" : 1e0 }'
    call = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": arguments}}
    history = EMPTY_HISTORY.extended(
        [
            {"role": "user", "content": "é"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    )
    digest = chained(source)
    for atom in (first, second):
        digest = chained(source, digest, field(atom))
    assert history.source_digest == digest
    assert history.tool_content_digest == chained(spelling, chained(spelling), b"\2")


@pytest.mark.requirement("ADM-3")
def test_only_user_messages_and_tool_results_are_observations() -> None:
    answer = {"role": "assistant", "content": "a"}
    user = {"role": "user", "content": "u"}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}

    def follow(*items: object) -> bool:
        return EMPTY_HISTORY.extended(items).observations_follow

    assert follow(user, answer, user)
    assert follow(answer, result, user)
    assert follow(answer, {"type": "function_call_output", "call_id": "c", "output": "r"})
    assert not follow(user)
    assert not follow(user, answer)
    assert not follow(answer, user, {"role": "system", "content": "s"})
    assert not follow(answer, user, {"role": "developer", "content": "s"})
    assert not follow(answer, user, answer)
    assert follow({"role": "system", "content": "s"}, answer, user)


@pytest.mark.requirement("ADM-2")
def test_an_answer_spells_its_missing_text_once_and_by_its_first_item() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "run"}}
    user = {"role": "user", "content": "u"}

    def spelt(*items: object) -> bytes:
        return EMPTY_HISTORY.extended([user, *items, user]).tool_content_digest

    def chained(*spellings: int) -> bytes:
        digest = hashlib.sha256(b"callforest-tool-content-v1").digest()
        for one in spellings:
            piece = digest + bytes([one])
            digest = hashlib.sha256(b"callforest-tool-content-v1" + piece).digest()
        return digest

    null = {"role": "assistant", "content": None, "tool_calls": [call]}
    empty = {"role": "assistant", "content": ""}
    reasoned = {"type": "reasoning", "encrypted_content": "x"}
    refused = {"role": "assistant", "content": None, "refusal": "no"}
    assert spelt(null) == spelt(null, empty) == chained(2)
    assert spelt(empty, null) == chained(3)
    assert spelt(reasoned, null) == chained(1)
    assert spelt(empty, user, reasoned, user, null) == chained(3, 1, 2)
    assert spelt(refused) == spelt(null, refused) == spelt(reasoned, refused) == chained()


@pytest.mark.requirement("ADM-2")
def test_what_cannot_be_read_has_no_boundaries() -> None:
    start = EMPTY_HISTORY.extended([{"role": "user", "content": "u"}])
    for bad in ("text", {"content": "no role"}, {"role": "user", "content": "\ud800"}):
        history = start.extended([{"role": "assistant", "content": "a"}, bad])
        later = history.extended([{"role": "assistant", "content": "b"}])
        assert facts(later) == facts(history)
        assert (history.atom_count, history.boundaries, history.native_ids) == (2, (), ())
        probe = history.probe(RENDER)
        assert (probe.has_unreadable_item, probe.boundaries) == (True, ())
        assert not start.probe(RENDER).has_unreadable_item
        assert not later.observations_follow
        assert history.fault is not None
        with pytest.raises(UnreadableItemError):
            history.summary(RENDER)
        with pytest.raises(UnreadableItemError):
            output_summary([bad])


def test_native_ids_are_those_of_the_last_answer() -> None:
    def said(name: str) -> list[dict[str, object]]:
        return [
            {"type": "reasoning", "id": f"rs_{name}", "content": [{"text": "t"}]},
            {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": "a"},
            {"type": "function_call", "id": f"fc_{name}_0", "call_id": "c", "name": "run"},
        ]

    user = {"role": "user", "id": "u1", "content": "u"}
    history = EMPTY_HISTORY.extended([user, *said("1"), user, *said("2")])
    assert history.native_ids == ("rs_2", "msg_2", "fc_2_0")
    assert history.extended([user]).native_ids == history.native_ids
    assert history.extended([user]).probe(RENDER).native_ids == history.native_ids
    plain = history.extended([user, {"role": "assistant", "content": "a"}])
    assert plain.native_ids == ()
    odd = [{"role": "assistant", "id": one, "content": "a"} for one in ("", 5, "x" * 257, "y")]
    assert EMPTY_HISTORY.extended(odd).native_ids == ("y",)
    many = [{"role": "assistant", "id": f"m{n // 2}", "content": "a"} for n in range(200)]
    kept = tuple(f"m{n}" for n in range(NATIVE_IDS_MAX))
    assert EMPTY_HISTORY.extended(many).native_ids == kept, "each once, and not too many"


def test_instructions_are_a_first_system_message() -> None:
    body = {"instructions": "Be brief.", "input": "Hi"}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            None,
            {"role": "user", "content": "Hi"},
        ]
    }
    one = EMPTY_HISTORY.extended(source_items(body, Dialect.RESPONSES))
    assert facts(one) == facts(EMPTY_HISTORY.extended(source_items(chat, Dialect.CHAT)))
    assert source_items({"messages": "Hi"}, Dialect.CHAT) == []


def test_an_output_is_its_answers_atoms_alone() -> None:
    answer = [{"role": "assistant", "content": "a"}]
    assert output_summary(answer).atom_count == 1
    assert output_summary(answer).normalization_version == SOURCE_VERSION
    silent = output_summary([{"role": "assistant", "content": None}])
    assert silent == output_summary([{"role": "assistant", "content": ""}])
    assert silent.atom_count == 1
    assert output_summary(answer).digest == EMPTY_HISTORY.extended(answer).source_digest


UNCOUNTED = {"instructions", "tool_choice", "parallel_tool_calls"}
DEFAULTS = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "continue_final_message": False,
}


@pytest.mark.requirement("ADM-2")
def test_render_options_count_as_far_as_they_reach_the_template() -> None:
    options = {"model": "m", "tools": [{"name": "run"}]}
    digest = source_render_digest(options)
    others = dict.fromkeys([*UNCOUNTED, "temperature"], "changed")
    assert source_render_digest({**options, **others, **DEFAULTS}) == digest
    assert source_render_digest({**options, "documents": [], "chat_template_kwargs": {}}) == digest
    for name in set(RENDER_OPTIONS) - UNCOUNTED:
        assert source_render_digest({**options, name: "changed"}) != digest
    for name, value in DEFAULTS.items():
        assert source_render_digest({**options, name: not value}) != digest
        assert source_render_digest({**options, name: int(value)}) != digest
    plain = json.dumps(
        {name: DEFAULTS.get(name) for name in sorted(set(RENDER_OPTIONS) - UNCOUNTED)},
        separators=(",", ":"),
    )
    expected = hashlib.sha256(b"callforest-render-v2" + plain.encode()).digest()
    assert source_render_digest({}) == expected
