"""The life of a call at the edge: intent, generation, record, and only then the response.

A life is a task of its own. When the harness goes away its generation is cancelled, but the life
goes on until the ledger has a row for the call: an admitted call must not end in silence.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import attempt_pb2, call_record_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_client.admission import AdmissionClient
from callforest_client.errors import CallforestError, RefusedError, UnavailableError, reason_name
from callforest_client.ledger import LedgerClient
from callforest_client.worker import WorkerClient
from callforest_core.lineage.items import Dialect
from callforest_mesh.chassis.call_attributes import verdict_attributes
from callforest_mesh.chassis.telemetry import OK, SILENT, ServiceTelemetry
from callforest_mesh.gateway import core
from callforest_mesh.gateway.conversations import Conversations
from callforest_mesh.gateway.life import (
    INVALID_COORDINATES,
    MISSING_COORDINATES,
    REQUEST_FINISHED,
    WORKER_CAPTURE_FAILED,
    AbandonedError,
    Life,
    PendingCall,
    Served,
)
from callforest_mesh.gateway.measures import LifeMeasures, ended_by
from callforest_mesh.gateway.options import GatewayOptions
from callforest_mesh.gateway.refusals import (
    HttpRefusal,
    faulty,
    of_service,
    overloaded,
    refused_verdict,
    unavailable,
)

_LOG = logging.getLogger("callforest")
_Answer = TypeVar("_Answer")

# The ledger has a row for the call, or its seal fixed the call as pending: the attempt is marked
# durably either way, and the completion may leave (CAP-7).
_MARKED: Final = frozenset(
    {
        er.ERROR_REASON_COORDINATES_MISMATCH,
        er.ERROR_REASON_CALL_MISMATCH,
        er.ERROR_REASON_ATTEMPT_SEALED,
    }
)
# The ledger answered with a fault of its own: whether the row is durable is unknown.
_UNKNOWN: Final = frozenset(
    {er.ERROR_REASON_UNSPECIFIED, er.ERROR_REASON_INTERNAL, er.ERROR_REASON_STORE_CORRUPT}
)


class Calls:
    """Takes calls from harnesses through their lives.

    Args:
        admission: judges calls.
        ledger: keeps their rows.
        worker: generates and captures.
        options: bounds.
        new_id: names a call; at most 128 characters of `A-Za-z0-9._~-`.
        now_ns: the wall clock, nanoseconds since the epoch.
        telemetry: what is said of the calls.
    """

    def __init__(
        self,
        admission: AdmissionClient,
        ledger: LedgerClient,
        worker: WorkerClient,
        options: GatewayOptions,
        *,
        new_id: Callable[[], str],
        now_ns: Callable[[], int],
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._admission = admission
        self._ledger = ledger
        self._worker = worker
        self._options = options
        self._new_id = new_id
        self._now_ns = now_ns
        self._tasks: set[asyncio.Task[Served] | asyncio.Task[None]] = set()
        self._conversations = Conversations()
        self._tracer = telemetry.tracer
        self._measures = LifeMeasures(telemetry.metrics, lambda: len(self._tasks))

    def read(self, capture_key: str, body: bytes, dialect: Dialect) -> core.NormalisedRequest:
        """Parse and judge a request of an attempt.

        Raises:
            HttpRefusal: it is malformed, or asks for what cannot be captured.
        """
        return core.read_request(body, dialect, self._conversations.get(capture_key))

    def begin(
        self, capture_key: str, request: core.NormalisedRequest, *, traceparent: str = ""
    ) -> PendingCall:
        """Take one call into work, from its intent to its response.

        Raises:
            HttpRefusal: too many are in work.
        """
        if len(self._tasks) >= self._options.calls_max:
            raise overloaded("calls_in_work", self._options.calls_max)
        admit_time = timestamp_pb2.Timestamp()
        # Whole microseconds: the peer's clock is a double, and must give the same time back.
        admit_time.FromNanoseconds(self._now_ns() // 1000 * 1000)
        span = self._tracer.entry("call", traceparent)
        life = Life(capture_key, self._new_id(), admit_time, request, traceparent, span=span)
        task = asyncio.ensure_future(self._live(life))
        self._watch(task)
        return PendingCall(life, task)

    async def serve(
        self, capture_key: str, request: core.NormalisedRequest, *, traceparent: str = ""
    ) -> Served:
        """Take one call through its life; cancelling this ends the generation, not the life.

        Raises:
            HttpRefusal: the call was refused, or something behind the gateway is away; then
                nothing was served.
        """
        return await self.begin(capture_key, request, traceparent=traceparent).served()

    async def settle(self, timeout_s: float) -> None:
        """Wait for the calls in work, at most `timeout_s`; then end them."""
        if not self._tasks:
            return
        _, left = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in left:
            task.cancel()
        if left:
            _LOG.warning("the gateway leaves %d calls pending", len(left))
            await asyncio.wait(left)

    async def _live(self, life: Life) -> Served:
        outcome = OK
        try:
            return await self._lived(life)
        except BaseException as error:
            outcome = ended_by(error)
            life.span.fail(outcome)
            raise
        finally:
            life.span.end()
            self._measures.count(outcome)

    async def _lived(self, life: Life) -> Served:
        verdict = await self._admit(life)
        request = life.request
        self._conversations.keep(life.capture_key, request.conversation, len(request.body))
        life.admitted.set()
        try:
            return await self._answer(life, verdict)
        except (HttpRefusal, AbandonedError):
            raise
        except Exception:
            self._fail_later(life, detail="a fault of the gateway")
            raise

    async def _answer(self, life: Life, verdict: capture_admission_pb2.Verdict) -> Served:
        """Take an admitted call to its row; whatever the end, it has one."""
        if life.abandoned:
            await self._fail(life, REQUEST_FINISHED, detail="the harness went away")
            raise AbandonedError
        generated = await self._generate(life, verdict)
        served = await self._read(life, generated.chat_response)
        if life.captured:
            await self._settle_capture(life, generated, served)
        return Served(served.body, life.call_id, generated.generation_us)

    async def _admit(self, life: Life) -> capture_admission_pb2.Verdict:
        intent = core.intent_of(life.request, life.capture_key, life.call_id, life.admit_time)
        try:
            verdict = await self._admission.admit(intent, traceparent=life.traceparent)
        except CallforestError as error:
            _LOG.warning("call %s/%s is not admitted: %s", life.capture_key, life.call_id, error)
            if isinstance(error, UnavailableError):
                # Whether the intent is durable is unknown; if it is, the call must not stay
                # pending until the rollout's owner gives up.
                self._fail_later(life, detail="the admission did not answer")
            raise of_service(error) from error
        if life.span.recording:
            life.span.describe(verdict_attributes(verdict))
        match verdict.WhichOneof("verdict"):
            case "refused":
                raise refused_verdict(life.capture_key, verdict.refused)
            case "uncaptured":
                life.captured = False
                uncaptured = verdict.uncaptured
                _LOG.warning(
                    "call %s/%s is served without capture: %s: %s",
                    life.capture_key,
                    life.call_id,
                    uncaptured.reason,
                    uncaptured.detail,
                )
            case None:
                raise _incident(f"call {life.call_id}: a verdict that this gateway does not know")
        return verdict

    async def _generate(
        self, life: Life, verdict: capture_admission_pb2.Verdict
    ) -> worker_pb.GeneratedCall:
        call = worker_pb.GenerateCall(
            capture_key=life.capture_key,
            call_id=life.call_id,
            create_time=life.admit_time,
            chat_request=life.request.body,
            admission=core.admission_of(verdict, life.capture_key, life.call_id),
        )
        life.generation = asyncio.ensure_future(
            self._worker.generate(
                call, timeout_s=self._options.generate_timeout_s, traceparent=life.traceparent
            )
        )
        try:
            return await life.generation
        except asyncio.CancelledError:
            if not life.abandoned:
                raise
            await self._fail(life, REQUEST_FINISHED, detail="the harness went away")
            raise AbandonedError from None
        except CallforestError as error:
            _LOG.warning("call %s/%s: %s", life.capture_key, life.call_id, error)
            detail = f"{reason_name(error.reason)}: {error.message}"
            await self._fail(life, REQUEST_FINISHED, detail=detail)
            refusal = of_service(error)
            refusal.parameter = core.parameter_of(life.request, refusal.parameter)
            raise refusal from error

    async def _read(self, life: Life, body: bytes) -> core.ServedResponse:
        """Serve nothing rather than tokens: an engine that leaks them is a fault (CAP-6)."""
        try:
            return core.read_response(body, life.request)
        except core.ServedResponseError as error:
            await self._fail(life, REQUEST_FINISHED, detail=error.fact)
            raise _incident(f"call {life.capture_key}/{life.call_id}: {error.fact}") from error

    async def _settle_capture(
        self, life: Life, generated: worker_pb.GeneratedCall, served: core.ServedResponse
    ) -> None:
        """Append the call's row: its record, or why there is none."""
        match generated.WhichOneof("capture"):
            case "staged":
                await self._record(life, generated, served)
            case "failed":
                await self._fail(
                    life,
                    WORKER_CAPTURE_FAILED,
                    worker_reason=generated.failed.reason,
                    detail=generated.failed.detail,
                )
            case _:
                await self._fail(life, MISSING_COORDINATES)

    async def _record(
        self, life: Life, generated: worker_pb.GeneratedCall, served: core.ServedResponse
    ) -> None:
        coords = generated.staged
        if (coords.capture_key, coords.call_id) != (life.capture_key, life.call_id):
            # They would be recorded for another call.
            named = f"they name {coords.capture_key}/{coords.call_id}"
            await self._fail(life, INVALID_COORDINATES, detail=named)
            return
        if not served.response_id:
            await self._fail(life, INVALID_COORDINATES, detail="the response has no id")
            return
        record = core.record_of(coords, life.request, served, generated.completion, life.admit_time)
        record.traceparent = life.span.traceparent
        try:
            await self._append(life, record)
            life.describe_row("committed", weight_version=coords.weight_version)
        except RefusedError as error:
            _LOG.warning("call %s/%s has no record: %s", life.capture_key, life.call_id, error)
            life.describe_row("refused", reason=reason_name(error.reason))
            if error.reason in _UNKNOWN:
                raise unavailable("The ledger failed; nothing was served.") from error
            if error.reason not in _MARKED:
                detail = f"{reason_name(error.reason)}: {error.message}"
                await self._fail(life, INVALID_COORDINATES, detail=detail)
        except UnavailableError as error:
            # The record may be durable. Only the same write may follow: a failure row would
            # contradict it.
            self._watch(asyncio.ensure_future(self._append(life, record)))
            raise unavailable("The ledger is away; nothing was served. Repeat.") from error

    async def _append(self, life: Life, record: call_record_pb2.CallRecord) -> None:
        await self._durably(
            lambda left_s: self._ledger.record(
                record, timeout_s=left_s, traceparent=life.traceparent
            )
        )

    async def _fail(
        self, life: Life, reason: str, *, worker_reason: str = "", detail: str = ""
    ) -> None:
        """Append a failure row; a call that was admitted without capture has its row already."""
        if not life.captured:
            return
        life.describe_row("failed", reason=reason)
        self._measures.count_failure(reason)
        failure = attempt_pb2.CallFailure(
            capture_key=life.capture_key,
            call_id=life.call_id,
            reason=reason,
            worker_reason=worker_reason[:128],
            detail=detail[:1024],
        )
        try:
            await self._durably(
                lambda left_s: self._ledger.record_failure(
                    failure, timeout_s=left_s, traceparent=life.traceparent
                )
            )
        except RefusedError as error:
            _LOG.warning("call %s/%s: no failure row: %s", life.capture_key, life.call_id, error)
            if error.reason not in _MARKED:
                raise of_service(error) from error
        except UnavailableError as error:
            raise unavailable("The ledger is away; nothing was served. Repeat.") from error

    def _fail_later(self, life: Life, *, detail: str) -> None:
        """Try once more to mark a call whose fate at the ledger is unknown; nobody waits."""
        self._watch(asyncio.ensure_future(self._fail(life, REQUEST_FINISHED, detail=detail)))

    async def _durably(self, send: Callable[[float], Awaitable[_Answer]]) -> _Answer:
        """Send a row within the bound; repeat when the ledger says after which delay."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.commit_timeout_s
        while True:
            try:
                return await send(max(0.001, deadline - loop.time()))
            except RefusedError as error:
                delay_ms = error.retry_after_ms
                if delay_ms is None or loop.time() + delay_ms / 1000 >= deadline:
                    raise
                await asyncio.sleep(delay_ms / 1000)

    def _watch(self, task: asyncio.Task[Served] | asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Served] | asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waits gets it; a life that was abandoned has only the log.
            expected = isinstance(error, HttpRefusal | AbandonedError | CallforestError)
            _LOG.log(logging.DEBUG if expected else logging.ERROR, "a call ended with %r", error)


def _incident(fact: str) -> HttpRefusal:
    incident_id = secrets.token_hex(8)
    _LOG.error("incident %s: %s", incident_id, fact)
    return faulty(incident_id)
