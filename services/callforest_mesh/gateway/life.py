"""One call while it lasts, and what those see of it who wait for its response."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import attempt_pb2
from callforest.gateway.v1 import gateway_service_pb2 as gateway_pb
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_mesh.chassis.call_attributes import (
    CALL_ID,
    CAPTURE_KEY,
    DISPOSITION,
    REASON,
    WEIGHT_VERSION,
)
from callforest_mesh.chassis.telemetry import NO_SPAN, Span
from callforest_mesh.gateway import core

WORKER_CAPTURE_FAILED: Final = "worker_capture_failed"
MISSING_COORDINATES: Final = "worker_response_missing_commit_coordinates"
INVALID_COORDINATES: Final = "invalid_worker_commit_coordinates"
REQUEST_FINISHED: Final = "request_finished_without_staged_coordinates"


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A response that may leave.

    Attributes:
        body: its bytes, plain or as events.
        call_id: the call.
        generation_us: how long the engine took, in microseconds.
        context: how the request's history was taken; None in chain mode.
    """

    body: bytes
    call_id: str
    generation_us: int
    context: gateway_pb.ContextReport | None = None


class AbandonedError(Exception):
    """The harness went away; nobody waits for this call's answer."""


@dataclass(slots=True, eq=False)
class Life:
    """One call while it lasts."""

    capture_key: str
    call_id: str
    admit_time: timestamp_pb2.Timestamp
    request: core.NormalisedRequest
    traceparent: str
    captured: bool = True
    abandoned: bool = False
    admitted: asyncio.Event = field(default_factory=asyncio.Event)
    generation: asyncio.Future[worker_pb.GeneratedCall] | None = field(default=None)
    span: Span = NO_SPAN
    intent: attempt_pb2.CallIntent | None = None

    def __post_init__(self) -> None:
        """Stand as the parent of what the call makes others do, if it is sampled."""
        if self.span.recording:
            self.traceparent = self.span.traceparent
            self.span.describe({CAPTURE_KEY: self.capture_key, CALL_ID: self.call_id})

    def describe_row(
        self, disposition: str, *, reason: str = "none", weight_version: int | None = None
    ) -> None:
        """Say in the span which row the ledger has of the call."""
        if not self.span.recording:
            return
        self.span.describe({DISPOSITION: disposition, REASON: reason})
        if weight_version is not None:
            self.span.describe({WEIGHT_VERSION: weight_version})

    def abandon(self) -> None:
        """Note that nobody waits any more; what is being generated ends."""
        self.abandoned = True
        if self.generation is not None:
            self.generation.cancel()


class PendingCall:
    """A call in work, to wait for.

    Args:
        life: the call.
        task: lives it.
    """

    def __init__(self, life: Life, task: asyncio.Task[Served]) -> None:
        self._life = life
        self._task = task

    @property
    def call_id(self) -> str:
        """The call."""
        return self._life.call_id

    @property
    def created(self) -> int:
        """When it was admitted, in seconds since the epoch."""
        return self._life.admit_time.seconds

    @property
    def done(self) -> bool:
        """Whether there is an answer, or a refusal."""
        return self._task.done()

    async def served(self) -> Served:
        """Wait for the response; cancelling this abandons the call.

        Raises:
            HttpRefusal: the call was refused, or something behind the gateway is away; then
                nothing was served.
        """
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._life.abandon()
            raise

    async def done_within(self, seconds: float) -> bool:
        """Wait for an answer, at most so long; say whether there is one."""
        await asyncio.wait({self._task}, timeout=seconds)
        return self._task.done()

    async def admitted_or_done(self) -> None:
        """Wait until the call is admitted, or has ended without."""
        admitted = asyncio.ensure_future(self._life.admitted.wait())
        try:
            await asyncio.wait({self._task, admitted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            admitted.cancel()

    def abandon(self) -> None:
        """Say that nobody waits any more: the generation ends, the life goes on to its row."""
        self._life.abandon()
