"""The engine boundary, with an engine that answers by script."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from callforest_core.custody.capture_input import HistoryMatch
from callforest_core.custody.reasoning import ReasoningReader
from callforest_mesh.worker.engine import EngineRefusalError, PrefixEvidence, WeightVersionSpan
from callforest_mesh.worker.vllm.capture import (
    Capture,
    CapturingClient,
    PromptMeasured,
    current_capture,
)

END = 9
PROMPT = [1, 2, 3]


@dataclass
class ScriptedClient:
    """Answers with given tokens; notes what it was asked."""

    generated: list[int] = field(default_factory=lambda: [4, 5])
    logprobs: list[dict[int, Any]] | None = None
    spans: list[tuple[int, int, str]] = field(default_factory=lambda: [(0, 2, "3")])
    seen: list[int] | None = None
    finish_reason: str | None = "stop"
    text: str = "DE"
    stop_reason: int | str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    name: str = "inner"

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        self.asked.append(
            {"prompt": prompt, "sampling": sampling_params, "request_id": request_id, **options}
        )
        completion = SimpleNamespace(
            token_ids=self.generated,
            text=self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs or [{t: SimpleNamespace(logprob=-t)} for t in self.generated],
            weight_versions=[
                SimpleNamespace(start=start, end=end, version=version)
                for start, end, version in self.spans
            ],
        )
        yield SimpleNamespace(
            finished=True,
            prompt_token_ids=self.seen or prompt["prompt_token_ids"],
            outputs=[completion],
        )


def sampling(**changes: Any) -> Any:
    zeros = (
        "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
        "seed min_tokens ignore_eos"
    )
    unset = (
        "stop stop_token_ids logit_bias bad_words allowed_token_ids structured_outputs logprobs "
        "logprob_token_ids thinking_token_budget watermarking trace_decode_token_ids extra_args"
    )
    fields = dict.fromkeys(zeros.split(), 0) | dict.fromkeys(unset.split())
    fields |= {"max_tokens": 5, "skip_special_tokens": True}
    return SimpleNamespace(**{**fields, **changes})


class Letters:
    """Letters from `A` on for ids from 1 on; those from 100 on are special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        shown = [one for one in token_ids if one < 100 or not skip_special_tokens]
        return "".join(chr(ord("A") + one - 1) for one in shown)


@pytest.fixture
def capture() -> Iterator[Capture]:
    capture = Capture()
    token = current_capture.set(capture)
    yield capture
    current_capture.reset(token)


def client_of(inner: ScriptedClient, context: int = 20) -> CapturingClient:
    return CapturingClient(
        inner,
        context_token_count=context,
        terminators=frozenset([END]),
        reader=ReasoningReader(lambda token_ids: "".join(map(chr, token_ids))),
        tokenizer=Letters(),
        weight_version=3,
    )


async def generate(
    inner: ScriptedClient, *, kind: str = "token", context: int = 20, **changes: Any
) -> list[Any]:
    client = client_of(inner, context)
    prompt = {"type": kind, "prompt_token_ids": PROMPT, "prompt": "text", "cache_salt": "s"}
    outputs = client.generate(prompt, sampling(**changes), "call-1", priority=0)
    return [output async for output in outputs]


@pytest.mark.requirement("CAP-5")
async def test_everything_that_crosses_is_captured(capture: Capture) -> None:
    inner = ScriptedClient()
    (output,) = await generate(inner, stop=["x"])
    assert capture.prompt_ids.tolist() == PROMPT
    assert capture.generated_ids.tolist() == [4, 5]
    assert capture.logprobs.tolist() == [-4.0, -5.0]
    assert (capture.weight_version, capture.spans) == (3, (WeightVersionSpan(0, 2, 3),))
    assert (capture.sampling["stop"], capture.sampling["max_tokens"]) == ('["x"]', 5)
    assert not {"bad_words", "thinking_token_budget", "watermarking"} & capture.sampling.keys()
    assert inner.asked[0]["sampling"].logprobs == 0
    assert inner.asked[0]["priority"] == 0
    assert output.outputs[0].logprobs is None


@pytest.mark.requirement("CAP-5")
@pytest.mark.bugcase("B08")
@pytest.mark.parametrize(
    ("generated", "text", "stop_reason", "ends_early"),
    [
        ([4, 5], "DE", None, False),
        ([4, 5, END], "DE", None, False),  # the engine's own end, whose text is never shown
        ([4, 5, END], "DE", END, False),  # another id that ends a turn
        ([4, 5, 6], "D", "EF", True),  # a stop string of two tokens
        ([4, 5, 6], "DEF", "EF", False),  # which the request wanted to see
        ([4, 5], "", "D", True),
        ([4, 5, 6], "DE", 6, True),  # a stop token with text
        ([4, 5, 106], "DE", 106, False),  # and one without
    ],
)
async def test_text_that_ends_before_the_tokens_is_told(
    generated: list[int],
    text: str,
    stop_reason: int | str | None,
    ends_early: bool,
    capture: Capture,
) -> None:
    spans = [(0, len(generated), "3")]
    await generate(ScriptedClient(generated, spans=spans, text=text, stop_reason=stop_reason))
    assert capture.generated_ids.tolist() == generated
    assert capture.text_ends_early is ends_early


@pytest.mark.bugcase("B08")
async def test_special_tokens_count_where_the_request_wants_to_see_them(capture: Capture) -> None:
    inner = ScriptedClient([4, 106], text="D", stop_reason=106)
    await generate(inner, skip_special_tokens=False)
    assert capture.text_ends_early


@pytest.mark.requirement("CAP-5")
async def test_tokens_that_the_engine_may_put_in_itself_are_told(capture: Capture) -> None:
    await generate(ScriptedClient(), thinking_token_budget=0, watermarking=True)
    assert capture.sampling["thinking_token_budget"] == "0"
    assert capture.sampling["watermarking"] == "true"


@pytest.mark.requirement("FOR-6")
@pytest.mark.parametrize(
    ("engine", "served", "counts"),
    [
        ("stop", "tool_calls", "tool_calls"),
        ("length", "tool_calls", "length"),
        ("abort", "tool_calls", "abort"),
        ("length", "length", "length"),
        (None, "stop", "stop"),
    ],
)
async def test_a_call_in_what_was_cut_does_not_hide_the_cut(
    capture: Capture, engine: str | None, served: str, counts: str
) -> None:
    await generate(ScriptedClient(finish_reason=engine))
    assert capture.reason_beside(served) == counts


async def test_logprobs_that_the_client_asked_for_stay(capture: Capture) -> None:
    (output,) = await generate(ScriptedClient(), logprobs=2)
    assert len(output.outputs[0].logprobs) == 2
    (output,) = await generate(ScriptedClient(), logprob_token_ids=[4])
    assert len(output.outputs[0].logprobs) == 2


async def test_a_request_outside_a_call_passes_untouched() -> None:
    inner = ScriptedClient()
    (output,) = await generate(inner)
    assert inner.asked[0]["sampling"].logprobs is None
    assert output.outputs[0].logprobs is not None
    assert client_of(inner).name == "inner"


@pytest.mark.requirement("CAP-7")
@pytest.mark.parametrize(
    "inner",
    [
        ScriptedClient(seen=[1, 2]),
        ScriptedClient(logprobs=[{4: SimpleNamespace(logprob=-1)}]),
        ScriptedClient(spans=[]),
        ScriptedClient(spans=[(0, 1, "3")]),
        ScriptedClient(spans=[(0, 1, "3"), (0, 2, "4")]),
        ScriptedClient(spans=[(0, 2, "2")]),
    ],
    ids=["another prompt", "no logprob", "no span", "span short", "spans overlap", "span old"],
)
async def test_what_cannot_be_a_capture_is_served_uncaptured(
    capture: Capture, inner: ScriptedClient, caplog: pytest.LogCaptureFixture
) -> None:
    (output,) = await generate(inner)
    assert output.outputs[0].token_ids == [4, 5]
    assert capture.finished
    assert len(capture.generated_ids) == 0
    assert "capture failed" in caplog.text


@pytest.mark.requirement("CAP-8")
async def test_spans_of_an_update_are_kept_and_the_stamp_is_of_the_beginning(
    capture: Capture,
) -> None:
    await generate(ScriptedClient(spans=[(0, 1, "3"), (1, 2, "5")]))
    assert capture.weight_version == 3
    assert capture.spans == (WeightVersionSpan(0, 1, 3), WeightVersionSpan(1, 2, 5))


@pytest.mark.requirement("ADM-6")
async def test_the_prefix_takes_the_place_of_the_history(capture: Capture) -> None:
    inner = ScriptedClient()
    capture.prefix = np.array([7, 8], np.uint32)
    capture.history_render = np.array([1, END], np.uint32)
    client = client_of(inner, 8)
    prompt = {"type": "token", "prompt_token_ids": [1, END, 6], "prompt": "t", "cache_salt": "s"}
    capture.asked_token_count = 100
    outputs = [output async for output in client.generate(prompt, sampling(), "call-1")]
    assert len(outputs) == 1
    assert inner.asked[0]["prompt"] == {
        "type": "token",
        "prompt_token_ids": [7, 8, END, 6],
        "cache_salt": "s",
    }
    assert capture.prompt_ids.tolist() == [7, 8, END, 6]
    assert inner.asked[0]["sampling"].max_tokens == 4


def in_forest(capture: Capture, match: HistoryMatch = HistoryMatch.EXACT) -> None:
    capture.prefix = np.array([7, 8], np.uint32)
    capture.history_render = np.array([1, END], np.uint32)
    capture.evidence = PrefixEvidence(match, bytes(32))


@pytest.mark.requirement("ADM-5", "ADM-6")
async def test_in_forest_mode_the_renderings_decide(capture: Capture) -> None:
    in_forest(capture)
    inner = ScriptedClient()
    prompt = {"type": "token", "prompt_token_ids": [1, END, 6], "prompt": "t"}
    assert [output async for output in client_of(inner).generate(prompt, sampling(), "call-1")]
    assert inner.asked[0]["prompt"] == {"type": "token", "prompt_token_ids": [7, 8, END, 6]}
    assert capture.decision is not None
    assert capture.decision.is_spliced
    assert (capture.decision.prefix_cut, capture.decision.render_cut) == (2, 1)


@pytest.mark.requirement("ADM-5")
@pytest.mark.parametrize(
    ("kind", "reason"), [("token", "boundary_not_found"), ("multimodal", "unsupported_prompt")]
)
async def test_what_is_not_proven_goes_in_as_it_was_rendered(
    capture: Capture, kind: str, reason: str
) -> None:
    in_forest(capture)
    inner = ScriptedClient()
    await generate(inner, kind=kind)
    assert inner.asked[0]["prompt"]["prompt_token_ids"] == PROMPT
    assert inner.asked[0]["prompt"]["prompt"] == "text"
    assert capture.decision is not None
    assert (capture.decision.is_spliced, capture.decision.reason) == (False, reason)
    assert capture.prefix_refused == ""
    assert capture.generated_ids.tolist() == [4, 5]


@pytest.mark.requirement("CAP-10")
async def test_a_measured_call_ends_before_the_engine(capture: Capture) -> None:
    in_forest(capture)
    capture.is_measured = True
    inner = ScriptedClient()
    prompt = {"type": "token", "prompt_token_ids": [1, END, 6]}
    with pytest.raises(PromptMeasured):
        client_of(inner).generate(prompt, sampling(), "call-1")
    assert capture.prompt_ids.tolist() == [7, 8, END, 6]
    assert not inner.asked
    with pytest.raises(EngineRefusalError, match="maximum context length"):
        client_of(inner, 4).generate(prompt, sampling(), "call-1")


async def test_a_prompt_with_media_is_not_spliced(capture: Capture) -> None:
    capture.prefix = capture.history_render = np.array([1, END], np.uint32)
    await generate(ScriptedClient(), kind="multimodal")
    assert capture.prefix_refused == "prompt of type multimodal cannot be spliced"
    assert capture.prompt_ids.tolist() == PROMPT


async def test_a_prompt_that_leaves_no_room_is_refused(capture: Capture) -> None:
    inner = ScriptedClient()
    with pytest.raises(EngineRefusalError, match="maximum context length is 3 tokens"):
        await generate(inner, context=3)
    assert not inner.asked
    assert not capture.finished
