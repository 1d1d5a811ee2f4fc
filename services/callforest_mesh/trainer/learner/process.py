"""The trainer's side of the learner's process: start it, ask it, end it with its whole group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc.aio

from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import learner_service_pb2 as pb
from callforest.trainer.v1 import learner_service_pb2_grpc as pb_grpc
from callforest_client.errors import CallforestError, error_of_rpc
from callforest_mesh.trainer.batch import BatchPlan, TrainingRow
from callforest_mesh.trainer.learner.messages import MESSAGE_OPTIONS, step_to_messages

_Answer = TypeVar("_Answer")
_LOGGER = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    # The socket appears when torch is imported; look for it often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_LOG = "log"
_LOG_TAIL_BYTES = 2000
_WHOLE_REFUSALS = frozenset(
    {
        er.ERROR_REASON_LEARNER_FAILED,
        er.ERROR_REASON_TRAINER_CONFIGURATION,
        er.ERROR_REASON_CHECKPOINT_REFUSED,
        er.ERROR_REASON_INVALID_MESSAGE,
    }
)
"""After these the learner is as it was before the call; after any other failure nobody knows."""


@dataclass(frozen=True, slots=True)
class LearnerLimits:
    """Deadlines in seconds.

    Attributes:
        start_s: until the process answers.
        load_s: loading a model or a checkpoint.
        step_s: one optimizer step.
        write_s: one export or checkpoint.
        stop_s: for the process to end by itself before its group is killed.
    """

    start_s: float = 300.0
    load_s: float = 600.0
    step_s: float = 3600.0
    write_s: float = 600.0
    stop_s: float = 10.0


class LearnerLostError(Exception):
    """There is no learner whose state is known. Start another and restore the last checkpoint."""


class LearnerProcess:
    """One run of the learner's process, leader of its own process group.

    A call that fails in a way that leaves the learner's state unknown (the process died, the
    deadline passed, the caller was cancelled) kills the process, so that no step can be applied
    behind the trainer's back. Whether to start another is the caller's decision: this object runs
    one process once.

    Args:
        limits: deadlines.
        command: what to run instead of the learner; gets `--socket PATH`. For tests.
    """

    def __init__(
        self, limits: LearnerLimits | None = None, *, command: Sequence[str] | None = None
    ) -> None:
        self._limits = limits or LearnerLimits()
        self._command = command or (
            sys.executable,
            "-m",
            "callforest_mesh.trainer.learner.child",
        )
        self._process: asyncio.subprocess.Process | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: pb_grpc.LearnerServiceStub | None = None
        self._scratch: Path | None = None
        self._lost = "the learner was not started"

    @property
    def pid(self) -> int:
        """Process id, and id of the process group.

        Raises:
            LearnerLostError: there is no process.
        """
        if self._process is None:
            raise LearnerLostError(self._lost)
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs and its state is known."""
        return (
            self._stub is not None
            and self._process is not None
            and (self._process.returncode is None)
        )

    async def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            LearnerLostError: it cannot be run, ended, or did not answer in time.
        """
        if self._process is not None or self._scratch is not None:
            raise LearnerLostError("a learner process is started once")
        # Short: the path of a socket in it has at most 107 bytes.
        self._scratch = Path(tempfile.mkdtemp(prefix="callforest-"))
        socket = self._scratch / "learner.sock"
        try:
            with (self._scratch / _LOG).open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--socket",
                    str(socket),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
            await self._wait_ready(self._process, self._channel)
            self._stub = pb_grpc.LearnerServiceStub(self._channel)
        except OSError as error:
            await self._kill("the learner cannot be run")
            raise LearnerLostError(f"the learner cannot be run: {error}") from error
        except BaseException:
            await self._kill("the learner did not start")
            raise

    async def load_model(self, model_path: Path, options: pb.LearnerOptions) -> int:
        """Load a Hugging Face checkpoint and start afresh; give the number of parameters.

        Raises:
            CallforestError: TRAINER_CONFIGURATION: it cannot be trained so.
            LearnerLostError: the process is gone.
        """
        request = pb.LoadModelRequest(model_path=str(model_path), options=options)
        stub = self._require()
        response = await self._answer(stub.LoadModel(request, timeout=self._limits.load_s))
        return response.parameter_count

    async def train_step(
        self, rows: Sequence[TrainingRow], plan: BatchPlan
    ) -> pb.TrainStepResponse:
        """Make one optimizer step.

        Raises:
            CallforestError: LEARNER_FAILED: refused or not finite, nothing changed.
            LearnerLostError: the process is gone, and with it what it had learnt since the last
                checkpoint.
        """
        stub = self._require()
        # Written before the call: what cannot be written is a fault of the caller, not of the line.
        messages = step_to_messages(rows, plan)
        first = next(messages)

        async def requests() -> AsyncIterator[pb.TrainStepRequest]:
            yield first
            for message in messages:
                yield message

        return await self._answer(stub.TrainStep(requests(), timeout=self._limits.step_s))

    async def export_weights(self, path: Path) -> int:
        """Write the weights for an engine, durably; give the size of the file in bytes.

        Raises:
            CallforestError: LEARNER_FAILED: the disk refused.
            LearnerLostError: the process is gone.
        """
        stub = self._require()
        request = pb.ExportWeightsRequest(path=str(path))
        response = await self._answer(stub.ExportWeights(request, timeout=self._limits.write_s))
        return response.size_bytes

    async def save_checkpoint(self, path: Path, *, trained_cursor: int, weight_version: int) -> int:
        """Write a checkpoint durably; give the last step in it.

        Raises:
            CallforestError: CHECKPOINT_REFUSED: another one is there; LEARNER_FAILED: the disk
                refused.
            LearnerLostError: the process is gone.
        """
        request = pb.SaveCheckpointRequest(
            path=str(path), trained_cursor=trained_cursor, weight_version=weight_version
        )
        stub = self._require()
        response = await self._answer(stub.SaveCheckpoint(request, timeout=self._limits.write_s))
        return response.step

    async def restore_checkpoint(self, path: Path) -> pb.RestoreCheckpointResponse:
        """Continue from a checkpoint of the loaded model.

        Raises:
            CallforestError: CHECKPOINT_REFUSED: nothing was restored.
            LearnerLostError: the process is gone.
        """
        request = pb.RestoreCheckpointRequest(path=str(path))
        stub = self._require()
        return await self._answer(stub.RestoreCheckpoint(request, timeout=self._limits.load_s))

    async def stop(self) -> None:
        """End the process and all it started, politely first. Idempotent."""
        self._stub = None
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._limits.stop_s)
        await self._kill("the learner was stopped")

    async def _wait_ready(
        self, process: asyncio.subprocess.Process, channel: grpc.aio.Channel
    ) -> None:
        ready = asyncio.ensure_future(channel.channel_ready())
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait(
                {ready, ended},
                timeout=self._limits.start_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ended.done():
                raise LearnerLostError(
                    f"the learner ended with status {process.returncode}: {self._log_tail()}"
                )
            if not ready.done():
                raise LearnerLostError(f"no answer within {self._limits.start_s} s")
        finally:
            ready.cancel()
            ended.cancel()

    def _require(self) -> pb_grpc.LearnerServiceStub:
        if self._stub is None:
            raise LearnerLostError(self._lost)
        return self._stub

    async def _answer(self, call: Awaitable[_Answer]) -> _Answer:
        """Await a call; kill the process unless it is known to be as it was before."""
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            error = error_of_rpc(failure)
            if error.reason in _WHOLE_REFUSALS:
                raise error from failure
            await self._lose(error)
            raise LearnerLostError(self._lost) from error
        except BaseException:
            # Cancelled: the step may go on, and nobody would know of it.
            await asyncio.shield(self._kill("a call of the learner was given up"))
            raise

    async def _lose(self, error: CallforestError) -> None:
        tail = self._log_tail()
        _LOGGER.error("the learner is lost: %s; its last words: %s", error, tail)
        await self._kill(f"the learner is lost: {error}")

    def _log_tail(self) -> str:
        if self._scratch is None or not (self._scratch / _LOG).exists():
            return ""
        return (self._scratch / _LOG).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    async def _kill(self, why: str) -> None:
        """Kill the process group and remove its directory. Idempotent."""
        self._stub, self._lost = None, why
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        if process is not None:
            # Its own children are in the group, and may have outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if channel is not None:
            await channel.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
