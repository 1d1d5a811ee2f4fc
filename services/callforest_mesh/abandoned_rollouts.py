"""Rollouts whose owner died: no receipt, no call for a long time, and their bytes still staged.

Nothing in the mesh tells a dead owner from a slow one, so only an age that the operator names makes
a rollout abandoned. Its release may be killed anywhere and repeated: the latest attempt is torn
down first, so that what it restored is missed by nobody, and its log goes last, since it tells the
next sweep what is left to do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_core.custody.attempts import attempt_name
from callforest_mesh.ledger.inventory import LoggedAttempt
from callforest_mesh.staging.inventory import StagedInventory

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class AbandonedRollout:
    """A rollout without a receipt that has made no call for long.

    Attributes:
        tenant: owns it.
        capture_key: names its latest attempt.
        revision: of that attempt, when it was looked at.
        call_count: what all its attempts have staged.
        byte_count: the same in bytes.
        age_s: since the latest attempt admitted a call of its own; None when it never did.
    """

    tenant: str
    capture_key: str
    revision: int
    call_count: int
    byte_count: int
    age_s: float | None

    @property
    def rollout_id(self) -> str:
        """The logical rollout."""
        return attempt_name(self.capture_key).rollout_id

    def described(self) -> str:
        """Say what it holds, and for how long nothing has come."""
        held = f"{self.call_count} staged calls, {self.byte_count} bytes"
        when = "no call of its own" if self.age_s is None else f"last call {self._days} days ago"
        return f"{held} of {self.tenant}/{self.capture_key}: no receipt, {when}"

    @property
    def _days(self) -> str:
        return f"{(self.age_s or 0.0) / _DAY_S:.1f}"


def look_at(latest: LoggedAttempt, staging: StagedInventory, now_s: float) -> AbandonedRollout:
    """Tell what a rollout holds by its latest attempt."""
    tenant, capture_key = latest.key.tenant, latest.key.capture_key
    attempts = [*attempt_name(capture_key).earlier, capture_key]
    sizes = [staging.size(tenant, attempt) for attempt in attempts]
    return AbandonedRollout(
        tenant,
        capture_key,
        latest.view.revision,
        sum(calls for calls, _ in sizes),
        sum(size for _, size in sizes),
        latest.age_s(now_s),
    )


async def release(
    rollout: AbandonedRollout,
    staging: StagingClient,
    ledger: LedgerClient,
    has_receipt: Callable[[], Awaitable[bool]],
) -> bool:
    """Seal a rollout's latest attempt, and remove all that its attempts staged, and their logs.

    Args:
        rollout: what was found.
        staging: of its tenant.
        ledger: of its tenant.
        has_receipt: asks the finalizer; a receipt, and a group that names it, needs what is staged.

    Returns:
        Whether it was; not when it has gone on since it was looked at, or has a receipt: then
        nothing was removed.

    Raises:
        CallforestError: a service does not answer; a repeat goes on.
    """
    key = rollout.capture_key
    try:
        attempt = await ledger.await_settled(key, wait_s=0.0)
        if attempt.superseded or attempt.revision != rollout.revision:
            return False
        if attempt.state != attempt_pb2.ATTEMPT_STATE_SEALED:
            attempt = await ledger.seal(key)
            # A row may have come until the seal: its writer lives.
            if attempt.superseded or attempt.revision != rollout.revision + 1:
                return False
    except RefusedError as error:
        if error.reason != er.ERROR_REASON_ATTEMPT_NOT_FOUND:
            raise
        return False  # another sweep was faster
    # Behind the seal: nothing can be added any more, and who was finalizing has a receipt.
    if await has_receipt():
        return False
    await staging.drop_partition(key)
    for earlier in attempt_name(key).earlier:
        await staging.drop_partition(earlier)
        await ledger.forget(earlier)
    await ledger.forget(key)
    return True
