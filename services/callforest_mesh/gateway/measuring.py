"""Measuring a call that is not made (CAP-10): every step of a call up to its generation.

The same reading, admission, decision and splice as a call's; no intent, no record, nothing kept.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf import timestamp_pb2

from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest_client.admission import AdmissionClient
from callforest_client.errors import CallforestError
from callforest_client.worker import WorkerClient
from callforest_mesh.gateway import core
from callforest_mesh.gateway.context_report import context_report
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
from callforest_mesh.gateway.options import GatewayOptions
from callforest_mesh.gateway.refusals import faulty, of_service, overloaded, refused_verdict

_LOG = logging.getLogger("callforest")


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """The size of a call that was not made.

    Attributes:
        token_count: prompt tokens that the model would see; never the tokens.
        is_continuation: whether captured tokens of an earlier call would head them.
        context: how the request's history would be taken; None in chain mode.
    """

    token_count: int
    is_continuation: bool
    context: pb.ContextReport | None


class Measuring:
    """Says how many prompt tokens calls would have.

    Args:
        admission: judges them, and announces nothing.
        worker: renders and decides, and generates nothing.
        configuration: of the engine.
        options: bounds.
        new_id: names what would be a call.
        now_ns: the wall clock, nanoseconds since the epoch.
    """

    def __init__(
        self,
        admission: AdmissionClient,
        worker: WorkerClient,
        configuration: EngineConfiguration,
        options: GatewayOptions,
        *,
        new_id: Callable[[], str],
        now_ns: Callable[[], int],
    ) -> None:
        self._admission = admission
        self._worker = worker
        self._configuration = configuration
        self._options = options
        self._new_id = new_id
        self._now_ns = now_ns
        self._running = 0

    async def measure(
        self, capture_key: str, request: core.NormalisedRequest, *, traceparent: str = ""
    ) -> Measured:
        """Measure one call.

        Raises:
            HttpRefusal: what a call would be refused with.
        """
        if self._running >= self._options.measures_max:
            raise overloaded("measured_calls", self._options.measures_max)
        self._running += 1
        try:
            return await self._measure(capture_key, request, traceparent)
        except CallforestError as error:
            refusal = of_service(error)
            refusal.parameter = core.parameter_of(request, refusal.parameter)
            raise refusal from error
        finally:
            self._running -= 1

    async def _measure(
        self, capture_key: str, request: core.NormalisedRequest, traceparent: str
    ) -> Measured:
        digest = await self._configuration.digest()
        call_id = self._new_id()
        time = timestamp_pb2.Timestamp()
        time.FromNanoseconds(self._now_ns())
        intent = core.intent_of(request, capture_key, call_id, time, digest)
        verdict = await self._admission.measure(intent)
        match verdict.WhichOneof("verdict"):
            case "refused":
                raise refused_verdict(capture_key, call_id, verdict.refused)
            case None:
                incident_id = secrets.token_hex(8)
                _LOG.error("incident %s: a verdict that this gateway does not know", incident_id)
                raise faulty(incident_id)
        call = core.generation_of(request, verdict, intent)
        try:
            measured = await self._worker.measure(
                call, timeout_s=self._options.generate_timeout_s, traceparent=traceparent
            )
        except CallforestError as error:
            if core.is_configuration_change(error.reason):
                self._configuration.forget(digest)
            raise
        decision = measured.decision if measured.HasField("decision") else None
        context = None
        if core.is_forest(intent):
            difference = request.evidence.explain(verdict)
            context = context_report(verdict, decision, difference)
        return Measured(
            token_count=measured.prompt_token_count,
            is_continuation=context.is_continuation
            if context
            else verdict.WhichOneof("verdict") == "continuation",
            context=context,
        )
