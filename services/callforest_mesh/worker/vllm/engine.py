"""vLLM as the worker's engine: keeps its process running, with the weights pushed last."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from callforest_mesh.worker.engine import (
    EngineDescription,
    EngineMeasure,
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
)
from callforest_mesh.worker.vllm.engine_process import EngineProcess, StaleWeightsError
from callforest_mesh.worker.vllm.limits import VllmLimits
from callforest_mesh.worker.vllm.options import VllmOptions

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Weights:
    path: str
    version: int


class VllmEngine:
    """The `Engine` port on a vLLM that runs in a child process of its own.

    The child is watched: when it dies, calls fail as unavailable, and it is started again, with the
    weights that were pushed last, before it answers. After `restarts_most` failed starts in a row
    it stays down.

    Args:
        options: what vLLM is started with.
        limits: deadlines and repeats.
        command: what to run instead of vLLM; gets `--socket PATH`. For tests.
    """

    def __init__(
        self,
        options: VllmOptions,
        limits: VllmLimits | None = None,
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        self._options = options
        self._limits = limits or VllmLimits()
        self._command = command or (
            sys.executable,
            "-m",
            "callforest_mesh.worker.vllm.child",
            "--options",
            options.to_json(),
        )
        self._loading = asyncio.Lock()
        self._child: EngineProcess | None = None
        self._description: EngineDescription | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._weights: _Weights | None = None
        self._asked: _Weights | None = None
        self._down = "the engine was not started"

    async def start(self) -> EngineDescription:
        """Start the child and wait until it can generate.

        Raises:
            EngineUnavailableError: it did not get ready; the message holds the end of its log.
        """
        child = await self._spawn()
        self._supervision = asyncio.create_task(self._supervise(child))
        return self.describe()

    async def stop(self) -> None:
        """End the child and all it started. Idempotent."""
        self._down = "the engine was stopped"
        supervision, self._supervision = self._supervision, None
        if supervision is not None:
            supervision.cancel()
            await asyncio.wait({supervision})
            if not supervision.cancelled():
                supervision.result()  # Given up, or a fault of its own that must be seen.
        child, self._child = self._child, None
        if child is not None:
            await child.end(politely=True)

    def describe(self) -> EngineDescription:
        """Describe the engine as last seen, its weight version as of now.

        Raises:
            EngineUnavailableError: the engine was never up.
        """
        if self._description is None:
            raise EngineUnavailableError(self._down)
        return self._description

    @property
    def child_pid(self) -> int:
        """Process id of the child that answers now.

        Raises:
            EngineUnavailableError: none does.
        """
        return self._require_child().pid

    async def generate(self, request: EngineRequest) -> EngineResult:
        """Generate one response; see `Engine.generate`."""
        return await self._require_child().generate(request)

    async def measure(self, request: EngineRequest) -> EngineMeasure:
        """Count the tokens of a prompt; see `Engine.measure`."""
        return await self._require_child().measure(request)

    async def update_weights(self, path: str, version: int) -> None:
        """Load new weights; see `Engine.update_weights`.

        Raises:
            EngineRefusalError: the file does not hold exactly this model's tensors.
            EngineUnavailableError: the engine is not there, or the load failed half-way; after a
                restart it serves the weights before these. Repeat.
            ValueError: the version does not exceed the present one.
        """
        async with self._loading:
            child = self._require_child()
            present = self.describe().weight_version
            if version <= present:
                raise ValueError(f"version {version} does not exceed {present}")
            weights = _Weights(path, version)
            repeated = weights == self._asked
            self._asked = weights
            await self._load(child, weights, repeated=repeated)
            self._weights = weights

    def _require_child(self) -> EngineProcess:
        if self._child is None:
            raise EngineUnavailableError(self._down)
        return self._child

    async def _load(self, child: EngineProcess, weights: _Weights, *, repeated: bool) -> None:
        try:
            await child.load_weights(weights.path, weights.version)
        except StaleWeightsError as error:
            # The answer to an earlier attempt was lost, the weights were not.
            if not (repeated and error.served == weights.version):
                raise
        self._description = replace(self.describe(), weight_version=weights.version)

    async def _spawn(self) -> EngineProcess:
        """Start a child that serves the weights that were pushed last, and let it answer.

        Raises:
            EngineUnavailableError: it did not get ready, or cannot load those weights.
        """
        child = await EngineProcess.spawn(self._command, self._options, self._limits)
        try:
            description = await child.wait_ready()
            async with self._loading:
                self._description = description
                if self._weights is not None:
                    await self._load(child, self._weights, repeated=False)
                self._child = child
        except BaseException:
            await child.end(politely=False)
            raise
        return child

    async def _supervise(self, child: EngineProcess) -> None:
        """Start the child anew whenever it ends, until that fails too often."""
        running: EngineProcess | None = child
        while running is not None:
            status = await running.wait_ended()
            self._child = None
            self._down = f"the engine ended with status {status} and is starting again"
            _LOGGER.error("%s; its last words: %s", self._down, running.log_tail())
            await running.end(politely=False)
            running = await self._respawn()

    async def _respawn(self) -> EngineProcess | None:
        """Try to start a child until one is up; None when given up."""
        for failures in range(self._limits.restarts_most):
            pause = min(self._limits.backoff_s * 2**failures, self._limits.backoff_most_s)
            await asyncio.sleep(pause)
            try:
                return await self._spawn()
            except (EngineUnavailableError, EngineRefusalError, ValueError, OSError) as error:
                self._down = f"the engine does not start again: {error}"
                _LOGGER.exception("restart %d failed", failures + 1)
        return None
