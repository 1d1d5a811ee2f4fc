"""One call while it lasts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Final, TypeVar

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.gateway.v1 import gateway_service_pb2 as gateway_pb
from callforest_mesh.chassis.call_attributes import (
    CALL_ID,
    CAPTURE_KEY,
    DISPOSITION,
    REASON,
    WEIGHT_VERSION,
)
from callforest_mesh.chassis.telemetry import NO_SPAN, Span
from callforest_mesh.gateway import core
from callforest_mesh.gateway.asked import NEW, Identity
from callforest_mesh.gateway.refusals import HttpRefusal

_Made = TypeVar("_Made")

WORKER_CAPTURE_FAILED: Final = "worker_capture_failed"
MISSING_COORDINATES: Final = "worker_response_missing_commit_coordinates"
INVALID_COORDINATES: Final = "invalid_worker_commit_coordinates"
REQUEST_FINISHED: Final = "request_finished_without_staged_coordinates"
WENT_AWAY: Final = "the harness went away"
CANCELLED: Final = "cancelled"
"""Why a request ended without a result, where that was its harness's doing (BUGCASES B24)."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A response that may leave.

    Attributes:
        body: its bytes, plain or as events.
        call_id: the call.
        generation_us: how long the engine took, in microseconds; 0 of an earlier generation.
        context: how the request's history was taken; None in chain mode.
    """

    body: bytes
    call_id: str
    generation_us: int
    context: gateway_pb.ContextReport | None = None


class AbandonedError(Exception):
    """The harness went away; nobody waits for this call's answer."""


class UnsettledError(Exception):
    """A call ends here, and whether it is staged is not known.

    Attributes:
        answer: what those get who wait.
        detail: why the call fails, should Staging not have it.
        is_over: whether its harness had its grace already.
    """

    def __init__(self, answer: Exception, detail: str, *, is_over: bool = False) -> None:
        super().__init__(detail)
        self.answer = answer
        self.detail = detail
        self.is_over = is_over


def _unanswered() -> asyncio.Future[Served]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Life:
    """One call while it lasts.

    Attributes:
        capture_key: its attempt.
        call_id: itself; a marked repeat takes the id of the call that it repeats.
        admit_time: when the call was first taken.
        request: what is asked.
        traceparent: the parent of what it makes others do.
        identity: which call its request said it is.
        lacking: why it can only be answered as a repeat; None when it can be generated.
        begun: when it was taken, on the loop's clock.
        allowed_s: how long it may take.
        ahead: how many calls were in work when it was taken.
        is_named: whether its id is known to more than this life: from a key, or from the ledger.
        captured: whether its rows are its own to write.
        abandoned: whether nobody waits any more.
        joined: whether it waits for the answer of another life.
        waiters: how many wait for its answer.
        farewell: gives it up when the grace is over; None while somebody waits.
        before: the life under the same name that must end first.
        behind: of a marked repeat, the calls that it may repeat and that the ledger may not know.
        owed: the call was announced by an earlier life that could not settle it, for this reason:
            whatever ends this one, the call must have a row; None when it has, or need not.
        grace_ended: set when there is nothing left to wait for before its row is written.
        admitted: set when what the ledger says of it is known.
        ended: set when it has ended.
        answer: what those get who wait.
        generated: whether it asked for a generation.
        waiting: its task, while that waits for what ends when nobody waits for the call any more.
        verdict: what the ledger says of it, when that is known.
        span: tells of it.
        intent: its announcement, from when that may be durable.
    """

    capture_key: str
    call_id: str
    admit_time: timestamp_pb2.Timestamp
    request: core.NormalisedRequest
    traceparent: str
    identity: Identity = NEW
    lacking: HttpRefusal | None = None
    begun: float = 0.0
    allowed_s: float = math.inf
    ahead: int = 0
    is_named: bool = field(init=False)
    captured: bool = True
    abandoned: bool = False
    joined: bool = False
    waiters: int = 0
    farewell: asyncio.TimerHandle | None = None
    before: Life | None = None
    behind: list[Life] = field(default_factory=list)
    owed: str | None = None
    grace_ended: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Future[Served] = field(default_factory=_unanswered)
    generated: bool = False
    waiting: asyncio.Task[object] | None = None
    verdict: capture_admission_pb2.Verdict | None = None
    span: Span = NO_SPAN
    intent: attempt_pb2.CallIntent | None = None

    def __post_init__(self) -> None:
        """Say whose id it has."""
        self.is_named = bool(self.identity.call_id)

    def trace(self, span: Span) -> None:
        """Stand as the parent of what the call makes others do, if it is sampled."""
        self.span = span
        if self.span.recording:
            self.traceparent = self.span.traceparent
            self.span.describe({CAPTURE_KEY: self.capture_key, CALL_ID: self.call_id})

    @property
    def is_served(self) -> bool:
        """Whether those who wait have a response."""
        return self.answer.done() and self.answer.exception() is None

    @property
    def takes_waiters(self) -> bool:
        """Whether a repeat can still have its answer."""
        return not (self.abandoned or self.answer.done())

    def describe_row(
        self, disposition: str, *, reason: str = "none", weight_version: int | None = None
    ) -> None:
        """Say in the span which row the ledger has of the call."""
        if not self.span.recording:
            return
        self.span.describe({DISPOSITION: disposition, REASON: reason})
        if weight_version is not None:
            self.span.describe({WEIGHT_VERSION: weight_version})

    def serve(self, served: Served) -> None:
        """Answer those who wait."""
        if not self.answer.done():
            self.answer.set_result(served)
        self.admitted.set()

    def refuse(self, error: Exception) -> None:
        """Tell those who wait why there is no answer."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # whoever waits gets it; there may be nobody
        self.admitted.set()

    def retake(self) -> None:
        """Note that a later life has taken the call up: what is not written yet is its to write."""
        self.grace_ended.set()

    async def wait_for(self, made: Coroutine[object, object, _Made]) -> _Made:
        """Wait, in the call's own task, for what ends when nobody waits for the call any more.

        Raises:
            AbandonedError: it ended so.
        """
        self.waiting = task = asyncio.current_task()
        try:
            return await made
        except asyncio.CancelledError:
            if not self.abandoned:
                raise
            assert task is not None, "it was cancelled"
            task.uncancel()
            raise AbandonedError from None
        finally:
            self.waiting = None

    def abandon(self) -> None:
        """Note that nobody waits any more; what is being generated ends."""
        self.abandoned = True
        if self.waiting is not None:
            self.waiting.cancel()
