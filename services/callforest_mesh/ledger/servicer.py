"""LedgerService: request -> ledger -> response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeAlias, TypeVar, cast

import grpc.aio

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2, item_pb2
from callforest.ledger.v1 import ledger_care_service_pb2 as care_pb
from callforest.ledger.v1 import ledger_care_service_pb2_grpc as care_rpc
from callforest.ledger.v1 import ledger_service_pb2 as pb
from callforest.ledger.v1 import ledger_service_pb2_grpc as rpc
from callforest.ledger.v1 import restore_attempt_pb2 as restore_pb
from callforest_client.streams import COMMIT_CALLS, RECORD_INTENTS
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.call_attributes import entry_attributes, intent_attributes
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.item_server import Drain, ItemServer
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.chassis.validation import malformed
from callforest_mesh.ledger.ledger import Ledger
from callforest_mesh.ledger.outline import CHAIN, FOREST, AttemptKey
from callforest_mesh.ledger.restore_measures import RestoreMeasures

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Unary: TypeAlias = grpc.aio.ServicerContext[_Request, Awaitable[_Response]]
_Pages: TypeAlias = grpc.aio.ServicerContext[_Request, AsyncIterator[_Response]]
_Items: TypeAlias = grpc.aio.ServicerContext[AsyncIterator[_Request], AsyncIterator[_Response]]


class LedgerServicer(rpc.LedgerServiceServicer):
    """Serves one ledger.

    Args:
        ledger: answers.
        drain: when begun, item streams end.
        telemetry: what it says of its work.
    """

    def __init__(self, ledger: Ledger, drain: Drain, telemetry: ServiceTelemetry = SILENT) -> None:
        self._ledger = ledger
        self._intents = ItemServer(
            RECORD_INTENTS,
            self._record_intent,
            service="ledger",
            drain=drain,
            telemetry=telemetry,
            describe=intent_attributes,
        )
        self._commits = ItemServer(
            COMMIT_CALLS,
            self._commit_call,
            service="ledger",
            drain=drain,
            telemetry=telemetry,
            describe=entry_attributes,
        )
        self._restores = RestoreMeasures(telemetry.metrics)

    async def OpenAttempt(
        self,
        request: pb.OpenAttemptRequest,
        context: _Unary[pb.OpenAttemptRequest, pb.OpenAttemptResponse],
    ) -> pb.OpenAttemptResponse:
        """Open the next attempt of a rollout."""
        attempt = await self._ledger.open_attempt(
            request.tenant, request.rollout_id, request.request_id, _mode(request)
        )
        failpoint("ledger.after_open")
        return pb.OpenAttemptResponse(attempt=attempt)

    async def RestoreAttempt(
        self,
        request: restore_pb.RestoreAttemptRequest,
        context: _Unary[restore_pb.RestoreAttemptRequest, restore_pb.RestoreAttemptResponse],
    ) -> restore_pb.RestoreAttemptResponse:
        """Open the next attempt of a rollout with calls of the one before."""
        try:
            restored = await self._ledger.restore_attempt(
                request.tenant, request.rollout_id, request.request_id, request.point
            )
        except Refusal as refusal:
            self._restores.count_refused(request, refusal)
            raise
        self._restores.count(request, restored)
        return restore_pb.RestoreAttemptResponse(attempt=restored.attempt)

    async def RecordIntents(
        self,
        request_iterator: AsyncIterator[pb.RecordIntentsRequest],
        context: _Items[pb.RecordIntentsRequest, pb.RecordIntentsResponse],
    ) -> AsyncIterator[pb.RecordIntentsResponse]:
        """Record calls before inference."""
        async for response in self._intents.serve(request_iterator):
            yield cast("pb.RecordIntentsResponse", response)

    async def FindPredecessor(
        self,
        request: pb.FindPredecessorRequest,
        context: _Unary[pb.FindPredecessorRequest, pb.FindPredecessorResponse],
    ) -> pb.FindPredecessorResponse:
        """Say what a request would continue."""
        return pb.FindPredecessorResponse(verdict=await self._ledger.find_predecessor(request))

    async def GetCall(
        self,
        request: pb.GetCallRequest,
        context: _Unary[pb.GetCallRequest, pb.GetCallResponse],
    ) -> pb.GetCallResponse:
        """Show one call."""
        return await self._ledger.get_call(_key(request), request.call_id)

    async def CommitCalls(
        self,
        request_iterator: AsyncIterator[pb.CommitCallsRequest],
        context: _Items[pb.CommitCallsRequest, pb.CommitCallsResponse],
    ) -> AsyncIterator[pb.CommitCallsResponse]:
        """Append rows."""
        async for response in self._commits.serve(request_iterator):
            yield cast("pb.CommitCallsResponse", response)

    async def CloseAdmissions(
        self,
        request: pb.CloseAdmissionsRequest,
        context: _Unary[pb.CloseAdmissionsRequest, pb.CloseAdmissionsResponse],
    ) -> pb.CloseAdmissionsResponse:
        """End new calls of an attempt."""
        failpoint("ledger.before_close")
        attempt = await self._ledger.close_admissions(_key(request))
        failpoint("ledger.after_close")
        return pb.CloseAdmissionsResponse(attempt=attempt)

    async def AwaitSettled(
        self,
        request: pb.AwaitSettledRequest,
        context: _Unary[pb.AwaitSettledRequest, pb.AwaitSettledResponse],
    ) -> pb.AwaitSettledResponse:
        """Wait until no admitted call is pending."""
        attempt = await self._ledger.await_settled(_key(request), wait_s=request.wait_ms / 1000)
        return pb.AwaitSettledResponse(attempt=attempt)

    async def SealAttempt(
        self,
        request: pb.SealAttemptRequest,
        context: _Unary[pb.SealAttemptRequest, pb.SealAttemptResponse],
    ) -> pb.SealAttemptResponse:
        """Make an attempt's manifest final."""
        failpoint("ledger.before_seal")
        attempt = await self._ledger.seal(_key(request))
        failpoint("ledger.after_seal")
        return pb.SealAttemptResponse(attempt=attempt)

    async def GetManifest(
        self,
        request: pb.GetManifestRequest,
        context: _Pages[pb.GetManifestRequest, pb.GetManifestResponse],
    ) -> AsyncIterator[pb.GetManifestResponse]:
        """Read an attempt and its rows."""
        async for part in self._ledger.manifest(_key(request)):
            if isinstance(part, attempt_pb2.Attempt):
                yield pb.GetManifestResponse(attempt=part)
            elif part:
                yield pb.GetManifestResponse(entries=part)

    async def HasRows(
        self,
        request: pb.HasRowsRequest,
        context: _Unary[pb.HasRowsRequest, pb.HasRowsResponse],
    ) -> pb.HasRowsResponse:
        """Say whether a call committed or failed."""
        return pb.HasRowsResponse(has_rows=await self._ledger.has_rows(_key(request)))

    def _record_intent(
        self, context: item_pb2.ItemContext, intent: attempt_pb2.CallIntent
    ) -> asyncio.Future[capture_admission_pb2.Verdict]:
        failpoint("ledger.before_intent")
        return self._ledger.record_intent(context.tenant, intent)

    def _commit_call(
        self, context: item_pb2.ItemContext, entry: attempt_pb2.ManifestEntry
    ) -> asyncio.Future[pb.CommittedEntry]:
        failpoint("ledger.before_row")
        which = entry.WhichOneof("entry")
        if which == "record":
            return self._ledger.commit_record(context.tenant, entry.record)
        if which == "failure":
            return self._ledger.commit_failure(context.tenant, entry.failure)
        if which == "withdrawal":
            return self._ledger.commit_withdrawal(context.tenant, entry.withdrawal)
        fault = "entry: neither a record, a failure nor a withdrawal"
        raise malformed(entry.DESCRIPTOR.full_name, fault)


class LedgerCareServicer(care_rpc.LedgerCareServiceServicer):
    """Serves whoever looks after the ledger's store.

    Args:
        ledger: answers.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def ForgetAttempt(
        self,
        request: care_pb.ForgetAttemptRequest,
        context: _Unary[care_pb.ForgetAttemptRequest, care_pb.ForgetAttemptResponse],
    ) -> care_pb.ForgetAttemptResponse:
        """Remove the log of a sealed attempt."""
        return care_pb.ForgetAttemptResponse(event_count=await self._ledger.forget(_key(request)))


_Keyed: TypeAlias = (
    pb.GetCallRequest
    | pb.CloseAdmissionsRequest
    | pb.AwaitSettledRequest
    | pb.SealAttemptRequest
    | pb.GetManifestRequest
    | pb.HasRowsRequest
    | care_pb.ForgetAttemptRequest
)


def _key(request: _Keyed) -> AttemptKey:
    return AttemptKey(request.tenant, request.capture_key)


def _mode(request: pb.OpenAttemptRequest) -> attempt_pb2.CaptureMode.ValueType:
    """Give the mode that is asked for; unspecified is chain mode, an unknown one is refused."""
    if request.mode == attempt_pb2.CAPTURE_MODE_UNSPECIFIED:
        return CHAIN
    if request.mode not in {CHAIN, FOREST}:
        raise malformed(request.DESCRIPTOR.full_name, f"mode: {request.mode} is not known")
    return request.mode
