"""From a generated or a staged call to its row and to what is served of it."""

from __future__ import annotations

import logging
import secrets

from callforest.capture.v1 import call_record_pb2, staged_call_pb2
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_client.codec import coords_without_columns
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.gateway import core
from callforest_mesh.gateway.life import (
    INVALID_COORDINATES,
    MISSING_COORDINATES,
    REQUEST_FINISHED,
    WORKER_CAPTURE_FAILED,
    Life,
)
from callforest_mesh.gateway.refusals import HttpRefusal, faulty
from callforest_mesh.gateway.rows import Rows

_LOG = logging.getLogger("callforest")


class Captures:
    """Reads what was generated, and settles the call's row.

    Args:
        rows: appends rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    async def read(self, life: Life, body: bytes) -> core.ServedResponse:
        """Serve nothing rather than tokens: an engine that leaks them is a fault (CAP-6).

        Raises:
            HttpRefusal: the response must not be served.
        """
        try:
            return core.read_response(body, life.request)
        except core.ServedResponseError as error:
            await self._rows.fail(life, REQUEST_FINISHED, detail=error.fact)
            raise incident(f"call {life.capture_key}/{life.call_id}: {error.fact}") from error

    async def settle(
        self,
        life: Life,
        generated: worker_pb.GeneratedCall,
        served: core.ServedResponse,
        difference: call_record_pb2.HistoryDifference | None,
    ) -> None:
        """Append the call's row: its record, or why there is none.

        Raises:
            HttpRefusal: no row is known to be durable.
        """
        match generated.WhichOneof("capture"):
            case "staged":
                await self._record(life, generated, served, difference)
            case "failed":
                await self._rows.fail(
                    life,
                    WORKER_CAPTURE_FAILED,
                    worker_reason=generated.failed.reason,
                    detail=generated.failed.detail,
                )
            case _:
                await self._rows.fail(life, MISSING_COORDINATES)

    async def _record(
        self,
        life: Life,
        generated: worker_pb.GeneratedCall,
        served: core.ServedResponse,
        difference: call_record_pb2.HistoryDifference | None,
    ) -> None:
        coords = generated.staged
        if (coords.capture_key, coords.call_id) != (life.capture_key, life.call_id):
            # They would be recorded for another call.
            named = f"they name {coords.capture_key}/{coords.call_id}"
            await self._rows.fail(life, INVALID_COORDINATES, detail=named)
            return
        if not served.response_id:
            await self._rows.fail(life, INVALID_COORDINATES, detail="the response has no id")
            return
        record = core.record_of(generated, life.request, served, life.admit_time)
        record.traceparent = life.span.traceparent
        if difference is not None:
            record.difference.CopyFrom(difference)
        failpoint("gateway.after_staging")
        if await self._rows.commit(life, record):
            failpoint("gateway.after_commit_ack")
            life.request.evidence.keep(life.call_id, served)


def generated_of(staged: staged_call_pb2.StagedCall) -> worker_pb.GeneratedCall:
    """Give a staged call as its worker answered it, or would have."""
    generated = worker_pb.GeneratedCall(
        chat_response=staged.served_response,
        completion=staged.completion,
        staged=coords_without_columns(staged),
    )
    if staged.HasField("decision"):
        generated.decision.CopyFrom(staged.decision)
    return generated


def incident(fact: str) -> HttpRefusal:
    """Log a fault; give its answer, which only names the incident."""
    incident_id = secrets.token_hex(8)
    _LOG.error("incident %s: %s", incident_id, fact)
    return faulty(incident_id)
