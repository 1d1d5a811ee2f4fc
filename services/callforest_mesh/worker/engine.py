"""The port between the worker and whatever generates: vLLM in a child process, or a script.

An engine renders the conversation, lets the worker's prefix replace the re-rendered history,
samples, and gives back what really went in and came out. It knows nothing of ledgers or staging.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.capture_input import CaptureDecision, HistoryMatch

TokenIds: TypeAlias = NDArray[np.uint32]
Logprobs: TypeAlias = NDArray[np.float32]
Scalar: TypeAlias = bool | int | float | str | None


class EngineRefusalError(Exception):
    """The engine refused the request before it generated anything (a malformed request).

    Attributes:
        parameter: the field of the request that is at fault, or "" when there is no single one.
    """

    def __init__(self, message: str, *, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class EngineUnavailableError(Exception):
    """The engine cannot answer now: it is starting, restarting or gone. Nothing was generated."""


@dataclass(frozen=True, slots=True)
class WeightVersionSpan:
    """Half-open range of generated tokens, [start, end), that one weight version sampled."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class PrefixEvidence:
    """What is known of a prefix in forest mode, where the engine itself decides about it.

    Attributes:
        match: in which sense the request's history is that of the prefix.
        chain_hash: of the prefix, 32 bytes.
    """

    match: HistoryMatch
    chain_hash: bytes


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """One generation.

    Attributes:
        call_id: names the call; the served response id derives from it.
        created: seconds since the epoch, written into the served response.
        body: a Chat Completions request as JSON bytes (never streamed, one choice).
        prefix: the exact tokens of the parent call (its prompt and its generation), which must
            replace the re-rendered history; None for a root.
        evidence: of the prefix in forest mode; None in chain mode, and for a root.
    """

    call_id: str
    created: int
    body: bytes
    prefix: TokenIds | None = None
    evidence: PrefixEvidence | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EngineResult:
    """What the engine saw and said.

    Attributes:
        prompt_ids: the prompt as the model saw it, after the splice, shape [prompt].
        generated_ids: every sampled token, a sampled terminator included, shape [generation].
        logprobs: log-probability of each sampled token under `logprobs_mode`, [generation].
        response: the Chat Completions response to serve, JSON bytes without token material.
        finish_reason: "stop", "length", "tool_calls", ... as served, but never "tool_calls" where
            the generation was cut.
        reported_completion_tokens: the engine's own count, checked against `generated_ids`.
        weight_version: version of the weights when the call began.
        weight_version_spans: every version that sampled a part, in order, covering the generation.
        sampling: the effective sampling parameters.
        logprobs_mode: for instance "raw_logprobs" (before temperature and truncation).
        prefix_refused: why the prefix could not be placed; then the prompt is the plain rendering
            and the call must not be captured as a continuation. "" when it was placed or absent,
            and in forest mode.
        decision: what became of a prefix that came with evidence; None without it.
        text_ends_early: the served text ends before the tokens do, as behind a stop string: the
            history that comes back is not that of the tokens, and the call must not be captured.
    """

    prompt_ids: TokenIds
    generated_ids: TokenIds
    logprobs: Logprobs
    response: bytes
    finish_reason: str
    reported_completion_tokens: int
    weight_version: int
    weight_version_spans: tuple[WeightVersionSpan, ...]
    sampling: dict[str, Scalar] = field(default_factory=dict)
    logprobs_mode: str = "raw_logprobs"
    prefix_refused: str = ""
    decision: CaptureDecision | None = None
    text_ends_early: bool = False


@dataclass(frozen=True, slots=True)
class EngineMeasure:
    """The prompt that a generation would have.

    Attributes:
        prompt_token_count: tokens that the model would see, after the splice.
        decision: what would become of a prefix that came with evidence; None without it.
    """

    prompt_token_count: int
    decision: CaptureDecision | None = None


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What the engine is.

    Attributes:
        engine: "vllm" or "scripted".
        model: name under which the model is served.
        context_token_count: most tokens a prompt and its generation may have together.
        weight_version: version of the weights that serve now.
        configuration_digest: 32 bytes over model, template, tokenizer, processor and the engine's
            own defaults of rendering; fixed for an attempt.
    """

    engine: str
    model: str
    context_token_count: int
    weight_version: int
    configuration_digest: bytes


class Engine(Protocol):
    """Generates for the worker. All methods may be called concurrently."""

    async def start(self) -> EngineDescription:
        """Load everything; return when the engine can generate."""
        ...

    async def stop(self) -> None:
        """Release everything. Idempotent."""
        ...

    def describe(self) -> EngineDescription:
        """Describe the running engine, its weight version as of now."""
        ...

    async def generate(self, request: EngineRequest) -> EngineResult:
        """Generate one response.

        Raises:
            EngineRefusalError: the request is malformed; nothing was generated.
            EngineUnavailableError: the engine is not there; nothing was generated.
        """
        ...

    async def measure(self, request: EngineRequest) -> EngineMeasure:
        """Prepare the prompt of a generation, count its tokens, and leave no trace.

        Raises:
            EngineRefusalError: the generation would be refused.
            EngineUnavailableError: the engine is not there.
        """
        ...

    async def update_weights(self, path: str, version: int) -> None:
        """Load the weights of the safetensors file at `path` and stamp `version` from now on.

        Running requests are kept; cached prefixes of the old weights are dropped.

        Raises:
            EngineUnavailableError: the engine is not there, or the load failed half-way.
            ValueError: the version does not exceed the present one.
        """
        ...
