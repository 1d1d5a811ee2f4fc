"""The client's side of an item stream: many callers, few messages, one result each.

What queues while a message is being written is the next message, so that the cost of a message is
shared. A broken stream is opened again, and items that may be repeated are sent again under their
ids until their time is up. Contract: docs/protocol.md, section "Item streams".
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Generic, cast

import grpc
import grpc.aio

from callforest.capture.v1 import item_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.deadlines import DeadlineTimer
from callforest_client.errors import (
    CallforestError,
    RefusedError,
    error_of,
    status_of,
)
from callforest_client.frames import (
    FRAME_BYTES,
    FRAME_FIELDS,
    PAYLOAD_BYTES,
    FrameAssembler,
    frames_of,
)
from callforest_client.gathering import Gathering
from callforest_client.pending_item import PendingItem, QueuedItem
from callforest_client.places import Places
from callforest_client.stream_breaks import broken, late, why_ended
from callforest_client.stream_spec import (
    ItemCall,
    PayloadT,
    RequestLike,
    ResultLike,
    ResultT,
    StreamSpec,
    put_arm,
)
from callforest_core.refusal import Refusal

MESSAGE_ITEMS = 256
MESSAGE_BYTES = 2 << 20
STREAM_S = 3600.0
"""A stream's own deadline, since every RPC has one."""
RENEW_S = 1800.0
"""A stream of this age takes nothing new; once it has answered what it took, another is opened."""
_ITEM_OVERHEAD_BYTES = 256
_CANCEL_FIELD = "cancel"
_LINGER_SHARE = 0.125
"""The part of an item's time that it may wait for others."""
_BACKOFF_FIRST_S = 0.05
_BACKOFF_LAST_S = 1.0


class ItemStream(Generic[PayloadT, ResultT]):
    """Sends payloads over one bidirectional stream and gives each caller its answer.

    Args:
        spec: the stream's messages.
        connect: opens the RPC, a stub's method; called again after a break.
        unanswered_max: callers beyond this many wait for a place.
        linger_s: how long to gather items at most, with many callers at work (fewer wait for
            less, and a few never); 0 never waits.
        renew_s: age from which a stream takes nothing new and another is opened.
    """

    def __init__(
        self,
        spec: StreamSpec[PayloadT, ResultT],
        connect: Callable[..., object],
        *,
        unanswered_max: int = 1024,
        linger_s: float = 0.02,
        renew_s: float = RENEW_S,
    ) -> None:
        self._spec = spec
        self._connect = connect
        self._renew_s = renew_s
        self._places = Places(unanswered_max)
        self._deadlines = DeadlineTimer(self._expire)
        self._unanswered: dict[int, PendingItem[PayloadT, ResultT]] = {}
        self._queue: deque[QueuedItem[PayloadT, ResultT]] = deque()
        self._wake = asyncio.Event()
        self._retired = asyncio.Event()
        self._enough = 1
        self._sent_count = 0
        self._gathering = Gathering(linger_s)
        self._sequence = 0
        self._answer_count = 0
        self._closed = False
        self._runner: asyncio.Task[None] | None = None
        self.message_count = 0
        self.item_count = 0

    async def send(
        self,
        payload: PayloadT,
        *,
        tenant: str,
        timeout_s: float,
        traceparent: str = "",
        repeatable: bool | None = None,
    ) -> ResultT:
        """Send one payload and await its answer.

        Args:
            payload: the item's payload.
            tenant: owns what the item touches.
            timeout_s: how long the answer may take, repeats included.
            traceparent: the caller's W3C trace context, or "".
            repeatable: whether it may be sent again when the stream broke; None: as its stream's.

        Raises:
            RefusedError: the service refused it.
            UnavailableError: no answer within `timeout_s`, or the stream broke and the item may
                not be repeated. Whether it took effect is unknown.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if not self._places.take():
            try:
                await self._places.wait(deadline)
            except TimeoutError:
                raise late(self._spec.name, timeout_s) from None
        try:
            if self._closed:
                raise broken(self._spec.name, "closed")
            self._sequence += 1
            again = self._spec.repeatable if repeatable is None else repeatable
            future: asyncio.Future[ResultT] = loop.create_future()
            pending = PendingItem(
                self._sequence, payload, tenant, timeout_s, deadline, traceparent, again, future
            )
            self._enqueue(pending)
            try:
                return await pending.future
            finally:
                self._retire(pending)
        finally:
            self._places.give_back()

    def expect(self, coming: Callable[[], int], linger_s: float) -> None:
        """Have messages wait for those callers of whom the owner knows that they will come soon.

        Args:
            coming: how many those are now.
            linger_s: how long to wait for them at most; as for the stream itself.
        """
        self._gathering = Gathering(linger_s, coming)

    async def close(self) -> None:
        """End the stream; callers that still wait get UnavailableError."""
        self._closed = True
        self._wake.set()
        self._deadlines.cancel()
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
        self._fail_all(broken(self._spec.name, "closed"))

    def _enqueue(self, pending: PendingItem[PayloadT, ResultT]) -> None:
        self._queue_items(pending)
        self._unanswered[pending.sequence] = pending
        self._deadlines.watch(pending.deadline)
        if len(self._queue) >= self._enough:
            self._wake.set()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    def _retire(self, pending: PendingItem[PayloadT, ResultT]) -> None:
        """Forget an item; tell the server if nobody waits for its answer any more."""
        if self._unanswered.pop(pending.sequence, None) is not None and pending.sent:
            self._sent_count -= 1
        self._retired.set()
        future = pending.future
        answered = future.done() and not future.cancelled()
        if answered:
            future.exception()  # a caller that was cancelled at the same time never looks at it
        if pending.sent and (pending.late or not answered) and not self._closed:
            cancel = item_pb2.ItemCancel()
            self._queue.append(QueuedItem(pending, _CANCEL_FIELD, cancel, _ITEM_OVERHEAD_BYTES))
            self._wake.set()

    def _expire(self, now: float) -> float:
        """Fail the items whose time is up; give the earliest deadline that is left."""
        for pending in self._unanswered.values():
            if pending.deadline <= now and not pending.future.done():
                pending.late = True
                pending.future.set_exception(late(self._spec.name, pending.timeout_s))
        left = (one.deadline for one in self._unanswered.values() if not one.future.done())
        return min(left, default=math.inf)

    def _queue_items(self, pending: PendingItem[PayloadT, ResultT]) -> None:
        """Queue a payload, whole or in frames.

        Raises:
            RefusedError: MESSAGE_TOO_LARGE.
        """
        payload = pending.payload
        size = payload.ByteSize()  # serializes: asked once
        if size <= FRAME_BYTES:
            size += _ITEM_OVERHEAD_BYTES
            self._queue.append(QueuedItem(pending, self._spec.payload_field, payload, size))
            return
        serialized = payload.SerializeToString()
        if len(serialized) > PAYLOAD_BYTES:
            refusal = Refusal(
                er.ERROR_REASON_MESSAGE_TOO_LARGE,
                "the payload is larger than any that is accepted",
                size_bytes=len(serialized),
                limit_bytes=PAYLOAD_BYTES,
            )
            raise error_of(status_of(refusal))
        for frame in frames_of(serialized):
            size = frame.ByteSize() + _ITEM_OVERHEAD_BYTES
            self._queue.append(QueuedItem(pending, FRAME_FIELDS[type(frame)], frame, size))

    async def _run(self) -> None:
        """Keep a stream open while there is something to send or to await."""
        backoff_s = _BACKOFF_FIRST_S
        while not self._closed and (self._queue or self._unanswered):
            answered = await self._converse()
            if answered:
                backoff_s = _BACKOFF_FIRST_S
            elif self._unanswered:
                # Waiting is bounded by the callers' own timeouts, each of which empties its place.
                await asyncio.sleep(random.uniform(0, backoff_s))  # noqa: S311 - spreads load
                backoff_s = min(backoff_s * 2, _BACKOFF_LAST_S)

    async def _converse(self) -> bool:
        """Run one stream until it ends; say whether it answered anything."""
        before = self._answer_count
        call = cast("ItemCall", self._connect(timeout=STREAM_S))
        reader = asyncio.ensure_future(self._read(call))
        writer = asyncio.ensure_future(self._write(call))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, reader):
                task.cancel()
            call.cancel()
            outcomes = await asyncio.gather(reader, writer, return_exceptions=True)
        error = next((one for one in outcomes if isinstance(one, CallforestError)), None)
        self._after_break(error)
        return self._answer_count > before

    async def _write(self, call: ItemCall) -> None:
        loop = asyncio.get_running_loop()
        renew_at = loop.time() + self._renew_s
        before = self.message_count
        while True:
            if not self._queue:
                self._wake.clear()
            await self._wake.wait()
            if loop.time() >= renew_at and self.message_count > before:
                await self._answered()
                return
            await self._gather()
            request = self._next_request(loop.time())
            if not request.items:
                continue
            self.message_count += 1
            self.item_count += len(request.items)
            try:
                await call.write(request)
            except grpc.aio.AioRpcError as error:
                raise why_ended(self._spec.name, error) from None
            except asyncio.InvalidStateError:
                raise broken(self._spec.name, "ended") from None

    async def _answered(self) -> None:
        """Wait until everything that was sent has its answer, or nobody waits for it."""
        while any(pending.sent for pending in self._unanswered.values()):
            self._retired.clear()
            await self._retired.wait()

    async def _gather(self) -> None:
        """Let more items come while several callers are at work."""
        loop = asyncio.get_running_loop()
        self._see(loop.time())
        if len(self._queue) >= self._gathering.enough:
            return
        self._enough = self._gathering.enough
        self._wake.clear()
        now = loop.time()
        first = min((one.pending.deadline for one in self._queue), default=math.inf)
        linger_s = min(self._gathering.linger_s, max(0.0, first - now) * _LINGER_SHARE)
        timer = loop.call_later(linger_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
            self._enough = 1
        self._gathering.waited(len(self._queue), len(self._unanswered))

    def _see(self, now: float) -> None:
        self._gathering.see(len(self._unanswered), self._sent_count, now)

    def _next_request(self, now: float) -> RequestLike:
        """Make the next message of what is queued; it has no items when nothing is."""
        self._see(now)
        request = self._spec.request()
        total = count = 0
        while self._queue and count < MESSAGE_ITEMS:
            queued = self._queue[0]
            pending = queued.pending
            waited_for = pending.sequence in self._unanswered
            if not waited_for and queued.arm != _CANCEL_FIELD:
                self._queue.popleft()  # nobody waits for it any more: it must not begin now
                continue
            total += queued.size
            if count and total > MESSAGE_BYTES:
                break
            self._queue.popleft()
            item = request.items.add()
            pending.fill(item.context, now)
            put_arm(item, queued.arm, queued.body)
            count += 1
            if waited_for and not pending.sent:
                pending.sent = True
                self._sent_count += 1
        return request

    async def _read(self, call: ItemCall) -> None:
        assembler = FrameAssembler(payloads_max=1024)
        try:
            async for response in call:
                for result in response.results:
                    self._take(result, assembler)
            code = await call.code()
        except grpc.aio.AioRpcError as error:
            raise why_ended(self._spec.name, error) from None
        raise broken(self._spec.name, code.name)

    def _take(self, result: ResultLike, assembler: FrameAssembler) -> None:
        self._answer_count += 1
        sequence: int = result.sequence
        pending = self._unanswered.get(sequence)
        if pending is None or pending.future.done():
            assembler.drop(sequence)
            return
        outcome = result.WhichOneof("outcome")
        try:
            if outcome == self._spec.answer_field:
                pending.future.set_result(getattr(result, outcome))
            elif outcome == "error":
                pending.future.set_exception(error_of(result.error, of_repeat=pending.repeated))
            elif outcome == "begin":
                assembler.begin(sequence, result.begin)
            elif outcome == "chunk":
                assembler.chunk(sequence, result.chunk)
            elif outcome == "end":
                answer = self._spec.answer.FromString(assembler.end(sequence))
                pending.future.set_result(answer)
            else:
                pending.future.set_exception(broken(self._spec.name, "an empty result"))
        except Refusal as refusal:
            pending.future.set_exception(error_of(status_of(refusal), of_repeat=True))

    def _after_break(self, error: CallforestError | None) -> None:
        """Queue what may be repeated again and fail what may not."""
        self._queue.clear()
        failure = error or broken(self._spec.name, "ended")
        fatal = isinstance(failure, RefusedError) and failure.retry_after_ms is None
        for pending in list(self._unanswered.values()):
            if pending.future.done():
                continue
            if fatal or (pending.sent and not pending.repeatable):
                pending.future.set_exception(failure)
                self._unanswered.pop(pending.sequence, None)
            else:
                pending.sent, pending.repeated = False, pending.sent or pending.repeated
                self._queue_items(pending)
        self._sent_count = sum(pending.sent for pending in self._unanswered.values())
        if self._queue:
            self._wake.set()

    def _fail_all(self, error: CallforestError) -> None:
        for pending in self._unanswered.values():
            if not pending.future.done():
                pending.future.set_exception(error)
        self._unanswered.clear()
        self._sent_count = 0
