"""Bug cases B12, B16 and B18 as stated: from the messages of a harness to parents and to rows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from callforest.capture.v1 import group_batch_pb2
from callforest_client.source_codec import source_probe_to_proto
from callforest_core.custody.tokens import TokenIds
from callforest_core.lineage.forest_view import ForestMatch, ForestVerdict, ForestView
from callforest_core.lineage.source import EMPTY_HISTORY, SourceProbe, source_render_digest
from callforest_mesh.trainer.core import AdvantageOptions, Baseline
from callforest_mesh.trainer.rows import gather_step
from callforest_mesh.worker.chat_text import Message
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions
from tests.integration.first_path_mesh import GO, WordVocabulary, scripted, turn
from tests.integration.keyed_forest import KEY, KeyedForest, Row, keyed_forest, script_of
from tests.integration.offline_rows import words

MEAN = AdvantageOptions(baseline=Baseline.MEAN, normalise=False)
LETTERS = WordVocabulary({number: letter for number, letter in enumerate(" abcdefghi") if number})


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def tokens_of(batch: group_batch_pb2.GroupBatch) -> list[tuple[list[int], list[int]]]:
    """Of each training row: its tokens, and those of them that have loss."""
    return [
        (row.token_ids.tolist(), row.token_ids[row.loss_mask].tolist())
        for row in gather_step([batch], MEAN).rows
    ]


@dataclass(frozen=True)
class BareTemplate:
    """Nothing but the texts, so that the ids are those of the case; four of them end turns."""

    terminators: frozenset[int] = frozenset({4, 6, 7, 9})

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        del add_generation_prompt
        return np.concatenate([LETTERS.encode(str(one["content"])) for one in messages])


ROLLED_BACK = {"A": (3, 4), "B": (6,), "C": (3, 4, 5, 6, 7), "D": (9,)}
"""What each call samples."""
PROMPTS = {"A": [1, 2], "B": [1, 2, 3, 4, 5], "C": [1, 2], "D": [1, 2, 3, 4, 5, 6, 7, 8]}
COMMITTED = ["ABCD", "ACBD", "CABD"]
ASKED = user("ab")


def nested_engine() -> ScriptedEngine:
    turns = {name: turn(*sampled) for name, sampled in ROLLED_BACK.items()}
    return ScriptedEngine(vocabulary=LETTERS, template=BareTemplate(), script=script_of(turns))


async def roll_back(forest: KeyedForest, order: str) -> None:
    """A and C are announced together, B when A is there, D when C is; they finish in this order."""
    held = {"A": await forest.hold("A", ASKED), "C": await forest.hold("C", ASKED)}
    for name in order:
        match name:
            case "B":
                await forest.ask("B", ASKED, forest.said("A"), user("e"))
            case "D":
                await forest.ask("D", ASKED, forest.said("C"), user("h"))
            case _:
                await forest.finish(name, held[name])


async def predecessor(forest: KeyedForest, *messages: object) -> str:
    """Whom a request with these messages would continue; nothing is recorded."""
    history = EMPTY_HISTORY.extended(messages)
    probe = history.probe(source_render_digest({"model": "scripted"}))
    verdict = await forest.mesh.ledger.find_predecessor(
        KEY,
        source_probe_to_proto(probe),
        configuration_digest=forest.mesh.engine.describe().configuration_digest,
    )
    return verdict.continuation.parent_call_id


async def behind_two(forest: KeyedForest) -> list[str]:
    """Whom histories continue that hold the answers of two calls each: A and B, C and D."""
    behind_b = [ASKED, forest.said("A"), user("e"), forest.said("B"), user("h")]
    behind_d = [ASKED, forest.said("C"), user("h"), forest.said("D"), user("e")]
    named = {one.coords.call_id: name for name, one in (await forest.records()).items()}
    return [named[await predecessor(forest, *asked)] for asked in (behind_b, behind_d)]


async def check_parents(forest: KeyedForest, order: str) -> None:
    """From messages to parents: those that the case states."""
    assert "".join(await forest.records()) == order
    assert forest.prompts() == PROMPTS
    assert await forest.parents() == {"A": "", "B": "A", "C": "", "D": "C"}
    whole = {name: [*PROMPTS[name], *sampled] for name, sampled in ROLLED_BACK.items()}
    heads = [name for name in "ABC" if PROMPTS["D"][: len(whole[name])] == whole[name]]
    assert heads == ["A", "B", "C"], "the tokens of three calls head the prompt of D"
    assert await behind_two(forest) == ["B", "D"], "the longest"


@pytest.mark.requirement("ADM-2", "SEL-2", "SEL-3", "FOR-3")
@pytest.mark.bugcase("B12")
@pytest.mark.parametrize("policy", ["returned_history", "all_captured"])
async def test_the_longest_history_is_the_parent_whatever_was_committed_first(
    policy: str, tmp_path: Path
) -> None:
    played: list[list[Row]] = []
    for order in COMMITTED:
        async with keyed_forest(tmp_path / order, nested_engine(), policy) as forest:
            await roll_back(forest, order)
            await check_parents(forest, order)
            batch = await forest.finalize("ABCD")
            assert tokens_of(batch) == [
                ([1, 2, 3, 4, 5, 6], [3, 4, 6]),
                ([1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 9]),
            ]
            played.append(forest.rows(batch))
    named = [(row_id, [(name, owns) for name, _, owns in spans]) for row_id, spans in played[0]]
    assert named == [
        ("g_g0_s0", [("A", True), ("B", True)]),
        ("g_g0_s1", [("C", True), ("D", True)]),
    ]
    assert all(rows == played[0] for rows in played), "row ids, calls, digests and ownership"


class FirstMatch(ForestView):
    """What the case is about: the first committed call whose history the request begins with."""

    def resolve(self, probe: SourceProbe) -> ForestVerdict:
        held = {(one.atom_count, one.source_digest) for one in probe.boundaries}
        for call_id, (key, render) in self._places.items():
            if key[1:] in held and render == probe.render_digest:
                row = self._groups[key][render].rows[call_id]
                return ForestMatch(call_id, row.prev_len, row.chain_hash, exact=True)
        return super().resolve(probe)


@pytest.mark.bugcase("B12")
@pytest.mark.parametrize("order", COMMITTED)
async def test_a_first_match_would_fail_the_case(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("callforest_mesh.ledger.attempt.ForestView", FirstMatch)
    async with keyed_forest(tmp_path / order, nested_engine()) as forest:
        await roll_back(forest, order)
        assert await behind_two(forest) == ["A", "C"]


INTERLEAVINGS = 20
RULES = {"r": "you lead", "x": "you search", "y": "you write"}
STEPS = ["r1", "x1", "x2", "y1", "y2", "r2"]


def late_engine(seed: int) -> ScriptedEngine:
    """Each call says its name, 5 to 50 ms later; the seed is of the latencies alone."""
    engine = ScriptedEngine(ScriptedOptions(latency_s=(0.005, 0.05), seed=seed))
    end = max(engine.template.terminators)
    engine.script = script_of(
        {name: turn(*engine.vocabulary.encode(f"I am {name}").tolist(), end) for name in STEPS}
    )
    return engine


async def share_a_session(forest: KeyedForest, chance: random.Random) -> None:
    """A leader asks, two children that were told other things work at once, it goes on."""
    histories = {
        agent: [{"role": "system", "content": rules}, GO] for agent, rules in RULES.items()
    }

    async def step(name: str) -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        history = histories[name[0]]
        history += [await forest.ask(name, *history), user(f"behind {name}")]

    async def child(agent: str) -> None:
        await step(f"{agent}1")
        await step(f"{agent}2")

    await step("r1")
    children = [child("x"), child("y")]
    chance.shuffle(children)
    await asyncio.gather(*children)
    await step("r2")


@pytest.mark.requirement("ADM-2", "SEL-2", "SEL-3", "FOR-2", "FOR-3")
@pytest.mark.bugcase("B16")
@pytest.mark.parametrize("policy", ["returned_history", "all_captured"])
async def test_agents_that_share_a_session_have_the_same_rows_every_time(
    policy: str, tmp_path: Path
) -> None:
    """One capture key, one key a logical call, fresh stores: three chains, the same digests."""
    played: list[list[Row]] = []
    announced: set[tuple[str, ...]] = set()
    committed: set[tuple[str, ...]] = set()
    for number in range(INTERLEAVINGS):
        engine = late_engine(number)
        async with keyed_forest(tmp_path / str(number), engine, policy) as forest:
            await share_a_session(forest, random.Random(number))
            records = await forest.records()
            assert await forest.parents() == {
                **dict.fromkeys(("r1", "x1", "y1"), ""),
                **{f"{agent}2": f"{agent}1" for agent in RULES},
            }
            committed.add(tuple(records))
            announced.add(tuple(sorted(records, key=lambda name: records[name].intent_number)))
            batch = await forest.finalize(STEPS)
            played.append(forest.rows(batch))
    assert len(committed) > 1, "they did interleave"
    assert [row_id for row_id, _ in played[0]] == ["g_g0_s0", "g_g0_s1", "g_g0_s2"]
    chains = [[(name, owns) for name, _, owns in spans] for _, spans in played[0]]
    assert sorted(chains) == [[(f"{agent}1", True), (f"{agent}2", True)] for agent in "rxy"]
    if policy == "returned_history":
        assert all(rows == played[0] for rows in played), "row ids, calls, digests and ownership"
        return
    assert len(announced) > 1, "children were announced in either order"
    contents = [sorted(spans for _, spans in rows) for rows in played]
    assert all(rows == contents[0] for rows in contents)
    assert {tuple(row_id for row_id, _ in rows) for rows in played} == {
        ("g_g0_s0", "g_g0_s1", "g_g0_s2")
    }


@pytest.mark.requirement("SEL-2", "FOR-2", "FOR-3")
@pytest.mark.bugcase("B18")
async def test_a_rejected_compaction_trains_nothing_and_the_accepted_one_once(
    tmp_path: Path,
) -> None:
    """K1 is rejected, K2 is its retry; the new root C is asked with what K2 said."""
    turns = {
        "A": turn(30, 4),
        "B": turn(31, 4),
        "K1": turn(40, 41, 4),
        "K2": turn(30, 31, 4),
        "C": turn(5, 4),
    }
    engine = scripted()
    engine.script = script_of(turns)
    async with keyed_forest(tmp_path / "r", engine) as forest:
        behind_a = [GO, await forest.ask("A", GO), GO]
        compacting = [*behind_a, await forest.ask("B", *behind_a), user("text")]
        await forest.ask("K1", *compacting)
        summary = (await forest.ask("K2", *compacting))["content"]
        assert summary == "sometext"
        await forest.ask("C", user(f"{summary}go"))
        assert await forest.parents() == {"A": "", "B": "A", "K1": "B", "K2": "B", "C": ""}
        batch = await forest.finalize(["A", "B", "K2", "C"])
        assert [[(name, owns) for name, _, owns in spans] for _, spans in forest.rows(batch)] == [
            [("A", True), ("B", True), ("K2", True)],
            [("C", True)],
        ]
        first, second = tokens_of(batch)
        assert first[0] == [1, 20, 2, 3, 30, 4, 1, 20, 2, 3, 31, 4, 1, 31, 2, 3, 30, 31, 4]
        assert first[1] == [30, 4, 31, 4, 30, 31, 4], "K2's own tokens, once"
        assert second == ([1, 30, 31, 20, 2, 3, 5, 4], [5, 4]), "what K2 generated has no loss here"
        quoted = batch.segments[batch.rows[1].spans[0].segment_index]
        carried = words(quoted)[: quoted.canonical.carry_token_count]
        assert carried[1:3] == [*turns["K2"].token_ids][:2], "C carries K2's generated ids"
        rejected = set(turns["K1"].token_ids) - {4}
        assert not any(rejected & set(tokens) for tokens, _ in (first, second))
        reasons = {one.call_id: one.reason for one in batch.receipts[0].calls}
        assert sorted(reasons.values()) == ["not_returned", *["selected"] * 4]
