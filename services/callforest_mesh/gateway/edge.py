"""The HTTP routes: requests in, calls made, answers out. Contract: docs/protocol.md, section 10."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from aiohttp import web

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError
from callforest_client.ledger import LedgerClient, Manifest
from callforest_client.worker import WorkerClient
from callforest_core.lineage.items import Dialect
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.chassis.trace_context import parse_traceparent
from callforest_mesh.gateway import core, refusals
from callforest_mesh.gateway.answers import CONTEXT_HEADER, Answer, refusal_of
from callforest_mesh.gateway.asked import KEY_HEADER, RETRY_HEADER, Asked, Identity, identify
from callforest_mesh.gateway.context_report import context_header
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.http_server import refused
from callforest_mesh.gateway.manifest_json import manifest_json
from callforest_mesh.gateway.measures import RequestMeasures
from callforest_mesh.gateway.options import GatewayOptions
from callforest_mesh.gateway.refusals import HttpRefusal
from callforest_mesh.gateway.work import Work

_CAPTURE_KEY: Final = re.compile(r"[A-Za-z0-9._~-]{1,128}", re.ASCII)
_BEARER: Final = "bearer "
_CLAIM_HEADER: Final = "x-callforest-continues"
MEASURE_ROUTE: Final = "/context/{capture_key}/measure"
MANIFEST_ROUTE: Final = "/training-token-capture/control/rollouts/{rollout_id}/manifest"

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Edge:
    """The routes of one gateway.

    Args:
        options: bounds and the control route's token.
        drain: when begun, no more requests are taken.
        work: what may be asked.
        ledger: read for the control route.
        worker: asked for its model.
        telemetry: what is said of the requests.
    """

    def __init__(
        self,
        options: GatewayOptions,
        drain: Drain,
        work: Work,
        ledger: LedgerClient,
        worker: WorkerClient,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._options = options
        self._drain = drain
        self._work = work
        self._ledger = ledger
        self._worker = worker
        self._telemetry = telemetry

    def application(self) -> web.Application:
        """Make the application."""
        application = web.Application(
            middlewares=[self._measure, self._answer_errors],
            client_max_size=core.BODY_BYTES_MAX,
        )
        application.add_routes(
            [
                web.post("/rollouts/{capture_key}/v1/chat/completions", self._chat),
                web.post("/v1/chat/completions", self._chat),
                web.post("/rollouts/{capture_key}/v1/responses", self._respond),
                web.post("/v1/responses", self._respond),
                web.post(MEASURE_ROUTE, self._measured),
                web.get("/rollouts/{capture_key}/v1/models", self._models),
                web.get("/v1/models", self._models),
                web.get(MANIFEST_ROUTE, self._manifest),
                web.get("/healthz", self._health),
            ]
        )
        patterns = [resource.canonical for resource in application.router.resources()]
        self._measures = RequestMeasures(self._telemetry.metrics, patterns)
        return application

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, Dialect.CHAT)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, Dialect.RESPONSES)

    async def _complete(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        capture_key = _capture_key(request)
        self._refuse_when_draining()
        body = await self._read(request)
        self._refuse_when_draining()  # meanwhile it may have begun to
        begun = asyncio.get_running_loop().time()
        asked = Asked(
            capture_key, body, dialect, _claim(request), identity=_identity(capture_key, request)
        )
        call = self._work.begin(asked, traceparent=_traceparent(request))
        answer = Answer(call, begun=begun, keep_alive_s=self._options.keep_alive_s)
        return await answer.send(request)

    async def _measured(self, request: web.Request) -> web.StreamResponse:
        """Say how many prompt tokens a call would have; the body says whose API it speaks."""
        capture_key = _capture_key(request)
        self._refuse_when_draining()
        body = await self._read(request)
        dialect = core.dialect_of(body)
        normalised = self._work.reader.read(capture_key, body, dialect, _claim(request))
        measured = await self._work.measuring.measure(
            capture_key, normalised, traceparent=_traceparent(request)
        )
        answer = {
            "prompt_token_count": measured.token_count,
            "is_exact": True,
            "is_continuation": measured.is_continuation,
        }
        response = _json(200, json.dumps(answer).encode("ascii"))
        if measured.context is not None:
            response.headers[CONTEXT_HEADER] = context_header(measured.context)
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        _capture_key(request)
        self._refuse_when_draining()
        engine = await self._worker.describe()
        model = {
            "id": engine.model,
            "object": "model",
            "created": 0,
            "owned_by": "callforest",
            "max_model_len": engine.context_token_count,
        }
        return _json(200, json.dumps({"object": "list", "data": [model]}).encode("ascii"))

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        self._require_control_token(request)
        rollout_id = request.match_info["rollout_id"]
        if _CAPTURE_KEY.fullmatch(rollout_id) is None:
            raise refusals.malformed("The rollout id is malformed.", "rollout_id")
        manifest: Manifest | None = None
        try:
            manifest = await self._ledger.manifest(rollout_id)
        except CallforestError as error:
            if error.reason != er.ERROR_REASON_ATTEMPT_NOT_FOUND:
                raise
        return _json(200, manifest_json(rollout_id, manifest))

    async def _health(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002 - a route
        if self._drain.begun:
            return _json(503, b'{"status": "draining"}')
        return _json(200, b'{"status": "ok"}')

    async def _read(self, request: web.Request) -> bytes:
        """Read a body as it was sent: a small one that unpacks to a large one is not taken."""
        if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
            raise refusals.unsupported_encoding(coding)
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise refusals.too_large(core.BODY_BYTES_MAX) from None
        except TimeoutError:
            raise HttpRefusal(408, "request_timeout", "The body did not arrive in time.") from None

    def _refuse_when_draining(self) -> None:
        if self._drain.begun:
            raise refusals.unavailable("The gateway is shutting down. Repeat.")

    def _require_control_token(self, request: web.Request) -> None:
        """Let only the token's holders pass; compared as bytes, in constant time."""
        token = self._options.control_token
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        expected = f"Bearer {token}".encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected) or not token:
            raise HttpRefusal(401, "invalid_api_key", "The control route needs its bearer token.")

    @web.middleware
    async def _measure(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Measure every request that is answered."""
        begun = time.perf_counter()
        response = await handler(request)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        self._measures.record(time.perf_counter() - begun, route, response.status)
        return response

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Turn whatever a route raises into an OpenAI-shaped error; its text stays here."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            code = "method_not_allowed" if error.status == 405 else "not_found"
            message = f"{request.method} {request.path} is not served here."
            return refused(HttpRefusal(error.status, code, message))
        except ConnectionError:
            raise  # the client is gone: there is nobody to answer
        except Exception as error:  # noqa: BLE001 - logged under the incident that the caller gets
            return refused(refusal_of(error, f"{request.method} {request.path}"))


def _capture_key(request: web.Request) -> str:
    """Give the attempt that a request names: by its path, or as its bearer key."""
    named = request.match_info.get("capture_key")
    if named is not None:
        if _CAPTURE_KEY.fullmatch(named) is None:
            raise refusals.attempt_not_found("of that name")
        return named
    header = request.headers.get("Authorization", "")
    bearer = header[len(_BEARER) :].strip()
    if not header.lower().startswith(_BEARER) or _CAPTURE_KEY.fullmatch(bearer) is None:
        raise refusals.no_attempt_named()
    return bearer


def _claim(request: web.Request) -> Claim | None:
    """Give the call that a request says it continues; its history is whole on this edge."""
    call_id = request.headers.get(_CLAIM_HEADER)
    if call_id is None:
        return None
    if _CAPTURE_KEY.fullmatch(call_id) is None:
        raise refusals.malformed(f"`{_CLAIM_HEADER}` is no call's id.", _CLAIM_HEADER)
    return Claim(call_id, history_is_whole=True)


def _identity(capture_key: str, request: web.Request) -> Identity:
    """Say which call a request is: by its key, by its client's mark, or a new one."""
    keys = request.headers.getall(KEY_HEADER, [])
    return identify(capture_key, keys, request.headers.get(RETRY_HEADER, ""))


def _traceparent(request: web.Request) -> str:
    """Give the caller's trace context; one that cannot be read is none (W3C, 4.3)."""
    context = parse_traceparent(request.headers.get("traceparent", ""))
    return "" if context is None else context.traceparent


def _json(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")
