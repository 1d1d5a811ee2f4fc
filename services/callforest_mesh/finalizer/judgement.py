"""The judgement of a rollout: ledger evidence first, then its tokens."""

from __future__ import annotations

import asyncio
import time

from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.codec import ColumnError, call_record_from_proto, staged_call_from_proto
from callforest_client.ledger import LedgerClient, Manifest
from callforest_client.staging import StagingClient
from callforest_core.custody.row import LinearizedRow
from callforest_core.lineage.terminal import Terminal
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.finalizer import core, spans
from callforest_mesh.finalizer.segments import LostCallError, read_segments


class Judge:
    """Finds out what a rollout contributes.

    Args:
        ledger: where manifests are.
        staging: where tokens are.
        telemetry: what is said of the judgements.
    """

    def __init__(
        self,
        ledger: LedgerClient,
        staging: StagingClient,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._ledger = ledger
        self._staging = staging
        self._tracer = telemetry.tracer
        self._rollouts = spans.count_rollouts(telemetry.metrics)

    async def judge(
        self, request: pb.FinalizeRolloutRequest, scored_response_sha256: bytes
    ) -> row_log_pb2.FinalizedRollout:
        """Verify a rollout and write its receipt. What cannot train is masked, with the reason.

        Raises:
            Refusal: the request does not fit the sealed attempt, or a peer is away.
            CallforestError: the ledger refused.
        """
        begun_ns = time.time_ns()
        manifest = await self._manifest(request)
        calls = [] if manifest is None else spans.call_links(manifest.records)
        with self._tracer.linked("finalize rollout", calls, begun_ns=begun_ns) as span:
            finalized = await self._judged(request, manifest, scored_response_sha256)
            receipt = finalized.receipt
            if span.recording:
                receipt.traceparent = span.traceparent
                span.describe(spans.receipt_attributes(receipt))
        self._rollouts.add(1, receipt.mask_reason if receipt.masked else spans.TRAINS)
        return finalized

    async def _judged(
        self,
        request: pb.FinalizeRolloutRequest,
        manifest: Manifest | None,
        scored_response_sha256: bytes,
    ) -> row_log_pb2.FinalizedRollout:
        evidence = _evidence(request, manifest)
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
        attempt = evidence.attempt
        finalized = row_log_pb2.FinalizedRollout(
            receipt=core.make_receipt(request, evidence, terminal, row, mask),
            scored_response_sha256=scored_response_sha256,
            path_call_ids=row.call_ids if row is not None else (),
            path_bytes=path_bytes,
            attempt_number=attempt.attempt_number if attempt is not None else 0,
        )
        if request.HasField("declared_response_id"):
            finalized.declared_response_id = request.declared_response_id
        return finalized

    async def _manifest(self, request: pb.FinalizeRolloutRequest) -> Manifest | None:
        if not request.HasField("capture_key"):
            return None
        return await self._ledger.for_tenant(request.tenant).manifest(request.capture_key)

    async def _verified(
        self, request: pb.FinalizeRolloutRequest, evidence: core.Evidence, terminal: Terminal
    ) -> tuple[LinearizedRow | core.Mask, int]:
        """Read and verify every staged call; give the row and the size of its calls."""
        staging = self._staging.for_tenant(request.tenant)
        call_ids = [record.call_id for record in evidence.records]
        try:
            staged = await read_segments(staging, request.capture_key, call_ids)
            calls = [staged_call_from_proto(call) for call in staged]
        except LostCallError as error:
            return core.Mask(error.reason, str(error)), 0
        except ColumnError as error:
            return core.Mask("invalid_snapshot", str(error)), 0
        # Hashing thousands of tokens is no work for the loop that acknowledges.
        verified = await asyncio.to_thread(
            core.verify, request.capture_key, evidence.records, terminal, calls
        )
        if isinstance(verified, core.Mask):
            return verified, 0
        sizes = {call.call_id: call.ByteSize() for call in staged}
        return verified, sum(sizes[call_id] for call_id in verified.call_ids)


def _evidence(request: pb.FinalizeRolloutRequest, manifest: Manifest | None) -> core.Evidence:
    if manifest is None:
        return core.Evidence(None, (), ())
    core.check_attempt(request, manifest.attempt)
    records = tuple(call_record_from_proto(record) for record in manifest.records)
    return core.Evidence(manifest.attempt, records, tuple(manifest.failures))
