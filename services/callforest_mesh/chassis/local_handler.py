"""The handler's side of a call inside the process: registry, servicer context, dispatch."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Never, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from callforest_mesh.chassis.call_limits import closing
from callforest_mesh.chassis.local_exchange import (
    OK,
    Exchange,
    MetadataLike,
    Outcome,
    PipeEndedError,
    as_metadata,
)

_LOG = logging.getLogger("callforest")

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
_Answer: TypeAlias = AsyncIterator[object] | Awaitable[object]
_Resolve: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


@dataclass(slots=True)
class _CallDetails:
    """What interceptors see of a call before its handler is known."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...]


class LocalRegistry:
    """Takes servicers where a server would, and serves calls of LocalChannels with them.

    Args:
        interceptors: what every call passes, outermost first, as on a server.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> None:
        self._handlers: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._resolve: _Resolve = self._find
        for interceptor in reversed(interceptors):
            self._resolve = _intercepted(interceptor, self._resolve)

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]
    ) -> None:
        """Take handlers that are asked for each method."""
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(
        self,
        service_name: str,
        method_handlers: Mapping[str, grpc.RpcMethodHandler[object, object]],
    ) -> None:
        """Take the handlers of one service by name."""
        for name, handler in method_handlers.items():
            self._handlers[f"/{service_name}/{name}"] = handler

    def serve(self, exchange: Exchange) -> None:
        """Start serving a call, in a task with a fresh context: nothing of its caller leaks in."""
        task = asyncio.get_running_loop().create_task(
            self._serve(exchange), context=contextvars.Context()
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.attach(task)

    async def close(self) -> None:
        """Cancel what is still being served and wait until it has ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self, details: grpc.HandlerCallDetails) -> Handler | None:
        handler = self._handlers.get(details.method)
        if handler is not None:
            return handler
        found = (generic.service(details) for generic in self._generic)
        return next((one for one in found if one is not None), None)

    async def _serve(self, exchange: Exchange) -> None:
        context: LocalContext[object, object] = LocalContext(exchange)
        try:
            details = _CallDetails(exchange.method, tuple(exchange.metadata))
            handler = await self._resolve(cast("grpc.HandlerCallDetails", details))
            if handler is None:
                outcome = Outcome(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            else:
                await _dispatch(handler, exchange, context)
                outcome = context.outcome()
        except grpc.aio.AbortError:
            outcome = context.outcome()
        except _TooLargeError as error:
            outcome = Outcome(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except PipeEndedError:
            return  # the caller gave up, and has its outcome
        except asyncio.CancelledError:
            exchange.complete(Outcome(grpc.StatusCode.CANCELLED, "the handler was cancelled"))
            raise
        except Exception:  # noqa: BLE001 - its text must not reach the caller
            _LOG.exception("the handler of %s failed", exchange.method)
            outcome = Outcome(grpc.StatusCode.UNKNOWN, "the handler failed")
        exchange.complete(outcome)


class LocalContext(grpc.aio.ServicerContext[RequestT, ResponseT], Generic[RequestT, ResponseT]):
    """What a handler knows of its call and says of its answer."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing = grpc.aio.Metadata()
        self._aborted = False
        self._parse: Callable[[bytes], RequestT] | None = None
        self._serialize: Callable[[ResponseT], bytes] | None = None

    def serve_with(
        self, parse: Callable[[bytes], RequestT], serialize: Callable[[ResponseT], bytes]
    ) -> None:
        """Take the codec of the handler that was found."""
        self._parse, self._serialize = parse, serialize

    def outcome(self) -> Outcome:
        """Give the outcome as the handler left it."""
        if self._code is grpc.StatusCode.OK and not len(self._trailing):
            return OK
        return Outcome(self._code, self._details, self._trailing)

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: MetadataLike = (),
    ) -> Never:
        """End the call with an error.

        Raises:
            AbortError: always; the handler lets it pass.
        """
        if self._aborted:
            raise grpc.aio.UsageError("the call was aborted before")
        self._aborted = True
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNKNOWN, "aborted with the code of success"
        self._code, self._details = code, details
        if trailing_metadata:
            self._trailing = as_metadata(trailing_metadata)
        raise grpc.aio.AbortError("aborted")

    async def abort_with_status(self, status: grpc.Status) -> Never:
        """End the call with a status and its trailing metadata; see `abort`."""
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def read(self) -> RequestT:
        """Receive the next request; grpc.aio.EOF at the end."""
        assert self._parse is not None
        raw = await self._exchange.requests.get()
        return cast("RequestT", grpc.aio.EOF) if raw is None else self._parse(raw)

    async def write(self, message: ResponseT) -> None:
        """Send a response once the window has room."""
        assert self._serialize is not None
        raw = self._serialize(message)
        if len(raw) > self._exchange.limits.message_bytes:
            raise _TooLargeError(
                f"a response of {len(raw)} bytes is over the limit of"
                f" {self._exchange.limits.message_bytes}"
            )
        self._exchange.begin_answer()
        await self._exchange.responses.put(raw)

    async def send_initial_metadata(self, initial_metadata: MetadataLike) -> None:
        """Send the initial metadata ahead of the first response."""
        self._exchange.begin_answer(as_metadata(initial_metadata))

    def set_trailing_metadata(self, trailing_metadata: MetadataLike) -> None:
        """Set what is sent with the outcome."""
        self._trailing = as_metadata(trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the outcome's code."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the outcome's message."""
        self._details = details

    def trailing_metadata(self) -> grpc.aio.Metadata:
        """Give what is sent with the outcome."""
        return self._trailing

    def code(self) -> grpc.StatusCode:
        """Give the outcome's code as set so far."""
        return self._code

    def details(self) -> str:
        """Give the outcome's message as set so far."""
        return self._details

    def invocation_metadata(self) -> grpc.aio.Metadata:
        """Give what the caller sent along."""
        return self._exchange.metadata

    def time_remaining(self) -> float | None:  # type: ignore[override]  # None: no deadline
        """Give the seconds until the deadline; None without one."""
        return self._exchange.time_remaining()

    def add_done_callback(
        self, callback: Callable[[LocalContext[RequestT, ResponseT]], None]
    ) -> None:
        """Call back with this context when the call has ended."""
        self._exchange.add_done_callback(lambda: callback(self))

    def cancelled(self) -> bool:
        """Whether the caller gave up."""
        outcome = self._exchange.outcome
        return outcome is not None and outcome.code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._exchange.outcome is not None

    def peer(self) -> str:
        """Name the caller: it is this process."""
        return "local:"

    def peer_identities(self) -> Iterable[bytes] | None:
        """Give no identities: there is no certificate inside a process."""
        return None

    def peer_identity_key(self) -> str | None:
        """Give no identity's name."""
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Give nothing: there is no certificate inside a process."""
        return {}

    def set_compression(self, compression: grpc.Compression) -> None:
        """Compress nothing: no byte leaves the process."""

    def disable_next_message_compression(self) -> None:
        """Compress nothing: no byte leaves the process."""


class _TooLargeError(Exception):
    """A response is over the limit."""


def _intercepted(interceptor: grpc.aio.ServerInterceptor, inner: _Resolve) -> _Resolve:
    async def resolve(details: grpc.HandlerCallDetails) -> Handler | None:
        return await interceptor.intercept_service(inner, details)

    return resolve


async def _dispatch(
    handler: Handler, exchange: Exchange, context: LocalContext[object, object]
) -> None:
    parse, serialize = handler.request_deserializer, handler.response_serializer
    if parse is None or serialize is None:
        raise TypeError("a handler without a codec cannot be served")
    context.serve_with(parse, serialize)
    if handler.request_streaming:
        argument: object = _requests(exchange, parse)
    else:
        raw = await exchange.requests.get()
        if raw is None:
            raise PipeEndedError
        argument = parse(raw)
    answer = _behaviour(handler)(argument, context)
    if not handler.response_streaming:
        await context.write(await cast("Awaitable[object]", answer))
    elif isinstance(answer, AsyncIterator):
        await _send_each(answer, context)
    else:
        await answer  # the handler writes to the context itself


def _behaviour(handler: Handler) -> Callable[[object, object], _Answer]:
    if handler.request_streaming:
        found = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        found = handler.unary_stream if handler.response_streaming else handler.unary_unary
    return cast("Callable[[object, object], _Answer]", found)


async def _send_each(
    responses: AsyncIterator[object], context: LocalContext[object, object]
) -> None:
    async with closing(responses):
        async for response in responses:
            await context.write(response)


async def _requests(exchange: Exchange, parse: Callable[[bytes], object]) -> AsyncIterator[object]:
    while (raw := await exchange.requests.get()) is not None:
        yield parse(raw)
