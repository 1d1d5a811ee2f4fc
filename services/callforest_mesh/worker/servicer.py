"""WorkerService: request -> calls and weights -> response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import TypeAlias, TypeVar, cast

import grpc.aio

from callforest.worker.v1 import worker_service_pb2 as pb
from callforest.worker.v1 import worker_service_pb2_grpc as rpc
from callforest_client.streams import GENERATE, MEASURE
from callforest_mesh.chassis.call_attributes import generate_attributes, measure_attributes
from callforest_mesh.chassis.item_server import Drain, ItemServer
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.worker.calls import Calls, engine_away
from callforest_mesh.worker.engine import Engine, EngineUnavailableError
from callforest_mesh.worker.generation_span import measure_engine
from callforest_mesh.worker.weight_record import WeightRecord
from callforest_mesh.worker.weights import Weights

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context: TypeAlias = grpc.aio.ServicerContext[_Request, Awaitable[_Response]]


class WorkerServicer(rpc.WorkerServiceServicer):
    """Serves one engine's calls and weights."""

    def __init__(
        self,
        engine: Engine,
        calls: Calls,
        weights: Weights,
        drain: Drain,
        *,
        engine_name: str,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._engine_name = engine_name
        self._generate = ItemServer(
            GENERATE,
            calls.generate,
            service="worker",
            drain=drain,
            telemetry=telemetry,
            describe=generate_attributes,
        )
        self._measure = ItemServer(
            MEASURE,
            calls.measure,
            service="worker",
            drain=drain,
            telemetry=telemetry,
            describe=measure_attributes,
        )
        measure_engine(telemetry.metrics, engine)

    async def Generate(
        self,
        request_iterator: AsyncIterator[pb.GenerateRequest],
        context: grpc.aio.ServicerContext[
            AsyncIterator[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]
        ],
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Generate calls."""
        async for response in self._generate.serve(request_iterator):
            yield cast("pb.GenerateResponse", response)

    async def Measure(
        self,
        request_iterator: AsyncIterator[pb.MeasureRequest],
        context: grpc.aio.ServicerContext[
            AsyncIterator[pb.MeasureRequest], AsyncIterator[pb.MeasureResponse]
        ],
    ) -> AsyncIterator[pb.MeasureResponse]:
        """Measure calls."""
        async for response in self._measure.serve(request_iterator):
            yield cast("pb.MeasureResponse", response)

    async def Describe(
        self,
        request: pb.DescribeRequest,
        context: _Context[pb.DescribeRequest, pb.DescribeResponse],
    ) -> pb.DescribeResponse:
        """Describe the engine."""
        try:
            description = self._engine.describe()
        except EngineUnavailableError as error:
            raise engine_away(self._engine_name) from error
        return pb.DescribeResponse(
            engine=description.engine,
            model=description.model,
            context_token_count=description.context_token_count,
            weight_version=description.weight_version,
            configuration_digest=description.configuration_digest,
        )

    async def UpdateWeights(
        self,
        request: pb.UpdateWeightsRequest,
        context: _Context[pb.UpdateWeightsRequest, pb.UpdateWeightsResponse],
    ) -> pb.UpdateWeightsResponse:
        """Load new weights."""
        record = WeightRecord(request.path, request.weight_version, request.sha256)
        return pb.UpdateWeightsResponse(weight_version=await self._weights.update(record))
