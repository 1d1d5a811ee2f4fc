"""A pending call's answer on its way to an HTTP client: plain, or as buffered events.

Nothing leaves before the call's row is durable, with one exception: a client that asked for events
and waits longer than `keep_alive_s` gets the status line and comments, so that neither it nor a
proxy gives up. That begins only once the call is admitted; until then a refusal has its status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import Final

from aiohttp import web

from callforest_client.errors import CallforestError
from callforest_mesh.chassis.failpoint import failpoint, is_armed
from callforest_mesh.chassis.fatal import end_if_without_memory
from callforest_mesh.gateway import events, refusals
from callforest_mesh.gateway.context_report import context_header
from callforest_mesh.gateway.lives import PendingCall
from callforest_mesh.gateway.refusals import HttpRefusal

_LOG = logging.getLogger("callforest")

CALL_ID_HEADER: Final = "x-callforest-call-id"
OVERHEAD_HEADER: Final = "x-callforest-overhead-ms"
CONTEXT_HEADER: Final = "x-callforest-context"
TTFB_HEADER: Final = "x-callforest-ttfb-ms"
EVENT_STREAM: Final = "text/event-stream"


class Answer:
    """The answer to one HTTP request.

    Args:
        call: makes the response.
        begun: when the request was there whole, on the loop's clock.
        keep_alive_s: how long a client that asked for events gets nothing.
    """

    def __init__(
        self,
        call: PendingCall,
        *,
        begun: float,
        keep_alive_s: float,
    ) -> None:
        self._normalised = call.request
        self._call = call
        self._begun = begun
        self._keep_alive_s = keep_alive_s

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Wait for the response and send it.

        Raises:
            HttpRefusal: the call was refused before anything was sent.
        """
        try:
            if self._normalised.streaming is not None and await self._outlasts():
                return await self._keep_alive(request)
            return await self._whole(request)
        except (asyncio.CancelledError, ConnectionError):
            self._call.leave()
            raise

    async def _outlasts(self) -> bool:
        """Say whether an admitted call takes longer than its client gets nothing."""
        if await self._call.done_within(self._keep_alive_s):
            return False
        await self._call.admitted_or_done()
        return not self._call.done

    async def _whole(self, request: web.Request) -> web.Response:
        served = await self._call.served()
        waited_ms = self._waited_ms()
        overhead_ms = max(0.0, waited_ms - served.generation_us / 1000)
        headers = {**self._headers(waited_ms), OVERHEAD_HEADER: f"{overhead_ms:.3f}"}
        if served.context is not None:
            headers[CONTEXT_HEADER] = context_header(served.context)
        events_asked = self._normalised.streaming is not None
        kind = EVENT_STREAM if events_asked else "application/json"
        response = web.Response(body=served.body, content_type=kind, headers=headers)
        if is_armed("gateway.after_reply_began"):
            # The status line goes with the body, in one packet, unless a test wants to be between.
            if (writer := await response.prepare(request)) is not None:
                writer.send_headers()
            failpoint("gateway.after_reply_began")
        return response

    async def _keep_alive(self, request: web.Request) -> web.StreamResponse:
        """Send the status line at once, comments while the call lasts, then the events."""
        response = web.StreamResponse(headers=self._headers(self._waited_ms()))
        response.content_type = EVENT_STREAM
        await response.prepare(request)
        while not self._call.done:
            await response.write(events.KEEP_ALIVE)
            failpoint("gateway.after_keep_alive")
            await self._call.done_within(self._keep_alive_s)
        await response.write(await self._events(request))
        with contextlib.suppress(ConnectionError):  # everything was sent before
            await response.write_eof()
        return response

    async def _events(self, request: web.Request) -> bytes:
        """Give the events of the response, or of what became of it: its status is sent already."""
        try:
            return (await self._call.served()).body
        except Exception as error:  # noqa: BLE001 - told to the client and logged
            refusal = refusal_of(error, f"{request.method} {request.path}")
        response_id = f"chatcmpl-{self._call.call_id}"
        dialect = self._normalised.dialect
        return events.failure_events(dialect, refusal, response_id, self._call.created)

    def _headers(self, waited_ms: float) -> dict[str, str]:
        headers = {CALL_ID_HEADER: self._call.call_id, TTFB_HEADER: f"{waited_ms:.3f}"}
        if self._normalised.streaming is not None:
            headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return headers

    def _waited_ms(self) -> float:
        return (asyncio.get_running_loop().time() - self._begun) * 1000


def refusal_of(error: Exception, route: str) -> HttpRefusal:
    """Give the refusal for whatever a route raised; its text stays in the log."""
    if isinstance(error, HttpRefusal):
        return error
    if isinstance(error, CallforestError):
        _LOG.warning("%s: %s", route, error)
        return refusals.of_service(error)
    end_if_without_memory("gateway", error)
    incident_id = secrets.token_hex(8)
    _LOG.error("incident %s: %s", incident_id, route, exc_info=error)
    return refusals.faulty(incident_id)
