"""Watches the items of one stream's server: a span of each sampled item, the duration of all."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
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
        self._takes_a_task = inspect.iscoroutinefunction(handler)
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
        """Answer an item; a handler that gives a future costs no task here either."""
        if context.traceparent:
            return self._watched(self._traced, context, payload)
        if self._takes_a_task:
            return self._watched(self._handler, context, payload)
        begun = time.perf_counter()
        self._running += 1
        try:
            answer = self._handler(context, payload)
        except BaseException as error:
            self._note(begun, context.timeout_ms, error)
            raise
        future = answer if isinstance(answer, asyncio.Future) else asyncio.ensure_future(answer)
        future.add_done_callback(functools.partial(self._ended, begun, context.timeout_ms))
        return future

    async def _watched(
        self, handler: Handler[PayloadT, ResultT], context: item_pb2.ItemContext, payload: PayloadT
    ) -> ResultT:
        """Answer an item, and take note of how it ends.

        The handler is called here: an item that is cancelled before it began leaves nothing behind.
        """
        begun = time.perf_counter()
        self._running += 1
        error: BaseException | None = None
        try:
            return await handler(context, payload)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._note(begun, context.timeout_ms, error)

    def _ended(self, begun: float, timeout_ms: int, answer: asyncio.Future[ResultT]) -> None:
        error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
        self._note(begun, timeout_ms, error)

    def _note(self, begun: float, timeout_ms: int, error: BaseException | None) -> None:
        self._running -= 1
        took_s = time.perf_counter() - begun
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
