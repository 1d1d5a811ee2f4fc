"""The life of a call on the worker: prefix, generation, delta, staging.

The engine's answer is served whatever becomes of the capture (CAP-7), and nothing is acknowledged
before it is durable (CAP-6).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from callforest.capture.v1 import capture_admission_pb2, item_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as staging_pb
from callforest.worker.v1 import worker_service_pb2 as pb
from callforest_client.codec import are_coords_of, coords_without_columns, staged_call_to_proto
from callforest_client.errors import (
    CallforestError,
    RefusedError,
    UnavailableError,
    reason_name,
)
from callforest_client.staging import StagingClient
from callforest_core.custody.errors import CaptureError
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.errors import item_late, overloaded
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.fatal import end_if_without_memory
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.chassis.validation import malformed
from callforest_mesh.worker import core
from callforest_mesh.worker.asked_call import AnsweredCall, AskedCall, Schedule
from callforest_mesh.worker.engine import (
    Engine,
    EngineRefusalError,
    EngineRequest,
    EngineResult,
    EngineUnavailableError,
)
from callforest_mesh.worker.generation_span import CaptureMeasures, generation_span
from callforest_mesh.worker.options import WorkerOptions
from callforest_mesh.worker.prefixes import Prefixes
from callforest_mesh.worker.staging_room import StagingRoom
from callforest_mesh.worker.stagings import Stagings
from callforest_mesh.worker.time_limits import TimeLimits

_Answer = TypeVar("_Answer")

_LOG = logging.getLogger("callforest")
_MARGIN_S = 0.5
"""Time that an answer keeps for its way back, at most."""


class Calls:
    """Generates calls and captures them.

    Args:
        engine: generates.
        staging: keeps the tokens.
        options: bounds.
        telemetry: what is said of the calls.
    """

    def __init__(
        self,
        engine: Engine,
        staging: StagingClient,
        options: WorkerOptions,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._engine = engine
        self._staging = staging
        self._options = options
        self._prefixes = Prefixes(
            staging, bytes_max=options.prefix_cache_bytes, timeout_s=options.prefix_timeout_s
        )
        self._room = StagingRoom(staging, options.stage_timeout_s)
        self._stagings = Stagings(staging, self._room, options.stage_timeout_s)
        self._limits = TimeLimits()
        self._running = self._generating = 0
        self.epoch_span_count = 0
        self._tracer = telemetry.tracer
        self._measures = CaptureMeasures(telemetry.metrics)

    @property
    def generating(self) -> int:
        """How many calls the engine has in work."""
        return self._generating

    async def generate(
        self, context: item_pb2.ItemContext, call: pb.GenerateCall
    ) -> pb.GeneratedCall:
        """Generate one call; capture it when it was admitted.

        Raises:
            Refusal: REQUEST_REFUSED, CANDIDATE_WITHOUT_PROOF, CONFIGURATION_CHANGED, STORE_FULL,
                ENGINE_UNAVAILABLE, OVERLOADED or ITEM_DEADLINE; nothing was staged.
        """
        return await self._run(self._generate, context, call)

    async def measure(
        self, context: item_pb2.ItemContext, call: pb.GenerateCall
    ) -> pb.MeasuredCall:
        """Count the tokens of the prompt that the call would have, and leave no trace of it.

        A predecessor whose tokens cannot be had counts as in a call: the plain rendering would be
        served, so that is counted, and there is no decision.

        Raises:
            Refusal: as `generate`.
        """
        return await self._run(self._measure, context, call)

    async def _run(
        self,
        work: Callable[[AskedCall], Awaitable[_Answer]],
        context: item_pb2.ItemContext,
        call: pb.GenerateCall,
    ) -> _Answer:
        """Do the work of a call, within the bound of what runs at once."""
        if self._running >= self._options.running_max:
            raise overloaded("running_calls", self._options.running_max)
        ask = self._ask_of(context, call)
        self._running += 1
        try:
            return await work(ask)
        finally:
            self._running -= 1

    async def settle(self) -> None:
        """Wait until what is being staged is done; each has its own bound."""
        await self._stagings.settle(self._options.stage_timeout_s + _MARGIN_S)

    def _ask_of(self, context: item_pb2.ItemContext, call: pb.GenerateCall) -> AskedCall:
        admission = _admission_of(call)
        evidence = core.evidence_of(admission) if admission else None
        now = asyncio.get_running_loop().time()
        return AskedCall(
            context, call, admission, evidence, self._schedule(context.timeout_ms, now)
        )

    async def _generate(self, ask: AskedCall) -> pb.GeneratedCall:
        if ask.context.is_repeat and (earlier := await self._earlier(ask)) is not None:
            return earlier
        if self._room.is_full and ask.admission is not None:
            await self._room.require(ask.context.tenant)
        loop = asyncio.get_running_loop()
        failpoint("worker.before_prefix")
        prefix, fault = await self._resolve(ask)
        failpoint("worker.before_engine")
        begun = loop.time()
        self._generating += 1
        try:
            with generation_span(self._tracer, ask.context.traceparent, ask.call) as span:
                result = await self._run_engine(ask, prefix, self._engine.generate)
                span.describe_result(result)
        finally:
            self._generating -= 1
        failpoint("worker.after_engine")
        self._measures.count(result)
        completion = core.completion_of(result)
        generated = pb.GeneratedCall(
            chat_response=result.response,
            generation_us=int((loop.time() - begun) * 1e6),
            decision=ask.decision(result.decision),
        )
        generated.completion.CopyFrom(completion)
        self._count_versions(ask.call, result, completion.weight_version_count)
        if ask.admission is not None:
            capture = AnsweredCall(ask.context, ask.admission, prefix, fault, result, ask.schedule)
            await self._capture(capture, generated)
        return generated

    async def _earlier(self, ask: AskedCall) -> pb.GeneratedCall | None:
        """Give what a worker staged that could not answer any more; None when there is none.

        Only an item that is sent again can have that; one that is, is not sampled twice.

        Raises:
            CallforestError: Staging cannot be asked.
            Refusal: ITEM_DEADLINE, the item's own time was too short for that.
        """
        if ask.admission is None:
            return None
        left_s = ask.schedule.generated - asyncio.get_running_loop().time()
        bound_s = max(0.001, min(self._options.stage_timeout_s, left_s))
        try:
            (staged,) = await self._staging.for_tenant(ask.context.tenant).fetch(
                ask.admission.capture_key,
                [ask.admission.call_id],
                without_columns=True,
                timeout_s=bound_s,
            )
        except RefusedError as error:
            if error.reason == er.ERROR_REASON_CALL_NOT_FOUND:
                return None
            raise
        except UnavailableError as error:
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and bound_s >= left_s:
                raise item_late(ask.schedule.timeout_ms) from error  # not Staging's doing
            raise
        generated = pb.GeneratedCall(staged=coords_without_columns(staged))
        _serve_first(staged, generated)
        return generated

    async def _measure(self, ask: AskedCall) -> pb.MeasuredCall:
        prefix, _ = await self._resolve(ask)
        measure = await self._run_engine(ask, prefix, self._engine.measure)
        return pb.MeasuredCall(
            prompt_token_count=measure.prompt_token_count,
            decision=ask.decision(measure.decision),
        )

    async def _resolve(self, ask: AskedCall) -> tuple[core.Sequence | None, CaptureError | None]:
        """Get the predecessor's tokens, or the reason why they cannot be had; neither of a root."""
        if ask.admission is None or not core.continues(ask.admission):
            return None, None
        try:
            return await self._prefixes.resolve(ask.context, ask.admission), None
        except CaptureError as error:
            return None, error

    def _schedule(self, timeout_ms: int, now: float) -> Schedule:
        timeout_s = timeout_ms / 1000
        budget_s = min(self._options.stage_timeout_s + _MARGIN_S, timeout_s / 3)
        end = now + timeout_s
        return Schedule(timeout_ms, end - budget_s, end - min(_MARGIN_S, budget_s / 3))

    async def _run_engine(
        self,
        ask: AskedCall,
        prefix: core.Sequence | None,
        work: Callable[[EngineRequest], Awaitable[_Answer]],
    ) -> _Answer:
        """Have the engine do its part, in time.

        The configuration is compared here, with nothing awaited until the request is on its way:
        an engine that starts anew in between fails the request.
        """
        call, schedule = ask.call, ask.schedule
        request = EngineRequest(
            call_id=call.call_id,
            created=call.create_time.seconds,
            body=call.chat_request,
            prefix=prefix.token_ids if prefix else None,
            evidence=ask.evidence if prefix else None,
        )
        try:
            actual = self._engine.describe().configuration_digest
            core.require_configuration(call.capture_key, call.configuration_digest, actual)
            return await self._limits.keep(work(request), schedule.generated)
        except TimeoutError:
            raise item_late(schedule.timeout_ms) from None
        except EngineRefusalError as error:
            raise Refusal(
                er.ERROR_REASON_REQUEST_REFUSED,
                core.shortened(str(error)),
                parameter=error.parameter,
            ) from error
        except EngineUnavailableError as error:
            _LOG.warning("call %s: the engine is unavailable: %s", call.call_id, error)
            raise engine_away(self._options.name) from error

    def _count_versions(self, call: pb.GenerateCall, result: EngineResult, versions: int) -> None:
        """Count a generation that straddled a weight update; it keeps its first version (CAP-8)."""
        if versions > 1:
            self.epoch_span_count += 1
            _LOG.warning(
                "call %s/%s was sampled by %d weight versions, stamped %d; epoch_span_count=%d",
                call.capture_key,
                call.call_id,
                versions,
                result.weight_version,
                self.epoch_span_count,
            )

    async def _capture(self, capture: AnsweredCall, generated: pb.GeneratedCall) -> None:
        """Stage the call and put the proof, or the reason why there is none, into the answer."""
        failure = await self._try_to_stage(capture, generated)
        if failure is None:
            return
        generated.failed.CopyFrom(failure)
        self._measures.count_failure(failure.reason)
        _LOG.warning(
            "call %s/%s is served without capture: %s: %s",
            capture.admission.capture_key,
            capture.admission.call_id,
            failure.reason,
            failure.detail,
        )

    async def _try_to_stage(
        self, capture: AnsweredCall, generated: pb.GeneratedCall
    ) -> pb.CaptureFailure | None:
        try:
            await self._stage(capture, generated)
        except CaptureError as error:
            reason, detail = error.reason, error.detail
        except CallforestError as error:
            late = error.reason == er.ERROR_REASON_ITEM_DEADLINE
            reason = core.STAGE_TIMEOUT if late else core.STAGE_FAILED
            detail = f"{reason_name(error.reason)}: {error.message}"
        except Exception as error:  # noqa: BLE001 - logged, and told as a failed capture
            end_if_without_memory("worker", error)  # else no fault takes the completion back
            reason, incident = core.STAGE_FAILED, secrets.token_hex(8)
            detail = f"a fault of the worker; its log has incident {incident}"
            _LOG.exception("incident %s: call %s", incident, capture.admission.call_id)
        else:
            return None
        return pb.CaptureFailure(reason=reason, detail=core.shortened(detail))

    async def _stage(self, capture: AnsweredCall, generated: pb.GeneratedCall) -> None:
        if capture.fault is not None:
            raise capture.fault
        staged, sequence = core.capture(capture.admission, capture.prefix, capture.result)
        decision = generated.decision if generated.HasField("decision") else None
        message = staged_call_to_proto(
            staged, capture.result.response, generated.completion, decision
        )
        failpoint("worker.before_stage")
        receipt = await self._stagings.stage(capture.context, message, capture.schedule.staged)
        failpoint("worker.after_stage")
        if receipt.HasField("winner"):
            _serve_first(receipt.winner, generated)
        elif are_coords_of(receipt.coords, staged):
            self._prefixes.keep(capture.context.tenant, staged.identity, sequence)
        else:
            raise CaptureError(core.STAGE_FAILED, "the store confirmed another call")
        generated.staged.CopyFrom(receipt.coords)


def _serve_first(
    winner: staging_pb.StagedWinner | staged_call_pb2.StagedCall, generated: pb.GeneratedCall
) -> None:
    """Answer with the generation that was staged first; another of the same call is nobody's."""
    generated.chat_response = winner.served_response
    generated.completion.CopyFrom(winner.completion)
    generated.ClearField("decision")
    if winner.HasField("decision"):
        generated.decision.CopyFrom(winner.decision)


def engine_away(engine: str) -> Refusal:
    """Make the refusal of an engine that does not answer."""
    return Refusal(
        er.ERROR_REASON_ENGINE_UNAVAILABLE,
        "the engine is starting, restarting or gone; nothing was generated",
        engine=engine,
    )


def _admission_of(call: pb.GenerateCall) -> capture_admission_pb2.CaptureAdmission | None:
    if not call.HasField("admission"):
        return None
    admission = call.admission
    if (admission.capture_key, admission.call_id) != (call.capture_key, call.call_id):
        raise malformed("callforest.worker.v1.GenerateCall", "the admission is of another call")
    return admission
