"""Capture at the engine boundary: what vLLM's serving layer asks of the engine, and what it gets.

The serving layer renders, parses and shapes errors; between it and the engine stands a
`CapturingClient`. It sees the very token ids that the model sees, whatever the API, places the
captured prefix there, and notes everything in the `Capture` of the call that is being served. No
vLLM module is changed, and this file imports none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from callforest_core.custody.capture_input import (
    Candidate,
    CaptureDecision,
    Rendering,
    decide_capture_input,
)
from callforest_core.custody.errors import SpliceRefusedError
from callforest_core.custody.reasoning import ReasoningReader
from callforest_core.custody.splice import splice_prefix
from callforest_mesh.worker.engine import (
    EngineRefusalError,
    Logprobs,
    PrefixEvidence,
    Scalar,
    TokenIds,
    WeightVersionSpan,
)

_LOGGER = logging.getLogger(__name__)

_SCALAR_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
)
# Sampling parameters that are seldom there; written as JSON, and only when the request sets them.
_SELDOM_SAMPLING = (
    *("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids"),
    # With these the engine puts tokens of its own, or biased ones, among the sampled ones.
    *("thinking_token_budget", "watermarking", "trace_decode_token_ids", "extra_args"),
)


class CaptureFaultError(Exception):
    """The engine gave back something that cannot be a capture; the message says what."""


class PromptMeasured(Exception):  # noqa: N818 - the end of a measured call, not an error
    """A measured call has reached the engine, and goes no further."""


class Tokenizer(Protocol):
    """Turns ids into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Give the text of ids, with or without that of special tokens."""
        ...


@dataclass(slots=True, eq=False)
class Capture:
    """One call, as it crosses the engine boundary.

    Those up to `is_measured` are set before the call, the others by the `CapturingClient`.

    Attributes:
        prefix: tokens of the parent call, to replace the re-rendered history; None for a root.
        evidence: of the prefix in forest mode; None in chain mode.
        history_render: the rendering up to and including the last assistant message, without
            generation prompt; set when there is a prefix and such a message.
        spellings: the same rendering for each spelling of missing text, where the evidence asks
            for it; None for one that cannot be rendered.
        prefix_refused: why the prefix is not placed; "" while it may be, and in forest mode.
        asked_token_count: most tokens that the client allows; None to leave it to the serving
            layer, which knows the length of the rendering only.
        is_measured: the call ends before the engine, with `PromptMeasured`.
        decision: what became of a prefix with evidence.
        prompt_ids: what the model saw, [prompt].
        generated_ids: what it sampled, [generation]; empty when the capture failed.
        logprobs: of each sampled token, [generation].
        weight_version: when the call began.
        spans: which weights sampled what, covering the generation.
        sampling: effective sampling parameters.
        finished: the engine has generated; from here on an error is no refusal.
        finish_reason: why the engine ended, in its own words; "" when it did not say.
        text_ends_early: the engine left out of its text what ended the generation.
    """

    prefix: TokenIds | None = None
    evidence: PrefixEvidence | None = None
    history_render: TokenIds | None = None
    spellings: tuple[TokenIds | None, ...] = ()
    prefix_refused: str = ""
    asked_token_count: int | None = None
    is_measured: bool = False
    decision: CaptureDecision | None = None
    prompt_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.uint32))
    generated_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.uint32))
    logprobs: Logprobs = field(default_factory=lambda: np.empty(0, np.float32))
    weight_version: int = 0
    spans: tuple[WeightVersionSpan, ...] = ()
    sampling: dict[str, Scalar] = field(default_factory=dict)
    finished: bool = False
    finish_reason: str = ""
    text_ends_early: bool = False

    def reason_beside(self, served: str) -> str:
        """Give the reason that counts: the served one, unless the engine was cut.

        The serving layer says `tool_calls` wherever it found a call, also in what was cut behind
        it for length or given up.
        """
        return served if self.finish_reason in ("", "stop") else self.finish_reason


current_capture: ContextVar[Capture | None] = ContextVar("current_capture", default=None)


class CapturingClient:
    """Stands for an engine client: passes everything on, and captures what is generated.

    Args:
        inner: the real engine client (`vllm.engine.protocol.EngineClient`).
        context_token_count: most tokens a prompt and its generation may have together.
        terminators: ids that end an assistant turn.
        reader: finds reasoning in turns.
        tokenizer: the engine's own.
        weight_version: version of the weights that are loaded now; its owner keeps it current.
    """

    def __init__(
        self,
        inner: Any,
        *,
        context_token_count: int,
        terminators: frozenset[int],
        reader: ReasoningReader,
        tokenizer: Tokenizer,
        weight_version: int,
    ) -> None:
        self._inner = inner
        self._context_token_count = context_token_count
        self._terminators = terminators
        self._reader = reader
        self._tokenizer = tokenizer
        self.weight_version = weight_version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """Generate as the inner client does, capturing into `current_capture` when there is one.

        Raises:
            EngineRefusalError: the prompt leaves no room for a generation.
            PromptMeasured: the call is only measured; nothing reached the engine.
        """
        capture = current_capture.get()
        if capture is None:
            outputs: AsyncIterator[Any] = self._inner.generate(
                prompt, sampling_params, request_id, **options
            )
            return outputs
        prompt = self._place_prefix(capture, prompt)
        self._limit_generation(capture, sampling_params)
        if capture.is_measured:
            raise PromptMeasured
        hide = sampling_params.logprobs is None and not sampling_params.logprob_token_ids
        if hide:
            sampling_params.logprobs = 0  # the sampled token's alone
        capture.weight_version = self.weight_version
        capture.sampling = _describe_sampling(sampling_params)
        return self._watch(
            capture,
            self._inner.generate(prompt, sampling_params, request_id, **options),
            hide_logprobs=hide,
            skip_special_tokens=sampling_params.skip_special_tokens,
        )

    def _place_prefix(self, capture: Capture, prompt: Any) -> Any:
        """Return the prompt for the engine, and note its ids."""
        rendered = np.asarray(prompt["prompt_token_ids"], np.uint32)
        capture.prompt_ids = rendered
        if capture.prefix is None or capture.prefix_refused:
            return prompt
        if capture.evidence is not None:
            self._decide(capture, capture.prefix, capture.evidence, prompt["type"])
        else:
            self._splice(capture, capture.prefix, prompt["type"])
        if capture.prompt_ids is rendered:
            return prompt
        spliced = dict(prompt, prompt_token_ids=capture.prompt_ids.tolist())
        # Text and offsets describe the rendering that was replaced.
        spliced.pop("prompt", None)
        spliced.pop("prompt_token_offsets", None)
        return spliced

    def _decide(
        self, capture: Capture, prefix: TokenIds, evidence: PrefixEvidence, prompt_type: str
    ) -> None:
        """Let the renderings decide what becomes of the prefix (forest mode)."""
        decided = decide_capture_input(
            Candidate(prefix, evidence.chain_hash, evidence.match),
            Rendering(
                capture.prompt_ids,
                capture.history_render,
                capture.spellings,
                is_token_list=prompt_type == "token",
            ),
            self._terminators,
            self._reader,
        )
        capture.prompt_ids, capture.decision = decided.token_ids, decided.decision

    def _splice(self, capture: Capture, prefix: TokenIds, prompt_type: str) -> None:
        """Place the prefix, or say why that cannot be done (chain mode)."""
        if capture.history_render is None:
            return
        if prompt_type != "token":
            # Placeholder ranges would have to move with the splice.
            capture.prefix_refused = f"prompt of type {prompt_type} cannot be spliced"
            return
        try:
            splice = splice_prefix(
                prefix, capture.prompt_ids, capture.history_render, self._terminators
            )
        except SpliceRefusedError as refusal:
            capture.prefix_refused = refusal.reason
            return
        capture.prompt_ids = splice.token_ids

    def _limit_generation(self, capture: Capture, sampling_params: Any) -> None:
        """Keep prompt and generation within the context: the splice changed the prompt's length."""
        room = self._context_token_count - len(capture.prompt_ids)
        if room <= 0:
            message = (
                f"This model's maximum context length is {self._context_token_count} tokens. "
                f"However, your messages resulted in {len(capture.prompt_ids)} tokens. "
                "Please reduce the length of the messages."
            )
            raise EngineRefusalError(message, parameter="messages")
        asked = capture.asked_token_count
        sampling_params.max_tokens = min(
            room, sampling_params.max_tokens if asked is None else asked
        )

    async def _watch(
        self,
        capture: Capture,
        outputs: AsyncIterator[Any],
        *,
        hide_logprobs: bool,
        skip_special_tokens: bool,
    ) -> AsyncIterator[Any]:
        async for output in outputs:
            if output.finished:
                capture.finished = True
                capture.text_ends_early = self._text_ends_early(
                    output, skip_special_tokens=skip_special_tokens
                )
                try:
                    _record(capture, output)
                except CaptureFaultError:
                    # The call is served all the same; the token counts no longer agree with the
                    # engine's, so that nothing downstream takes it for captured.
                    _LOGGER.exception("capture failed at the engine boundary")
            if hide_logprobs:
                for completion in output.outputs:
                    completion.logprobs = None
            yield output

    def _text_ends_early(self, output: Any, *, skip_special_tokens: bool) -> bool:
        """Say whether text of sampled tokens was left out, one that ends a turn apart.

        A stop string is cut off, even from within a token, and a stop token is not shown; how much
        is missing the engine does not say. Where nothing is (the request asks for the stop string,
        or the stop token has no text), the tokens' text is exactly the served one.
        """
        (completion,) = output.outputs
        stop = completion.stop_reason
        if stop is None or stop in self._terminators:
            return False
        text = self._tokenizer.decode(
            list(completion.token_ids), skip_special_tokens=skip_special_tokens
        )
        return bool(text != completion.text)


def _record(capture: Capture, output: Any) -> None:
    """Take over the finished output of a call that is neither streamed nor sampled twice.

    Raises:
        CaptureFaultError: the engine saw another prompt than it was given, or some sampled token
            has no logprob.
    """
    (completion,) = output.outputs
    capture.finish_reason = completion.finish_reason or ""
    seen = np.asarray(output.prompt_token_ids, np.uint32)
    if not np.array_equal(seen, capture.prompt_ids):
        raise CaptureFaultError(
            f"the engine saw {len(seen)} prompt ids, given were {len(capture.prompt_ids)}"
        )
    token_ids = list(completion.token_ids)
    alternatives = completion.logprobs or ()
    if len(alternatives) != len(token_ids):
        raise CaptureFaultError(f"{len(alternatives)} logprobs for {len(token_ids)} sampled tokens")
    spans = _read_spans(completion.weight_versions, len(token_ids), capture.weight_version)
    capture.logprobs = np.fromiter(
        (step[token].logprob for step, token in zip(alternatives, token_ids, strict=True)),
        np.float32,
        len(token_ids),
    )
    capture.generated_ids = np.asarray(token_ids, np.uint32)
    capture.spans = spans


def _read_spans(spans: Any, token_count: int, weight_version: int) -> tuple[WeightVersionSpan, ...]:
    """Read the engine's own account of which weights sampled what.

    Raises:
        CaptureFaultError: the spans do not cover the generation exactly.
    """
    if token_count == 0:
        return ()
    read = tuple(WeightVersionSpan(span.start, span.end, int(span.version)) for span in spans or ())
    covered = 0
    for span in read:
        if span.start != covered or span.end <= span.start or span.version < weight_version:
            break
        covered = span.end
    else:
        if covered == token_count:
            return read
    raise CaptureFaultError(f"weight version spans {read} do not cover {token_count} tokens")


def _describe_sampling(sampling_params: Any) -> dict[str, Scalar]:
    described: dict[str, Scalar] = {
        name: getattr(sampling_params, name) for name in _SCALAR_SAMPLING
    }
    for name in _SELDOM_SAMPLING:
        value = getattr(sampling_params, name)
        if value or (value == 0 and value is not False):  # a thinking budget of 0 is one
            described[name] = json.dumps(value, separators=(",", ":"))
    # A grammar masks the logits before the engine takes even its raw logprobs: they count only what
    # it allows, and a learner that scores without it finds others.
    described["structured_outputs"] = sampling_params.structured_outputs is not None
    return described
