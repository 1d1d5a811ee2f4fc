"""The caller's side of a call inside the process, in its four arities.

Behaves as the calls of grpc.aio do: what awaits or iterates a call gets messages, an AioRpcError,
or CancelledError when the call was cancelled here; a cancelled waiter cancels its call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import grpc
import grpc.aio

from callforest_mesh.chassis.local_exchange import WITHDRAWN, Exchange, Outcome, PipeEndedError

_LOG = logging.getLogger("callforest")

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class Codec(Generic[RequestT, ResponseT]):
    """How the caller writes requests and reads responses."""

    serialize: Callable[[RequestT], bytes]
    parse: Callable[[bytes], ResponseT]


class LocalCall(Generic[RequestT, ResponseT], grpc.aio.Call):  # noqa: PYI059 - as grpc's own
    """What all four arities share: outcome, metadata, cancellation."""

    def __init__(self, exchange: Exchange, codec: Codec[RequestT, ResponseT]) -> None:
        self._exchange = exchange
        self._codec = codec

    def __del__(self) -> None:
        # A call that nobody can read any more must not go on for ever.
        exchange = getattr(self, "_exchange", None)
        if exchange is not None:
            exchange.give_up(WITHDRAWN)

    def cancel(self) -> bool:
        """Give the call up; say whether it was under way."""
        return self._exchange.give_up(WITHDRAWN)

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        outcome = self._exchange.outcome
        return outcome is not None and outcome.code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._exchange.outcome is not None

    def time_remaining(self) -> float | None:
        """Give the seconds until the deadline; None without one."""
        return self._exchange.time_remaining()

    def add_done_callback(self, callback: Callable[[LocalCall[RequestT, ResponseT]], None]) -> None:
        """Call back with this call when its outcome is known."""
        self._exchange.add_done_callback(lambda: callback(self))

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Wait for the initial metadata."""
        await self._exchange.begun()
        return self._exchange.initial

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        """Wait for the outcome's metadata."""
        return (await self._exchange.ended()).trailing

    async def code(self) -> grpc.StatusCode:
        """Wait for the outcome's code."""
        return (await self._exchange.ended()).code

    async def details(self) -> str:
        """Wait for the outcome's message."""
        return (await self._exchange.ended()).details

    async def wait_for_connection(self) -> None:
        """Return at once: the handler is in this process."""
        if self._exchange.outcome is not None:
            self._raise_unless_ok(self._exchange.outcome)

    def _raise_unless_ok(self, outcome: Outcome) -> None:
        if outcome.withdrawn:
            raise asyncio.CancelledError
        if not outcome.ok:
            raise grpc.aio.AioRpcError(
                outcome.code, self._exchange.initial, outcome.trailing, outcome.details
            )

    def _serialized(self, request: RequestT) -> bytes | None:
        """Serialize a request; None when it is too large, which ends the call."""
        raw = self._codec.serialize(request)
        limit = self._exchange.limits.message_bytes
        if len(raw) <= limit:
            return raw
        message = f"a request of {len(raw)} bytes is over the limit of {limit}"
        self._exchange.give_up(Outcome(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
        return None

    def _send_only(self, request: RequestT) -> None:
        raw = self._serialized(request)
        if raw is not None and not self.done():
            self._exchange.requests.offer(raw)
            self._exchange.requests.end()


class _OneResponse(LocalCall[RequestT, ResponseT]):
    """A call that answers once, and is awaited."""

    _answer: bytes | None = None

    def __await__(self) -> Generator[None, None, ResponseT]:
        return cast("Generator[None, None, ResponseT]", self._response().__await__())

    async def _response(self) -> ResponseT:
        try:
            if self._answer is None:
                self._answer = await self._exchange.responses.get()
            self._raise_unless_ok(await self._exchange.ended())
        except asyncio.CancelledError:
            self.cancel()
            raise
        assert self._answer is not None, "a handler that succeeded has answered"
        return self._codec.parse(self._answer)


class _ManyResponses(LocalCall[RequestT, ResponseT]):
    """A call that answers with a stream, and is iterated or read."""

    _iterator: AsyncIterator[ResponseT] | None = None
    _reads = False

    def __aiter__(self) -> AsyncIterator[ResponseT]:
        if self._reads:
            raise grpc.aio.UsageError("a call is iterated or read, not both")
        if self._iterator is None:
            self._iterator = self._each()
        return self._iterator

    async def read(self) -> object | ResponseT:
        """Receive the next response; grpc.aio.EOF at the end."""
        if self._iterator is not None:
            raise grpc.aio.UsageError("a call is iterated or read, not both")
        self._reads = True
        raw = await self._next()
        return grpc.aio.EOF if raw is None else self._codec.parse(raw)

    async def _each(self) -> AsyncIterator[ResponseT]:
        while (raw := await self._next()) is not None:
            yield self._codec.parse(raw)

    async def _next(self) -> bytes | None:
        try:
            raw = await self._exchange.responses.get()
            if raw is None:
                self._raise_unless_ok(await self._exchange.ended())
        except asyncio.CancelledError:
            self.cancel()
            raise
        return raw


class _ManyRequests(LocalCall[RequestT, ResponseT]):
    """A call that takes a stream, from an iterator or by writes."""

    _feeder: asyncio.Task[None] | None = None
    _half_closed = False

    async def write(self, request: RequestT) -> None:
        """Send a request once the window has room.

        Raises:
            AioRpcError: the call failed while the request waited.
            asyncio.InvalidStateError: the call has ended, or `done_writing` was called.
        """
        if self._feeder is not None:
            raise grpc.aio.UsageError("a call takes an iterator or writes, not both")
        await self._write(request)

    async def done_writing(self) -> None:
        """Say that no request follows. Idempotent."""
        if self._feeder is not None:
            raise grpc.aio.UsageError("a call takes an iterator or writes, not both")
        self._end_requests()

    def _feed_from(self, requests: AsyncIterable[RequestT] | Iterable[RequestT] | None) -> None:
        if requests is None:
            return
        # The task holds the pipe and not the call, so that a call nobody holds can end.
        feeding = _feed(requests, self._exchange, self._codec.serialize)
        self._feeder = feeder = asyncio.get_running_loop().create_task(feeding)
        self._exchange.add_done_callback(lambda: _stop(feeder))

    async def _write(self, request: RequestT) -> None:
        if self.done():
            raise asyncio.InvalidStateError("the call has ended")
        if self._half_closed:
            raise asyncio.InvalidStateError("done_writing was called")
        raw = self._serialized(request)
        try:
            if raw is not None:
                await self._exchange.requests.put(raw)
                return
        except PipeEndedError:
            pass  # the outcome says why
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_unless_ok(await self._exchange.ended())

    def _end_requests(self) -> None:
        self._half_closed = True
        self._exchange.requests.end()


def _stop(feeder: asyncio.Task[None]) -> None:
    feeder.cancel()


async def _feed(
    requests: AsyncIterable[RequestT] | Iterable[RequestT],
    exchange: Exchange,
    serialize: Callable[[RequestT], bytes],
) -> None:
    """Send what an iterator gives, until it or the call ends."""
    try:
        async for request in _asynchronous(requests):
            raw = serialize(request)
            if len(raw) > exchange.limits.message_bytes:
                message = f"a request of {len(raw)} bytes is over the limit"
                exchange.give_up(Outcome(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
                return
            await exchange.requests.put(raw)
        exchange.requests.end()
    except PipeEndedError:
        return  # the call has ended; its outcome says why
    except Exception:  # noqa: BLE001 - whatever it was, the call must not hang
        _LOG.exception("the request iterator of %s failed; the call is cancelled", exchange.method)
        exchange.give_up(WITHDRAWN)


async def _asynchronous(
    requests: AsyncIterable[RequestT] | Iterable[RequestT],
) -> AsyncIterator[RequestT]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request


class LocalUnaryUnaryCall(
    _OneResponse[RequestT, ResponseT], grpc.aio.UnaryUnaryCall[RequestT, ResponseT]
):
    """One request, one response."""

    def __init__(
        self, exchange: Exchange, codec: Codec[RequestT, ResponseT], request: RequestT
    ) -> None:
        super().__init__(exchange, codec)
        self._send_only(request)


class LocalUnaryStreamCall(
    _ManyResponses[RequestT, ResponseT], grpc.aio.UnaryStreamCall[RequestT, ResponseT]
):
    """One request, a stream of responses."""

    def __init__(
        self, exchange: Exchange, codec: Codec[RequestT, ResponseT], request: RequestT
    ) -> None:
        super().__init__(exchange, codec)
        self._send_only(request)


class LocalStreamUnaryCall(
    _ManyRequests[RequestT, ResponseT],
    _OneResponse[RequestT, ResponseT],
    grpc.aio.StreamUnaryCall[RequestT, ResponseT],
):
    """A stream of requests, one response."""

    def __init__(
        self,
        exchange: Exchange,
        codec: Codec[RequestT, ResponseT],
        requests: AsyncIterable[RequestT] | Iterable[RequestT] | None,
    ) -> None:
        super().__init__(exchange, codec)
        self._feed_from(requests)


class LocalStreamStreamCall(
    _ManyRequests[RequestT, ResponseT],
    _ManyResponses[RequestT, ResponseT],
    grpc.aio.StreamStreamCall[RequestT, ResponseT],
):
    """A stream of requests, a stream of responses."""

    def __init__(
        self,
        exchange: Exchange,
        codec: Codec[RequestT, ResponseT],
        requests: AsyncIterable[RequestT] | Iterable[RequestT] | None,
    ) -> None:
        super().__init__(exchange, codec)
        self._feed_from(requests)
