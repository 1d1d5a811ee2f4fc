"""The Finalizer's RPCs: request to core to store to response."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import finalizer_service_pb2_grpc as rpc
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.finalizer import core, spans
from callforest_mesh.finalizer.delivery import Subscriptions
from callforest_mesh.finalizer.judgement import Judge
from callforest_mesh.finalizer.store import RowLog


class FinalizerServicer(rpc.FinalizerServiceServicer):
    """Serves receipts, groups and rows.

    Args:
        row_log: the durable log.
        judge: verifies rollouts.
        subscriptions: the live deliveries.
        row_multiple: groups are padded to a multiple of it.
        telemetry: what is said of what is published.
    """

    def __init__(
        self,
        row_log: RowLog,
        judge: Judge,
        subscriptions: Subscriptions,
        *,
        row_multiple: int,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._row_log = row_log
        self._judge = judge
        self._subscriptions = subscriptions
        self._row_multiple = row_multiple
        self._tracer = telemetry.tracer
        self._published = spans.Published(telemetry.metrics)

    async def FinalizeRollout(
        self, request: pb.FinalizeRolloutRequest, context: object
    ) -> pb.FinalizeRolloutResponse:
        """Fix the receipt of one rollout."""
        sha256 = hashlib.sha256(request.scored_response).digest()
        stored = self._row_log.rollout(request.tenant, request.rollout_id)
        if stored is None:
            finalized = await self._judge.judge(request, sha256)
            stored = await self._row_log.keep_rollout(request.tenant, finalized)
        field = core.differing_field(stored, request, sha256)
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
        )

    async def SubscribeRows(
        self, request_iterator: AsyncIterator[pb.SubscribeRowsRequest], context: object
    ) -> AsyncIterator[pb.SubscribeRowsResponse]:
        """Deliver groups."""
        async for response in self._subscriptions.serve(request_iterator):
            yield response

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
            laid_out = core.log_group(
                request.group_id,
                [rollouts[slot] for slot in sorted(rollouts)],
                row_multiple=self._row_multiple,
                abandon_reason=request.abandon_reason,
            )
            links = spans.rollout_links(laid_out, list(rollouts.values()))
            with self._tracer.linked("publish group", links) as span:
                laid_out.traceparent = span.traceparent
                logged = await self._row_log.publish(request.tenant, laid_out)
                if logged is not None and span.recording:
                    span.describe(spans.group_attributes(logged))
            if logged is not None:
                if logged is laid_out:
                    self._published.count(logged)
                return logged
