"""The HTTP server beneath the routes: what it says of requests that never reach one.

aiohttp answers a request that is no HTTP with its own words, some of them Python's, and waits for a
request's head for ever. Here both are as the protocol document says of every answer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from callforest_mesh.chassis.fatal import end_if_without_memory
from callforest_mesh.gateway.refusals import HttpRefusal

_LOG = logging.getLogger("callforest")
IDLE_S: Final = 600.0
"""How long a connection is kept open between two requests."""
_NOT_READ: Final = HttpRefusal(
    400, "invalid_request_error", "The request's line or headers cannot be read, or are too long."
)
_NOT_EXPECTED: Final = "Of what `Expect` may ask only `100-continue` is known."
_FAULTS: Final = {
    413: HttpRefusal(413, "request_too_large", "The request is too large."),
    500: HttpRefusal(500, "internal_error", "The gateway is at fault. Tell an operator."),
}


def refused(refusal: HttpRefusal) -> web.Response:
    """Make the response of a refusal, shaped as providers do it."""
    response = web.Response(
        status=refusal.status, body=refusal.body(), content_type="application/json"
    )
    if refusal.retry_after_s is not None:
        response.headers["Retry-After"] = str(refusal.retry_after_s)
    return response


class _Connection(RequestHandler):
    """One connection."""

    def __init__(self, *args: Any, head_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._unasked: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Give the client a while for its first request; the next ones have IDLE_S."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._unasked = loop.call_later(self._head_timeout_s, transport.close)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the client."""
        self.asked()
        super().connection_lost(exc)

    def asked(self) -> None:
        """Note that a request's head has come."""
        if self._unasked is not None:
            self._unasked.cancel()
            self._unasked = None

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - aiohttp's own words
    ) -> web.StreamResponse:
        """Answer a request that no route can be found for; the connection ends with it.

        Raises:
            ConnectionError: a part of another answer is on its way already.
        """
        end_if_without_memory("gateway", exc)
        if status >= 500:
            _LOG.error("a request could not be handled", exc_info=exc)
        else:
            _LOG.debug("a request was no HTTP: %r", exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        response = refused(_FAULTS.get(status, _NOT_READ))
        response.force_close()
        return response


class _Server(web.Server):
    """Makes the connections."""

    def __init__(self, *args: Any, head_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._make: Any = self.request_factory
        self._handle: Any = self.request_handler
        self.request_factory = self._asked
        self.request_handler = self._handled

    def __call__(self) -> _Connection:
        """Take a connection."""
        return _Connection(
            self, loop=self._loop, head_timeout_s=self._head_timeout_s, **self._kwargs
        )

    def _asked(self, message: Any, payload: Any, protocol: Any, *rest: Any) -> web.Request:
        protocol.asked()
        request: web.Request = self._make(message, payload, protocol, *rest)
        return request

    async def _handled(self, request: BaseRequest) -> web.StreamResponse:
        """Answer what aiohttp refuses before any route has the request: an odd `Expect`."""
        try:
            response: web.StreamResponse = await self._handle(request)
        except web.HTTPException as error:
            said = _NOT_EXPECTED if error.status == 417 else _NOT_READ.message
            return refused(HttpRefusal(error.status, "invalid_request_error", said))
        return response


class EdgeRunner(web.AppRunner):
    """Runs an application behind this server.

    Args:
        application: the routes.
        head_timeout_s: how long a connection may take to its first request's head.
        shutdown_timeout_s: how long requests may go on when it stops.
    """

    def __init__(
        self, application: web.Application, *, head_timeout_s: float, shutdown_timeout_s: float
    ) -> None:
        # A handler is cancelled when its client goes away, which ends the generation.
        super().__init__(
            application, handler_cancellation=True, shutdown_timeout=shutdown_timeout_s
        )
        self._head_timeout_s = head_timeout_s

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=True,
            head_timeout_s=self._head_timeout_s,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
        )
