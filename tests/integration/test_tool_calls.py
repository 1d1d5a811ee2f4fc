"""Tool calls of a real model through the whole mesh: a real template, vLLM's parser, the SDK."""

import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio

from callforest.capture.v1 import receipt_pb2
from callforest_client.codec import call_record_from_proto, staged_call_from_proto
from callforest_client.rollout import OpenRollout, Outcome
from callforest_core.custody.call import CallRecord, Receipt, StagedCall
from callforest_core.custody.verification import verify_and_linearize
from callforest_core.lineage.fingerprint import ConversationScan
from callforest_mesh.demo.smollm2 import make_smollm2
from tests.integration.reference_model import Reference
from tests.integration.running_mesh import Running, running

TEMPLATE = Path(__file__).parents[1] / "golden/data/templates/qwen2_5.jinja"
TEMPLATE_SHA256 = "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is 12 plus 30? Call add."}
# Compact, where the template writes spaces: what it renders is not what is sampled.
CALL = '<tool_call>\n{"name":"add","arguments":{"a":12,"b":30}}\n</tool_call>'
# So small a model calls of itself when it has been shown how: two times in three.
SHOWN = [{"role": role, "content": CALL} for _ in range(3) for role in ("user", "assistant")][:-1]
TRIES = 12
# And when it is held to the form; the numbers are its choice.
ARGUMENTS = r'\{"a":[1-9][0-9]?,"b":[1-9][0-9]?\}'
GRAMMAR = rf'<tool_call>\n\{{"name":"add","arguments":{ARGUMENTS}\}}\n</tool_call>'
ABSENT = object()


@dataclass
class Setting:
    mesh: Running
    model: Reference
    rollouts: int = 0

    async def open(self) -> tuple[OpenRollout, openai.AsyncOpenAI]:
        self.rollouts += 1
        rollout = await self.mesh.owner.open(f"r{self.rollouts}")
        client = openai.AsyncOpenAI(base_url=rollout.base_url, api_key="any", max_retries=0)
        return rollout, client

    async def calls(self, rollout: OpenRollout) -> tuple[list[CallRecord], list[StagedCall]]:
        """The committed calls: their ledger rows and their tokens, in the order of the commits."""
        manifest = await self.mesh.clients.ledger().manifest(rollout.capture_key)
        assert not manifest.failures
        records = [call_record_from_proto(record) for record in manifest.records]
        ids = [record.call_id for record in records]
        staged = await self.mesh.clients.staging().fetch(rollout.capture_key, ids)
        return records, [staged_call_from_proto(call) for call in staged]

    async def finish(self, rollout: OpenRollout, response_id: str) -> receipt_pb2.Receipt:
        outcome = Outcome(reward=1.0, declared_response_id=response_id)
        return await self.mesh.owner.finish(
            rollout, outcome, group_id=f"g-{rollout.rollout_id}", slot=0
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setting]:
    assert hashlib.sha256(TEMPLATE.read_bytes()).hexdigest() == TEMPLATE_SHA256
    folder = tmp_path_factory.mktemp("tools")
    checkpoint = make_smollm2(folder / "smollm2")
    vllm = {
        "model": str(checkpoint),
        "dtype": "float32",
        "chat_template": str(TEMPLATE),
        "context_token_count": 1024,
        "concurrent_sequences": 4,
    }
    engine = ["worker.engine=vllm", f"worker.vllm={json.dumps(vllm)}"]
    async with running("embedded", folder, *engine) as mesh:
        yield Setting(mesh, Reference(checkpoint))


async def call_freely(setting: Setting) -> tuple[OpenRollout, openai.AsyncOpenAI, Any]:
    """Ask, a new rollout each time, until the model calls by nothing but its own sampling."""
    for seed in range(TRIES):
        rollout, client = await setting.open()
        completion = await client.chat.completions.create(
            model="policy", messages=SHOWN, tools=[ADD], max_completion_tokens=64, seed=seed
        )
        if completion.choices[0].finish_reason == "tool_calls":
            return rollout, client, completion
        await client.close()
    raise AssertionError(f"no tool call in {TRIES} tries")


async def call_by_grammar(client: openai.AsyncOpenAI) -> Any:
    """Let the model call, its text held to a grammar."""
    return await client.chat.completions.create(
        model="policy",
        messages=[QUESTION],
        tools=[ADD],
        max_completion_tokens=64,
        seed=3,
        extra_body={"structured_outputs": {"regex": GRAMMAR}},
    )


def echo(message: Any, content: object) -> dict[str, Any]:
    """What a harness sends back of a tool-call message, its content written as it likes."""
    echoed = {"role": "assistant", "tool_calls": [c.to_dict() for c in message.tool_calls]}
    return echoed if content is ABSENT else {**echoed, "content": content}


def result_of(message: Any) -> dict[str, Any]:
    """Run the tool: what a harness answers."""
    (call,) = message.tool_calls
    asked = json.loads(call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": str(asked["a"] + asked["b"])}


def logprobs_of(model: Reference, path: np.ndarray, last: StagedCall) -> np.ndarray:
    """What transformers gives the last call's sampled tokens, the path before them given."""
    start = len(path) - last.generation_len
    return model.logprobs(path[:start], path[start:])


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.requirement("CAP-1", "CAP-5", "ADM-1", "ADM-6", "FOR-4")
@pytest.mark.bugcase("B01", "B04")
async def test_the_turn_after_a_tool_call_continues_its_exact_tokens(setting: Setting) -> None:
    rollout, client, called = await call_freely(setting)
    async with client:
        message = called.choices[0].message
        (call,) = message.tool_calls
        assert (call.type, call.function.name) == ("function", "add")
        messages: list[Any] = [*SHOWN, message, result_of(message)]
        answered = await client.chat.completions.create(
            model="policy", messages=messages, tools=[ADD], max_completion_tokens=16, seed=3
        )
    records, (first, second) = await setting.calls(rollout)
    assert len(records) == 2
    assert records[1].parent_call_id == records[0].call_id

    tokenizer = setting.model.tokenizer
    sampled = first.token_ids[first.carry_len :]
    text = tokenizer.decode(sampled, skip_special_tokens=True)
    assert text.startswith('<tool_call>\n{"name":"add","arguments":{')
    assert '"name": "add", "description": "Add two numbers."' in tokenizer.decode(
        first.token_ids[: first.carry_len]
    )
    assert second.prev_len == first.cum_len
    path = np.concatenate([first.token_ids, second.token_ids])
    rendered = tokenizer.apply_chat_template(
        [*SHOWN, echo(message, None), result_of(message)],
        tools=[ADD],
        chat_template=TEMPLATE.read_text(),
        return_dict=False,
    )
    assert rendered[: len(first.token_ids)] != first.token_ids.tolist(), "the text was re-spaced"
    carried = tokenizer.decode(second.token_ids[: second.carry_len])
    assert f"<tool_response>\n{result_of(message)['content']}\n</tool_response>" in carried
    # The engine's own logprobs are those of these very tokens: it saw no others.
    for staged, seen in ((first, first.token_ids), (second, path)):
        expected = logprobs_of(setting.model, seen, staged)
        np.testing.assert_allclose(staged.logprobs, expected, atol=1e-3, rtol=0)

    receipt = await setting.finish(rollout, answered.id)
    assert not receipt.masked, receipt
    row = verify_and_linearize(
        Receipt(
            capture_key=rollout.capture_key,
            manifest=tuple(records),
            terminal_call_id=records[1].call_id,
            capture_poisoned=False,
            terminal_selection="declared",
        ),
        [first, second],
    )
    assert row.token_ids.tolist() == path.tolist()
    spans = [(link.start + link.carry_len, link.end) for link in row.links]
    trained = np.zeros(len(path))
    for start, end in spans:
        trained[start:end] = 1
    assert np.asarray(row.token_mask).tolist() == trained.tolist()


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.requirement("CAP-5")
async def test_a_call_held_to_a_grammar_is_captured_and_does_not_train(setting: Setting) -> None:
    rollout, client = await setting.open()
    async with client:
        called = await call_by_grammar(client)
    assert called.choices[0].finish_reason == "tool_calls"
    _, (staged,) = await setting.calls(rollout)
    own = logprobs_of(setting.model, staged.token_ids, staged)
    # The engine's raw logprobs, too, count only what the grammar allows: never less, often all.
    assert (staged.logprobs >= own - 1e-3).all()
    assert (staged.logprobs - own).max() > 1
    receipt = await setting.finish(rollout, called.id)
    assert (receipt.masked, receipt.mask_reason) == (True, "sampling_mismatch")


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.requirement("ADM-1", "ADM-6")
@pytest.mark.bugcase("B06")
async def test_an_echoed_tool_call_matches_however_it_writes_no_content(setting: Setting) -> None:
    carries = []
    for content in (None, "", ABSENT):
        rollout, client = await setting.open()
        async with client:
            message = (await call_by_grammar(client)).choices[0].message
            assert not message.content
            await client.chat.completions.create(
                model="policy",
                messages=[QUESTION, echo(message, content), result_of(message)],
                tools=[ADD],
                max_completion_tokens=2,
            )
        (record, continued), (_, second) = await setting.calls(rollout)
        assert continued.parent_call_id == record.call_id
        carries.append((result_of(message)["content"], second.token_ids[: second.carry_len]))
    texts = [setting.model.tokenizer.decode(carry).replace(sum_, "N") for sum_, carry in carries]
    assert len(set(texts)) == 1, "all three are one conversation to the renderer too"


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.requirement("ADM-1")
@pytest.mark.bugcase("B05")
async def test_a_tool_call_that_was_cleared_is_no_continuation(setting: Setting) -> None:
    rollout, client = await setting.open()
    async with client:
        message = (await call_by_grammar(client)).choices[0].message
        cleared = {"role": "assistant", "content": "", "tool_calls": None}
        await client.chat.completions.create(
            model="policy",
            messages=[QUESTION, cleared, result_of(message)],
            tools=[ADD],
            max_completion_tokens=2,
        )
    manifest = await setting.mesh.clients.ledger().manifest(rollout.capture_key)
    assert (len(manifest.records), len(manifest.failures)) == (1, 1)


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.requirement("ADM-1", "ADM-6")
@pytest.mark.bugcase("B06")
@pytest.mark.parametrize("content", [None, "", ABSENT], ids=["null", "empty", "absent"])
async def test_an_empty_answer_is_continued_as_the_renderer_reads_it(
    setting: Setting, content: object
) -> None:
    """vLLM gives the template the same text for all three, so all three are one conversation."""
    rollout, client = await setting.open()
    model = setting.model.tokenizer
    turn = {"role": "assistant"} | ({} if content is ABSENT else {"content": content})
    async with client:
        said = await client.chat.completions.create(
            model="policy",
            messages=[QUESTION],
            max_completion_tokens=4,
            logit_bias={str(model.eos_token_id): 100},
        )
        assert said.choices[0].message.content == ""
        await client.chat.completions.create(
            model="policy", messages=[QUESTION, turn, QUESTION], max_completion_tokens=2
        )
    (record, continued), (first, second) = await setting.calls(rollout)
    assert continued.parent_call_id == record.call_id
    assert first.token_ids[first.carry_len :].tolist() == [model.eos_token_id]
    assert model.decode(second.token_ids[: second.carry_len]) == (
        f"\n<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n"
    )


TURN = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]


def written(content: object, calls: object) -> dict[str, object]:
    message: dict[str, object] = {"role": "assistant"}
    if content is not ABSENT:
        message["content"] = content
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.requirement("ADM-1")
@pytest.mark.bugcase("B06")
@pytest.mark.parametrize("calls", [TURN, None], ids=["tool_call", "plain"])
def test_chain_fingerprints_read_no_content_alike(calls: object) -> None:
    """The contract counts text that is there: nine of nine pairs match, with and without calls."""
    contents = (None, "", ABSENT)
    question = {"role": "user", "content": "go"}
    for emitted, echoed in itertools.product(contents, contents):
        served = ConversationScan([question]).continued([written(emitted, calls)])
        asked = ConversationScan([question, written(echoed, calls)])
        assert served.fingerprint == asked.assistant_fingerprint
    said = ConversationScan([question, written("no content", calls)])
    assert said.assistant_fingerprint != asked.assistant_fingerprint
