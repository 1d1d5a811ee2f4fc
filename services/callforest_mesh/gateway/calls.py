"""The life of a call at the edge: intent, generation, record, and only then the response.

A life is a task of its own. When the harness goes away its generation is cancelled after a grace,
but the life goes on until the ledger has a row for the call: an admitted call must not end in
silence. Those who wait for one call, its repeats among them, have one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import capture_admission_pb2
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_client.admission import AdmissionClient
from callforest_client.errors import CallforestError, UnavailableError, reason_name
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_client.worker import WorkerClient
from callforest_mesh.chassis.call_attributes import verdict_attributes
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.telemetry import OK, SILENT, ServiceTelemetry
from callforest_mesh.gateway import core
from callforest_mesh.gateway.admitting import Admitting
from callforest_mesh.gateway.asked import NEW, Identity
from callforest_mesh.gateway.captures import Captures, incident
from callforest_mesh.gateway.context_report import context_of_call
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
from callforest_mesh.gateway.life import (
    WENT_AWAY,
    AbandonedError,
    Life,
    Served,
    UnsettledError,
)
from callforest_mesh.gateway.lives import Lives, PendingCall
from callforest_mesh.gateway.measures import LifeMeasures, ended_by
from callforest_mesh.gateway.options import GatewayOptions
from callforest_mesh.gateway.pace import Pace
from callforest_mesh.gateway.refusals import (
    HttpRefusal,
    of_service,
    refused_verdict,
    unavailable,
)
from callforest_mesh.gateway.repeats import Repeats, earlier_of
from callforest_mesh.gateway.rows import Rows, never_was

_LOG = logging.getLogger("callforest")


class Calls:
    """Takes calls from harnesses through their lives.

    Args:
        admission: judges calls.
        ledger: keeps their rows.
        worker: generates and captures.
        staging: keeps what was generated, for repeats.
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
        staging: StagingClient,
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
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order in which they began
        self._joined_count = 0
        self._lives = Lives(options.repeat_grace_s)
        self._pace = Pace(options.calls_max)
        self._tracer = telemetry.tracer
        self._measures = LifeMeasures(telemetry.metrics, lambda: len(self._tasks))
        self._rows = Rows(ledger, options.commit_timeout_s, self._measures, watch=self._watch)
        self._captures = Captures(self._rows)
        self._repeats = Repeats(
            staging,
            self._admitting,
            self._captures,
            self._rows,
            timeout_s=options.commit_timeout_s,
            forest=options.forest,
        )

    def same(self, capture_key: str, identity: Identity, body_digest: bytes) -> PendingCall | None:
        """Wait for the call in work that a request with a key repeats; None when there is none.

        Raises:
            HttpRefusal: its key is in work with another request, or too many wait already.
        """
        return self._lives.same(capture_key, identity, body_digest)

    def begin(
        self,
        capture_key: str,
        request: core.NormalisedRequest,
        identity: Identity = NEW,
        *,
        lacking: HttpRefusal | None = None,
        allowed_s: float | None = None,
        traceparent: str = "",
    ) -> PendingCall:
        """Take one call into work, from its intent to its response.

        Args:
            capture_key: its attempt.
            request: what is asked.
            identity: which call that is.
            lacking: why it can only be answered as a repeat, if so.
            allowed_s: how long its caller waits; None when the caller does not say.
            traceparent: the caller's W3C trace context, or "".

        Raises:
            HttpRefusal: too many are in work, all of them or for the time that the call has; or its
                key is in work with another request.
        """
        joined = self._lives.same(capture_key, identity, request.body_digest)
        if joined is not None:
            return joined
        bound_s = self._options.generate_timeout_s
        allowed_s = bound_s if allowed_s is None else min(allowed_s, bound_s)
        begun = asyncio.get_running_loop().time()
        ahead, has_key = len(self._tasks) - self._joined_count, bool(identity.call_id)
        self._pace.require_place(ahead, allowed_s, begun, may_repeat=has_key)
        admit_time = timestamp_pb2.Timestamp()
        # Whole microseconds: the peer's clock is a double, and must give the same time back.
        admit_time.FromNanoseconds(self._now_ns() // 1000 * 1000)
        life = Life(
            capture_key,
            identity.call_id or self._new_id(),
            admit_time,
            request,
            traceparent,
            identity,
            lacking,
            begun=begun,
            allowed_s=allowed_s,
            ahead=ahead,
        )
        pending = self._lives.enter(life)
        life.trace(self._tracer.entry("call", traceparent))
        self._watch(asyncio.get_running_loop().create_task(self._live(life)))
        return pending

    async def serve(
        self,
        capture_key: str,
        request: core.NormalisedRequest,
        identity: Identity = NEW,
        *,
        traceparent: str = "",
    ) -> Served:
        """Take one call through its life; cancelling this leaves it.

        Raises:
            HttpRefusal: the call was refused, or something behind the gateway is away; then
                nothing was served.
        """
        return await self.begin(capture_key, request, identity, traceparent=traceparent).served()

    async def finish(self, timeout_s: float) -> None:
        """Wait until no call is in work, at most `timeout_s`; no repeat comes in any more."""
        self._lives.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def settle(self, timeout_s: float) -> None:
        """Wait for the calls in work, at most `timeout_s`; then end them."""
        await self.finish(timeout_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            _LOG.warning("the gateway leaves %d calls pending", len(left))
            await asyncio.wait(left)

    async def _live(self, life: Life) -> None:
        """Answer those who wait; then settle what is not known of the call."""
        try:
            unsettled = await self._answered(life)
            self._pace.keep(life, asyncio.get_running_loop().time())
            if unsettled is not None:
                await self._settle_unknown(life, unsettled)
        finally:
            life.span.end()
            self._lives.leave(life)

    async def _answered(self, life: Life) -> UnsettledError | None:
        """Give those who wait the response, or why there is none; say what is left to settle."""
        outcome, unsettled = OK, None
        try:
            life.serve(await self._lived(life))
        except UnsettledError as error:
            unsettled = error
            outcome = ended_by(error.answer)
            life.refuse(error.answer)
        except (HttpRefusal, AbandonedError) as error:
            outcome = ended_by(error)
            life.refuse(error)
            if life.owed is not None:
                is_over = isinstance(error, AbandonedError)
                unsettled = UnsettledError(error, life.owed, is_over=is_over)
        except BaseException as error:
            outcome = ended_by(error)
            life.refuse(unavailable("The gateway is shutting down. Repeat."))
            raise
        finally:
            if outcome != OK:
                life.span.fail(outcome)
            self._measures.count(outcome)
        return unsettled

    async def _settle_unknown(self, life: Life, unsettled: UnsettledError) -> None:
        """Leave a call to its repeats for the grace; then see what became of it.

        A repeat that came meanwhile waits for this end, and has the duty from here on.
        """
        if not life.captured:
            return
        if not unsettled.is_over:
            await self._lives.grace(life)
        successor = self._lives.find(life.capture_key, life.call_id)
        if successor is None or successor is life:
            await self._repeats.settle(life, unsettled.detail)
        else:
            successor.owed = unsettled.detail

    async def _lived(self, life: Life) -> Served:
        for one in life.behind:
            await one.admitted.wait()
        life.behind.clear()
        try:
            return await self._take(life)
        except (HttpRefusal, AbandonedError, UnsettledError):
            raise
        except Exception as error:
            _LOG.exception("call %s/%s: a fault", life.capture_key, life.call_id)
            raise UnsettledError(error, "a fault of the gateway") from error

    async def _take(self, life: Life) -> Served:
        """Learn which call it is, and answer it: by another life, by what is staged, or anew."""
        while True:
            if life.before is not None:
                await life.before.ended.wait()
                life.before = None
            verdict = await self._admit(life)
            earlier = earlier_of(life, verdict)
            if earlier is None or earlier.call_id == life.call_id:
                break
            other = self._lives.find(life.capture_key, earlier.call_id)
            if other is not None and other.takes_waiters:
                return await self._join(life, other)
            self._lives.rename(life, earlier.call_id)
            if life.before is None:
                break
        life.verdict = verdict
        self._lives.judged(life)
        life.admitted.set()
        if earlier is not None:
            served = await self._repeats.answer(life, verdict, earlier)
            if served is not None:
                return served
        return await self._make(life, verdict)

    async def _join(self, life: Life, other: Life) -> Served:
        """Have the answer of another life; the place of this one is free."""
        pending = self._lives.join(other)
        life.joined, life.captured = True, False
        life.call_id, life.admit_time = other.call_id, other.admit_time
        life.admitted.set()
        self._joined_count += 1
        try:
            if life.abandoned:
                raise AbandonedError
            return await life.wait_for(pending.served())
        finally:
            pending.leave()
            self._joined_count -= 1

    async def _make(self, life: Life, verdict: capture_admission_pb2.Verdict) -> Served:
        """Generate an admitted call and take it to its row; whatever the end, it has one."""
        if life.abandoned:
            raise UnsettledError(AbandonedError(), WENT_AWAY, is_over=True)
        generated = await self._generate(life, verdict)
        failpoint("gateway.after_engine")
        served = await self._captures.read(life, generated.chat_response)
        difference = life.request.evidence.explain(verdict)
        if life.captured:
            await self._captures.settle(life, generated, served, difference)
        context = None
        if core.is_forest(life.intent):
            context = context_of_call(verdict, generated, difference)
        return Served(served.body, life.call_id, generated.generation_us, context)

    async def _admit(self, life: Life) -> capture_admission_pb2.Verdict:
        try:
            verdict = await self._admitting.verdict(life)
        except CallforestError as error:
            _LOG.warning("call %s/%s is not admitted: %s", life.capture_key, life.call_id, error)
            refusal = of_service(error)
            if life.intent is not None and isinstance(error, UnavailableError):
                # Whether the intent is durable is unknown; if it is, the call must not stay
                # pending until the rollout's owner gives up.
                raise UnsettledError(refusal, "the admission did not answer") from error
            raise refusal from error
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
                raise incident(f"call {life.call_id}: a verdict that this gateway does not know")
        return verdict

    async def _generate(
        self, life: Life, verdict: capture_admission_pb2.Verdict
    ) -> worker_pb.GeneratedCall:
        assert life.intent is not None, "it was admitted"
        call = core.generation_of(life.request, verdict, life.intent, captured=life.captured)
        failpoint("gateway.before_engine")
        life.generated = True
        generating = self._worker.generate(
            call, timeout_s=self._options.generate_timeout_s, traceparent=life.traceparent
        )
        try:
            return await life.wait_for(generating)
        except AbandonedError as error:
            raise UnsettledError(error, WENT_AWAY, is_over=True) from None
        except CallforestError as error:
            _LOG.warning("call %s/%s: %s", life.capture_key, life.call_id, error)
            refusal = of_service(error)
            refusal.parameter = core.parameter_of(life.request, refusal.parameter)
            self._pace.hold(error, asyncio.get_running_loop().time())
            asks_again = isinstance(error, UnavailableError) or error.retry_after_ms is not None
            if asks_again and not never_was(life, error):
                raise UnsettledError(
                    refusal, f"{reason_name(error.reason)}: {error.message}"
                ) from error
            if core.is_configuration_change(error.reason):
                self._configuration.forget(call.configuration_digest)
            await self._rows.settle_refused(life, error)
            raise refusal from error

    def _watch(self, task: asyncio.Task[None]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            expected = isinstance(error, HttpRefusal | CallforestError)
            _LOG.log(logging.DEBUG if expected else logging.ERROR, "a call ended with %r", error)
