"""The ledger's row of a call: written within a bound, or known not to be.

No response leaves before its call's row is durable, and after an unknown outcome only the same row
may follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from callforest.capture.v1 import attempt_pb2, call_record_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, RefusedError, UnavailableError, reason_name
from callforest_client.ledger import LedgerClient
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.gateway.life import INVALID_COORDINATES, REQUEST_FINISHED, Life
from callforest_mesh.gateway.measures import LifeMeasures
from callforest_mesh.gateway.refusals import of_service, unavailable

_LOG = logging.getLogger("callforest")
_Answer = TypeVar("_Answer")

# The ledger has a row for the call, or its seal fixed the call as pending: the attempt is marked
# durably either way, and the completion may leave (CAP-7).
_MARKED: Final = frozenset(
    {
        er.ERROR_REASON_COORDINATES_MISMATCH,
        er.ERROR_REASON_CALL_MISMATCH,
        er.ERROR_REASON_ATTEMPT_SEALED,
    }
)
# The ledger answered with a fault of its own: whether the row is durable is unknown.
_UNKNOWN: Final = frozenset(
    {er.ERROR_REASON_UNSPECIFIED, er.ERROR_REASON_INTERNAL, er.ERROR_REASON_STORE_CORRUPT}
)
# The worker refused before it generated: the call never was.
_WITHDRAWN: Final = frozenset(
    {
        er.ERROR_REASON_REQUEST_REFUSED,
        er.ERROR_REASON_CONFIGURATION_CHANGED,
        er.ERROR_REASON_CANDIDATE_WITHOUT_PROOF,
    }
)
# The same, unless the call was asked for before.
_AT_A_BOUND: Final = frozenset({er.ERROR_REASON_OVERLOADED, er.ERROR_REASON_STORE_FULL})


class Rows:
    """Appends the rows of calls.

    Args:
        ledger: keeps them.
        timeout_s: how long a row may take to become durable.
        measures: counts failure rows.
        watch: takes a task that goes on while nobody waits for it.
    """

    def __init__(
        self,
        ledger: LedgerClient,
        timeout_s: float,
        measures: LifeMeasures,
        *,
        watch: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._measures = measures
        self._watch = watch

    async def commit(self, life: Life, record: call_record_pb2.CallRecord) -> bool:
        """Append a call's record; say whether it has one, or else another row.

        Raises:
            HttpRefusal: no row is known to be durable.
        """
        try:
            await self._append(life, record)
        except RefusedError as error:
            _LOG.warning("call %s/%s has no record: %s", life.capture_key, life.call_id, error)
            life.describe_row("refused", reason=reason_name(error.reason))
            if _was_withdrawn(error):
                life.owed = None
                raise unavailable("The call was withdrawn meanwhile. Repeat.") from error
            if error.reason in _UNKNOWN:
                raise unavailable("The ledger failed; nothing was served.") from error
            if error.retry_after_ms is not None:
                # Nothing is wrong with the row: a failure row in its place would mask the rollout
                # for a full disk. The call is staged, and stays pending for its repeats.
                self._watch(asyncio.ensure_future(self._append(life, record)))
                raise of_service(error) from error
            if error.reason not in _MARKED:
                detail = f"{reason_name(error.reason)}: {error.message}"
                await self.fail(life, INVALID_COORDINATES, detail=detail)
            life.owed = None
            return False
        except UnavailableError as error:
            # The record may be durable. Only the same write may follow: a failure row would
            # contradict it.
            self._watch(asyncio.ensure_future(self._append(life, record)))
            raise unavailable("The ledger is away; nothing was served. Repeat.") from error
        life.owed = None
        life.describe_row("committed", weight_version=record.coords.weight_version)
        return True

    async def settle_refused(self, life: Life, error: CallforestError) -> None:
        """Settle a call that its worker did not generate: withdrawn if that is certain.

        Raises:
            HttpRefusal: no row is known to be durable.
        """
        detail = f"{reason_name(error.reason)}: {error.message}"
        if not never_was(life, error):
            await self.fail(life, REQUEST_FINISHED, detail=detail)
            return
        if not life.captured:
            return
        reason = reason_name(error.reason)
        life.describe_row("withdrawn", reason=reason)
        withdrawal = attempt_pb2.CallWithdrawal(
            capture_key=life.capture_key,
            call_id=life.call_id,
            reason=reason,
            detail=error.message[:1024],
        )
        await self._settle(
            life,
            lambda left_s: self._ledger.record_withdrawal(
                withdrawal, timeout_s=left_s, traceparent=life.traceparent
            ),
        )

    async def fail(
        self, life: Life, reason: str, *, worker_reason: str = "", detail: str = ""
    ) -> None:
        """Append a failure row; a call that was admitted without capture has its row already.

        Raises:
            HttpRefusal: no row is known to be durable.
        """
        if not life.captured:
            return
        life.describe_row("failed", reason=reason)
        self._measures.count_failure(reason)
        failure = attempt_pb2.CallFailure(
            capture_key=life.capture_key,
            call_id=life.call_id,
            reason=reason,
            worker_reason=worker_reason[:128],
            detail=detail[:1024],
        )
        await self._settle(
            life,
            lambda left_s: self._ledger.record_failure(
                failure, timeout_s=left_s, traceparent=life.traceparent
            ),
        )

    async def _settle(self, life: Life, send: Callable[[float], Awaitable[object]]) -> None:
        try:
            await self._durably(send)
        except RefusedError as error:
            _LOG.warning(
                "call %s/%s: its row was refused: %s", life.capture_key, life.call_id, error
            )
            if _was_withdrawn(error):
                life.owed = None
                raise unavailable("The call was withdrawn meanwhile. Repeat.") from error
            if error.reason not in _MARKED:
                raise of_service(error) from error
        except UnavailableError as error:
            raise unavailable("The ledger is away; nothing was served. Repeat.") from error
        life.owed = None

    async def _append(self, life: Life, record: call_record_pb2.CallRecord) -> None:
        await self._durably(
            lambda left_s: self._ledger.record(
                record, timeout_s=left_s, traceparent=life.traceparent
            )
        )
        failpoint("gateway.after_append")

    async def _durably(self, send: Callable[[float], Awaitable[_Answer]]) -> _Answer:
        """Send a row within the bound; repeat when the ledger says after which delay."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            try:
                return await send(max(0.001, deadline - loop.time()))
            except RefusedError as error:
                delay_ms = error.retry_after_ms
                if delay_ms is None or loop.time() + delay_ms / 1000 >= deadline:
                    raise
                await asyncio.sleep(delay_ms / 1000)


def never_was(life: Life, error: CallforestError) -> bool:
    """Say whether a worker's refusal means that nothing was generated.

    A worker at its bound, or before a full Staging, says so before it begins; but of a repeat that
    is no word on the first.
    """
    if error.reason in _AT_A_BOUND:
        is_repeat = life.verdict is not None and life.verdict.HasField("earlier")
        return not (error.of_repeat or is_repeat)
    return isinstance(error, RefusedError) and error.reason in _WITHDRAWN


def _was_withdrawn(error: RefusedError) -> bool:
    """Say whether a row was refused since its call never was: no row marks it, nothing may leave.

    A repeat announces it anew.
    """
    is_mismatch = error.reason == er.ERROR_REASON_CALL_MISMATCH
    return is_mismatch and error.metadata.get("field") == "withdrawal"
