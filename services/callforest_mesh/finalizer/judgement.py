"""The judgement of a rollout: ledger evidence first, then its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from callforest.capture.v1 import attempt_pb2, receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.codec import ColumnError, call_record_from_proto, staged_call_from_proto
from callforest_client.ledger import LedgerClient, Manifest
from callforest_client.staging import StagingClient
from callforest_core.custody.call import StagedCall
from callforest_core.custody.row import LinearizedRow
from callforest_core.forest.reconstruction import Forest
from callforest_core.forest.selection import SelectionRefusedError
from callforest_core.lineage.terminal import Terminal
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.finalizer import core, forest, spans
from callforest_mesh.finalizer.policies import Policy
from callforest_mesh.finalizer.segments import LostCallError, read_segments

_MODES = (
    attempt_pb2.CAPTURE_MODE_UNSPECIFIED,
    attempt_pb2.CAPTURE_MODE_CHAIN,
    attempt_pb2.CAPTURE_MODE_FOREST,
)
_T = TypeVar("_T", LinearizedRow, Forest)


@dataclass(frozen=True, slots=True)
class Judged:
    """A rollout's receipt and its rows.

    Attributes:
        receipt: fixed.
        paths: the calls of each row; none when masked.
        sizes: of all their calls in a batch, by call.
    """

    receipt: receipt_pb2.Receipt
    paths: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]


class Judge:
    """Finds out what a rollout contributes.

    Args:
        ledger: where manifests are.
        staging: where tokens are.
        policy: what selects in forest mode when a request does not.
        telemetry: what is said of the judgements.
        salvages: verified paths of an incomplete attempt of forest mode train (FIN-8).
    """

    def __init__(
        self,
        ledger: LedgerClient,
        staging: StagingClient,
        policy: Policy,
        telemetry: ServiceTelemetry = SILENT,
        *,
        salvages: bool = False,
    ) -> None:
        self._salvages = salvages
        self._ledger = ledger
        self._staging = staging
        self._policy = policy
        self._tracer = telemetry.tracer
        self._refused = spans.Refused(telemetry.metrics)

    async def judge(
        self, request: pb.FinalizeRolloutRequest, asked: core.Asked
    ) -> row_log_pb2.FinalizedRollout:
        """Verify a rollout and write its receipt. What cannot train is masked, with the reason.

        Raises:
            Refusal: the request does not fit the sealed attempt, its selection cannot be taken,
                or a peer is away.
            CallforestError: the ledger refused.
        """
        begun_ns = time.time_ns()
        manifest = await self._manifest(request)
        calls = [] if manifest is None else spans.call_links(manifest.records)
        with self._tracer.linked("finalize rollout", calls, begun_ns=begun_ns) as span:
            finalized = await self._finalized(request, manifest, asked)
            receipt = finalized.receipt
            if span.recording:
                receipt.traceparent = span.traceparent
                span.describe(spans.receipt_attributes(receipt))
        return finalized

    async def _finalized(
        self, request: pb.FinalizeRolloutRequest, manifest: Manifest | None, asked: core.Asked
    ) -> row_log_pb2.FinalizedRollout:
        evidence = _evidence(request, manifest)
        attempt = evidence.attempt
        in_forest = attempt is not None and attempt.mode == attempt_pb2.CAPTURE_MODE_FOREST
        if request.HasField("selection") and attempt is not None and not in_forest:
            raise _wrong_mode(attempt)
        judged = await (self._forest if in_forest else self._chain)(request, evidence)
        finalized = row_log_pb2.FinalizedRollout(
            receipt=judged.receipt,
            scored_response_sha256=asked.scored_response_sha256,
            result_sha256=asked.result_sha256,
            path_bytes=sum(judged.sizes.values()),
            call_bytes=[judged.sizes.get(call.call_id, 0) for call in judged.receipt.calls],
            attempt_number=attempt.attempt_number if attempt is not None else 0,
            mask_refused_selection=request.mask_refused_selection,
        )
        for path in judged.paths:
            if in_forest:
                finalized.paths.add(call_ids=path)
            else:
                finalized.path_call_ids.extend(path)
        if request.HasField("declared_response_id"):
            finalized.declared_response_id = request.declared_response_id
        if request.HasField("selection"):
            finalized.selection.CopyFrom(request.selection)
        return finalized

    async def _chain(self, request: pb.FinalizeRolloutRequest, evidence: core.Evidence) -> Judged:
        """Judge a rollout of which the path to the scored call trains."""
        mask = core.mask_before_tokens(evidence)
        terminal: Terminal | None = None
        row: LinearizedRow | None = None
        kept: dict[str, int] = {}
        if mask is None:
            terminal = core.attribute(request, evidence.records)
            if terminal.call_id is None:
                mask = core.Mask("terminal_not_attributed", terminal.trail)
        if mask is None and terminal is not None:
            attributed = terminal
            verified, sizes = await self._verified(
                request,
                evidence,
                lambda calls: core.verify(request.capture_key, evidence.records, attributed, calls),
            )
            if isinstance(verified, core.Mask):
                mask = verified
            else:
                row = verified
                mask = _environment_mask(request)
                kept = {call_id: sizes[call_id] for call_id in row.call_ids}
        receipt = core.make_receipt(request, evidence, terminal, row, mask)
        if row is None or mask is not None:
            return Judged(receipt, (), {})
        return Judged(receipt, (row.call_ids,), kept)

    async def _forest(self, request: pb.FinalizeRolloutRequest, evidence: core.Evidence) -> Judged:
        """Judge a rollout of which all selected calls train.

        What the environment masks needs no evidence: what can be selected and verified of it all
        the same is counted (FIN-9).
        """
        choice: forest.Choice | None = None
        salvaged: core.Mask | None = None
        early = mask = forest.mask_before_selection(evidence)
        if mask is None:
            choice, mask = await self._chosen(request, evidence)
        if mask is not None and self._may_salvage(request, mask):
            salvaged = mask
            choice, mask = await self._salvaged(request, evidence, mask)
        grown: Forest | None = None
        kept: dict[str, int] = {}
        if mask is None and choice is not None:
            chosen = choice
            verified, sizes = await self._verified(
                request,
                evidence,
                lambda calls: forest.verify(request.capture_key, evidence.records, chosen, calls),
            )
            if isinstance(verified, core.Mask):
                mask = verified
            else:
                grown = verified
                mask = _environment_mask(request)
                kept = {call_id: sizes[call_id] for call_id in chosen.selection.call_ids}
        if mask is not None and early is None:
            mask = _environment_mask(request, besides=mask) or mask
        salvaged = salvaged if mask is None else None
        receipt = forest.make_receipt(request, evidence, choice, grown, mask, salvaged)
        if grown is None or mask is not None:
            return Judged(receipt, (), {})
        return Judged(receipt, tuple(row.line.call_ids for row in grown.rows), kept)

    def _may_salvage(self, request: pb.FinalizeRolloutRequest, mask: core.Mask) -> bool:
        incomplete = mask.reason in (core.PENDING_CALL, core.CAPTURE_POISONED)
        return self._salvages and incomplete and not request.environment_masked

    async def _salvaged(
        self, request: pb.FinalizeRolloutRequest, evidence: core.Evidence, mask: core.Mask
    ) -> tuple[forest.Choice | None, core.Mask | None]:
        """Select what is verified of an incomplete attempt, or keep the mask, with why."""
        found = await asyncio.to_thread(forest.salvage, request, evidence, self._policy)
        if isinstance(found, forest.Choice):
            return found, None
        told = f"{mask.detail}; not salvaged, {found.reason}: {found.detail}"
        return None, core.Mask(mask.reason, told)

    async def _chosen(
        self, request: pb.FinalizeRolloutRequest, evidence: core.Evidence
    ) -> tuple[forest.Choice | None, core.Mask | None]:
        """Select, on a thread: matching a long history takes its time, a policy may too."""
        try:
            choice = await asyncio.to_thread(forest.choose, request, evidence.records, self._policy)
            return choice, forest.mask_of_selection(evidence, choice.selection)
        except SelectionRefusedError as error:
            if request.environment_masked:
                return None, forest.mask_of_refusal(error)
            self._refused.count(error.fault)
            if request.mask_refused_selection:
                return None, forest.mask_of_refusal(error)
            raise forest.refusal(request.rollout_id, error) from error

    async def _manifest(self, request: pb.FinalizeRolloutRequest) -> Manifest | None:
        if not request.HasField("capture_key"):
            return None
        return await self._ledger.for_tenant(request.tenant).manifest(request.capture_key)

    async def _verified(
        self,
        request: pb.FinalizeRolloutRequest,
        evidence: core.Evidence,
        verify: Callable[[list[StagedCall]], _T | core.Mask],
    ) -> tuple[_T | core.Mask, dict[str, int]]:
        """Read every staged call and verify it; give what it is and the calls' sizes."""
        staging = self._staging.for_tenant(request.tenant)
        names = [
            (record.owner_in(request.capture_key), record.call_id) for record in evidence.records
        ]
        try:
            staged = await read_segments(staging, names)
            calls = [staged_call_from_proto(call) for call in staged]
        except LostCallError as error:
            return core.Mask(error.reason, str(error)), {}
        except ColumnError as error:
            return core.Mask("invalid_snapshot", str(error)), {}
        # Hashing thousands of tokens is no work for the loop that acknowledges.
        verified = await asyncio.to_thread(verify, calls)
        return verified, {call.call_id: call.ByteSize() for call in staged}


def _environment_mask(
    request: pb.FinalizeRolloutRequest, besides: core.Mask | None = None
) -> core.Mask | None:
    """Give the environment's mask, which tells what else would have masked the rollout."""
    if not request.environment_masked:
        return None
    told = "the environment keeps the rollout from training"
    if besides is not None and besides.reason != core.ENVIRONMENT_MASKED:
        told = f"{told}; besides, {besides.reason}: {besides.detail}"
    return core.Mask(core.ENVIRONMENT_MASKED, told)


def _evidence(request: pb.FinalizeRolloutRequest, manifest: Manifest | None) -> core.Evidence:
    if manifest is None:
        return core.Evidence(None, (), ())
    attempt = manifest.attempt
    core.check_attempt(request, attempt)
    if attempt.mode not in _MODES:
        raise _wrong_mode(attempt)
    records = tuple(call_record_from_proto(record) for record in manifest.records)
    return core.Evidence(attempt, records, tuple(manifest.failures))


def _wrong_mode(attempt: attempt_pb2.Attempt) -> Refusal:
    mode = attempt.mode
    known = mode in attempt_pb2.CaptureMode.values()
    return Refusal(
        er.ERROR_REASON_MODE_MISMATCH,
        "only an attempt of forest mode has a selection",
        capture_key=attempt.capture_key,
        expected=attempt_pb2.CaptureMode.Name(attempt_pb2.CAPTURE_MODE_FOREST),
        actual=attempt_pb2.CaptureMode.Name(mode) if known else str(mode),
    )
