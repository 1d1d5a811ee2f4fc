"""Forest mode on vLLM: its own renderer with a real template decides, measures and is watched."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.custody.capture_input import HistoryMatch
from callforest_core.custody.digests import chain_hash
from callforest_core.refusal import Refusal
from callforest_mesh.worker.calls import Calls
from callforest_mesh.worker.engine import (
    EngineMeasure,
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
    PrefixEvidence,
    TokenIds,
)
from callforest_mesh.worker.options import WorkerOptions
from callforest_mesh.worker.tiny_model import END_OF_TEXT, TURN_END, make_tiny_model
from callforest_mesh.worker.vllm.engine import VllmEngine
from callforest_mesh.worker.vllm.limits import VllmLimits
from callforest_mesh.worker.vllm.options import VllmOptions
from tests.unit.worker.played_staging import CONTEXT, PlayedStaging, call_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

QWEN3 = Path(__file__).parents[1] / "golden/data/templates/qwen3.jinja"
# Shows every part of a content, also an empty one: what is not there and what is empty differ.
PARTED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ '[' + part.text + ']' }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
USER = {"role": "user", "content": "go"}
CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "3"}
ANSWER = {"role": "assistant", "content": "yes"}
REASONED = "<think>\nhm\n</think>\n\nyes"
EXACT, EQUIVALENT = HistoryMatch.EXACT, HistoryMatch.TOOL_CONTENT_EQUIVALENT
SPELLINGS = [{}, {"content": None}, {"content": ""}]


@dataclass
class Setting:
    engine: VllmEngine
    template: Path
    tokenizer: object
    calls: int = 0

    def ids(self, text: str) -> TokenIds:
        return np.array(self.tokenizer.encode(text), np.uint32)

    def request(
        self, messages: list[dict], captured: TokenIds | None, match: HistoryMatch = EXACT
    ) -> EngineRequest:
        self.calls += 1
        body = {"model": "policy", "messages": messages, "max_tokens": 4, "seed": 5}
        evidence = None
        if captured is not None:
            evidence = PrefixEvidence(match, chain_hash(None, captured))
        return EngineRequest(f"c{self.calls}", 1, json.dumps(body).encode(), captured, evidence)

    async def both(
        self, messages: list[dict], captured: TokenIds | None, match: HistoryMatch = EXACT
    ) -> EngineResult:
        """Measure and generate: they must agree."""
        request = self.request(messages, captured, match)
        measured = await self.engine.measure(request)
        result = await self.engine.generate(request)
        assert measured == EngineMeasure(len(result.prompt_ids), result.decision)
        return result

    async def rendered(self, messages: list[dict]) -> list[int]:
        return (await self.engine.generate(self.request(messages, None))).prompt_ids.tolist()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def setting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Setting]:
    from transformers import AutoTokenizer

    base = tmp_path_factory.mktemp("models")
    model = make_tiny_model(base / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    # As checkpoints have it: more ends than the tokenizer's one.
    ends = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    template = base / "template.jinja"
    template.write_bytes(QWEN3.read_bytes())
    engine = VllmEngine(
        VllmOptions(
            model=str(model),
            dtype="float32",
            context_token_count=512,
            chat_template=str(template),
        ),
        VllmLimits(start_s=300.0, generate_s=120.0, backoff_s=0.1),
    )
    await engine.start()
    try:
        yield Setting(engine, template, tokenizer)
    finally:
        await engine.stop()


def turn(text: str, end: str = "<|im_end|>") -> str:
    return f"<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n{text}{end}"


NEXT = "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.requirement("ADM-5", "ADM-6", "CAP-10")
@pytest.mark.bugcase("B02")
async def test_reasoning_that_the_template_drops_stays_in_the_prompt(setting: Setting) -> None:
    captured = setting.ids(turn(REASONED))
    history = [USER, {"role": "assistant", "content": "yes", "reasoning": "hm"}, USER]
    result = await setting.both(history, captured)
    assert result.prompt_ids.tolist() == [*captured.tolist(), *setting.ids(NEXT).tolist()]
    assert result.decision is not None
    assert result.decision.is_spliced
    assert result.decision.notes == ("template_truncated_reasoning",)
    assert len(result.decision.proof) == 32
    assert len(result.generated_ids)


@pytest.mark.requirement("ADM-5")
@pytest.mark.bugcase("B06")
@pytest.mark.parametrize("echoed", SPELLINGS, ids=str)
async def test_its_own_renderer_proves_that_spellings_are_alike(
    setting: Setting, echoed: dict[str, object]
) -> None:
    captured = setting.ids(turn('<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>'))
    history = [USER, {"role": "assistant", "tool_calls": [CALL], **echoed}, RESULT]
    result = await setting.both(history, captured, EQUIVALENT)
    assert result.decision is not None
    assert (result.decision.reason, result.decision.is_spliced) == ("", True)
    assert result.decision.notes == ("tool_content_equivalence",)
    assert result.prompt_ids[: len(captured)].tolist() == captured.tolist()


@pytest.mark.requirement("ADM-5")
@pytest.mark.parametrize(
    ("captured", "history", "reason"),
    [
        # Only the generation configuration knows this end; the template writes the other.
        (turn("yes", END_OF_TEXT), [USER, ANSWER, USER], "terminator_differs"),
        (turn("yes"), [USER], "boundary_not_found"),
        (turn("yes") + NEXT + "yes<|im_end|>", [USER, ANSWER, USER], "turn_count_differs"),
    ],
)
async def test_what_is_not_proven_is_generated_from_the_plain_rendering(
    setting: Setting, captured: str, history: list[dict], reason: str
) -> None:
    result = await setting.both(history, setting.ids(captured))
    assert result.decision is not None
    assert (result.decision.is_spliced, result.decision.reason) == (False, reason)
    assert result.prefix_refused == ""
    assert result.prompt_ids.tolist() == await setting.rendered(history)


@pytest.mark.requirement("CAP-10")
async def test_a_measure_is_refused_as_the_call_would_be(setting: Setting) -> None:
    too_long = [{"role": "user", "content": "word " * 600}]
    errors = []
    for ask in (setting.engine.measure, setting.engine.generate):
        with pytest.raises(EngineRefusalError) as refused:
            await ask(setting.request(too_long, None))
        errors.append((refused.value.parameter, str(refused.value)))
    assert errors[0] == errors[1]
    captured = np.concatenate([setting.ids(turn("yes", "")), np.full(512, 100, np.uint32)])
    history = [USER, ANSWER, USER]
    with pytest.raises(EngineRefusalError, match="maximum context length is 512"):
        await setting.engine.measure(setting.request(history, captured))


async def restarted(setting: Setting) -> None:
    os.killpg(setting.engine.child_pid, signal.SIGKILL)
    async with asyncio.timeout(300):
        while True:
            try:
                await setting.engine.generate(setting.request([USER], None))
            except EngineUnavailableError:
                await asyncio.sleep(0.5)
            else:
                return


@pytest.mark.requirement("CAP-11", "ADM-5")
async def test_an_engine_that_starts_again_with_another_template_is_found_out(
    setting: Setting,
) -> None:
    calls = Calls(setting.engine, PlayedStaging(), WorkerOptions("unused"))
    bound = setting.engine.describe().configuration_digest
    call = call_of(USER)
    call.configuration_digest = bound
    assert (await calls.generate(CONTEXT, call)).HasField("staged")
    await restarted(setting)
    assert (await calls.generate(CONTEXT, call)).HasField("staged")
    setting.template.write_text(PARTED)
    await restarted(setting)
    for ask in (calls.generate, calls.measure):
        with pytest.raises(Refusal) as refused:
            await ask(CONTEXT, call)
        assert refused.value.reason == er.ERROR_REASON_CONFIGURATION_CHANGED
        assert refused.value.facts["expected"] == bound.hex()
        assert refused.value.facts["actual"] != bound.hex()
    # This template shows an empty text and none differently, and the renderer is asked.
    captured = setting.ids("<|im_start|>user\n[go]<|im_end|>\n<|im_start|>assistant\n<|im_end|>")
    for echoed in SPELLINGS:
        history = [USER, {"role": "assistant", "tool_calls": [CALL], **echoed}, RESULT]
        result = await setting.both(history, captured, EQUIVALENT)
        assert result.decision is not None
        assert result.decision.reason == "renderer_not_equivalent"
