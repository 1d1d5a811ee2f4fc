"""How many calls a service serves at once; calls that wait for long are counted apart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from callforest_mesh.chassis.errors import overloaded

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
_Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
_Many: TypeAlias = Callable[[object, object], AsyncIterator[object]]
_One: TypeAlias = Callable[[object, object], Awaitable[object]]

_WAITING_PREFIXES = ("Await", "Subscribe", "Watch")


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The most calls that a service serves at once.

    Attributes:
        calls: calls that answer as fast as they can.
        waits: calls that last as long as their caller wants: every stream of requests, and the
            methods named Await..., Subscribe... and Watch....
    """

    calls: int = 1024
    waits: int = 16_384

    def __post_init__(self) -> None:
        """Refuse limits that let nothing pass.

        Raises:
            ValueError: a limit is below 1.
        """
        for name in ("calls", "waits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class CallCounter(grpc.aio.ServerInterceptor):
    """Counts the calls of one service, refuses those over its limits, and says when none is left.

    Stands inside the EdgeInterceptor, which turns its refusals into statuses.

    Args:
        limits: the most calls at once.
        own: the full names of the counted services; health and reflection pass uncounted.
    """

    def __init__(self, limits: CallLimits, *, own: frozenset[str]) -> None:
        self._limits = limits
        self._own = own
        self._calls = 0
        self._waits = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """How many calls are being served."""
        return self._calls + self._waits

    async def idle(self) -> None:
        """Wait until no call is being served."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        """Give the counted handler of a method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # such a path may be of any shape
        _, service, method = handler_call_details.method.split("/")
        if service not in self._own:
            return handler
        waits = handler.request_streaming or method.startswith(_WAITING_PREFIXES)
        counted = self._counted(cast("_Handler", handler), waits=waits)
        return cast("grpc.RpcMethodHandler[RequestT, ResponseT]", counted)

    def _counted(self, handler: _Handler, *, waits: bool) -> _Handler:
        parse, serialize = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            behaviour = handler.stream_stream or handler.unary_stream
            many = cast("_Many", behaviour)

            async def stream(request: object, context: object) -> AsyncIterator[object]:
                with self._place(waits=waits):
                    async with closing(many(request, context)) as responses:
                        async for response in responses:
                            yield response

            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(stream, parse, serialize)
            return grpc.unary_stream_rpc_method_handler(stream, parse, serialize)
        one = cast("_One", handler.stream_unary or handler.unary_unary)

        async def answer(request: object, context: object) -> object:
            with self._place(waits=waits):
                return await one(request, context)

        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(answer, parse, serialize)
        return grpc.unary_unary_rpc_method_handler(answer, parse, serialize)

    @contextlib.contextmanager
    def _place(self, *, waits: bool) -> Iterator[None]:
        """Hold a place for one call.

        Raises:
            Refusal: OVERLOADED, when there is none.
        """
        if waits:
            if self._waits >= self._limits.waits:
                raise overloaded("concurrent_waits", self._limits.waits)
            self._waits += 1
        else:
            if self._calls >= self._limits.calls:
                raise overloaded("concurrent_calls", self._limits.calls, retry_after_ms=100)
            self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            if waits:
                self._waits -= 1
            else:
                self._calls -= 1
            if not self.in_flight:
                self._idle.set()


@contextlib.asynccontextmanager
async def closing(responses: AsyncIterator[object]) -> AsyncIterator[AsyncIterator[object]]:
    """Give a handler's responses, and end the handler with the block if it is a generator."""
    try:
        yield responses
    finally:
        if isinstance(responses, AsyncGenerator):
            await responses.aclose()
