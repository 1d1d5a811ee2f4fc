"""Watches the items of one stream's server: a span of each sampled item, the duration of all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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


Handler: TypeAlias = Callable[
    [item_pb2.ItemContext, PayloadT],
    Coroutine[object, object, ResultT] | asyncio.Future[ResultT],
]


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
        handler: Handler[PayloadT, ResultT],
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

    def __call__(
        self, context: item_pb2.ItemContext, payload: PayloadT
    ) -> Coroutine[object, object, ResultT] | asyncio.Future[ResultT]:
        """Have an item answered, within a span if it is sampled."""
        if context.traceparent:
            return self._traced(context, payload)
        return self._handler(context, payload)

    def begin(self) -> None:
        """Take note of an item that is to be answered."""
        self._running += 1

    def end(self, took_s: float, timeout_ms: int, error: BaseException | None) -> None:
        """Take note of how an item ended that `begin` was told of."""
        self._running -= 1
        outcome = OK
        if error is not None:
            outcome = "ITEM_DEADLINE" if took_s * 1000 >= timeout_ms else outcome_of(error)
        self._durations.record(took_s, outcome)

    async def _traced(self, context: item_pb2.ItemContext, payload: PayloadT) -> ResultT:
        with self._tracer.child(self._name, context.traceparent, "server") as span:
            return await self._answer(context, payload, span)

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
