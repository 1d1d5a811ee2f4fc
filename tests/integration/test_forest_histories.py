"""What harnesses do to their histories in forest mode: bug cases B04, B05, B06, B15 and B16."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from callforest.capture.v1 import call_record_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError
from callforest_client.gateway import RESPONSES
from callforest_core.custody.tokens import TokenIds
from callforest_mesh.worker.chat_text import Message
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions, ScriptedTurn
from tests.integration.argument_echoes import ARGUMENT_ECHOES
from tests.integration.first_path_mesh import (
    GO,
    WORDS,
    FirstPathMesh,
    TurnTemplate,
    running_mesh,
    scripted,
    spoken,
    turn,
)

SAMPLED = [30, 31, 4]
MISSING = object()


def call(arguments: object, call_id: str = "call_1") -> dict[str, object]:
    function = {"name": "run", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str = "call_1") -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call_id, "content": "text"}


def says(message: dict[str, object], *sampled: int) -> ScriptedTurn:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return turn(*(sampled or SAMPLED), finish_reason=reason, message=message)


def context_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-callforest-context"]


async def echoed(
    path: Path, emitted: dict[str, object], echo: dict[str, object], *behind: object
) -> tuple[FirstPathMesh, str]:
    """Have a message emitted, echo another, and give the mesh and how the context was taken."""
    engine = scripted(says(emitted), turn(5, 4))
    async with running_mesh(path, engine, local=True, forest=True) as mesh:
        key = await mesh.open()
        assert context_of(await mesh.ask(key, GO)) == "root"
        response = await mesh.ask(key, GO, echo, *behind)
        context = context_of(response)
        manifest = await mesh.manifest(key)
        assert not manifest.failures, "a history that is not known poisons nothing"
        root, second = manifest.records
        continued = context == "continuation"
        assert bool(second.coords.parent_call_id) == continued
        if continued:
            assert second.coords.parent_call_id == root.coords.call_id
            assert mesh.prompts()[1][4 : 4 + len(SAMPLED)] == SAMPLED, "the sampled ids"
        return mesh, context


@pytest.mark.requirement("ADM-2")
@pytest.mark.bugcase("B04")
@pytest.mark.parametrize(
    ("emitted", "variant", "expected"), ARGUMENT_ECHOES.values(), ids=ARGUMENT_ECHOES
)
async def test_tool_arguments_are_compared_as_json(
    emitted: str, variant: str, expected: str, tmp_path: Path
) -> None:
    said = {"role": "assistant", "content": "some"}
    _, context = await echoed(
        tmp_path,
        {**said, "tool_calls": [call(emitted)]},
        {**said, "tool_calls": [call(variant)]},
        result(),
    )
    if expected == "continuation":
        assert context == expected
    else:
        assert context == f"root; reason=history_not_recorded; difference={expected}"


@pytest.mark.requirement("ADM-2", "ADM-3")
@pytest.mark.bugcase("B05")
@pytest.mark.parametrize("cleared", [{"tool_calls": None}, {"tool_calls": []}, {}])
async def test_cleared_tool_calls_are_another_history(
    cleared: dict[str, object], tmp_path: Path
) -> None:
    said = {"role": "assistant", "content": "some"}
    mesh, context = await echoed(
        tmp_path, {**said, "tool_calls": [call("{}")]}, {**said, **cleared}, result()
    )
    assert context == "root; reason=history_not_recorded; difference=rewritten_history"
    assert mesh.prompts()[1] != [1, 20, 2, 3, *SAMPLED, 1, 31, 2, 3], "nothing is spliced back"


def spelt(content: object, **fields: object) -> dict[str, object]:
    return {**fields} if content is MISSING else {"content": content, **fields}


@dataclass(frozen=True)
class TellingTemplate(TurnTemplate):
    """As its base, but a content that is null is rendered as a word."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        told = [
            {**one, "content": "o"} if one.get("content", "") is None else one for one in messages
        ]
        return super().render(
            [{**one, "content": one.get("content") or ""} for one in told],
            add_generation_prompt=add_generation_prompt,
        )


@dataclass(frozen=True)
class DeafTemplate(TurnTemplate):
    """As its base; content that is missing is rendered like empty content."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        return super().render(
            [{**one, "content": one.get("content") or ""} for one in messages],
            add_generation_prompt=add_generation_prompt,
        )


SPELLINGS = {"missing": MISSING, "null": None, "empty": ""}


@pytest.mark.requirement("ADM-2", "ADM-4", "ADM-5")
@pytest.mark.bugcase("B06")
@pytest.mark.parametrize("template", [DeafTemplate(WORDS), TellingTemplate(WORDS)])
@pytest.mark.parametrize("kind", ["tool-call turn", "plain turn"])
async def test_missing_text_is_equal_where_the_renderer_says_so(
    kind: str, template: TurnTemplate, tmp_path: Path
) -> None:
    """All nine of emitted and echoed, by renderings that were made and compared."""
    tools = {"tool_calls": [call("{}")]} if kind == "tool-call turn" else {}
    behind = result() if tools else GO
    contexts: dict[tuple[str, str], str] = {}
    for emitted, echo in itertools.product(SPELLINGS, SPELLINGS):
        engine = ScriptedEngine(
            vocabulary=WORDS,
            template=template,
            script=lambda _prompt, _call_id, ordinal, emitted=emitted: [
                says(spelt(SPELLINGS[emitted], **tools), 4),
                turn(5, 4),
            ][ordinal],
        )
        path = tmp_path / f"{emitted}-{echo}"
        path.mkdir()
        async with running_mesh(path, engine, local=True, forest=True) as mesh:
            key = await mesh.open()
            await mesh.ask(key, GO)
            message = spelt(SPELLINGS[echo], role="assistant", **tools)
            contexts[emitted, echo] = context_of(await mesh.ask(key, GO, message, behind))
            manifest = await mesh.manifest(key)
            assert not manifest.failures
    deaf = isinstance(template, DeafTemplate)
    for (emitted, echo), context in contexts.items():
        if emitted == echo or deaf:
            assert context == "continuation", (emitted, echo)
        else:
            assert context == "root; reason=renderer_not_equivalent", (emitted, echo)


async def siblings(mesh: FirstPathMesh, key: str) -> list[httpx.Response]:
    """Ask the same twice; both answers are the text `ok`, of different tokens."""
    answers = [await mesh.respond(key, [GO]) for _ in range(2)]
    for answer in answers:
        assert answer.json()["output"][0]["content"][0]["text"] == "ok"
    return answers


def ambiguous_engine() -> ScriptedEngine:
    return scripted(turn(5, 4), turn(6, 7, 4), *[turn(30, 4)] * 6)


def call_id_of(response: httpx.Response) -> str:
    return response.headers["x-callforest-call-id"]


@pytest.mark.requirement("ADM-2")
@pytest.mark.bugcase("B15")
async def test_identical_siblings_are_refused_before_generation(tmp_path: Path) -> None:
    async with running_mesh(tmp_path, ambiguous_engine(), local=True, forest=True) as mesh:
        key = await mesh.open()
        both = [call_id_of(one) for one in await siblings(mesh, key)]
        nameless = {"role": "assistant", "content": "ok"}
        before = (await mesh.manifest(key)).attempt
        response = await mesh.ask(key, GO, nameless, GO)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (422, "ambiguous_history")
        assert all(one in error["message"] for one in both)
        assert "ids" in error["message"]
        with pytest.raises(RefusedError) as caught:
            await mesh.gateway.complete(
                key, json.dumps({"model": "scripted", "messages": [GO, nameless, GO]}).encode()
            )
        assert caught.value.reason == er.ERROR_REASON_AMBIGUOUS_HISTORY
        assert caught.value.metadata["capture_key"] == key
        with pytest.raises(RefusedError) as caught:
            await mesh.gateway.measure(
                key,
                json.dumps({"model": "scripted", "input": [GO, nameless, GO]}).encode(),
                RESPONSES,
            )
        assert caught.value.reason == er.ERROR_REASON_AMBIGUOUS_HISTORY
        assert (await mesh.manifest(key)).attempt == before, "nothing was written"
        assert len(mesh.prompts()) == 2, "nothing was generated"
        healthy = await mesh.open("healthy")
        said = spoken(await mesh.ask(healthy, GO))
        assert context_of(await mesh.ask(healthy, GO, said, GO)) == "continuation"


@pytest.mark.requirement("ADM-2", "API-8")
@pytest.mark.bugcase("B15")
@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize("way", ["items", "message id", "header", "delta", "whole claim"])
async def test_an_echoed_id_or_a_claim_names_the_sibling(
    way: str, chosen: int, tmp_path: Path
) -> None:
    """Never the latest: whichever of the two is named."""
    async with running_mesh(tmp_path, ambiguous_engine(), local=True, forest=True) as mesh:
        key = await mesh.open()
        answers = await siblings(mesh, key)
        call_id = call_id_of(answers[chosen])
        nameless = {"role": "assistant", "content": "ok"}
        whole = json.dumps({"model": "scripted", "input": [GO, nameless, GO]}).encode()
        match way:
            case "items":
                output = answers[chosen].json()["output"]
                context = context_of(await mesh.respond(key, [GO, *output, GO]))
            case "message id":
                named = {**nameless, "id": answers[chosen].json()["id"]}
                context = context_of(await mesh.ask(key, GO, named, GO))
            case "header":
                response = await mesh.http.post(
                    f"{mesh.url}/rollouts/{key}/v1/responses",
                    content=whole,
                    headers={"x-callforest-continues": call_id},
                )
                context = context_of(response)
            case "delta":
                served = await mesh.gateway.complete(
                    key,
                    json.dumps({"model": "scripted", "input": [GO]}).encode(),
                    RESPONSES,
                    continues_call_id=call_id,
                )
                context = "continuation" if served.context.is_continuation else "root"
            case _:
                served = await mesh.gateway.complete(
                    key, whole, RESPONSES, continues_call_id=call_id, history_is_whole=True
                )
                context = "continuation" if served.context.is_continuation else "root"
        assert context == "continuation"
        records = (await mesh.manifest(key)).records
        assert records[-1].coords.parent_call_id == call_id
        sampled = [[5, 4], [6, 7, 4]][chosen]
        assert mesh.prompts()[-1][4 : 4 + len(sampled)] == sampled


INTERLEAVINGS = 200
AT_ONCE = 20
AGENTS = {"r": "you lead", "x": "you search", "y": "you write"}


async def agents_of_one_session(mesh: FirstPathMesh, key: str, chance: random.Random) -> None:
    """Be three agents that share an attempt: the leader asks, two children work, it goes on."""

    async def steps(name: str, count: int, history: list[object]) -> None:
        for number in range(count):
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            response = await mesh.ask(key, *history)
            history += [spoken(response), {"role": "user", "content": f"{name}{number}"}]

    started = {name: [{"role": "system", "content": rules}, GO] for name, rules in AGENTS.items()}
    await steps("r", 1, started["r"])
    children = [steps("x", 2, started["x"]), steps("y", 2, started["y"])]
    chance.shuffle(children)
    await asyncio.gather(*children)
    await steps("r", 1, started["r"])


def chains_of(records: Sequence[call_record_pb2.CallRecord]) -> list[tuple[bytes, ...]]:
    """Give the chain hashes along each path from a root; they do not depend on call ids."""
    by_id = {one.coords.call_id: one.coords for one in records}
    inner = {one.coords.parent_call_id for one in records}
    chains = []
    for leaf in (one.coords for one in records if one.coords.call_id not in inner):
        chain = [leaf.chain_hash]
        parent = leaf.parent_call_id
        while parent:
            chain.append(by_id[parent].chain_hash)
            parent = by_id[parent].parent_call_id
        chains.append(tuple(reversed(chain)))
    return sorted(chains)


@pytest.mark.requirement("ADM-2", "ADM-3")
@pytest.mark.bugcase("B16")
async def test_agents_that_share_a_session_keep_their_chains(tmp_path: Path) -> None:
    """200 random interleavings, answers 5 to 50 ms away: always the same three chains."""
    engine = ScriptedEngine(ScriptedOptions(latency_s=(0.005, 0.05), seed=5))
    seen: list[list[tuple[bytes, ...]]] = []
    orders: set[tuple[str, ...]] = set()
    async with running_mesh(tmp_path, engine, local=True, forest=True) as mesh:
        free = asyncio.Semaphore(AT_ONCE)

        async def interleaving(number: int) -> None:
            async with free:
                key = await mesh.open(f"r{number}")
                await agents_of_one_session(mesh, key, random.Random(number))
                manifest = await mesh.manifest(key)
            assert not manifest.failures
            assert len(manifest.records) == 6
            seen.append(chains_of(manifest.records))
            digests = [one.coords.chain_hash.hex() for one in manifest.records]
            orders.add(tuple(digests))

        async with asyncio.TaskGroup() as group:
            for number in range(INTERLEAVINGS):
                group.create_task(interleaving(number))
    assert len(seen) == INTERLEAVINGS
    assert all(chains == seen[0] for chains in seen)
    assert [len(chain) for chain in seen[0]] == [2, 2, 2]
    assert len(orders) > 1, "they did interleave"
