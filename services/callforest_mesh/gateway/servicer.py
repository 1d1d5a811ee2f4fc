"""GatewayService: request -> calls -> response, as the HTTP routes do."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable
from typing import Final, TypeAlias, TypeVar, cast

import grpc.aio

from callforest.capture.v1 import item_pb2
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest.gateway.v1 import gateway_service_pb2_grpc as rpc
from callforest_client.streams import COMPLETE, MEASURE_CONTEXT
from callforest_client.worker import WorkerClient
from callforest_core.lineage.items import Dialect
from callforest_mesh.chassis.item_server import Drain, ItemServer
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.chassis.validation import malformed
from callforest_mesh.gateway.asked import Asked, identify
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.life import Served
from callforest_mesh.gateway.lives import PendingCall
from callforest_mesh.gateway.refusals import HttpRefusal, attempt_not_found, unsupported
from callforest_mesh.gateway.work import Work

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
        work: what may be asked.
        worker: asked for its model.
        drain: when begun, no more calls are taken.
        telemetry: what is said of the items; the calls speak for themselves.
    """

    def __init__(
        self,
        tenant: str,
        work: Work,
        worker: WorkerClient,
        drain: Drain,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._tenant = tenant
        self._work = work
        self._worker = worker
        self._complete = ItemServer(
            COMPLETE, self._serve, service="gateway", drain=drain, telemetry=telemetry
        )
        self._measure = ItemServer(
            MEASURE_CONTEXT, self._size, service="gateway", drain=drain, telemetry=telemetry
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

    async def Measure(
        self,
        request_iterator: AsyncIterator[pb.MeasureRequest],
        context: grpc.aio.ServicerContext[
            AsyncIterator[pb.MeasureRequest], AsyncIterator[pb.MeasureResponse]
        ],
    ) -> AsyncIterator[pb.MeasureResponse]:
        """Measure calls that are not made."""
        async for response in self._measure.serve(request_iterator):
            yield cast("pb.MeasureResponse", response)

    async def ListModels(
        self,
        request: pb.ListModelsRequest,
        context: _Context[pb.ListModelsRequest, pb.ListModelsResponse],
    ) -> pb.ListModelsResponse:
        """Name the served models."""
        engine = await self._worker.describe()
        return pb.ListModelsResponse(models=[engine.model])

    def _serve(
        self, context: item_pb2.ItemContext, call: pb.CompletionCall
    ) -> asyncio.Future[pb.ServedCompletion]:
        """Make one call; what is given fails as this does, and cancelling it leaves the call.

        Raises:
            Refusal: what HTTP would answer with an error.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            asked = self._asked(context, call)
            pending = self._work.begin(
                asked, allowed_s=context.timeout_ms / 1000, traceparent=context.traceparent
            )
            if pending.request.streaming is not None:
                pending.leave()
                raise _no_events()
        except HttpRefusal as refused:
            raise refused.refusal() from refused
        waiting: asyncio.Future[pb.ServedCompletion] = loop.create_future()
        waiting.add_done_callback(functools.partial(_leave, pending))
        pending.when_answered(functools.partial(_answer, waiting, begun))
        return waiting

    async def _size(
        self, context: item_pb2.ItemContext, call: pb.CompletionCall
    ) -> pb.MeasuredContext:
        """Measure one call.

        Raises:
            Refusal: what the call would be refused with.
        """
        try:
            asked = self._asked(context, call)
            request = self._work.reader.read(
                asked.capture_key, asked.body, asked.dialect, asked.claim
            )
            if request.streaming is not None:
                raise _no_events()
            measured = await self._work.measuring.measure(
                call.capture_key, request, traceparent=context.traceparent
            )
        except HttpRefusal as refused:
            raise refused.refusal() from refused
        return pb.MeasuredContext(
            prompt_token_count=measured.token_count, is_exact=True, context=measured.context
        )

    def _asked(self, context: item_pb2.ItemContext, call: pb.CompletionCall) -> Asked:
        """Give what one call asks.

        Raises:
            HttpRefusal: it asks for what is not served here.
        """
        capture_key = call.capture_key
        if context.tenant != self._tenant:
            raise attempt_not_found(capture_key)
        dialect = _DIALECTS.get(call.api)
        if dialect is None:
            raise malformed("CompletionCall", "api is unknown", [("api", "is unknown here")])
        claim = None
        if call.HasField("continues_call_id"):
            claim = Claim(call.continues_call_id, history_is_whole=call.history_is_whole)
        key = call.idempotency_key
        identity = identify(capture_key, [key] if key else [])
        return Asked(capture_key, call.request, dialect, claim, identity)


def _leave(pending: PendingCall, waiting: asyncio.Future[pb.ServedCompletion]) -> None:
    if waiting.cancelled():
        pending.leave()


def _answer(
    waiting: asyncio.Future[pb.ServedCompletion], begun: float, answer: asyncio.Future[Served]
) -> None:
    """Pass the answer of a call on to one who waits for it, if he still does."""
    if waiting.done():
        return
    try:
        waiting.set_result(_completion(answer.result(), begun))
    except HttpRefusal as refused:
        refusal = refused.refusal()
        refusal.__cause__ = refused
        waiting.set_exception(refusal)
    except Exception as error:  # noqa: BLE001 - told to the one who waits
        waiting.set_exception(error)


def _completion(served: Served, begun: float) -> pb.ServedCompletion:
    waited_us = int((asyncio.get_running_loop().time() - begun) * 1e6)
    return pb.ServedCompletion(
        response=served.body,
        call_id=served.call_id,
        overhead_us=max(0, waited_us - served.generation_us),
        context=served.context,
    )


def _no_events() -> HttpRefusal:
    return unsupported("stream", "A result comes whole here. Ask without `stream`.")
