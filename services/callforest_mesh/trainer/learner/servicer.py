"""LearnerService in the learner's own process: request -> learner -> response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import grpc.aio

from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import learner_service_pb2 as pb
from callforest.trainer.v1 import learner_service_pb2_grpc as pb_grpc
from callforest_core.refusal import Refusal
from callforest_mesh.trainer.batch import BatchRefusal, BatchRefusedError, TrainingRow
from callforest_mesh.trainer.learner.architecture import ModelRefusedError
from callforest_mesh.trainer.learner.checkpoint import CheckpointRefusedError, RunShape
from callforest_mesh.trainer.learner.learner import (
    Learner,
    LearnerOptions,
    NotLoadedError,
    StepMetrics,
)
from callforest_mesh.trainer.learner.loss import LossOptions, Metric
from callforest_mesh.trainer.learner.messages import plan_from_message, row_from_message
from callforest_mesh.trainer.learner.model import ModelOptions
from callforest_mesh.trainer.learner.optimizer import NonFiniteStepError, OptimizerOptions

_Result = TypeVar("_Result")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context: TypeAlias = grpc.aio.ServicerContext[_Request, Awaitable[_Response]]


class LearnerServicer(pb_grpc.LearnerServiceServicer):
    """Serves one learner to the trainer that started its process.

    Everything runs on one thread of its own, one call after the other, so that the process answers
    pings meanwhile and torch sees one thread only.
    """

    def __init__(self) -> None:
        self._learner: Learner | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def LoadModel(
        self,
        request: pb.LoadModelRequest,
        context: _Context[pb.LoadModelRequest, pb.LoadModelResponse],
    ) -> pb.LoadModelResponse:
        """Load a checkpoint and start afresh."""
        count = await self._run(lambda: self._load(request))
        return pb.LoadModelResponse(parameter_count=count)

    async def TrainStep(
        self,
        request_iterator: AsyncIterator[pb.TrainStepRequest],
        context: _Context[AsyncIterator[pb.TrainStepRequest], pb.TrainStepResponse],
    ) -> pb.TrainStepResponse:
        """Make one optimizer step."""
        plan, rows = await self._receive(request_iterator)
        metrics = await self._run(lambda: self._require().step(rows, plan_from_message(plan, rows)))
        return _metrics_to_message(metrics)

    async def ExportWeights(
        self,
        request: pb.ExportWeightsRequest,
        context: _Context[pb.ExportWeightsRequest, pb.ExportWeightsResponse],
    ) -> pb.ExportWeightsResponse:
        """Write the weights for an engine."""
        size = await self._run(lambda: self._require().export(Path(request.path)))
        return pb.ExportWeightsResponse(size_bytes=size)

    async def SaveCheckpoint(
        self,
        request: pb.SaveCheckpointRequest,
        context: _Context[pb.SaveCheckpointRequest, pb.SaveCheckpointResponse],
    ) -> pb.SaveCheckpointResponse:
        """Write a checkpoint."""
        progress = await self._run(
            lambda: self._require().save(
                Path(request.path),
                trained_cursor=request.trained_cursor,
                weight_version=request.weight_version,
            ),
            path=request.path,
        )
        return pb.SaveCheckpointResponse(step=progress.step)

    async def RestoreCheckpoint(
        self,
        request: pb.RestoreCheckpointRequest,
        context: _Context[pb.RestoreCheckpointRequest, pb.RestoreCheckpointResponse],
    ) -> pb.RestoreCheckpointResponse:
        """Continue from a checkpoint."""
        progress = await self._run(
            lambda: self._require().restore(Path(request.path)), path=request.path
        )
        return pb.RestoreCheckpointResponse(
            step=progress.step,
            trained_cursor=progress.trained_cursor,
            weight_version=progress.weight_version,
        )

    async def _receive(
        self, requests: AsyncIterator[pb.TrainStepRequest]
    ) -> tuple[pb.StepPlan, list[TrainingRow]]:
        """Collect a step; no more rows than its plan has."""
        plan: pb.StepPlan | None = None
        rows: list[TrainingRow] = []
        planned = 0
        try:
            async for request in requests:
                if (plan is None) != request.HasField("plan"):
                    raise BatchRefusedError(
                        BatchRefusal.PLAN_MISMATCH, "a step is one plan, then rows"
                    )
                if plan is None:
                    plan = request.plan
                    planned = sum(len(each.row_indexes) for each in plan.microbatches)
                rows.extend(row_from_message(row) for row in request.rows.rows)
                if len(rows) > planned:
                    raise BatchRefusedError(
                        BatchRefusal.PLAN_MISMATCH, f"more rows than the {planned} planned"
                    )
            if plan is None:
                raise BatchRefusedError(BatchRefusal.PLAN_MISMATCH, "a step without a plan")
        except BatchRefusedError as error:
            raise self._refusal(error) from error
        return plan, rows

    def _load(self, request: pb.LoadModelRequest) -> int:
        try:
            options = options_from_message(request.options)
        except ValueError as error:
            raise Refusal(
                er.ERROR_REASON_TRAINER_CONFIGURATION, str(error), key="options"
            ) from error
        learner = Learner(options)
        count = learner.load(Path(request.model_path))
        self._learner = learner
        return count

    def _require(self) -> Learner:
        if self._learner is None:
            raise NotLoadedError("load a model first")
        return self._learner

    async def _run(self, work: Callable[[], _Result], *, path: str = "") -> _Result:
        """Run on the learner's thread.

        Raises:
            Refusal: the learner refused.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (
            BatchRefusedError,
            CheckpointRefusedError,
            ModelRefusedError,
            NonFiniteStepError,
            NotLoadedError,
            OSError,
        ) as error:
            raise self._refusal(error, path) from error

    def _refusal(self, error: Exception, path: str = "") -> Refusal:
        """Say what an exception of the learner means."""
        if isinstance(error, CheckpointRefusedError):
            field = error.refusal.name.lower()
            return Refusal(er.ERROR_REASON_CHECKPOINT_REFUSED, str(error), path=path, field=field)
        if isinstance(error, ModelRefusedError | NotLoadedError):
            return Refusal(er.ERROR_REASON_TRAINER_CONFIGURATION, str(error), key="model_path")
        step = None if self._learner is None else self._learner.step_count + 1
        detail = type(error).__name__
        if isinstance(error, BatchRefusedError):
            detail = error.refusal.name.lower()
        if isinstance(error, NonFiniteStepError):
            detail = f"non_finite_{error.quantity.replace(' ', '_')}"
        return Refusal(er.ERROR_REASON_LEARNER_FAILED, str(error), step=step, detail=detail)


def options_from_message(message: pb.LearnerOptions) -> LearnerOptions:
    """Read the options of a learner alone in its process.

    Raises:
        ValueError: a number means nothing.
    """
    model = replace(ModelOptions(), seed=message.seed)
    return LearnerOptions(
        optimizer=OptimizerOptions(
            learning_rate=message.learning_rate,
            weight_decay=message.weight_decay,
            clip_grad_norm=message.clip_grad_norm,
        ),
        loss=LossOptions(
            clip_low=message.ratio_clip_low,
            clip_high=message.ratio_clip_high,
            importance_correction=message.importance_correction,
        ),
        model=model,
        shape=RunShape(forest=message.forest, row_multiple=message.row_multiple),
    )


def _metrics_to_message(metrics: StepMetrics) -> pb.TrainStepResponse:
    return pb.TrainStepResponse(
        loss=metrics.means[Metric.LOSS],
        valid_token_count=metrics.retained_token_count,
        token_mult_prob_error=metrics.means[Metric.TOKEN_MULT_PROB_ERROR],
        gen_kl_error=metrics.means[Metric.GEN_KL_ERROR],
        grad_norm=metrics.gradient_norm,
        step=metrics.step,
    )
