"""The rollout owner's side: open an attempt, hand its URL to a harness, finish it, publish a group.

What a harness needs is the URL alone. What the owner needs is here in five calls. All but `open`
may be repeated; another `open` begins another attempt and gives the one before up. `restore` begins
another that goes on from a checkpoint of the one before.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from callforest.capture.v1 import attempt_pb2, receipt_pb2, restore_point_pb2, selection_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.admission import AdmissionClient
from callforest_client.errors import RefusedError
from callforest_client.finalizer import FinalizerClient
from callforest_client.ledger import SETTLE_WAIT_S, LedgerClient
from callforest_client.restore_point import check_restore_point
from callforest_core.custody.attempts import attempt_name


@dataclass(frozen=True, slots=True)
class OpenRollout:
    """One try at a rollout, ready for a harness.

    Attributes:
        rollout_id: the logical rollout.
        attempt: the opened attempt.
        base_url: what an OpenAI-style client takes as its base URL.
    """

    rollout_id: str
    attempt: attempt_pb2.Attempt
    base_url: str

    @property
    def capture_key(self) -> str:
        """The attempt's name."""
        return self.attempt.capture_key


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended, as its harness says.

    Attributes:
        reward: finite.
        declared_response_id: the scored response's id, if the harness declares one.
        scored_response: the scored response as JSON bytes, or b"".
        result: the harness's ordinary result as JSON bytes, or b""; what forest mode selects from.
        selection: the calls that train, of forest mode, instead of having a policy choose them.
        environment_masked: the environment keeps the rollout from training.
        mask_refused_selection: evidence that cannot be taken masks the rollout, instead of being
            refused, so that its siblings train.
    """

    reward: float
    declared_response_id: str | None = None
    scored_response: bytes = field(default=b"", repr=False)
    result: bytes = field(default=b"", repr=False)
    selection: selection_pb2.Selection | None = None
    environment_masked: bool = False
    mask_refused_selection: bool = False


class RolloutFinalizedError(Exception):
    """The rollout has its receipt; no later attempt of it could be finalized.

    Attributes:
        receipt: the receipt.
    """

    def __init__(self, receipt: receipt_pb2.Receipt) -> None:
        super().__init__(
            f"rollout {receipt.rollout_id} is not restored: it was finalized as attempt"
            f" {receipt.capture_key or 'none'}, and a rollout has one receipt"
        )
        self.receipt = receipt


class RolloutOwner:
    """Opens, finishes and publishes rollouts.

    Args:
        admission: opens and closes attempts.
        ledger: settles and seals them.
        finalizer: fixes receipts and publishes groups.
        gateway_url: where harnesses reach the gateway, without a trailing slash.
        settle_wait_s: how long admitted calls may take to settle (LED-6).
        replacement_budget: how many groups may be run in the place of dropped ones (FIN-5).
    """

    def __init__(
        self,
        admission: AdmissionClient,
        ledger: LedgerClient,
        finalizer: FinalizerClient,
        gateway_url: str,
        *,
        settle_wait_s: float = SETTLE_WAIT_S,
        replacement_budget: int = 0,
    ) -> None:
        self._admission = admission
        self._ledger = ledger
        self._finalizer = finalizer
        self._gateway_url = gateway_url.rstrip("/")
        self._settle_wait_s = settle_wait_s
        self._replacements_left = replacement_budget
        self._replaced: set[str] = set()

    async def open(
        self,
        rollout_id: str,
        *,
        mode: attempt_pb2.CaptureMode.ValueType = attempt_pb2.CAPTURE_MODE_UNSPECIFIED,
    ) -> OpenRollout:
        """Open the next attempt of a rollout; the one before is sealed and never trains.

        Args:
            rollout_id: the logical rollout.
            mode: how its calls are found and which of them train.
        """
        attempt = await self._admission.open_attempt(
            rollout_id, request_id=str(uuid.uuid4()), mode=mode
        )
        return self._opened(attempt)

    async def restore(
        self, point: restore_point_pb2.RestorePoint, *, request_id: str
    ) -> OpenRollout:
        """Go on from a checkpoint: open the next attempt with the calls on which it stands.

        End the harness of the attempt before first. Keep point and checkpoint in one file, with
        the request id; rewrite the point with the new attempt's `capture_key` before the harness
        goes on. The harness must go on from a context whose answers are of restored calls, and
        send everything to the new URL.

        Args:
            point: names the rollout's latest attempt and every accepted answer of the
                conversations that go on or may be selected.
            request_id: a UUID of this start of the harness, written down before; a repeat with it
                gets the same attempt as long as that was not used.

        Raises:
            RestorePointError: the point is of another capture schema; nothing was asked.
            RolloutFinalizedError: the rollout has a receipt.
            RefusedError: RESTORE_REFUSED, whose `fault` says what to do; UNIMPLEMENTED, a service
                is of a release that cannot restore. Nothing was opened and nothing sealed.
        """
        check_restore_point(point)
        rollout_id = attempt_name(point.capture_key).rollout_id
        receipt = await self._receipt(rollout_id)
        if receipt is not None:
            raise RolloutFinalizedError(receipt)
        return self._opened(
            await self._admission.restore_attempt(rollout_id, request_id=request_id, point=point)
        )

    def _opened(self, attempt: attempt_pb2.Attempt) -> OpenRollout:
        base_url = f"{self._gateway_url}/rollouts/{attempt.capture_key}/v1"
        return OpenRollout(attempt.rollout_id, attempt, base_url)

    async def _receipt(self, rollout_id: str) -> receipt_pb2.Receipt | None:
        try:
            return await self._finalizer.receipt(rollout_id)
        except RefusedError as error:
            if error.reason != er.ERROR_REASON_RECEIPT_NOT_FOUND:
                raise
            return None

    async def finish(
        self,
        rollout: OpenRollout,
        outcome: Outcome,
        *,
        group_id: str,
        slot: int,
        settle_wait_s: float | None = None,
    ) -> receipt_pb2.Receipt:
        """Close, settle, seal and finalize a rollout; give its receipt.

        A rollout that cannot train has a masked receipt that says why; that is no error.

        Args:
            rollout: what `open` gave.
            outcome: how it ended.
            group_id: names its group.
            slot: its place in the group, from 0.
            settle_wait_s: how long its calls may take to settle; None for the owner's own limit.
        """
        key = rollout.capture_key
        await self._admission.close_attempt(key)
        wait_s = self._settle_wait_s if settle_wait_s is None else settle_wait_s
        await self._ledger.await_settled(key, wait_s=wait_s)
        sealed = await self._ledger.seal(key)
        request = pb.FinalizeRolloutRequest(
            group_id=group_id,
            rollout_id=rollout.rollout_id,
            slot=slot,
            capture_key=key,
            epoch=sealed.epoch,
            revision=sealed.revision,
            reward=outcome.reward,
            declared_response_id=outcome.declared_response_id,
            scored_response=outcome.scored_response,
            result=outcome.result,
            selection=outcome.selection,
            environment_masked=outcome.environment_masked,
            mask_refused_selection=outcome.mask_refused_selection,
        )
        return await self._finalizer.finalize_rollout(request)

    async def publish(self, group_id: str, rollout_count: int) -> pb.FinalizeGroupResponse:
        """Publish a group whose rollouts are all finished."""
        return await self._finalizer.finalize_group(group_id, rollout_count)

    @property
    def replacements_left(self) -> int:
        """How many dropped groups may still be replaced."""
        return self._replacements_left

    def may_replace(self, group_id: str, published: pb.FinalizeGroupResponse) -> bool:
        """Say whether another group is to be run in the place of this one, and take it as begun.

        True once for each group that was dropped for too few verified rollouts, as long as the
        budget lasts. The other group needs an id and rollouts of its own.

        Args:
            group_id: the group.
            published: what `publish` gave for it.
        """
        if not published.replacement_wanted or group_id in self._replaced:
            return False
        if self._replacements_left < 1:
            return False
        self._replaced.add(group_id)
        self._replacements_left -= 1
        return True

    async def abandon(
        self, group_id: str, rollout_count: int, *, reason: str
    ) -> pb.FinalizeGroupResponse:
        """Drop a group that cannot be finished; its position says so."""
        return await self._finalizer.finalize_group(group_id, rollout_count, abandon_reason=reason)
