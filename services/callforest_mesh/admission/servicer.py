"""AdmissionService: request -> ledger -> response, for whichever tenant each item names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Final, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from callforest.admission.v1 import admission_service_pb2 as pb
from callforest.admission.v1 import admission_service_pb2_grpc as rpc
from callforest.capture.v1 import attempt_pb2, capture_admission_pb2, item_pb2
from callforest_client.errors import CallforestError
from callforest_client.ledger import LedgerClient
from callforest_client.streams import ADMIT_CALLS
from callforest_mesh.admission import core
from callforest_mesh.chassis.call_attributes import intent_attributes
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.item_server import Drain, ItemServer
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry

T = TypeVar("T")
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Unary: TypeAlias = grpc.aio.ServicerContext[_Request, Awaitable[_Response]]
_VERDICTS: Final = tuple(
    one.name for one in capture_admission_pb2.Verdict.DESCRIPTOR.oneofs_by_name["verdict"].fields
)
_Items: TypeAlias = grpc.aio.ServicerContext[AsyncIterator[_Request], AsyncIterator[_Response]]


class AdmissionServicer(rpc.AdmissionServiceServicer):
    """Serves admission before one ledger.

    Args:
        ledger: decides and remembers.
        drain: when begun, item streams end.
        telemetry: what it says of its work.
        mode: of the attempts that are opened without one.
    """

    def __init__(
        self,
        ledger: LedgerClient,
        drain: Drain,
        telemetry: ServiceTelemetry = SILENT,
        *,
        mode: attempt_pb2.CaptureMode.ValueType = attempt_pb2.CAPTURE_MODE_CHAIN,
    ) -> None:
        self._ledger = ledger
        self._mode = mode
        self._calls = ItemServer(
            ADMIT_CALLS,
            self._admit,
            service="admission",
            drain=drain,
            telemetry=telemetry,
            describe=intent_attributes,
        )
        self._verdicts = telemetry.metrics.counter(
            Description("callforest.admission.calls", "{call}", "Judged calls by verdict."),
            {"verdict": _VERDICTS},
        )

    async def OpenAttempt(
        self,
        request: pb.OpenAttemptRequest,
        context: _Unary[pb.OpenAttemptRequest, pb.OpenAttemptResponse],
    ) -> pb.OpenAttemptResponse:
        """Open the next attempt of a rollout."""
        ledger = self._ledger.for_tenant(request.tenant)
        opening = ledger.open_attempt(
            request.rollout_id, request_id=request.request_id, mode=request.mode or self._mode
        )
        attempt = await _in_time(opening, context.time_remaining())
        failpoint("admission.after_open")
        return pb.OpenAttemptResponse(attempt=attempt)

    async def RestoreAttempt(
        self,
        request: pb.RestoreAttemptRequest,
        context: _Unary[pb.RestoreAttemptRequest, pb.RestoreAttemptResponse],
    ) -> pb.RestoreAttemptResponse:
        """Open the next attempt of a rollout with calls of the one before."""
        restoring = self._ledger.for_tenant(request.tenant).restore_attempt(
            request.rollout_id, request_id=request.request_id, point=request.point
        )
        attempt = await _in_time(restoring, context.time_remaining())
        return pb.RestoreAttemptResponse(attempt=attempt)

    async def AdmitCalls(
        self,
        request_iterator: AsyncIterator[pb.AdmitCallsRequest],
        context: _Items[pb.AdmitCallsRequest, pb.AdmitCallsResponse],
    ) -> AsyncIterator[pb.AdmitCallsResponse]:
        """Judge calls before inference."""
        async for response in self._calls.serve(request_iterator):
            yield cast("pb.AdmitCallsResponse", response)

    async def Measure(
        self,
        request: pb.MeasureRequest,
        context: _Unary[pb.MeasureRequest, pb.MeasureResponse],
    ) -> pb.MeasureResponse:
        """Judge a call that will not be made."""
        intent = request.intent
        which = intent.WhichOneof("probe")
        finding = self._ledger.for_tenant(request.tenant).find_predecessor(
            intent.capture_key,
            intent.source if which == "source" else intent.chain,
            configuration_digest=intent.configuration_digest,
        )
        return pb.MeasureResponse(verdict=await _in_time(finding, context.time_remaining()))

    async def CloseAttempt(
        self,
        request: pb.CloseAttemptRequest,
        context: _Unary[pb.CloseAttemptRequest, pb.CloseAttemptResponse],
    ) -> pb.CloseAttemptResponse:
        """End new calls of an attempt."""
        failpoint("admission.before_close")
        closing = self._ledger.for_tenant(request.tenant).close_admissions(request.capture_key)
        attempt = await _in_time(closing, context.time_remaining())
        failpoint("admission.after_close")
        return pb.CloseAttemptResponse(attempt=attempt)

    async def _admit(
        self, context: item_pb2.ItemContext, intent: attempt_pb2.CallIntent
    ) -> capture_admission_pb2.Verdict:
        left_s = context.timeout_ms / 1000
        judging = self._ledger.for_tenant(context.tenant).record_intent(
            intent, timeout_s=core.ledger_time_s(left_s), traceparent=context.traceparent
        )
        failpoint("admission.before_intent")
        verdict = await _answered(judging)
        failpoint("admission.after_verdict")
        self._verdicts.add(1, verdict.WhichOneof("verdict") or "")
        return verdict


async def _in_time(asked: Awaitable[T], left_s: float | None) -> T:
    """Await the ledger's answer.

    Args:
        asked: the call, with a deadline of its own.
        left_s: how long the caller still waits, None when it is the call's own deadline.

    Raises:
        Refusal: PEER_UNAVAILABLE.
        CallforestError: the ledger's own answer.
    """
    try:
        async with asyncio.timeout(None if left_s is None else core.ledger_time_s(left_s)):
            return await _answered(asked)
    except TimeoutError:
        raise core.ledger_absent() from None


async def _answered(asked: Awaitable[T]) -> T:
    """Await the ledger's answer by the call's own deadline; raises what `_in_time` does."""
    try:
        return await asked
    except CallforestError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED and core.is_absence(error.reason):
            raise core.ledger_absent() from error
        raise
