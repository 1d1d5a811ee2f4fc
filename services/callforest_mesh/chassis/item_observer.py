"""Watches the items of one stream's server: a span of each sampled item, the duration of all."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeAlias

from callforest.capture.v1 import item_pb2
from callforest_client.stream_spec import PayloadT, ResultT
from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.telemetry import (
    OK,
    REASONS,
    Attributes,
    ServiceTelemetry,
    Span,
    outcome_of,
)

Describe: TypeAlias = Callable[[PayloadT, ResultT | None], Attributes]
"""Says what a span should hold of an item, once it is answered; None when it failed."""


class ItemObserver(Generic[PayloadT, ResultT]):
    """Stands around the handler of one stream's items.

    Messages mix the items of many callers, so each item brings the context of its own caller; the
    handler gets the item's span in its place, and so passes it on as a parent by what it does
    anyway.

    Args:
        handler: answers one item.
        service: the service's short name.
        rpc: the stream's method.
        telemetry: what the service says of its work.
        describe: gives the attributes of a sampled item's span.
    """

    def __init__(
        self,
        handler: Callable[[item_pb2.ItemContext, PayloadT], Awaitable[ResultT]],
        *,
        service: str,
        rpc: str,
        telemetry: ServiceTelemetry,
        describe: Describe[PayloadT, ResultT] | None,
    ) -> None:
        self._handler = handler
        self._name = f"{service}/{rpc}"
        self._rpc = rpc
        self._tracer = telemetry.tracer
        self._describe = describe
        self._running = 0
        constants = {"rpc": rpc}
        self._durations = telemetry.metrics.histogram(
            Description("callforest.item.duration", "s", "Time that items took.", constants),
            {"outcome": REASONS},
        )
        telemetry.metrics.gauge(
            Description("callforest.items.running", "{item}", "Items in work.", constants),
            lambda: self._running,
        )

    async def __call__(self, context: item_pb2.ItemContext, payload: PayloadT) -> ResultT:
        """Answer an item."""
        begun = time.perf_counter()
        outcome = OK
        self._running += 1
        try:
            if not context.traceparent:
                return await self._handler(context, payload)
            with self._tracer.child(self._name, context.traceparent, "server") as span:
                return await self._answer(context, payload, span)
        except BaseException as error:
            late = (time.perf_counter() - begun) * 1000 >= context.timeout_ms
            outcome = "ITEM_DEADLINE" if late else outcome_of(error)
            raise
        finally:
            self._running -= 1
            self._durations.record(time.perf_counter() - begun, outcome)

    async def _answer(
        self, context: item_pb2.ItemContext, payload: PayloadT, span: Span
    ) -> ResultT:
        if not span.recording:
            return await self._handler(context, payload)
        context.traceparent = span.traceparent
        span.describe(
            {"rpc.system": "grpc", "rpc.method": self._rpc, "callforest.tenant": context.tenant}
        )
        answer: ResultT | None = None
        try:
            answer = await self._handler(context, payload)
        finally:
            if self._describe is not None:
                span.describe(self._describe(payload, answer))
        return answer
