"""vLLM in this process, behind the `Engine` port: its own serving layer, without HTTP or a port."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from callforest_core.custody.capture_input import HistoryMatch
from callforest_mesh.worker.engine import (
    EngineDescription,
    EngineMeasure,
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
)
from callforest_mesh.worker.vllm.capture import (
    Capture,
    CapturingClient,
    PromptMeasured,
    current_capture,
)
from callforest_mesh.worker.vllm.chat_body import (
    asked_token_count,
    history_body,
    read_body,
    spelled_bodies,
    write_response,
)
from callforest_mesh.worker.vllm.configuration_digest import (
    digest_configuration,
    reasoning_parser_of,
    require_options_without_prompt,
)
from callforest_mesh.worker.vllm.options import CPU, VllmOptions
from callforest_mesh.worker.vllm.packed_weights import PACK_EMBEDDINGS
from callforest_mesh.worker.vllm.serving_layer import (
    QuietRenderer,
    parse_request,
    raise_failure,
    render_history,
    render_spelling,
)
from callforest_mesh.worker.vllm.turn_marks import read_reasoning, read_terminators
from callforest_mesh.worker.vllm.weight_file import (
    TensorShapes,
    read_shapes,
    require_same_tensors,
    weight_files,
)

_LOGGER = logging.getLogger(__name__)

_NO_HISTORY = "no_assistant_message"
_Answer = TypeVar("_Answer")


class VllmHost:
    """One vLLM engine and upstream's chat serving layer on it.

    Rendering, tool-call and reasoning parsing, stop strings, structured outputs and the shapes of
    errors are vLLM's own. The environment of the process must be that of
    `VllmOptions.environment` before vLLM is first imported.

    Once weights fail to load half-way the host answers nothing any more: no one knows what a
    model of mixed weights would sample. Its process must be replaced.

    Args:
        options: what vLLM is started with.
        on_broken: called once, when that happens.
    """

    def __init__(self, options: VllmOptions, on_broken: Callable[[], None] = lambda: None) -> None:
        self._options = options
        self._on_broken = on_broken
        self._cleanup = AsyncExitStack()
        self._updating = asyncio.Lock()
        self._updates: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Task[object]] = set()
        self._broken = ""
        self._client: CapturingClient | None = None
        self._serving: Any = None
        self._renderer: Any = None
        self._shapes: TensorShapes = {}
        self._digest = b""
        self._context_token_count = 0

    @property
    def broken(self) -> str:
        """Why this host will never answer again; "" while it may."""
        return self._broken

    async def start(self) -> EngineDescription:
        """Load the model and build the serving layer; return when it can generate."""
        from starlette.datastructures import State
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

        arguments = _parse_arguments(self._options)
        self._read_checkpoint(arguments)
        engine = await self._cleanup.enter_async_context(build_async_engine_client(arguments))
        require_options_without_prompt(vars(arguments), engine.model_config.tokenizer_mode)
        await engine.update_weight_version(str(self._options.weight_version))
        tokenizer = engine.get_tokenizer()
        self._context_token_count = engine.model_config.max_model_len
        self._client = CapturingClient(
            engine,
            context_token_count=self._context_token_count,
            terminators=read_terminators(engine),
            reader=read_reasoning(tokenizer, reasoning_parser_of(vars(arguments))),
            tokenizer=tokenizer,
            weight_version=self._options.weight_version,
        )
        state = State()
        tasks = await engine.get_supported_tasks()
        await init_app_state(self._client, state, arguments, tasks)
        self._renderer = QuietRenderer(state.online_renderer)
        self._serving = state.openai_serving_chat
        self._serving.online_renderer = self._renderer
        return self.describe()

    async def stop(self) -> None:
        """End the engine and its processes. Idempotent."""
        self._broken = self._broken or "stopped"
        await self._cleanup.aclose()

    def describe(self) -> EngineDescription:
        """Describe the engine, its weight version as of now."""
        return EngineDescription(
            engine="vllm",
            model=self._options.served_model_name,
            context_token_count=self._context_token_count,
            weight_version=self._require_client().weight_version,
            configuration_digest=self._digest,
        )

    async def generate(self, request: EngineRequest) -> EngineResult:
        """Generate one response; see `Engine.generate`."""
        return await self._run(self._generate(request))

    async def measure(self, request: EngineRequest) -> EngineMeasure:
        """Prepare the prompt and count it; see `Engine.measure`."""
        return await self._run(self._measure(request))

    async def _run(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Do the work of a call as one that ends when the host breaks."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if not self._broken:
                raise
            task.uncancel()
            raise EngineUnavailableError(self._broken) from None
        finally:
            self._running.discard(task)

    async def update_weights(self, path: str, version: int) -> None:
        """Load the weights at `path` (a safetensors file, or a directory of them).

        Raises:
            EngineUnavailableError: the engine is not there, or the load failed half-way; then the
                host is broken.
            EngineRefusalError: the file does not hold exactly this model's tensors; nothing was
                changed.
            ValueError: the version does not exceed the present one; nothing was changed.
        """
        update = asyncio.create_task(self._update_weights(Path(path), version))
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)
        # A caller that gives up must not leave the engine paused, half-way.
        await asyncio.shield(update)

    def _read_checkpoint(self, arguments: Any) -> None:
        from vllm.renderers.chat_utils import load_chat_template

        model = Path(self._options.model)
        template = load_chat_template(arguments.chat_template)
        self._digest = digest_configuration(model, template, vars(arguments))
        self._shapes = read_shapes(weight_files(model))

    def _require_client(self) -> CapturingClient:
        if self._client is None or self._broken:
            raise EngineUnavailableError(self._broken or "not started")
        return self._client

    async def _generate(self, request: EngineRequest) -> EngineResult:
        self._require_client()
        body = read_body(request.body, request.call_id)
        capture = await self._prepare(request, body)
        response = await self._serve(body, capture)
        return EngineResult(
            prompt_ids=capture.prompt_ids,
            generated_ids=capture.generated_ids,
            logprobs=capture.logprobs,
            response=write_response(response, created=request.created),
            finish_reason=capture.reason_beside(response["choices"][0]["finish_reason"]),
            reported_completion_tokens=response["usage"]["completion_tokens"],
            weight_version=capture.weight_version,
            weight_version_spans=capture.spans,
            sampling=capture.sampling,
            logprobs_mode=self._options.logprobs_mode,
            prefix_refused=capture.prefix_refused,
            decision=capture.decision,
            text_ends_early=capture.text_ends_early,
        )

    async def _measure(self, request: EngineRequest) -> EngineMeasure:
        self._require_client()
        body = read_body(request.body, request.call_id)
        capture = await self._prepare(request, body)
        capture.is_measured = True
        try:
            await self._serve(body, capture)
        except PromptMeasured:
            return EngineMeasure(len(capture.prompt_ids), capture.decision)
        raise EngineUnavailableError("the serving layer answered without asking the engine")

    async def _prepare(self, request: EngineRequest, body: dict[str, Any]) -> Capture:
        """Render what the prefix replaces, through the same renderer as the prompt itself."""
        capture = Capture()
        if request.prefix is None or not len(request.prefix):
            return capture
        capture.prefix, capture.evidence = request.prefix, request.evidence
        capture.asked_token_count = asked_token_count(body)
        history = history_body(body)
        if history is None:
            capture.prefix_refused = "" if request.evidence else _NO_HISTORY
            return capture
        if request.evidence and request.evidence.match is HistoryMatch.TOOL_CONTENT_EQUIVALENT:
            # One after the other: the renderer's pool has few threads, and other calls need them.
            spelled = [
                await render_spelling(self._renderer, one) for one in spelled_bodies(history)
            ]
            capture.spellings = tuple(spelled)
        capture.history_render = await render_history(self._renderer, history)
        return capture

    async def _serve(self, body: dict[str, Any], capture: Capture) -> dict[str, Any]:
        """Let the serving layer answer, and sort its failures into the port's two."""
        from vllm.entrypoints.serve import create_error_response

        token = current_capture.set(capture)
        try:
            answer = await self._serving.create_chat_completion(parse_request(body))
        except (EngineRefusalError, PromptMeasured):
            raise
        except Exception as error:
            answer = create_error_response(error)
            if answer.error.code >= 500:
                _LOGGER.exception("the engine failed on %s", body["request_id"])
                cause = error.__cause__ or error
                answer.error.message = f"{type(cause).__name__}: {cause}"
        finally:
            current_capture.reset(token)
        # The serving layer turns a cancellation into an error response; it must stay one.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        failure = getattr(answer, "error", None)
        if failure is not None:
            raise_failure(failure, generated=capture.finished)
        response: dict[str, Any] = answer.model_dump(mode="json")
        if capture.reason_beside(response["choices"][0]["finish_reason"]) == "abort":
            raise EngineUnavailableError("the engine gave up the request")
        return response

    async def _update_weights(self, path: Path, version: int) -> None:
        async with self._updating:
            client = self._require_client()
            if version <= client.weight_version:
                raise ValueError(f"version {version} does not exceed {client.weight_version}")
            try:
                files = await asyncio.to_thread(weight_files, path)
                require_same_tensors(self._shapes, await asyncio.to_thread(read_shapes, files))
            except (OSError, ValueError) as error:
                raise EngineRefusalError(str(error), parameter="path") from error
            try:
                await self._load(client, files, version)
            except Exception as error:
                self._break(f"weight update to version {version} failed: {error}")
                raise EngineUnavailableError(self._broken) from error

    async def _load(self, client: CapturingClient, files: list[Path], version: int) -> None:
        # vLLM loads a directory; the files may lie among others.
        directory = Path(tempfile.mkdtemp(prefix="weights-"))
        try:
            for file in files:
                (directory / file.name).with_suffix(".safetensors").symlink_to(file.resolve())
            # "keep" puts running requests back; they go on with the tokens they have, their keys
            # and values computed anew.
            await client.pause_generation(mode="keep", clear_cache=True)
            await client.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
            if self._options.device == CPU:
                await client.collective_rpc(PACK_EMBEDDINGS)
            if not await client.reset_prefix_cache(reset_running_requests=True):
                raise EngineUnavailableError(
                    "the prefix cache of the old weights could not be dropped"
                )
            await client.update_weight_version(str(version))
            client.weight_version = version
            await client.resume_generation()
        finally:
            shutil.rmtree(directory)

    def _break(self, reason: str) -> None:
        """Stop answering for good; requests in flight end as unavailable."""
        self._broken = reason
        for task in self._running:
            task.cancel()
        self._on_broken()


def _parse_arguments(options: VllmOptions) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(options.arguments())
    validate_parsed_serve_args(arguments)
    return arguments
