"""The Trainer's RPCs."""

from __future__ import annotations

from collections.abc import AsyncIterator

from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest.trainer.v1 import trainer_service_pb2_grpc as rpc
from callforest_core.refusal import Refusal
from callforest_mesh.trainer.announcements import Announcements
from callforest_mesh.trainer.learner.process import LearnerLostError
from callforest_mesh.trainer.training import Training


class TrainerServicer(rpc.TrainerServiceServicer):
    """Says where the trainer is.

    Args:
        training: the run.
        announcements: its state and news.
    """

    def __init__(self, training: Training, announcements: Announcements) -> None:
        self._training = training
        self._announcements = announcements

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: object
    ) -> pb.GetStatusResponse:
        """Say where the trainer is."""
        status = pb.GetStatusResponse()
        status.CopyFrom(self._announcements.status)
        return status

    async def WatchMetrics(
        self, request: pb.WatchMetricsRequest, context: object
    ) -> AsyncIterator[pb.WatchMetricsResponse]:
        """Send each step's metrics."""
        async for response in self._announcements.metrics(request.after_step):
            yield response

    async def WatchWeights(
        self, request: pb.WatchWeightsRequest, context: object
    ) -> AsyncIterator[pb.WatchWeightsResponse]:
        """Send each weight version that serves."""
        async for response in self._announcements.weights():
            yield response

    async def Checkpoint(
        self, request: pb.CheckpointRequest, context: object
    ) -> pb.CheckpointResponse:
        """Write a checkpoint and commit the cursor behind it."""
        status = self._announcements.status
        if status.phase == pb.TRAINER_PHASE_FAILED:
            raise _failed(status)
        try:
            step, cursor = await self._training.checkpoint()
        except LearnerLostError:
            raise _failed(status) from None
        return pb.CheckpointResponse(step=step, committed_cursor=cursor)


def _failed(status: pb.GetStatusResponse) -> Refusal:
    return Refusal(
        er.ERROR_REASON_LEARNER_FAILED,
        f"training stopped: {status.failure}",
        step=status.step,
        detail=status.failure,
    )
