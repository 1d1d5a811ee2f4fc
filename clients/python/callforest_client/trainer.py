"""The Trainer service's client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest.trainer.v1 import trainer_service_pb2_grpc as rpc
from callforest_client import unary

WATCH_S = 3600.0
"""A watch ends after this long; watch again behind the last step."""


class TrainerClient:
    """Watches a trainer.

    Args:
        channel: a channel to the Trainer service.
        timeout_s: the deadline of each call, watches and checkpoints apart.
    """

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float = 10.0) -> None:
        self._stub = rpc.TrainerServiceStub(channel)
        self._timeout_s = timeout_s

    async def status(self) -> pb.GetStatusResponse:
        """Learn where the trainer is."""
        return await unary.call(
            self._stub.GetStatus, pb.GetStatusRequest(), timeout_s=self._timeout_s
        )

    async def watch_metrics(self, *, after_step: int = 0) -> AsyncIterator[pb.StepMetrics]:
        """Give the metrics of each step behind `after_step` as its weights begin to serve.

        Raises:
            RefusedError: training stopped (LEARNER_FAILED).
            UnavailableError: the stream broke; watch again behind the last step.
        """
        request = pb.WatchMetricsRequest(after_step=after_step)
        responses = unary.stream(self._stub.WatchMetrics, request, timeout_s=WATCH_S)
        async for response in responses:
            yield response.metrics

    async def watch_weights(self) -> AsyncIterator[pb.WatchWeightsResponse]:
        """Give the weight version that serves on every worker, then each new one."""
        request = pb.WatchWeightsRequest()
        responses = unary.stream(self._stub.WatchWeights, request, timeout_s=WATCH_S)
        async for response in responses:
            yield response

    async def checkpoint(self, *, timeout_s: float = 600.0) -> pb.CheckpointResponse:
        """Have a checkpoint written and the cursor behind it committed."""
        return await unary.call(self._stub.Checkpoint, pb.CheckpointRequest(), timeout_s=timeout_s)
