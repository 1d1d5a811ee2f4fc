"""The Finalizer's RPCs: request to core to store to response."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from callforest_client.codec import call_record_from_proto, staged_call_from_proto

from callforest.capture.v1 import receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import finalizer_service_pb2_grpc as rpc
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.errors import RefusedError
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_core.custody.row import LinearizedRow
from callforest_core.lineage.terminal import Terminal
from callforest_core.refusal import Refusal
from callforest_mesh.finalizer import core
from callforest_mesh.finalizer.delivery import Subscriptions
from callforest_mesh.finalizer.store import RowLog

_UNREADABLE = {
    er.ERROR_REASON_CALL_NOT_FOUND: "staged_call_missing",
    er.ERROR_REASON_STORE_CORRUPT: "staged_call_corrupt",
}


class FinalizerServicer(rpc.FinalizerServiceServicer):
    """Serves receipts, groups and rows.

    Args:
        row_log: the durable log.
        ledger: where manifests are.
        staging: where tokens are.
        subscriptions: the live deliveries.
        row_multiple: groups are padded to a multiple of it.
    """

    def __init__(
        self,
        row_log: RowLog,
        ledger: LedgerClient,
        staging: StagingClient,
        subscriptions: Subscriptions,
        *,
        row_multiple: int,
    ) -> None:
        self._row_log = row_log
        self._ledger = ledger
        self._staging = staging
        self._subscriptions = subscriptions
        self._row_multiple = row_multiple

    async def FinalizeRollout(
        self, request: pb.FinalizeRolloutRequest, context: object
    ) -> pb.FinalizeRolloutResponse:
        """Fix the receipt of one rollout."""
        sha256 = hashlib.sha256(request.scored_response).digest()
        stored = self._row_log.rollout(request.tenant, request.rollout_id)
        if stored is None:
            finalized = await self._finalize(request, sha256)
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
            logged = await self._row_log.publish(
                request.tenant,
                core.log_group(
                    request.group_id,
                    [rollouts[slot] for slot in sorted(rollouts)],
                    row_multiple=self._row_multiple,
                    abandon_reason=request.abandon_reason,
                ),
            )
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

    async def _finalize(
        self, request: pb.FinalizeRolloutRequest, sha256: bytes
    ) -> row_log_pb2.FinalizedRollout:
        """Judge a rollout: ledger evidence first, then its tokens."""
        evidence = await self._evidence(request)
        mask = core.mask_before_tokens(evidence)
        terminal: Terminal | None = None
        row: LinearizedRow | None = None
        path_bytes = 0
        if mask is None:
            terminal = core.attribute(request, evidence.records)
            if terminal.call_id is None:
                mask = core.Mask("terminal_not_attributed", terminal.trail)
            else:
                verified, path_bytes = await self._verified(request, evidence, terminal)
                if isinstance(verified, core.Mask):
                    mask = verified
                else:
                    row = verified
        receipt = core.make_receipt(request, evidence, terminal, row, mask)
        return _finalized(request, receipt, row, path_bytes, sha256, evidence)

    async def _evidence(self, request: pb.FinalizeRolloutRequest) -> core.Evidence:
        if not request.HasField("capture_key"):
            return core.Evidence(None, (), ())
        manifest = await self._ledger.for_tenant(request.tenant).manifest(request.capture_key)
        core.check_attempt(request, manifest.attempt)
        records = tuple(call_record_from_proto(record) for record in manifest.records)
        return core.Evidence(manifest.attempt, records, tuple(manifest.failures))

    async def _verified(
        self, request: pb.FinalizeRolloutRequest, evidence: core.Evidence, terminal: Terminal
    ) -> tuple[LinearizedRow | core.Mask, int]:
        """Fetch and verify every staged call; give the row and the size of its calls."""
        staging = self._staging.for_tenant(request.tenant)
        call_ids = [record.call_id for record in evidence.records]
        try:
            staged = await staging.fetch(request.capture_key, call_ids)
        except RefusedError as error:
            reason = _UNREADABLE.get(error.reason)
            if reason is None:
                raise
            return core.Mask(reason, error.message), 0
        sizes = {}
        for call in staged:
            call.ClearField("served_response")
            sizes[call.call_id] = call.ByteSize()
        calls = [staged_call_from_proto(call) for call in staged]
        # Hashing thousands of tokens is no work for the loop that acknowledges.
        verified = await asyncio.to_thread(
            core.verify, request.capture_key, evidence.records, terminal, calls
        )
        if isinstance(verified, core.Mask):
            return verified, 0
        return verified, sum(sizes[call_id] for call_id in verified.call_ids)


def _finalized(
    request: pb.FinalizeRolloutRequest,
    receipt: receipt_pb2.Receipt,
    row: LinearizedRow | None,
    path_bytes: int,
    sha256: bytes,
    evidence: core.Evidence,
) -> row_log_pb2.FinalizedRollout:
    finalized = row_log_pb2.FinalizedRollout(
        receipt=receipt,
        scored_response_sha256=sha256,
        path_call_ids=row.call_ids if row is not None else (),
        path_bytes=path_bytes,
        attempt_number=evidence.attempt.attempt_number if evidence.attempt is not None else 0,
    )
    if request.HasField("declared_response_id"):
        finalized.declared_response_id = request.declared_response_id
    return finalized
