"""The trainer's side of the learner's process: start it, ask it, end it with its whole group."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import learner_service_pb2 as pb
from callforest.trainer.v1 import learner_service_pb2_grpc as pb_grpc
from callforest_client.errors import CallforestError
from callforest_mesh.chassis.child_process import ChildLostError, ChildProcess
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.trainer.batch import BatchPlan, TrainingRow
from callforest_mesh.trainer.learner.messages import step_to_messages

_Answer = TypeVar("_Answer")
_LOGGER = logging.getLogger(__name__)

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
        self._child: ChildProcess | None = None
        self._stub: pb_grpc.LearnerServiceStub | None = None
        self._begun = False
        self._lost = "the learner was not started"

    @property
    def pid(self) -> int:
        """Process id, and id of the process group.

        Raises:
            LearnerLostError: there is no process.
        """
        if self._child is None:
            raise LearnerLostError(self._lost)
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs and its state is known."""
        return self._stub is not None and self._child is not None and self._child.running

    async def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            LearnerLostError: it cannot be run, ended, or did not answer in time.
        """
        if self._begun:
            raise LearnerLostError("a learner process is started once")
        self._begun = True
        try:
            self._child = await ChildProcess.spawn(self._command, name="learner")
            await self._child.wait_ready(self._limits.start_s)
            self._stub = pb_grpc.LearnerServiceStub(self._child.channel)
        except ChildLostError as error:
            await self._end(f"the learner did not start: {error}")
            raise LearnerLostError(self._lost) from error
        except BaseException:
            await self._end("the learner did not start")
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

        failpoint("trainer.before_step")
        made = await self._answer(stub.TrainStep(requests(), timeout=self._limits.step_s))
        failpoint("trainer.after_step")
        return made

    async def export_weights(self, path: Path) -> int:
        """Write the weights for an engine, durably; give the size of the file in bytes.

        Raises:
            CallforestError: LEARNER_FAILED: the disk refused.
            LearnerLostError: the process is gone.
        """
        stub = self._require()
        request = pb.ExportWeightsRequest(path=str(path))
        response = await self._answer(stub.ExportWeights(request, timeout=self._limits.write_s))
        failpoint("trainer.after_export")
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
        failpoint("trainer.before_checkpoint")
        response = await self._answer(stub.SaveCheckpoint(request, timeout=self._limits.write_s))
        failpoint("trainer.after_checkpoint")
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
        await self._end("the learner was stopped", grace_s=self._limits.stop_s)

    def _require(self) -> pb_grpc.LearnerServiceStub:
        if self._stub is None:
            raise LearnerLostError(self._lost)
        return self._stub

    async def _answer(self, call: Awaitable[_Answer]) -> _Answer:
        """Await a call; kill the process unless it is known to be as it was before."""
        child = self._child
        if child is None:
            raise LearnerLostError(self._lost)
        try:
            return await child.answer_of(call)
        except CallforestError as error:
            if error.reason in _WHOLE_REFUSALS:
                raise
            _LOGGER.exception("the learner is lost; its last words: %s", child.log_tail())
            await self._end(f"the learner is lost: {error}")
            raise LearnerLostError(self._lost) from error
        except ChildLostError as error:
            raise LearnerLostError(self._lost) from error
        except BaseException:
            # Cancelled: the step may go on, and nobody would know of it.
            await asyncio.shield(self._end("a call of the learner was given up"))
            raise

    async def _end(self, why: str, *, grace_s: float = 0.0) -> None:
        """End the process with its group, and remember why. Idempotent."""
        self._stub, self._lost = None, why
        child, self._child = self._child, None
        if child is not None:
            await child.end(grace_s=grace_s)
