"""The scripted engine behaves as a real one does at the port."""

import asyncio
import json

import numpy as np
import pytest

from callforest_mesh.worker.chat_text import TURN_BEGIN, TURN_END, ByteVocabulary, ChatMlTemplate
from callforest_mesh.worker.engine import (
    EngineRefusalError,
    EngineRequest,
    EngineUnavailableError,
    WeightVersionSpan,
)
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions, ScriptedTurn

HELLO = [{"role": "user", "content": "hé"}]


def request(*messages: object, call_id: str = "c", **fields: object) -> EngineRequest:
    body = json.dumps({"messages": messages or HELLO, **fields}).encode()
    return EngineRequest(call_id=call_id, created=9, body=body)


async def started(engine: ScriptedEngine | None = None) -> ScriptedEngine:
    engine = engine or ScriptedEngine()
    await engine.start()
    return engine


async def test_prompt_is_chatml_in_bytes() -> None:
    engine = await started()
    result = await engine.generate(request())
    text = [*b"user\n", *"hé".encode()]
    opening = [TURN_BEGIN, *b"assistant\n"]
    assert result.prompt_ids.tolist() == [TURN_BEGIN, *text, TURN_END, *b"\n", *opening]
    assert engine.prompts[-1].token_ids.tolist() == result.prompt_ids.tolist()


@pytest.mark.parametrize("said", ["yes", "né\0n", "\ud800", None])
def test_a_part_of_a_prompt_is_what_its_messages_render_to(said: str | None) -> None:
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [*HELLO, {"role": "assistant", "content": said, "tool_calls": [call]}, *HELLO]
    template = ChatMlTemplate()
    for count in (1, 2, 3):
        whole, part = template.render_parts(messages, count)
        alone = template.render(messages[:count], add_generation_prompt=False)
        assert part.tolist() == alone.tolist()
        assert whole.tolist() == template.render(messages, add_generation_prompt=True).tolist()


async def test_answer_is_the_same_each_time_and_other_with_another_seed() -> None:
    one, again = await started(), await started()
    first, second = await one.generate(request()), await again.generate(request())
    assert first.generated_ids.tolist() == second.generated_ids.tolist()
    assert first.response == second.response
    other = await one.generate(request(seed=2))
    assert other.generated_ids.tolist() != first.generated_ids.tolist()


async def test_answer_is_plausible() -> None:
    engine = await started()
    result = await engine.generate(request())
    assert result.generated_ids[-1] == TURN_END
    assert len(result.logprobs) == len(result.generated_ids) == result.reported_completion_tokens
    assert np.isfinite(result.logprobs).all()
    assert (result.logprobs < 0).all()
    response = json.loads(result.response)
    assert response["id"] == "chatcmpl-c"
    assert response["created"] == 9
    content = response["choices"][0]["message"]["content"]
    assert ByteVocabulary().encode(content).tolist() == result.generated_ids[:-1].tolist()
    assert response["usage"]["completion_tokens"] == len(result.generated_ids)


async def test_limit_cuts_the_turn() -> None:
    engine = await started()
    result = await engine.generate(request(max_tokens=2))
    assert (len(result.generated_ids), result.finish_reason) == (2, "length")
    assert TURN_END not in result.generated_ids


def spelling(text: str) -> ScriptedTurn:
    """A turn that says a text, a byte a token, and ends."""
    token_ids = [*text.encode(), TURN_END]
    return ScriptedTurn(token_ids, [-0.5] * len(token_ids))


@pytest.mark.bugcase("B08")
@pytest.mark.parametrize(
    ("fields", "text", "sampled", "ends_early"),
    [
        ({"stop": "not said"}, "said aloud", "said aloud", False),
        ({"stop": " a"}, "said", "said a", True),
        ({"stop": ["loud", "aid", "said"]}, "s", "said", True),
        ({"stop": ["d a", "said"], "include_stop_str_in_output": True}, "said", "said", False),
        ({"stop": None}, "said aloud", "said aloud", False),
    ],
)
async def test_stop_string_ends_the_turn_and_is_not_in_its_text(
    fields: dict[str, object], text: str, sampled: str, ends_early: bool
) -> None:
    engine = await started(ScriptedEngine(script=lambda *_: spelling("said aloud")))
    result = await engine.generate(request(**fields))
    message = json.loads(result.response)["choices"][0]["message"]
    assert (message["content"], result.finish_reason) == (text, "stop")
    end = [] if sampled != "said aloud" else [TURN_END]
    assert result.generated_ids.tolist() == [*sampled.encode(), *end]
    assert len(result.logprobs) == result.reported_completion_tokens == len(result.generated_ids)
    assert result.text_ends_early is ends_early


async def test_stop_string_inside_a_token_cuts_the_text() -> None:
    words = {1: "some", 2: "thing"}

    class Words:
        def encode(self, text: str) -> np.ndarray:
            raise NotImplementedError

        def decode(self, token_ids: np.ndarray) -> str:
            return "".join(words.get(int(one), "") for one in token_ids)

    turn = ScriptedTurn([1, 2, TURN_END], [-0.5] * 3)
    engine = await started(ScriptedEngine(vocabulary=Words(), script=lambda *_: turn))
    result = await engine.generate(request(stop="th", include_stop_str_in_output=True))
    message = json.loads(result.response)["choices"][0]["message"]
    assert (message["content"], result.generated_ids.tolist()) == ("someth", [1, 2])
    assert result.text_ends_early


@pytest.mark.parametrize("stop", ["", ["a", ""], [1], 1, {"a": 1}])
async def test_stop_strings_that_are_none_are_refused(stop: object) -> None:
    engine = await started()
    with pytest.raises(EngineRefusalError, match="stop") as caught:
        await engine.generate(request(stop=stop))
    assert caught.value.parameter == "stop"


async def test_prefix_takes_the_place_of_the_history() -> None:
    engine = await started()
    first = await engine.generate(request())
    prefix = np.concatenate((first.prompt_ids, first.generated_ids))
    answer = {"role": "assistant", "content": "not what was sampled"}
    body = request(*HELLO, answer, *HELLO).body
    second = await engine.generate(EngineRequest("d", 9, body, prefix))
    assert second.prefix_refused == ""
    assert second.prompt_ids[: len(prefix)].tolist() == prefix.tolist()
    tail = ChatMlTemplate().render(HELLO, add_generation_prompt=True)
    assert second.prompt_ids[len(prefix) :].tolist() == [*b"\n", *tail.tolist()]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (HELLO, "no_assistant_message"),
        ([*HELLO, *HELLO, {"role": "assistant", "content": "x"}, *HELLO], "turn_count_differs"),
    ],
)
async def test_prefix_that_cannot_be_placed_is_refused_with_the_reason(
    messages: list[object], why: str
) -> None:
    engine = await started()
    first = await engine.generate(request())
    prefix = np.concatenate((first.prompt_ids, first.generated_ids))
    result = await engine.generate(EngineRequest("d", 9, request(*messages).body, prefix))
    assert result.prefix_refused == why
    plain = ChatMlTemplate().render(messages, add_generation_prompt=True)
    assert result.prompt_ids.tolist() == plain.tolist()


@pytest.mark.requirement("CAP-8")
async def test_update_during_a_generation_is_told_by_spans() -> None:
    paused, resume = asyncio.Event(), asyncio.Event()

    async def pause(_call_id: str) -> None:
        paused.set()
        await resume.wait()

    engine = await started(
        ScriptedEngine(script=lambda *_: ScriptedTurn([1, 2, 3, TURN_END], [-1.0] * 4), pause=pause)
    )
    generation = asyncio.ensure_future(engine.generate(request()))
    await paused.wait()
    await engine.update_weights("", 5)
    resume.set()
    result = await generation
    assert result.weight_version == 0
    assert result.weight_version_spans == (WeightVersionSpan(0, 2, 0), WeightVersionSpan(2, 4, 5))
    assert engine.describe().weight_version == 5


async def test_script_gets_prompt_call_and_ordinal() -> None:
    seen: list[tuple[int, str, int]] = []

    def script(prompt: np.ndarray, call_id: str, ordinal: int) -> ScriptedTurn:
        seen.append((len(prompt), call_id, ordinal))
        return ScriptedTurn([65, TURN_END], [-0.5, -0.5], message={"content": None, "x": 1})

    engine = await started(ScriptedEngine(script=script))
    for call_id in "ab":
        result = await engine.generate(request(call_id=call_id))
    assert [(call_id, ordinal) for _, call_id, ordinal in seen] == [("a", 0), ("b", 1)]
    message = json.loads(result.response)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": None, "x": 1}


@pytest.mark.bugcase("B10")
async def test_logprobs_that_json_cannot_hold_are_served_as_a_number() -> None:
    logprobs = [-0.5, float("-inf"), float("nan")]
    engine = await started(
        ScriptedEngine(script=lambda *_: ScriptedTurn([65, 66, TURN_END], logprobs))
    )
    served = json.loads((await engine.generate(request(logprobs=True))).response)
    shown = [one["logprob"] for one in served["choices"][0]["logprobs"]["content"]]
    assert shown == [-0.5, -9999.0, -9999.0]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"messages":[]}',
        b'{"messages":[{"content":"no role"}]}',
        b'{"messages":[{"role":"user","content":5}]}',
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":0}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":"hot"}',
    ],
)
async def test_malformed_request_is_refused(body: bytes) -> None:
    engine = await started()
    with pytest.raises(EngineRefusalError):
        await engine.generate(EngineRequest("c", 9, body))


async def test_prompt_without_room_is_refused() -> None:
    engine = await started(ScriptedEngine(ScriptedOptions(context_token_count=16)))
    with pytest.raises(EngineRefusalError, match="maximum context length"):
        await engine.generate(request())


async def test_engine_answers_only_while_it_runs() -> None:
    engine = ScriptedEngine()
    with pytest.raises(EngineUnavailableError):
        await engine.generate(request())
    await engine.start()
    await engine.generate(request())
    await engine.stop()
    with pytest.raises(EngineUnavailableError):
        engine.describe()


async def test_version_must_exceed_the_present_one() -> None:
    engine = await started(ScriptedEngine(ScriptedOptions(weight_version=3)))
    with pytest.raises(ValueError, match="does not exceed 3"):
        await engine.update_weights("", 3)
