"""A scripted engine: an `Engine` whose answers a script decides, for tests and demos.

It renders, splices and accounts for tokens exactly as a real engine does, so that everything around
it can be proven without one. It has no model: `update_weights` only bumps the version.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import Final, Protocol, TypeAlias

import numpy as np

from callforest_core.custody.capture_input import (
    Candidate,
    CaptureDecision,
    HistoryMatch,
    Rendering,
    decide_capture_input,
)
from callforest_core.custody.errors import SpliceRefusedError
from callforest_core.custody.reasoning import ReasoningReader
from callforest_core.custody.splice import splice_prefix
from callforest_mesh.worker.chat_text import ByteVocabulary, ChatMlTemplate, Message
from callforest_mesh.worker.engine import (
    EngineDescription,
    EngineMeasure,
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
    Logprobs,
    Scalar,
    TokenIds,
    WeightVersionSpan,
)
from callforest_mesh.worker.scripted_body import ScriptedBody, read_scripted_body, write_completion
from callforest_mesh.worker.scripted_turn import ScriptedTurn, pseudo_random_turn, turn_stopped
from callforest_mesh.worker.spelling import spellings_of

__all__ = ["RecordedPrompt", "Script", "ScriptedEngine", "ScriptedOptions", "ScriptedTurn"]

_RECORDED_MAX: Final = 4096
_PROMPTS_MAX: Final = 256


class Vocabulary(Protocol):
    """Turns text into ids and back."""

    def encode(self, text: str) -> TokenIds:
        """Give the ids of a text."""
        ...

    def decode(self, token_ids: TokenIds) -> str:
        """Give the text of ids; ids without text are left out."""
        ...


class Template(Protocol):
    """Turns a conversation into a prompt."""

    @property
    def terminators(self) -> frozenset[int]:
        """The ids that end a turn."""
        ...

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        """Give the prompt of a conversation, with or without the opening of the next turn."""
        ...


Script: TypeAlias = Callable[[TokenIds, str, int], ScriptedTurn]
"""(prompt ids as the model sees them, call id, how many calls came before) -> answer."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedPrompt:
    """A prompt that the engine was given: the call, and the ids after the splice."""

    call_id: str
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A prompt, and what became of the prefix that was to head it."""

    token_ids: TokenIds
    prefix_refused: str = ""
    decision: CaptureDecision | None = None


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """How a scripted engine behaves.

    Attributes:
        model: name under which it serves.
        context_token_count: most tokens of a prompt and its generation.
        weight_version: that it starts with.
        latency_s: shortest and longest time that a generation takes, drawn uniformly.
        seed: of the latencies and of the built-in script.
        turn_tokens: fewest and most tokens of a turn of the built-in script.
        logprobs_mode: what the log-probabilities count as.
    """

    model: str = "scripted"
    context_token_count: int = 32768
    weight_version: int = 0
    latency_s: tuple[float, float] = (0.0, 0.0)
    seed: int = 0
    turn_tokens: tuple[int, int] = (4, 24)
    logprobs_mode: str = "raw_logprobs"


@dataclass(slots=True)
class ScriptedEngine:
    """An `Engine` that answers by a script.

    Attributes:
        options: how it behaves.
        vocabulary: ids and text; bytes unless told otherwise.
        template: the prompt's form; ChatML unless told otherwise.
        script: decides the answers; None for pseudo-random ones that depend on the prompt and the
            request's seed alone, so that a rerun is equal.
        pause: awaited between the beginning of a generation and its sampling, with the call id; a
            test holds a call there.
        prompts: the last prompts that it was given.
    """

    options: ScriptedOptions = field(default_factory=ScriptedOptions)
    vocabulary: Vocabulary = field(default_factory=ByteVocabulary)
    template: Template = field(default_factory=ChatMlTemplate)
    script: Script | None = None
    pause: Callable[[str], Awaitable[None]] | None = None
    prompts: deque[RecordedPrompt] = field(default_factory=lambda: deque(maxlen=_PROMPTS_MAX))
    cancelled_call_ids: deque[str] = field(default_factory=lambda: deque(maxlen=_RECORDED_MAX))
    _version: int = -1
    _ordinal: int = 0
    _running: bool = False
    _described: tuple[tuple[object, ...], EngineDescription] | None = None
    _latencies: random.Random = field(default_factory=random.Random)
    _letters: TokenIds = field(default_factory=lambda: np.empty(0, np.uint32))

    async def start(self) -> EngineDescription:
        """Begin to answer."""
        self._version = self.options.weight_version
        self._latencies = random.Random(self.options.seed)  # noqa: S311 - latencies, no secrets
        if self.script is None:  # a script may bring a vocabulary without letters
            self._letters = self.vocabulary.encode("abcdefghijklmnopqrstuvwxyz ")
        self._running = True
        return self.describe()

    async def stop(self) -> None:
        """Answer no more."""
        self._running = False

    def describe(self) -> EngineDescription:
        """Describe the engine; see `Engine.describe`."""
        self._require_running()
        # A test may put another template in at any time.
        parts = (self.options, self.vocabulary, self.template, self._version)
        if self._described is None or any(map(is_not, parts, self._described[0])):
            self._described = parts, self._description()
        return self._described[1]

    def _description(self) -> EngineDescription:
        # What a vocabulary or a template is must show in its repr, as it does in a dataclass's.
        form = f"{self.options.model} {self.vocabulary!r} {self.template!r}".encode()
        return EngineDescription(
            engine="scripted",
            model=self.options.model,
            context_token_count=self.options.context_token_count,
            weight_version=self._version,
            configuration_digest=hashlib.sha256(form).digest(),
        )

    async def update_weights(self, path: str, version: int) -> None:  # noqa: ARG002 - no model
        """Stamp `version` from now on; see `Engine.update_weights`."""
        self._require_running()
        if version <= self._version:
            raise ValueError(f"version {version} does not exceed {self._version}")
        self._version = version

    async def generate(self, request: EngineRequest) -> EngineResult:
        """Answer by the script; see `Engine.generate`."""
        self._require_running()
        body = read_scripted_body(request.body)
        prompt = self._prompt(body, request)
        begun = self._version
        ordinal, self._ordinal = self._ordinal, self._ordinal + 1
        self.prompts.append(RecordedPrompt(request.call_id, prompt.token_ids))
        try:
            await self._wait(request.call_id)
        except asyncio.CancelledError:
            self.cancelled_call_ids.append(request.call_id)
            raise
        self._require_running()
        turn = self._turn(prompt.token_ids, request.call_id, ordinal, body)
        return self._result(request, body, prompt, turn, begun)

    async def measure(self, request: EngineRequest) -> EngineMeasure:
        """Prepare the prompt and count it; see `Engine.measure`."""
        self._require_running()
        prompt = self._prompt(read_scripted_body(request.body), request)
        return EngineMeasure(len(prompt.token_ids), prompt.decision)

    def _require_running(self) -> None:
        if not self._running:
            raise EngineUnavailableError("the scripted engine is not running")

    async def _wait(self, call_id: str) -> None:
        if self.pause is not None:
            await self.pause(call_id)
        shortest, longest = self.options.latency_s
        if longest > 0:
            await asyncio.sleep(self._latencies.uniform(shortest, longest))

    def _prompt(self, body: ScriptedBody, request: EngineRequest) -> _Prompt:
        """Render, and put the prefix in the history's place; say why if that cannot be done.

        Raises:
            EngineRefusalError: the prompt leaves no room for a generation.
        """
        prompt = self._placed(body, request)
        if len(prompt.token_ids) >= self.options.context_token_count:
            raise EngineRefusalError(
                f"This model's maximum context length is {self.options.context_token_count} "
                f"tokens. However, your messages resulted in {len(prompt.token_ids)} tokens.",
                parameter="messages",
            )
        return prompt

    def _placed(self, body: ScriptedBody, request: EngineRequest) -> _Prompt:
        prefix, evidence = request.prefix, request.evidence
        if prefix is None or not len(prefix):
            return _Prompt(self.template.render(body.messages, add_generation_prompt=True))
        rendered, history = self._renderings(body)
        terminators = self.template.terminators
        if evidence is not None:
            asked = evidence.match is HistoryMatch.TOOL_CONTENT_EQUIVALENT
            spelled = spellings_of(body.history) if asked else []
            decided = decide_capture_input(
                Candidate(prefix, evidence.chain_hash, evidence.match),
                Rendering(rendered, history, tuple(map(self._render_spelling, spelled))),
                terminators,
                ReasoningReader(self.vocabulary.decode),
            )
            return _Prompt(decided.token_ids, decision=decided.decision)
        if history is None:
            return _Prompt(rendered, "no_assistant_message")
        try:
            splice = splice_prefix(prefix, rendered, history, terminators)
        except SpliceRefusedError as refusal:
            return _Prompt(rendered, refusal.reason)
        return _Prompt(splice.token_ids)

    def _renderings(self, body: ScriptedBody) -> tuple[TokenIds, TokenIds | None]:
        """Render the conversation, and its history; None when it has none.

        Other templates than ours may render a message otherwise when more messages follow.
        """
        count = body.history_count
        if count and type(self.template) is ChatMlTemplate:
            return self.template.render_parts(body.messages, count)
        rendered = self.template.render(body.messages, add_generation_prompt=True)
        return rendered, self._render_history(body.history)

    def _render_history(self, history: Sequence[Message]) -> TokenIds | None:
        return self.template.render(history, add_generation_prompt=False) if history else None

    def _render_spelling(self, history: Sequence[Message]) -> TokenIds | None:
        try:
            return self._render_history(history)
        except EngineRefusalError:  # the template cannot read this spelling
            return None

    def _turn(
        self, prompt: TokenIds, call_id: str, ordinal: int, body: ScriptedBody
    ) -> ScriptedTurn:
        if self.script is not None:
            return self.script(prompt, call_id, ordinal)
        room = self.options.context_token_count - len(prompt)
        limit = room if body.max_tokens is None else min(room, body.max_tokens)
        seed = f"{self.options.seed} {body.seed}"
        return pseudo_random_turn(
            prompt,
            seed,
            limit=limit,
            sizes=self.options.turn_tokens,
            letters=self._letters,
            terminator=max(self.template.terminators),
        )

    def _result(
        self,
        request: EngineRequest,
        body: ScriptedBody,
        prompt: _Prompt,
        turn: ScriptedTurn,
        begun: int,
    ) -> EngineResult:
        turn = turn_stopped(turn, body.stop, self.vocabulary.decode, shown=body.shows_stop)
        token_ids = np.asarray(turn.token_ids, np.uint32)
        logprobs = np.asarray(turn.logprobs, np.float32)
        count = len(token_ids) if turn.reported_count is None else turn.reported_count
        text = self.vocabulary.decode(token_ids)
        message: dict[str, object] = {"content": text} if turn.message is None else {**turn.message}
        response = write_completion(
            call_id=request.call_id,
            created=request.created,
            model=self.options.model,
            message=message,
            finish_reason=turn.finish_reason,
            token_counts=(len(prompt.token_ids), count),
            token_logprobs=self._scored(token_ids, logprobs) if body.logprobs else None,
        )
        return EngineResult(
            prompt_ids=prompt.token_ids,
            generated_ids=token_ids,
            logprobs=logprobs,
            response=response,
            finish_reason=turn.finish_reason,
            reported_completion_tokens=count,
            weight_version=begun,
            weight_version_spans=_spans(len(token_ids), begun, self._version),
            sampling=_sampling(body),
            logprobs_mode=self.options.logprobs_mode,
            prefix_refused=prompt.prefix_refused,
            decision=prompt.decision,
            text_ends_early=turn.text_ends_early,
        )

    def _scored(self, token_ids: TokenIds, logprobs: Logprobs) -> list[tuple[str, float]]:
        """Give the text of each token with its log-probability."""
        tokens = [self.vocabulary.decode(token_ids[i : i + 1]) for i in range(len(token_ids))]
        return list(zip(tokens, logprobs.tolist(), strict=False))


def _spans(size: int, begun: int, ended: int) -> tuple[WeightVersionSpan, ...]:
    """Say which versions sampled: both halves differ when the weights changed meanwhile."""
    if size < 2 or begun == ended:
        return (WeightVersionSpan(0, size, begun),) if size else ()
    middle = size // 2
    return (WeightVersionSpan(0, middle, begun), WeightVersionSpan(middle, size, ended))


def _sampling(body: ScriptedBody) -> dict[str, Scalar]:
    return {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": -1,
        "seed": body.seed,
        "max_tokens": body.max_tokens,
    }
