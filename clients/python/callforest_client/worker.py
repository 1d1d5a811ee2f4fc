"""The Worker service's client."""

from __future__ import annotations

import copy

import grpc.aio

from callforest.worker.v1 import worker_service_pb2 as pb
from callforest.worker.v1 import worker_service_pb2_grpc as rpc
from callforest_client import unary
from callforest_client.item_stream import ItemStream
from callforest_client.streams import GENERATE, MEASURE


class WorkerClient:
    """Has calls generated and captured.

    Args:
        channel: a channel to the Worker service.
        tenant: owns everything that is touched.
        timeout_s: the deadline of each call, generations apart.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, tenant: str = "default", timeout_s: float = 60.0
    ) -> None:
        self._stub = rpc.WorkerServiceStub(channel)
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._generations = ItemStream(GENERATE, self._stub.Generate)
        self._measures = ItemStream(MEASURE, self._stub.Measure)

    async def generate(
        self, call: pb.GenerateCall, *, timeout_s: float, traceparent: str = ""
    ) -> pb.GeneratedCall:
        """Generate one call and capture it."""
        return await self._generations.send(
            call, tenant=self._tenant, timeout_s=timeout_s, traceparent=traceparent
        )

    async def measure(
        self, call: pb.GenerateCall, *, timeout_s: float, traceparent: str = ""
    ) -> pb.MeasuredCall:
        """Learn how many prompt tokens a call would have; nothing is generated or kept."""
        return await self._measures.send(
            call, tenant=self._tenant, timeout_s=timeout_s, traceparent=traceparent
        )

    async def describe(self) -> pb.DescribeResponse:
        """Learn what the engine is and which weights serve."""
        return await unary.call(
            self._stub.Describe, pb.DescribeRequest(), timeout_s=self._timeout_s
        )

    async def update_weights(self, path: str, weight_version: int, sha256: bytes) -> int:
        """Load new weights; the answer means that they serve."""
        request = pb.UpdateWeightsRequest(path=path, weight_version=weight_version, sha256=sha256)
        response = await unary.call(self._stub.UpdateWeights, request, timeout_s=self._timeout_s)
        return response.weight_version

    def for_tenant(self, tenant: str) -> WorkerClient:
        """Give the same client for another tenant; streams are shared."""
        if tenant == self._tenant:
            return self
        other = copy.copy(self)
        other._tenant = tenant  # noqa: SLF001 - a copy of this very class
        return other

    async def close(self) -> None:
        """End the client's streams; the channel stays open."""
        await self._generations.close()
        await self._measures.close()
