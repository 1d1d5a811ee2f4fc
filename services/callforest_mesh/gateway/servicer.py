"""GatewayService: request -> calls -> response, as the HTTP routes do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Final, TypeAlias, TypeVar, cast

import grpc.aio

from callforest.capture.v1 import item_pb2
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest.gateway.v1 import gateway_service_pb2_grpc as rpc
from callforest_client.streams import COMPLETE
from callforest_client.worker import WorkerClient
from callforest_core.lineage.items import Dialect
from callforest_mesh.chassis.item_server import Drain, ItemServer
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.chassis.validation import malformed
from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.refusals import HttpRefusal, attempt_not_found, unsupported

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Context: TypeAlias = grpc.aio.ServicerContext[_Request, Awaitable[_Response]]
_DIALECTS: Final = {
    pb.COMPLETION_API_CHAT: Dialect.CHAT,
    pb.COMPLETION_API_RESPONSES: Dialect.RESPONSES,
}


class GatewayServicer(rpc.GatewayServiceServicer):
    """Serves harnesses that speak gRPC.

    Args:
        tenant: owns every attempt that is served.
        calls: the calls' lives.
        worker: asked for its model.
        drain: when begun, no more calls are taken.
        telemetry: what is said of the items; the calls speak for themselves.
    """

    def __init__(
        self,
        tenant: str,
        calls: Calls,
        worker: WorkerClient,
        drain: Drain,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._tenant = tenant
        self._calls = calls
        self._worker = worker
        self._complete = ItemServer(
            COMPLETE, self._serve, service="gateway", drain=drain, telemetry=telemetry
        )

    async def Complete(
        self,
        request_iterator: AsyncIterator[pb.CompleteRequest],
        context: grpc.aio.ServicerContext[
            AsyncIterator[pb.CompleteRequest], AsyncIterator[pb.CompleteResponse]
        ],
    ) -> AsyncIterator[pb.CompleteResponse]:
        """Make calls."""
        async for response in self._complete.serve(request_iterator):
            yield cast("pb.CompleteResponse", response)

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: _Context[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        """Name the served models."""
        engine = await self._worker.describe()
        return pb.ListModelsResponse(models=[engine.model])

    async def _serve(
        self, context: item_pb2.ItemContext, call: pb.CompletionCall
    ) -> pb.ServedCompletion:
        """Make one call.

        Raises:
            Refusal: what HTTP would answer with an error.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            if context.tenant != self._tenant:
                raise attempt_not_found(call.capture_key)
            dialect = _DIALECTS.get(call.api)
            if dialect is None:
                raise malformed("CompletionCall", "api is unknown", [("api", "is unknown here")])
            normalised = self._calls.read(call.capture_key, call.request, dialect)
            if normalised.streaming is not None:
                raise unsupported("stream", "A result comes whole here. Ask without `stream`.")
            served = await self._calls.serve(
                call.capture_key, normalised, traceparent=context.traceparent
            )
        except HttpRefusal as refused:
            raise refused.refusal() from refused
        overhead_us = int((loop.time() - begun) * 1e6) - served.generation_us
        return pb.ServedCompletion(
            response=served.body, call_id=served.call_id, overhead_us=max(0, overhead_us)
        )
