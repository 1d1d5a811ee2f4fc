"""The Finalizer's RPCs: request to core to store to response."""

from __future__ import annotations

from collections.abc import AsyncIterator

from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import finalizer_service_pb2_grpc as rpc
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.staging import StagingClient
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.finalizer import core, groups, spans
from callforest_mesh.finalizer.delivery import Subscriptions
from callforest_mesh.finalizer.judgement import Judge
from callforest_mesh.finalizer.parts import PartedGroup, needs_parts
from callforest_mesh.finalizer.segments import LostCallError, parts_of, read_proven
from callforest_mesh.finalizer.store import RowLog


class FinalizerServicer(rpc.FinalizerServiceServicer):
    """Serves receipts, groups and rows.

    Args:
        row_log: the durable log.
        judge: verifies rollouts.
        staging: where tokens are.
        subscriptions: the live deliveries.
        row_multiple: groups are padded to a multiple of it.
        min_valid_fraction: a group with a smaller part of verified rollouts is dropped.
        telemetry: what is said of what is published.
    """

    def __init__(
        self,
        row_log: RowLog,
        judge: Judge,
        staging: StagingClient,
        subscriptions: Subscriptions,
        *,
        row_multiple: int,
        min_valid_fraction: float | None = None,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._row_log = row_log
        self._judge = judge
        self._staging = staging
        self._subscriptions = subscriptions
        self._row_multiple = row_multiple
        self._min_valid_fraction = min_valid_fraction
        self._tracer = telemetry.tracer
        self._published = spans.Published(telemetry.metrics)
        self._finalized = spans.Finalized(telemetry.metrics)

    async def FinalizeRollout(
        self, request: pb.FinalizeRolloutRequest, context: object
    ) -> pb.FinalizeRolloutResponse:
        """Fix the receipt of one rollout."""
        asked = core.Asked.of(request)
        stored = self._row_log.rollout(request.tenant, request.rollout_id)
        if stored is None:
            failpoint("finalizer.before_judge")
            finalized = await self._judge.judge(request, asked)
            failpoint("finalizer.after_judge")
            stored = await self._row_log.keep_rollout(request.tenant, finalized)
            failpoint("finalizer.after_receipt")
            if stored is finalized:
                self._finalized.count(stored.receipt)
        field = core.differing_field(stored, request, asked)
        if field is not None:
            raise Refusal(
                er.ERROR_REASON_GROUP_MISMATCH,
                f"rollout {request.rollout_id} was finalized with another {field}",
                group_id=request.group_id,
                rollout_id=request.rollout_id,
                field=field,
            )
        return pb.FinalizeRolloutResponse(receipt=stored.receipt)

    async def FinalizeGroup(
        self, request: pb.FinalizeGroupRequest, context: object
    ) -> pb.FinalizeGroupResponse:
        """Publish one group."""
        logged = self._row_log.group(request.tenant, request.group_id)
        if logged is None:
            logged = await self._publish(request)
            self._subscriptions.published(request.tenant)
        elif len(logged.rollout_ids) != request.rollout_count and not logged.drop_reason:
            raise Refusal(
                er.ERROR_REASON_GROUP_MISMATCH,
                f"group {request.group_id} was published with another rollout_count",
                group_id=request.group_id,
                field="rollout_count",
            )
        return pb.FinalizeGroupResponse(
            cursor=logged.cursor,
            row_ids=[row.row_id for row in logged.rows],
            drop_reason=logged.drop_reason,
            heuristic_fraction=logged.heuristic_fraction,
            replacement_wanted=logged.drop_reason == groups.BELOW_MIN_VALID_FRACTION,
        )

    async def SubscribeRows(
        self, request_iterator: AsyncIterator[pb.SubscribeRowsRequest], context: object
    ) -> AsyncIterator[pb.SubscribeRowsResponse]:
        """Deliver groups."""
        async for response in self._subscriptions.serve(request_iterator):
            yield response

    async def GetGroup(
        self, request: pb.GetGroupRequest, context: object
    ) -> AsyncIterator[pb.GetGroupResponse]:
        """Read a published group."""
        logged = self._row_log.group(request.tenant, request.group_id)
        if logged is None:
            raise Refusal(
                er.ERROR_REASON_GROUP_INCOMPLETE,
                f"group {request.group_id} was not published",
                group_id=request.group_id,
            )
        if groups.comes_in_parts(logged) and not request.takes_parts:
            raise needs_parts(logged)
        try:
            async for response in self._read(request.tenant, logged):
                yield response
        except LostCallError as error:
            raise _unreadable(logged.group_id, error) from error

    async def GetRowLog(
        self, request: pb.GetRowLogRequest, context: object
    ) -> pb.GetRowLogResponse:
        """Say how far a tenant's log is."""
        state = self._row_log.state(request.tenant)
        return pb.GetRowLogResponse(
            head_cursor=state.head_cursor,
            committed_cursor=state.committed_cursor,
            consumer=state.consumer,
        )

    async def GetReceipt(
        self, request: pb.GetReceiptRequest, context: object
    ) -> pb.GetReceiptResponse:
        """Read the receipt of a rollout."""
        stored = self._row_log.rollout(request.tenant, request.rollout_id)
        if stored is None:
            raise Refusal(
                er.ERROR_REASON_RECEIPT_NOT_FOUND,
                f"rollout {request.rollout_id} was not finalized",
                rollout_id=request.rollout_id,
            )
        return pb.GetReceiptResponse(receipt=stored.receipt)

    async def _read(
        self, tenant: str, logged: row_log_pb2.LoggedGroup
    ) -> AsyncIterator[pb.GetGroupResponse]:
        """Give a published group as it is or was delivered."""
        staging = self._staging.for_tenant(tenant)
        receipts = [one.receipt for one in self._row_log.rollouts(tenant, logged)]
        if not groups.comes_in_parts(logged):
            segments = await read_proven(staging, logged.segments)
            batch = groups.make_batch(logged, receipts, segments)
            for response in parts_of(batch, pb.GetGroupResponse):
                yield response
            return
        parted = PartedGroup(logged, receipts, staging, pb.GetGroupResponse)
        while not parted.has_ended:
            for response in await parted.next_payload():
                yield response

    async def _publish(self, request: pb.FinalizeGroupRequest) -> row_log_pb2.LoggedGroup:
        """Lay a group out and publish it; once more whenever a rollout joined it meanwhile."""
        while True:  # each turn but the last has one rollout more, and slots end at 4,096
            rollouts = self._row_log.group_rollouts(request.tenant, request.group_id)
            wanted = list(range(request.rollout_count))
            if sorted(rollouts) != wanted and not request.abandon_reason:
                raise Refusal(
                    er.ERROR_REASON_GROUP_INCOMPLETE,
                    f"group {request.group_id} has not exactly the slots 0 to {wanted[-1]}",
                    group_id=request.group_id,
                    expected=request.rollout_count,
                    actual=",".join(map(str, sorted(rollouts)[:64])) or "none",
                )
            laid_out = groups.log_group(
                request.group_id,
                [rollouts[slot] for slot in sorted(rollouts)],
                row_multiple=self._row_multiple,
                abandon_reason=request.abandon_reason,
                min_valid_fraction=self._min_valid_fraction,
            )
            links = spans.rollout_links(laid_out, list(rollouts.values()))
            with self._tracer.linked("publish group", links) as span:
                laid_out.traceparent = span.traceparent
                failpoint("finalizer.before_publish")
                logged = await self._row_log.publish(request.tenant, laid_out)
                failpoint("finalizer.after_publish")
                if logged is not None and span.recording:
                    span.describe(spans.group_attributes(logged))
            if logged is not None:
                if logged is laid_out:
                    self._published.count(logged)
                return logged


def _unreadable(group_id: str, error: LostCallError) -> Refusal:
    """Say that a group's rows cannot be read: its calls are gone, or not as they were verified."""
    told = f"the rows of group {group_id} cannot be read any more: {error}"
    if error.is_gone:
        return Refusal(
            er.ERROR_REASON_CALL_NOT_FOUND,
            told,
            capture_key=error.capture_key,
            call_id=error.call_id,
        )
    key = f"{error.capture_key}/{error.call_id}"
    return Refusal(er.ERROR_REASON_STORE_CORRUPT, told, store="staging", key=key)
