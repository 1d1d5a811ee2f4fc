"""The client's side of an item stream: many callers, few messages, one result each.

What queues while a message is being written is the next message, so that the cost of a message is
shared. A broken stream is opened again, and items that may be repeated are sent again under their
ids until their time is up. Contract: docs/protocol.md, section "Item streams".
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, cast

import grpc
import grpc.aio

from callforest.capture.v1 import item_pb2
from callforest.error.v1 import error_reason_pb2 as er
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
from callforest_client.stream_breaks import broken, late, why_ended
from callforest_client.stream_spec import (
    ItemCall,
    ItemLike,
    PayloadT,
    ResultLike,
    ResultT,
    StreamSpec,
)
from callforest_core.refusal import Refusal

MESSAGE_ITEMS = 256
MESSAGE_BYTES = 2 << 20
STREAM_S = 3600.0
"""A stream's own deadline, since every RPC has one."""
RENEW_S = 1800.0
"""A stream of this age takes nothing new; once it has answered what it took, another is opened."""
_ITEM_OVERHEAD_BYTES = 256
_BACKOFF_FIRST_S = 0.05
_BACKOFF_LAST_S = 1.0
_CROWD = 4
"""Callers at work from which waiting for more of them pays; below it nothing ever waits."""
_CROWD_FULL = 16
"""Callers at work from which the whole linger is waited."""
_CROWD_KEPT_S = 0.1
"""How long a crowd counts after it was seen."""
_GATHERED_MAX = 32
"""Items that are never kept waiting: their message's cost is shared well enough."""


@dataclass(slots=True, eq=False)
class _Pending(Generic[PayloadT, ResultT]):
    sequence: int
    payload: PayloadT
    tenant: str
    deadline: float
    traceparent: str
    repeatable: bool
    future: asyncio.Future[ResultT]
    sent: bool = False
    late: bool = False


class ItemStream(Generic[PayloadT, ResultT]):
    """Sends payloads over one bidirectional stream and gives each caller its answer.

    Args:
        spec: the stream's messages.
        connect: opens the RPC, a stub's method; called again after a break.
        unanswered_max: callers beyond this many wait for a place.
        linger_s: how long to gather items at most, once several callers are at work; 0 never
            waits.
        renew_s: age from which a stream takes nothing new and another is opened.
    """

    def __init__(
        self,
        spec: StreamSpec[PayloadT, ResultT],
        connect: Callable[..., object],
        *,
        unanswered_max: int = 1024,
        linger_s: float = 0.005,
        renew_s: float = RENEW_S,
    ) -> None:
        self._spec = spec
        self._connect = connect
        self._linger_s = linger_s
        self._renew_s = renew_s
        self._places = asyncio.Semaphore(unanswered_max)
        self._unanswered: dict[int, _Pending[PayloadT, ResultT]] = {}
        self._queue: deque[tuple[ItemLike, int]] = deque()
        self._wake = asyncio.Event()
        self._retired = asyncio.Event()
        self._enough = 1
        self._crowd = 0
        self._crowd_until = 0.0
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
            repeatable: whether it may be sent again when the stream broke, instead of what the
                stream says of its items.

        Raises:
            RefusedError: the service refused it.
            UnavailableError: no answer within `timeout_s`, or the stream broke and the item may
                not be repeated. Whether it took effect is unknown.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            if self._places.locked():
                async with asyncio.timeout_at(deadline):
                    await self._places.acquire()
            else:
                await self._places.acquire()
            try:
                again = self._spec.repeatable if repeatable is None else repeatable
                pending = self._enqueue(loop, payload, tenant, deadline, traceparent, again)
                # A timer costs a tenth of a timeout, which also looks after its task.
                timer = loop.call_at(deadline, _expire, pending)
                try:
                    return await pending.future
                finally:
                    timer.cancel()
                    self._retire(pending)
            finally:
                self._places.release()
        except TimeoutError:
            raise late(self._spec.name, timeout_s) from None

    async def close(self) -> None:
        """End the stream; callers that still wait get UnavailableError."""
        self._closed = True
        self._wake.set()
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
        self._fail_all(broken(self._spec.name, "closed"))

    def _enqueue(
        self,
        loop: asyncio.AbstractEventLoop,
        payload: PayloadT,
        tenant: str,
        deadline: float,
        traceparent: str,
        repeatable: bool,  # noqa: FBT001 - in the order of _Pending
    ) -> _Pending[PayloadT, ResultT]:
        if self._closed:
            raise broken(self._spec.name, "closed")
        self._sequence += 1
        pending = _Pending(
            self._sequence, payload, tenant, deadline, traceparent, repeatable, loop.create_future()
        )
        self._unanswered[pending.sequence] = pending
        self._queue.extend(self._items(pending, loop.time()))
        if len(self._queue) >= self._enough:
            self._wake.set()
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run())
        return pending

    def _retire(self, pending: _Pending[PayloadT, ResultT]) -> None:
        """Forget an item; tell the server if nobody waits for its answer any more."""
        self._unanswered.pop(pending.sequence, None)
        self._retired.set()
        future = pending.future
        answered = future.done() and not future.cancelled()
        if answered:
            future.exception()  # a caller that was cancelled at the same time never looks at it
        if pending.sent and (pending.late or not answered) and not self._closed:
            context = self._context(pending, asyncio.get_running_loop().time())
            cancel = self._spec.item(context=context, cancel=item_pb2.ItemCancel())
            self._queue.append((cancel, _ITEM_OVERHEAD_BYTES))
            self._wake.set()

    def _context(self, pending: _Pending[PayloadT, ResultT], now: float) -> item_pb2.ItemContext:
        return item_pb2.ItemContext(
            sequence=pending.sequence,
            tenant=pending.tenant,
            timeout_ms=max(1, int((pending.deadline - now) * 1000)),
            traceparent=pending.traceparent,
        )

    def _items(
        self, pending: _Pending[PayloadT, ResultT], now: float
    ) -> Iterator[tuple[ItemLike, int]]:
        """Give the items of a payload, each with about what it takes in a message."""
        context = self._context(pending, now)
        size = pending.payload.ByteSize()  # serializes: asked once
        if size <= FRAME_BYTES:
            item = self._spec.item(context=context, **{self._spec.payload_field: pending.payload})
            yield item, size + _ITEM_OVERHEAD_BYTES
            return
        serialized = pending.payload.SerializeToString()
        if len(serialized) > PAYLOAD_BYTES:
            raise error_of(
                status_of(
                    Refusal(
                        er.ERROR_REASON_MESSAGE_TOO_LARGE,
                        "the payload is larger than any that is accepted",
                        size_bytes=len(serialized),
                        limit_bytes=PAYLOAD_BYTES,
                    )
                )
            )
        for frame in frames_of(serialized):
            item = self._spec.item(context=context, **{FRAME_FIELDS[type(frame)]: frame})
            yield item, frame.ByteSize() + _ITEM_OVERHEAD_BYTES

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
            await self._wake.wait()
            if loop.time() >= renew_at and self.message_count > before:
                await self._answered()
                return
            await self._gather()
            batch = self._next_batch()
            if not batch:
                self._wake.clear()
                continue
            self.message_count += 1
            self.item_count += len(batch)
            try:
                await call.write(self._spec.request(items=batch))
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
        """Let more items come while several callers are at work.

        A message costs as much as ten items. How many callers were at work lately says whether
        more are to be expected: those that a message answers come back together.
        """
        loop = asyncio.get_running_loop()
        present = len(self._unanswered)
        if present >= self._crowd or loop.time() > self._crowd_until:
            self._crowd, self._crowd_until = present, loop.time() + _CROWD_KEPT_S
        enough = min(_GATHERED_MAX, self._crowd // 2)
        if self._crowd < _CROWD or not self._linger_s or len(self._queue) >= enough:
            return
        linger_s = self._linger_s * min(1.0, self._crowd / _CROWD_FULL)
        self._enough = enough
        self._wake.clear()
        timer = loop.call_later(linger_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
            self._enough = 1

    def _next_batch(self) -> list[ItemLike]:
        batch: list[ItemLike] = []
        total = 0
        while self._queue and len(batch) < MESSAGE_ITEMS:
            item, size = self._queue[0]
            pending = self._unanswered.get(item.context.sequence)
            if pending is None and item.WhichOneof("body") != "cancel":
                self._queue.popleft()  # nobody waits for it any more: it must not begin now
                continue
            total += size
            if batch and total > MESSAGE_BYTES:
                break
            self._queue.popleft()
            batch.append(item)
            if pending is not None:
                pending.sent = True
        return batch

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
                pending.future.set_exception(error_of(result.error))
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
            pending.future.set_exception(error_of(status_of(refusal)))

    def _after_break(self, error: CallforestError | None) -> None:
        """Queue what may be repeated again and fail what may not."""
        self._queue.clear()
        failure = error or broken(self._spec.name, "ended")
        fatal = isinstance(failure, RefusedError) and failure.retry_after_ms is None
        now = asyncio.get_running_loop().time()
        for pending in list(self._unanswered.values()):
            if pending.future.done():
                continue
            if fatal or (pending.sent and not pending.repeatable):
                pending.future.set_exception(failure)
                self._unanswered.pop(pending.sequence, None)
            else:
                pending.sent = False
                self._queue.extend(self._items(pending, now))
        if self._queue:
            self._wake.set()

    def _fail_all(self, error: CallforestError) -> None:
        for pending in self._unanswered.values():
            if not pending.future.done():
                pending.future.set_exception(error)
        self._unanswered.clear()


def _expire(pending: _Pending[PayloadT, ResultT]) -> None:
    if not pending.future.done():
        pending.late = True
        pending.future.set_exception(TimeoutError())
