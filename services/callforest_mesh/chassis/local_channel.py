"""A grpc.aio channel to services in this process: same stubs, interceptors and messages, no socket.

Every message is serialised and parsed, so that caller and handler never share one; every handler
runs in a fresh context; deadlines, cancellation, back-pressure, metadata, size limits and rich
statuses are those of a socket. The tests of the services run over both.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Generic, TypeVar, cast
from weakref import WeakSet

import grpc
import grpc.aio

from callforest_mesh.chassis.local_call import (
    Codec,
    LocalStreamStreamCall,
    LocalStreamUnaryCall,
    LocalUnaryStreamCall,
    LocalUnaryUnaryCall,
)
from callforest_mesh.chassis.local_exchange import (
    WITHDRAWN,
    Exchange,
    LocalLimits,
    MetadataLike,
    Outcome,
    as_metadata,
    oversize,
)
from callforest_mesh.chassis.local_handler import LocalRegistry

__all__ = ["LocalChannel", "LocalLimits", "LocalRegistry"]

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
_METADATA_KEY = re.compile(r"(?!grpc-)[0-9a-z_.-]+")


class LocalChannel(grpc.aio.Channel):
    """A channel to the services of a registry.

    Args:
        registry: has the servicers.
        limits: the bounds of each call.
    """

    def __init__(self, registry: LocalRegistry, limits: LocalLimits | None = None) -> None:
        self._registry = registry
        self._limits = limits or LocalLimits()
        self._exchanges: WeakSet[Exchange] = WeakSet()
        self._closed = False

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[RequestT], bytes] | None = None,
        response_deserializer: Callable[[bytes], ResponseT] | None = None,
        *,
        _registered_method: bool = False,
    ) -> grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]:
        """Give the callable of a method that takes one message and answers one."""
        return _UnaryUnary(self, method, _codec(request_serializer, response_deserializer))

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[RequestT], bytes] | None = None,
        response_deserializer: Callable[[bytes], ResponseT] | None = None,
        *,
        _registered_method: bool = False,
    ) -> grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT]:
        """Give the callable of a method that takes one message and answers a stream."""
        return _UnaryStream(self, method, _codec(request_serializer, response_deserializer))

    def stream_unary(
        self,
        method: str,
        request_serializer: Callable[[RequestT], bytes] | None = None,
        response_deserializer: Callable[[bytes], ResponseT] | None = None,
        *,
        _registered_method: bool = False,
    ) -> grpc.aio.StreamUnaryMultiCallable[RequestT, ResponseT]:
        """Give the callable of a method that takes a stream and answers one message."""
        return _StreamUnary(self, method, _codec(request_serializer, response_deserializer))

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[RequestT], bytes] | None = None,
        response_deserializer: Callable[[bytes], ResponseT] | None = None,
        *,
        _registered_method: bool = False,
    ) -> grpc.aio.StreamStreamMultiCallable[RequestT, ResponseT]:
        """Give the callable of a method that takes a stream and answers one."""
        return _StreamStream(self, method, _codec(request_serializer, response_deserializer))

    def open(
        self,
        method: str,
        timeout_s: float | None,
        metadata: MetadataLike | None,
        credentials: grpc.CallCredentials | None,
    ) -> Exchange:
        """Begin a call.

        Args:
            method: the full name of the RPC, with slashes.
            timeout_s: the deadline from now; None has none.
            metadata: what goes along.
            credentials: must be None.

        Raises:
            UsageError: the channel is closed, or credentials were given: there is no wire here.
            TypeError, ValueError: the metadata could not travel over a wire.
        """
        if self._closed:
            raise grpc.aio.UsageError("the channel is closed")
        if credentials is not None:
            raise grpc.aio.UsageError("a channel within a process carries no credentials")
        sent = as_metadata(metadata)
        _check_metadata(sent)
        exchange = Exchange(method, sent, timeout_s, self._limits)
        if oversize(sent, self._limits):
            message = f"metadata is over its limit of {self._limits.metadata_bytes} bytes"
            exchange.give_up(Outcome(grpc.StatusCode.RESOURCE_EXHAUSTED, message))
            return exchange
        self._exchanges.add(exchange)
        self._registry.serve(exchange)
        return exchange

    async def close(self, grace: float | None = None) -> None:  # noqa: ARG002 - calls end at once
        """End the channel; calls under way are cancelled."""
        self._closed = True
        for exchange in list(self._exchanges):
            exchange.give_up(WITHDRAWN)

    def get_state(
        self,
        try_to_connect: bool = False,  # noqa: ARG002, FBT001, FBT002 - grpc's signature
    ) -> grpc.ChannelConnectivity:
        """Say whether the channel is open."""
        state = grpc.ChannelConnectivity
        return state.SHUTDOWN if self._closed else state.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return if the state is another one; a local channel changes only when it is closed.

        Raises:
            UsageError: the state is still the same: nothing would end the wait.
        """
        if last_observed_state is self.get_state():
            raise grpc.aio.UsageError("a channel within a process does not change its state")

    async def channel_ready(self) -> None:
        """Return at once."""

    async def __aenter__(self) -> LocalChannel:  # noqa: PYI034 - subclasses are not foreseen
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


class _Method(Generic[RequestT, ResponseT]):
    """A method of a channel."""

    def __init__(
        self, channel: LocalChannel, method: str, codec: Codec[RequestT, ResponseT]
    ) -> None:
        self._channel = channel
        self._method = method
        self._codec = codec


class _UnaryUnary(
    _Method[RequestT, ResponseT], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]
):
    def __call__(
        self,
        request: RequestT,
        *,
        timeout: float | None = None,
        metadata: MetadataLike | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: ARG002 - always ready
        compression: grpc.Compression | None = None,  # noqa: ARG002 - nothing travels
    ) -> LocalUnaryUnaryCall[RequestT, ResponseT]:
        exchange = self._channel.open(self._method, timeout, metadata, credentials)
        return LocalUnaryUnaryCall(exchange, self._codec, request)


class _UnaryStream(
    _Method[RequestT, ResponseT], grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT]
):
    def __call__(
        self,
        request: RequestT,
        *,
        timeout: float | None = None,
        metadata: MetadataLike | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: ARG002 - always ready
        compression: grpc.Compression | None = None,  # noqa: ARG002 - nothing travels
    ) -> LocalUnaryStreamCall[RequestT, ResponseT]:
        exchange = self._channel.open(self._method, timeout, metadata, credentials)
        return LocalUnaryStreamCall(exchange, self._codec, request)


class _StreamUnary(
    _Method[RequestT, ResponseT], grpc.aio.StreamUnaryMultiCallable[RequestT, ResponseT]
):
    def __call__(
        self,
        request_iterator: AsyncIterator[RequestT] | Iterator[RequestT] | None = None,
        timeout: float | None = None,
        metadata: MetadataLike | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: ARG002, FBT001 - grpc's signature
        compression: grpc.Compression | None = None,  # noqa: ARG002 - nothing travels
    ) -> LocalStreamUnaryCall[RequestT, ResponseT]:
        exchange = self._channel.open(self._method, timeout, metadata, credentials)
        return LocalStreamUnaryCall(exchange, self._codec, request_iterator)


class _StreamStream(
    _Method[RequestT, ResponseT], grpc.aio.StreamStreamMultiCallable[RequestT, ResponseT]
):
    def __call__(
        self,
        request_iterator: AsyncIterator[RequestT] | Iterator[RequestT] | None = None,
        timeout: float | None = None,
        metadata: MetadataLike | None = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,  # noqa: ARG002, FBT001 - grpc's signature
        compression: grpc.Compression | None = None,  # noqa: ARG002 - nothing travels
    ) -> LocalStreamStreamCall[RequestT, ResponseT]:
        exchange = self._channel.open(self._method, timeout, metadata, credentials)
        return LocalStreamStreamCall(exchange, self._codec, request_iterator)


def _codec(
    serialize: Callable[[RequestT], bytes] | None,
    parse: Callable[[bytes], ResponseT] | None,
) -> Codec[RequestT, ResponseT]:
    """Pair the codec's halves; one that is missing passes bytes as they are."""
    return Codec(
        serialize or cast("Callable[[RequestT], bytes]", bytes),
        parse or cast("Callable[[bytes], ResponseT]", bytes),
    )


def _check_metadata(metadata: grpc.aio.Metadata) -> None:
    for key, value in metadata:
        binary = key.endswith("-bin")
        if _METADATA_KEY.fullmatch(key) is None:
            raise ValueError(f"metadata key {key!r} cannot travel")
        if not isinstance(value, bytes if binary else str):
            raise TypeError(f"metadata {key!r} must be {'bytes' if binary else 'text'}")
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            raise ValueError(f"metadata {key!r} must be printable ASCII")
