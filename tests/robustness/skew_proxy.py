"""Stands between two gRPC peers and lets each see the other as if it were of another release."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import cast

import grpc
import grpc.aio

from callforest_client.channel import SERVER_OPTIONS, connect
from tests.robustness.skew_images import Change, Image

_OWN = ("user-agent", "grpc-", "content-type", "te")
"""Metadata that gRPC makes for itself."""


class SkewProxy(grpc.GenericRpcHandler):
    """Passes every message on as a peer of another release would have written it.

    Health and reflection pass as they are. What the release does not know is UNIMPLEMENTED.

    Args:
        upstream: where the callee listens.
        image: the release.
        change: what becomes of a message.

    Attributes:
        address: where callers find it, once started.
        counts: messages by method.
    """

    def __init__(self, upstream: str, image: Image, change: Change) -> None:
        self._upstream = connect(upstream)
        self._image = image
        self._change = change
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        self.address = ""
        self.counts: Counter[str] = Counter()

    async def start(self) -> str:
        """Listen; give the address."""
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Listen no more, and end what is open."""
        await self._server.stop(0)
        await self._upstream.close()

    def calm(self) -> None:
        """Do what a proxy with faults does at its end: nothing."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """Give the handler of one call; None for a method that the release does not know."""
        method = handler_call_details.method
        if method.startswith("/callforest.") and method not in self._image.methods:
            self.counts["unimplemented"] += 1
            return None
        asked, told = self._image.methods.get(method, ("", ""))

        async def serve(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            async def changed() -> AsyncIterator[bytes]:
                async for one in requests:
                    yield self._passed(method, asked, one)

            metadata = [
                (key, value)
                for key, value in context.invocation_metadata() or ()
                if not key.startswith(_OWN)
            ]
            call = self._upstream.stream_stream(method)(
                changed(), timeout=context.time_remaining(), metadata=metadata
            )
            try:
                async for one in call:
                    yield self._passed(method, told, cast("bytes", one))
                code, details = await call.code(), await call.details()
                trailing = await call.trailing_metadata()
            except grpc.aio.AioRpcError as error:
                code, details, trailing = error.code(), error.details(), error.trailing_metadata()
            finally:
                call.cancel()
            context.set_trailing_metadata(tuple(trailing or ()))
            context.set_code(code)
            context.set_details(details or "")

        return grpc.stream_stream_rpc_method_handler(serve)

    def _passed(self, method: str, name: str, message: bytes) -> bytes:
        if not name:
            return message
        self.counts[method] += 1
        return self._change(name, message)
