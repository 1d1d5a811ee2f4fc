"""What a repeat of a call gets, and what becomes of a call whose end is not known.

Contract: docs/protocol.md, section "Repeats: the same request is the same call".
"""

from __future__ import annotations

import logging
from typing import Final

from callforest.capture.v1 import capture_admission_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, RefusedError
from callforest_client.staging import StagingClient
from callforest_mesh.gateway.admitting import Admitting
from callforest_mesh.gateway.captures import Captures, generated_of, incident
from callforest_mesh.gateway.context_report import context_of_call
from callforest_mesh.gateway.life import (
    CANCELLED,
    REQUEST_FINISHED,
    WENT_AWAY,
    Life,
    Served,
    UnsettledError,
)
from callforest_mesh.gateway.refusals import HttpRefusal, consumed, of_service
from callforest_mesh.gateway.rows import Rows

_LOG = logging.getLogger("callforest")
_PENDING: Final = capture_admission_pb2.EARLIER_STATE_PENDING
_COMMITTED: Final = capture_admission_pb2.EARLIER_STATE_COMMITTED
_STATES: Final = frozenset({_PENDING, _COMMITTED, capture_admission_pb2.EARLIER_STATE_FAILED})
_UNANSWERED: Final = "its repeats could not be answered"


class Repeats:
    """Answers repeats by what the ledger and Staging have of their call.

    Args:
        staging: keeps staged calls.
        admitting: says whether a call may be generated again.
        captures: settles rows.
        rows: appends failure rows.
        timeout_s: how long Staging may take.
        forest: whether answers say how their context was taken.
    """

    def __init__(
        self,
        staging: StagingClient,
        admitting: Admitting,
        captures: Captures,
        rows: Rows,
        *,
        timeout_s: float,
        forest: bool,
    ) -> None:
        self._staging = staging
        self._admitting = admitting
        self._captures = captures
        self._rows = rows
        self._timeout_s = timeout_s
        self._forest = forest

    async def answer(
        self,
        life: Life,
        verdict: capture_admission_pb2.Verdict,
        earlier: capture_admission_pb2.EarlierCall,
    ) -> Served | None:
        """Answer a repeat with what was staged; None when its call is to be generated (again).

        `life.captured` then says whether as the call, or without capture.

        Raises:
            HttpRefusal: the call was consumed, or must not be generated; or something that must be
                asked is away.
            UnsettledError: the same, and the call is pending.
        """
        if earlier.state not in _STATES:
            raise incident(f"call {life.call_id}: a state that this gateway does not know")
        was_captured, is_pending = life.captured, earlier.state == _PENDING
        life.captured = was_captured and is_pending
        life.admit_time.CopyFrom(earlier.admit_time)
        try:
            staged = await self._fetch(life) if was_captured else None
            if staged is None:
                if earlier.state == _COMMITTED:
                    raise consumed(life.capture_key)
                await self._admitting.require_generation(life)
                return None
        except (CallforestError, HttpRefusal) as error:
            refusal = of_service(error) if isinstance(error, CallforestError) else error
            if not is_pending:
                raise refusal from error
            raise UnsettledError(refusal, _UNANSWERED) from error
        return await self._serve(life, verdict, staged, is_kept=earlier.state == _COMMITTED)

    async def settle(self, life: Life, detail: str) -> None:
        """Settle a call whose end is not known: adopt it if it is staged, else fail it.

        While Staging cannot be asked the call stays pending: a repeat may take it up.

        Raises:
            HttpRefusal: no row is known to be durable.
        """
        try:
            staged = await self._fetch(life)
            if staged is not None and life.verdict is None:
                # It is known to the ledger, since it was generated: nothing new is announced.
                earlier = (await self._admitting.verdict(life)).earlier
                life.admit_time.CopyFrom(earlier.admit_time)
        except (CallforestError, HttpRefusal) as error:
            _LOG.warning("call %s/%s stays pending: %s", life.capture_key, life.call_id, error)
            return
        if staged is None:
            cause = CANCELLED if detail == WENT_AWAY else ""
            await self._rows.fail(life, REQUEST_FINISHED, worker_reason=cause, detail=detail)
            return
        served = await self._captures.read(life, staged.served_response)
        await self._captures.settle(life, generated_of(staged), served, None)

    async def _serve(
        self,
        life: Life,
        verdict: capture_admission_pb2.Verdict,
        staged: staged_call_pb2.StagedCall,
        *,
        is_kept: bool,
    ) -> Served:
        """Serve a staged call; one that is pending gets its record from it alone."""
        generated = generated_of(staged)
        served = await self._captures.read(life, staged.served_response)
        if life.captured:
            difference = life.request.evidence.explain(verdict)
            await self._captures.settle(life, generated, served, difference)
        elif is_kept:
            life.request.evidence.keep(life.call_id, served)
        context = context_of_call(verdict, generated, None) if self._forest else None
        return Served(served.body, life.call_id, 0, context)

    async def _fetch(self, life: Life) -> staged_call_pb2.StagedCall | None:
        """Ask Staging for a call; None when it says that it has none.

        Raises:
            CallforestError: it cannot be asked, or the call is damaged.
        """
        try:
            (staged,) = await self._staging.fetch(
                life.capture_key, [life.call_id], without_columns=True, timeout_s=self._timeout_s
            )
        except RefusedError as error:
            if error.reason == er.ERROR_REASON_CALL_NOT_FOUND:
                return None
            raise
        return staged


def earlier_of(
    life: Life, verdict: capture_admission_pb2.Verdict
) -> capture_admission_pb2.EarlierCall | None:
    """Give the call that a request repeats; None when it is one of its own.

    An intent that was sent twice, since a stream broke, finds itself: no other request has its id,
    unless a key or the ledger gave it.
    """
    if not verdict.HasField("earlier"):
        return None
    earlier = verdict.earlier
    return earlier if life.is_named or earlier.call_id != life.call_id else None
