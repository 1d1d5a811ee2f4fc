"""The life of a call at the edge: intent, generation, record, and only then the response.

A life is a task of its own. When the harness goes away its generation is cancelled, but the life
goes on until the ledger has a row for the call: an admitted call must not end in silence.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import call_record_pb2, capture_admission_pb2
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_client.admission import AdmissionClient
from callforest_client.errors import CallforestError, UnavailableError
from callforest_client.ledger import LedgerClient
from callforest_client.worker import WorkerClient
from callforest_mesh.chassis.call_attributes import verdict_attributes
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.telemetry import OK, SILENT, ServiceTelemetry
from callforest_mesh.gateway import core
from callforest_mesh.gateway.admitting import Admitting
from callforest_mesh.gateway.context_report import context_of_call
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
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
)
from callforest_mesh.gateway.rows import Rows

_LOG = logging.getLogger("callforest")


class Calls:
    """Takes calls from harnesses through their lives.

    Args:
        admission: judges calls.
        ledger: keeps their rows.
        worker: generates and captures.
        configuration: of the engine.
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
        configuration: EngineConfiguration,
        options: GatewayOptions,
        *,
        new_id: Callable[[], str],
        now_ns: Callable[[], int],
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._admitting = Admitting(admission, configuration)
        self._configuration = configuration
        self._worker = worker
        self._options = options
        self._new_id = new_id
        self._now_ns = now_ns
        self._tasks: set[asyncio.Task[Served] | asyncio.Task[None]] = set()
        self._tracer = telemetry.tracer
        self._measures = LifeMeasures(telemetry.metrics, lambda: len(self._tasks))
        self._rows = Rows(ledger, options.commit_timeout_s, self._measures, watch=self._watch)

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
            await self._rows.fail(life, REQUEST_FINISHED, detail="the harness went away")
            raise AbandonedError
        generated = await self._generate(life, verdict)
        failpoint("gateway.after_engine")
        served = await self._read(life, generated.chat_response)
        difference = life.request.evidence.explain(verdict)
        if life.captured:
            await self._settle_capture(life, generated, served, difference)
        context = None
        if core.is_forest(life.intent):
            context = context_of_call(verdict, generated, difference)
        return Served(served.body, life.call_id, generated.generation_us, context)

    async def _admit(self, life: Life) -> capture_admission_pb2.Verdict:
        try:
            verdict = await self._admitting.verdict(life)
        except CallforestError as error:
            _LOG.warning("call %s/%s is not admitted: %s", life.capture_key, life.call_id, error)
            if life.intent is not None and isinstance(error, UnavailableError):
                # Whether the intent is durable is unknown; if it is, the call must not stay
                # pending until the rollout's owner gives up.
                self._fail_later(life, detail="the admission did not answer")
            raise of_service(error) from error
        if life.span.recording:
            life.span.describe(verdict_attributes(verdict))
        match verdict.WhichOneof("verdict"):
            case "refused":
                raise refused_verdict(life.capture_key, life.call_id, verdict.refused)
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
        assert life.intent is not None, "it was admitted"
        call = core.generation_of(life.request, verdict, life.intent)
        failpoint("gateway.before_engine")
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
            await self._rows.fail(life, REQUEST_FINISHED, detail="the harness went away")
            raise AbandonedError from None
        except CallforestError as error:
            _LOG.warning("call %s/%s: %s", life.capture_key, life.call_id, error)
            if core.is_configuration_change(error.reason):
                self._configuration.forget(call.configuration_digest)
            await self._rows.settle_refused(life, error)
            refusal = of_service(error)
            refusal.parameter = core.parameter_of(life.request, refusal.parameter)
            raise refusal from error

    async def _read(self, life: Life, body: bytes) -> core.ServedResponse:
        """Serve nothing rather than tokens: an engine that leaks them is a fault (CAP-6)."""
        try:
            return core.read_response(body, life.request)
        except core.ServedResponseError as error:
            await self._rows.fail(life, REQUEST_FINISHED, detail=error.fact)
            raise _incident(f"call {life.capture_key}/{life.call_id}: {error.fact}") from error

    async def _settle_capture(
        self,
        life: Life,
        generated: worker_pb.GeneratedCall,
        served: core.ServedResponse,
        difference: call_record_pb2.HistoryDifference | None,
    ) -> None:
        """Append the call's row: its record, or why there is none."""
        match generated.WhichOneof("capture"):
            case "staged":
                await self._record(life, generated, served, difference)
            case "failed":
                await self._rows.fail(
                    life,
                    WORKER_CAPTURE_FAILED,
                    worker_reason=generated.failed.reason,
                    detail=generated.failed.detail,
                )
            case _:
                await self._rows.fail(life, MISSING_COORDINATES)

    async def _record(
        self,
        life: Life,
        generated: worker_pb.GeneratedCall,
        served: core.ServedResponse,
        difference: call_record_pb2.HistoryDifference | None,
    ) -> None:
        coords = generated.staged
        failpoint("gateway.after_staging")
        if (coords.capture_key, coords.call_id) != (life.capture_key, life.call_id):
            # They would be recorded for another call.
            named = f"they name {coords.capture_key}/{coords.call_id}"
            await self._rows.fail(life, INVALID_COORDINATES, detail=named)
            return
        if not served.response_id:
            await self._rows.fail(life, INVALID_COORDINATES, detail="the response has no id")
            return
        record = core.record_of(generated, life.request, served, life.admit_time)
        record.traceparent = life.span.traceparent
        if difference is not None:
            record.difference.CopyFrom(difference)
        if await self._rows.commit(life, record):
            failpoint("gateway.after_commit_ack")
            life.request.evidence.keep(life.call_id, served)

    def _fail_later(self, life: Life, *, detail: str) -> None:
        """Try once more to mark a call whose fate at the ledger is unknown; nobody waits."""
        self._watch(asyncio.ensure_future(self._rows.fail(life, REQUEST_FINISHED, detail=detail)))

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
