"""The server's side of an item stream: each item is answered for itself, results go together.

Contract: docs/protocol.md, section "Item streams".
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Generic, cast

from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from callforest.capture.v1 import frame_pb2, item_pb2
from callforest_client.deadlines import DeadlineTimer
from callforest_client.frames import FRAME_BYTES, FRAME_FIELDS, FrameAssembler, frames_of
from callforest_client.item_stream import MESSAGE_BYTES, MESSAGE_ITEMS
from callforest_client.stream_spec import (
    ItemLike,
    PayloadT,
    RequestLike,
    ResponseLike,
    ResultT,
    StreamSpec,
    put_arm,
)
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.errors import (
    draining,
    item_late,
    overloaded,
    status_of_exception,
)
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.item_observer import Describe, Handler, ItemObserver
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.chassis.validation import check, malformed

_RESULT_OVERHEAD_BYTES = 64
_ERROR_FIELD = "error"
UNANSWERED_MAX = 1024


class Drain:
    """Says when a service stops taking work. Set once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def begin(self) -> None:
        """Stop taking work; what was taken is finished."""
        self._event.set()

    @property
    def begun(self) -> bool:
        """Whether the service stops taking work."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait until the service stops taking work."""
        await self._event.wait()


@dataclass(slots=True, eq=False)
class _Running(Generic[ResultT]):
    """An item that is being answered."""

    answering: asyncio.Future[ResultT]
    begun: float
    deadline: float
    timeout_ms: int
    late: bool = False


@dataclass(slots=True, eq=False)
class _Result:
    """A result to send: the arm of its outcome, and what that holds."""

    sequence: int
    arm: str
    outcome: Message
    size: int


class ItemServer(Generic[PayloadT, ResultT]):
    """Serves one kind of item stream for all its callers.

    Args:
        spec: the stream's messages.
        handler: answers one item; raises Refusal or CallforestError for a typed failure. It is
            called in the order of the items. What it gives is cancelled when nobody waits for it
            any more.
        service: names the service in errors.
        drain: when begun, streams end after the items they had taken.
        telemetry: what the service says of its items.
        describe: gives the attributes of a sampled item's span.
    """

    def __init__(
        self,
        spec: StreamSpec[PayloadT, ResultT],
        handler: Handler[PayloadT, ResultT],
        *,
        service: str,
        drain: Drain,
        telemetry: ServiceTelemetry = SILENT,
        describe: Describe[PayloadT, ResultT] | None = None,
    ) -> None:
        self._spec = spec
        telemetry.metrics.limit("unanswered_items", UNANSWERED_MAX)
        self._observer = ItemObserver(
            handler, service=service, rpc=spec.name, telemetry=telemetry, describe=describe
        )
        self._service = service
        self._drain = drain

    async def serve(self, requests: AsyncIterator[RequestLike]) -> AsyncIterator[ResponseLike]:
        """Serve one stream: give the response messages for the request messages.

        Raises:
            Refusal: DRAINING, after every taken item was answered.
        """
        stream = _Stream(self._spec, self._observer, self._service)
        reader = asyncio.ensure_future(stream.read(requests))
        reader.add_done_callback(stream.wake)
        ending = asyncio.ensure_future(self._drain.wait())
        ending.add_done_callback(lambda _: reader.cancel())
        try:
            while True:
                await stream.wait()
                while stream.has_results:
                    yield stream.next_response()
                    failpoint("stream.after_answer")
                if reader.done() and stream.idle:
                    break
        finally:
            ending.cancel()
            reader.cancel()
            stream.cancel_all()
        if not reader.cancelled():
            reader.result()
        if self._drain.begun:
            raise draining(self._service)


class _Stream(Generic[PayloadT, ResultT]):
    """The state of one stream."""

    def __init__(
        self,
        spec: StreamSpec[PayloadT, ResultT],
        observer: ItemObserver[PayloadT, ResultT],
        service: str,
    ) -> None:
        self._spec = spec
        self._observer = observer
        self._service = service
        self._assembler = FrameAssembler()
        self._running: dict[int, _Running[ResultT]] = {}
        self._deadlines = DeadlineTimer(self._expire)
        self._results: deque[_Result] = deque()
        self._wake = asyncio.Event()
        self._highest = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is left to answer."""
        return not self._running and not self._results

    @property
    def has_results(self) -> bool:
        """Whether there is something to send."""
        return bool(self._results)

    def wake(self, _done: object = None) -> None:
        """Say that there may be something to do."""
        self._wake.set()

    async def wait(self) -> None:
        """Wait until there may be something to do."""
        await self._wake.wait()
        self._wake.clear()

    async def read(self, requests: AsyncIterator[RequestLike]) -> None:
        """Take items until the client ends its side; cancelled when the service drains."""
        async for request in requests:
            for item in request.items:
                self._take(item)

    def next_response(self) -> ResponseLike:
        """Give the next message, of the results that fit into it."""
        response = self._spec.response()
        total = count = 0
        while self._results and count < MESSAGE_ITEMS:
            result = self._results[0]
            total += result.size
            if count and total > MESSAGE_BYTES:
                break
            self._results.popleft()
            put_arm(response.results.add(sequence=result.sequence), result.arm, result.outcome)
            count += 1
        return response

    def cancel_all(self) -> None:
        """Cancel what nobody waits for any more."""
        self._deadlines.cancel()
        for running in list(self._running.values()):
            running.answering.cancel()

    def _take(self, item: ItemLike) -> None:
        context: item_pb2.ItemContext = item.context
        sequence = context.sequence
        body = item.WhichOneof("body")
        try:
            if body == "cancel":
                self._assembler.drop(sequence)
                if (running := self._running.get(sequence)) is not None:
                    running.answering.cancel()
                return
            if sequence in self._running:
                return  # it came twice, and its one result is still to come
            failpoint("stream.before_validate")
            check(cast("Message", item))
            if body in (self._spec.payload_field, "begin"):
                self._open(context)
            payload = self._payload(sequence, body, item)
        except Refusal as refusal:
            self._assembler.drop(sequence)
            self._answer_error(sequence, status_of_exception(refusal, service=self._service))
            return
        if payload is not None:
            failpoint("stream.after_validate")
            self._start(context, payload)

    def _open(self, context: item_pb2.ItemContext) -> None:
        """Admit a new item to the stream; the server never stops reading, it sheds."""
        if context.sequence <= self._highest:
            raise malformed(self._spec.name, f"sequence {context.sequence} does not rise")
        self._highest = context.sequence
        if context.timeout_ms < 1:
            raise malformed(self._spec.name, "timeout_ms must be at least 1 on a new item")
        if len(self._running) >= UNANSWERED_MAX:
            raise overloaded("unanswered_items", UNANSWERED_MAX, retry_after_ms=100)

    def _payload(self, sequence: int, body: str | None, item: ItemLike) -> PayloadT | None:
        """Give the item's payload; None while frames are missing."""
        if body == self._spec.payload_field:
            payload: PayloadT = getattr(item, self._spec.payload_field)
            return payload
        frame = getattr(item, body or "")
        if not isinstance(frame, frame_pb2.FrameBegin) and not self._assembler.has(sequence):
            return None  # the rest of a payload that was answered already
        if isinstance(frame, frame_pb2.FrameBegin):
            self._assembler.begin(sequence, frame)
            return None
        if isinstance(frame, frame_pb2.FrameChunk):
            self._assembler.chunk(sequence, frame)
            return None
        serialized = self._assembler.end(sequence)
        try:
            framed = self._spec.payload.FromString(serialized)
        except DecodeError:
            raise malformed(self._spec.name, "the framed payload cannot be parsed") from None
        check(framed)
        return framed

    def _answer_with(self, sequence: int, answer: ResultT) -> None:
        size = answer.ByteSize()  # serializes: asked once
        if size <= FRAME_BYTES:
            self._put(sequence, self._spec.answer_field, answer, size)
            return
        for frame in frames_of(answer.SerializeToString()):
            self._put(sequence, FRAME_FIELDS[type(frame)], frame, frame.ByteSize())

    def _answer_error(self, sequence: int, status: status_pb2.Status) -> None:
        self._put(sequence, _ERROR_FIELD, status, status.ByteSize())

    def _put(self, sequence: int, arm: str, outcome: Message, size: int) -> None:
        self._results.append(_Result(sequence, arm, outcome, size + _RESULT_OVERHEAD_BYTES))
        self._wake.set()

    def _start(self, context: item_pb2.ItemContext, payload: PayloadT) -> None:
        """Have an item answered. A handler that gives a future costs no task."""
        sequence, timeout_ms = context.sequence, context.timeout_ms
        loop = asyncio.get_running_loop()
        begun = loop.time()
        self._observer.begin()
        try:
            answer = self._observer(context, payload)
            answering = answer if isinstance(answer, asyncio.Future) else loop.create_task(answer)
        except Exception as error:  # noqa: BLE001 - mapped, logged
            self._observer.end(loop.time() - begun, timeout_ms, error)
            self._answer_error(sequence, status_of_exception(error, service=self._service))
            return
        deadline = begun + timeout_ms / 1000
        self._running[sequence] = _Running(answering, begun, deadline, timeout_ms)
        self._deadlines.watch(deadline)
        answering.add_done_callback(functools.partial(self._finished, sequence))

    def _expire(self, now: float) -> float:
        """Cancel the items whose time is up; give the earliest deadline that is left."""
        for running in self._running.values():
            if running.deadline <= now and not running.late:
                running.late = True
                running.answering.cancel()
        left = (one.deadline for one in self._running.values() if not one.late)
        return min(left, default=math.inf)

    def _finished(self, sequence: int, answering: asyncio.Future[ResultT]) -> None:
        running = self._running.pop(sequence)
        error = asyncio.CancelledError() if answering.cancelled() else answering.exception()
        took_s = asyncio.get_running_loop().time() - running.begun
        self._observer.end(took_s, running.timeout_ms, error)
        if error is None:
            failpoint("stream.before_answer")
            self._answer_with(sequence, answering.result())
            return
        if isinstance(error, TimeoutError) or (running.late and answering.cancelled()):
            error = item_late(running.timeout_ms)
        self._answer_error(sequence, status_of_exception(error, service=self._service))
