"""What every RPC passes, in order: parse, drain, validate, map errors.

Item streams validate each item for itself (chassis/item_server.py), so that one bad item never
fails its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2
from grpc_status import rpc_status

from callforest_mesh.chassis.errors import draining, status_of_exception
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.validation import check, malformed

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Message, Message]"


class _Malformed:
    """Stands in for a request that could not be parsed."""


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    """Guards every method of one service.

    Args:
        service: names the service in errors.
        drain: once begun, new calls are refused.
        own: the full names of the services whose messages are validated; health and reflection
            pass untouched.
    """

    def __init__(self, service: str, drain: Drain, *, own: frozenset[str]) -> None:
        self._service = service
        self._drain = drain
        self._own = own
        self._guarded: dict[str, _Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[RequestT, ResponseT] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[RequestT, ResponseT] | None:
        """Give the guarded handler of a method; it is built once."""
        method = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is None:
            handler = await continuation(handler_call_details)
            if handler is None or method.split("/")[1] not in self._own:
                return handler
            guarded = self._guard(cast("_Handler", handler))
            self._guarded[method] = guarded
        return cast("grpc.RpcMethodHandler[RequestT, ResponseT]", guarded)

    def _guard(self, handler: _Handler) -> _Handler:
        parse = _tolerant(handler.request_deserializer)
        if handler.request_streaming:
            inner = cast(
                "Callable[[AsyncIterator[Message], Context], AsyncIterator[Message]]",
                handler.stream_stream,
            )
            if not handler.response_streaming:
                return self._guard_stream_unary(handler, parse)
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(lambda requests, context: inner(_parsed(requests), context)),
                request_deserializer=parse,
                response_serializer=handler.response_serializer,
            )
        if handler.response_streaming:
            many = cast(
                "Callable[[Message, Context], AsyncIterator[Message]]", handler.unary_stream
            )

            def stream(request: Message, context: Context) -> AsyncIterator[Message]:
                return many(_checked(request), context)

            return grpc.unary_stream_rpc_method_handler(
                self._streaming(stream),
                request_deserializer=parse,
                response_serializer=handler.response_serializer,
            )
        one = cast("Callable[[Message, Context], Awaitable[Message]]", handler.unary_unary)

        async def unary(request: Message, context: Context) -> Message:
            try:
                self._refuse_when_draining()
                return await one(_checked(request), context)
            except (Exception, asyncio.CancelledError) as error:
                await self._abort(error, context)
                raise  # unreachable: abort raises

        return grpc.unary_unary_rpc_method_handler(
            unary, request_deserializer=parse, response_serializer=handler.response_serializer
        )

    def _guard_stream_unary(self, handler: _Handler, parse: Callable[[bytes], Message]) -> _Handler:
        one = cast(
            "Callable[[AsyncIterator[Message], Context], Awaitable[Message]]", handler.stream_unary
        )

        async def collect(requests: AsyncIterator[Message], context: Context) -> Message:
            try:
                self._refuse_when_draining()
                return await one(_checked_each(requests), context)
            except (Exception, asyncio.CancelledError) as error:
                await self._abort(error, context)
                raise  # unreachable: abort raises

        return grpc.stream_unary_rpc_method_handler(
            collect, request_deserializer=parse, response_serializer=handler.response_serializer
        )

    def _streaming(
        self, serve: Callable[[RequestT, Context], AsyncIterator[Message]]
    ) -> Callable[[RequestT, Context], AsyncIterator[Message]]:
        async def guarded(request: RequestT, context: Context) -> AsyncIterator[Message]:
            try:
                self._refuse_when_draining()
                async for response in serve(request, context):
                    yield response
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - mapped
                await self._abort(error, context)

        return guarded

    def _refuse_when_draining(self) -> None:
        if self._drain.begun:
            raise draining(self._service)

    async def _abort(self, error: BaseException, context: Context) -> None:
        if isinstance(error, (grpc.aio.AbortError, asyncio.CancelledError)):
            raise error
        status: status_pb2.Status = status_of_exception(error, service=self._service)
        await context.abort_with_status(rpc_status.to_status(status))


def _tolerant(
    parse: Callable[[bytes], Message] | None,
) -> Callable[[bytes], Message]:
    """Parse without raising: gRPC would answer UNKNOWN with the exception's text."""
    if parse is None:
        raise TypeError("a method without a deserializer cannot be guarded")

    def tolerant(raw: bytes) -> Message:
        try:
            return parse(raw)
        except Exception:  # noqa: BLE001 - every parse fault is the same answer
            return cast("Message", _Malformed())

    return tolerant


def _well_formed(request: Message) -> Message:
    if isinstance(request, _Malformed):
        raise malformed("request", "the message cannot be parsed")
    return request


def _checked(request: Message) -> Message:
    check(_well_formed(request))
    return request


async def _parsed(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
    async for request in requests:
        yield _well_formed(request)


async def _checked_each(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
    async for request in requests:
        yield _checked(request)
