"""The vLLM engine, through the port, in its own process: one start serves the whole module."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from callforest_mesh.worker.engine import (
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
    TokenIds,
    WeightVersionSpan,
)
from callforest_mesh.worker.tiny_model import VOCABULARY_SIZE, make_tiny_model
from tests.integration.reference_model import Reference
from tests.integration.vllm_setting import (
    CONTEXT,
    Setting,
    message_of,
    path_of,
    running_engine,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

# Longer than a block of the prefix cache (128 tokens): only then can old keys and values survive.
LONG_QUESTION = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 20}]
QUESTION = [{"role": "user", "content": "go"}]
ANSWER = [{"role": "assistant", "content": "short"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
TOOL_CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setting]:
    async with running_engine(tmp_path_factory.mktemp("models")) as running:
        yield running


def assert_model_saw(result: EngineResult, reference: Reference) -> None:
    expected = reference.logprobs(result.prompt_ids, result.generated_ids)
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.requirement("CAP-5")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_captures_what_the_model_saw_and_sampled(
    setting: Setting, temperature: float
) -> None:
    result = await setting.ask(QUESTION, temperature=temperature, top_p=0.9)
    rendered = setting.old.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    assert result.prompt_ids.tolist() == rendered
    assert len(result.generated_ids) == result.reported_completion_tokens == 24
    assert (result.logprobs_mode, result.finish_reason) == ("raw_logprobs", "length")
    assert_model_saw(result, setting.old)
    assert result.sampling["temperature"] == temperature
    assert (result.sampling["top_p"], result.sampling["max_tokens"]) == (0.9, 24)
    assert result.weight_version_spans == (WeightVersionSpan(0, 24, 0),)
    assert result.weight_version == 0


@pytest.mark.requirement("CAP-5")
async def test_response_is_named_after_the_call_and_holds_no_tokens(setting: Setting) -> None:
    result = await setting.ask(
        QUESTION, return_token_ids=True, return_prompt_text=True, prompt_logprobs=1
    )
    response = json.loads(result.response)
    assert response["id"] == f"chatcmpl-call-{setting.calls}"
    assert response["created"] == 1_700_000_000 + setting.calls
    assert response["model"] == "policy"
    assert response["choices"][0]["logprobs"] is None
    keys = {*response, *response["choices"][0], *response["choices"][0]["message"]}
    assert not [key for key in keys if "token_ids" in key or key.startswith("prompt_")]
    assert response["usage"]["completion_tokens"] == len(result.generated_ids)
    assert response["usage"]["prompt_tokens"] == len(result.prompt_ids)


async def test_logprobs_are_served_when_asked_for(setting: Setting) -> None:
    result = await setting.ask(QUESTION, logprobs=True, top_logprobs=2)
    served = json.loads(result.response)["choices"][0]["logprobs"]["content"]
    assert [len(step["top_logprobs"]) for step in served] == [2] * len(served)
    np.testing.assert_allclose([step["logprob"] for step in served], result.logprobs, atol=1e-6)


@pytest.mark.requirement("CAP-5", "ADM-6")
@pytest.mark.bugcase("B01")
async def test_continuation_carries_the_sampled_ids_not_their_text(setting: Setting) -> None:
    first = await setting.ask(QUESTION)
    text = message_of(first)["content"]
    assert setting.old.tokenizer.encode(text) != first.generated_ids.tolist()
    history = [*QUESTION, {"role": "assistant", "content": text}, *QUESTION]
    second = await setting.ask(history, prefix=path_of(first))
    exact = path_of(first)
    assert second.prefix_refused == ""
    assert second.prompt_ids[: len(exact)].tolist() == exact.tolist()
    turn_end = setting.old.tokenizer.encode("<|im_end|>\n")
    asked_again = setting.old.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    assert second.prompt_ids[len(exact) :].tolist() == turn_end + asked_again
    assert_model_saw(second, setting.old)
    history += [{"role": "assistant", "content": message_of(second)["content"]}, *QUESTION]
    third = await setting.ask(history, prefix=path_of(second))
    assert third.prefix_refused == ""
    assert third.prompt_ids[: len(path_of(second))].tolist() == path_of(second).tolist()
    assert_model_saw(third, setting.old)


@pytest.mark.requirement("ADM-6")
async def test_a_sampled_terminator_appears_once(setting: Setting) -> None:
    first = await setting.ask(QUESTION, structured_outputs={"choice": ["yes"]})
    assert (first.finish_reason, message_of(first)["content"]) == ("stop", "yes")
    terminator = setting.old.tokenizer.eos_token_id
    assert first.generated_ids[-1] == terminator
    history = [*QUESTION, {"role": "assistant", "content": "yes"}, *QUESTION]
    second = await setting.ask(history, prefix=path_of(first))
    exact = path_of(first)
    assert second.prefix_refused == ""
    assert second.prompt_ids[: len(exact)].tolist() == exact.tolist()
    assert second.prompt_ids[len(exact)] != terminator


def letters(setting: Setting) -> dict[str, object]:
    """Have the model say words of two letters or more alone, always the same ones."""
    tokens = [(one, setting.old.tokenizer.decode([one])) for one in range(VOCABULARY_SIZE)]
    words = [one for one, text in tokens if len(text) > 1 and text.isascii() and text.isalpha()]
    return {"allowed_token_ids": words}


@pytest.mark.requirement("CAP-5")
@pytest.mark.bugcase("B08")
async def test_text_that_a_stop_string_cuts_is_told(setting: Setting) -> None:
    asked = letters(setting)
    free = await setting.ask(QUESTION, **asked)
    assert not free.text_ends_early
    whole = setting.old.tokenizer.decode(free.generated_ids[:5].tolist())
    for stop, fields, text in (
        (whole, {}, ""),
        (whole[-2:] + "!", {}, message_of(free)["content"]),
        (whole[:-1], {}, ""),
        (whole[1:], {}, whole[:1]),
        (whole[:-1], {"include_stop_str_in_output": True}, whole[:-1]),
    ):
        cut = await setting.ask(QUESTION, stop=[stop], **asked, **fields)
        assert message_of(cut)["content"] == text
        is_cut = text != message_of(free)["content"]
        kept = free.generated_ids[:5] if is_cut else free.generated_ids
        assert cut.generated_ids.tolist() == kept.tolist()
        assert cut.text_ends_early is is_cut
    token = int(free.generated_ids[0])
    by_token = await setting.ask(QUESTION, stop_token_ids=[token], **asked)
    assert (by_token.generated_ids.tolist(), message_of(by_token)["content"]) == ([token], "")
    assert by_token.text_ends_early


@pytest.mark.requirement("CAP-5")
@pytest.mark.bugcase("B08")
async def test_text_with_its_whole_stop_string_is_continued(setting: Setting) -> None:
    asked = letters(setting)
    free = await setting.ask(QUESTION, **asked)
    stop = setting.old.tokenizer.decode(free.generated_ids[:5].tolist())
    asked |= {"stop": [stop], "include_stop_str_in_output": True}
    first = await setting.ask(QUESTION, **asked)
    assert (message_of(first)["content"], first.text_ends_early) == (stop, False)
    assert first.generated_ids.tolist() == free.generated_ids[:5].tolist()
    history = [*QUESTION, {"role": "assistant", "content": stop}, *QUESTION]
    second = await setting.ask(history, prefix=path_of(first))
    exact = path_of(first)
    assert second.prefix_refused == ""
    assert second.prompt_ids[: len(exact)].tolist() == exact.tolist()


async def test_tool_calls_are_parsed_and_their_turn_is_continued(setting: Setting) -> None:
    first = await setting.ask(
        QUESTION, tools=TOOLS, max_tokens=200, structured_outputs={"choice": [TOOL_CALL_TEXT]}
    )
    assert first.finish_reason == "tool_calls"
    (call,) = message_of(first)["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("add", '{"a": 1}')
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "1"},
    ]
    second = await setting.ask(history, tools=TOOLS, prefix=path_of(first))
    exact = path_of(first)
    assert second.prefix_refused == ""
    assert second.prompt_ids[: len(exact)].tolist() == exact.tolist()
    assert "<tool_response>\n1" in setting.old.tokenizer.decode(second.prompt_ids[len(exact) :])
    assert_model_saw(second, setting.old)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (QUESTION, "no_assistant_message"),
        (
            [*QUESTION, *ANSWER, *QUESTION, *ANSWER, *QUESTION],
            "turn_count_differs",
        ),
    ],
)
async def test_prefix_that_does_not_fit_is_refused_and_the_call_served_plainly(
    setting: Setting, messages: list[dict], reason: str
) -> None:
    first = await setting.ask(QUESTION)
    result = await setting.ask(messages, prefix=path_of(first))
    assert result.prefix_refused == reason
    assert result.prompt_ids.tolist() == setting.old.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert len(result.generated_ids) == 24


def long_prefix(setting: Setting, token_count: int) -> TokenIds:
    rendered = setting.old.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    filler = [100 + i % 100 for i in range(token_count - len(rendered))]
    return np.array(rendered + filler, np.uint32)


async def test_generation_is_limited_by_the_spliced_prompt(setting: Setting) -> None:
    history = [*QUESTION, *ANSWER, *QUESTION]
    prefix = long_prefix(setting, CONTEXT - 40)
    result = await setting.ask(history, prefix=prefix, max_tokens=CONTEXT, ignore_eos=True)
    assert result.finish_reason == "length"
    assert len(path_of(result)) == CONTEXT
    assert result.sampling["max_tokens"] == CONTEXT - len(result.prompt_ids)


@pytest.mark.requirement("CAP-3")
@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"n": 2}, "n"),
        ({"stream": True}, "stream"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
        ({"temperature": -1}, "temperature"),
        ({"seed": "soon"}, "seed"),
        ({"messages": "go"}, "messages"),
        ({"model": "another"}, "model"),
        ({"max_tokens": CONTEXT + 1}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * CONTEXT}]}, "input_tokens"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"structured_outputs": {"regex": "("}}, ""),
    ],
)
async def test_refused_before_generation(
    setting: Setting, fields: dict[str, object], parameter: str
) -> None:
    with pytest.raises(EngineRefusalError) as refusal:
        await setting.ask(**{"messages": QUESTION, **fields})
    assert refusal.value.parameter == parameter
    assert str(refusal.value)


@pytest.mark.parametrize("body", [b"{}", b"[]", b"{", b"\xff\xff", b'{"messages": NaN}'])
async def test_malformed_body_is_refused(setting: Setting, body: bytes) -> None:
    with pytest.raises(EngineRefusalError):
        await setting.engine.generate(EngineRequest("malformed", 1, body))


async def test_spliced_prompt_that_fills_the_context_is_refused(setting: Setting) -> None:
    history = [*QUESTION, *ANSWER, *QUESTION]
    with pytest.raises(EngineRefusalError, match="maximum context length is 1024") as refusal:
        await setting.ask(history, prefix=long_prefix(setting, CONTEXT))
    assert refusal.value.parameter == "messages"


async def test_weights_of_another_model_change_nothing(setting: Setting, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(setting.new_weights.read_bytes()[:-8])
    other = make_tiny_model(tmp_path / "other", seed=0, layer_count=1)
    for path in (cut, other, tmp_path / "absent.safetensors"):
        with pytest.raises(EngineRefusalError) as refusal:
            await setting.engine.update_weights(str(path), 1)
        assert refusal.value.parameter == "path"
    assert setting.engine.describe().weight_version == 0
    assert_model_saw(await setting.ask(QUESTION), setting.old)


@pytest.mark.requirement("TRN-10")
async def test_new_weights_serve_and_no_cached_prefix_of_the_old_survives(
    setting: Setting,
) -> None:
    old = await setting.ask(LONG_QUESTION, temperature=0)
    assert len(old.prompt_ids) > 128
    assert old.generated_ids.tolist() == setting.old.greedy(old.prompt_ids, 24)
    await setting.engine.update_weights(str(setting.new_weights), 1)
    assert setting.engine.describe().weight_version == 1
    new = await setting.ask(LONG_QUESTION, temperature=0)
    assert new.prompt_ids.tolist() == old.prompt_ids.tolist()
    assert new.generated_ids.tolist() == setting.new.greedy(new.prompt_ids, 24)
    assert new.generated_ids.tolist() != old.generated_ids.tolist()
    assert_model_saw(new, setting.new)
    assert new.weight_version == 1
    assert new.weight_version_spans == (WeightVersionSpan(0, 24, 1),)
    with pytest.raises(ValueError, match="does not exceed 1"):
        await setting.engine.update_weights(str(setting.new_weights), 1)


@pytest.mark.requirement("CAP-8", "TRN-10")
async def test_update_keeps_a_running_call_and_its_spans_say_who_sampled_what(
    setting: Setting,
) -> None:
    before = setting.engine.describe().weight_version
    if before == 1:
        old, new, weights = setting.new, setting.old, setting.old_weights
    else:
        old, new, weights = setting.old, setting.new, setting.new_weights
    running = asyncio.create_task(setting.ask(QUESTION, max_tokens=900, ignore_eos=True))
    # Answered in the same batch: when it is, the longer one is under way.
    await setting.ask(LONG_QUESTION, max_tokens=8)
    await setting.engine.update_weights(str(weights), before + 1)
    result = await running
    assert len(result.generated_ids) == 900
    assert result.weight_version == before
    first, second = result.weight_version_spans
    assert (first.start, first.version) == (0, before)
    assert (second.start, second.end, second.version) == (first.end, 900, before + 1)
    expected = np.concatenate(
        [
            old.logprobs(result.prompt_ids, result.generated_ids)[: first.end],
            new.logprobs(result.prompt_ids, result.generated_ids)[first.end :],
        ]
    )
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4, rtol=0)


async def test_a_cancelled_call_leaves_the_engine_free(setting: Setting) -> None:
    running = asyncio.create_task(setting.ask(QUESTION, max_tokens=900, ignore_eos=True))
    await setting.ask(QUESTION, max_tokens=4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len((await setting.ask(QUESTION)).generated_ids) == 24


async def answered_after_restart(setting: Setting) -> EngineResult:
    async with asyncio.timeout(300):
        while True:
            try:
                return await setting.ask(QUESTION, temperature=0)
            except EngineUnavailableError:
                await asyncio.sleep(0.5)


@pytest.mark.requirement("TRN-10")
async def test_a_killed_engine_comes_back_with_the_weights_it_had(setting: Setting) -> None:
    version = setting.engine.describe().weight_version + 1
    await setting.engine.update_weights(str(setting.new_weights), version)
    running = asyncio.create_task(setting.ask(QUESTION, max_tokens=900, ignore_eos=True))
    await setting.ask(QUESTION, max_tokens=4)
    os.killpg(setting.engine.child_pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError):
        await running
    result = await answered_after_restart(setting)
    assert result.weight_version == version
    assert result.generated_ids.tolist() == setting.new.greedy(result.prompt_ids, 24)
