"""What harnesses may ask on either edge: a call, or its size."""

from __future__ import annotations

from dataclasses import dataclass

from callforest.error.v1 import error_reason_pb2 as er
from callforest_mesh.gateway.asked import Asked
from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.lives import PendingCall
from callforest_mesh.gateway.lost_history import read_without_history
from callforest_mesh.gateway.measuring import Measuring
from callforest_mesh.gateway.reading import RequestReader
from callforest_mesh.gateway.refusals import HttpRefusal


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What both edges share.

    Attributes:
        reader: reads requests in the gateway's capture mode.
        calls: the calls' lives.
        measuring: sizes of calls that are not made.
    """

    reader: RequestReader
    calls: Calls
    measuring: Measuring

    def begin(
        self, asked: Asked, *, allowed_s: float | None = None, traceparent: str = ""
    ) -> PendingCall:
        """Take a request into work, or wait for the call in work that it repeats.

        Args:
            asked: the request.
            allowed_s: how long its caller waits; None when the caller does not say.
            traceparent: the caller's W3C trace context, or "".

        Raises:
            HttpRefusal: it is malformed, asks for what cannot be captured, builds upon a history
                that is not kept, or comes upon a bound.
        """
        digest = lacking = None
        if asked.identity.call_id:
            digest = asked.body_digest
            joined = self.calls.same(asked.capture_key, asked.identity, digest)
            if joined is not None:
                return joined
        try:
            request = self.reader.read(
                asked.capture_key, asked.body, asked.dialect, asked.claim, digest
            )
        except HttpRefusal as refusal:
            is_lost = refusal.reason == er.ERROR_REASON_HISTORY_REQUIRED
            if not (is_lost and asked.identity.may_repeat):
                raise
            request, lacking = read_without_history(asked), refusal
        return self.calls.begin(
            asked.capture_key,
            request,
            asked.identity,
            lacking=lacking,
            allowed_s=allowed_s,
            traceparent=traceparent,
        )
