"""An item of a stream on its way: who waits for it, and what of it is still to be sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic

from google.protobuf.message import Message

from callforest.capture.v1 import item_pb2
from callforest_client.stream_spec import PayloadT, ResultT


@dataclass(slots=True, eq=False)
class PendingItem(Generic[PayloadT, ResultT]):
    """An item whose caller waits.

    Attributes:
        sequence: names it in its stream.
        payload: what it brings.
        tenant: owns what it touches.
        timeout_s: how long its answer may take.
        deadline: when that is over, on the loop's clock.
        traceparent: its caller's trace context, or "".
        repeatable: whether it may be sent again when the stream broke.
        future: its answer.
        sent: whether all of it was given to the present stream.
        repeated: whether it was sent before, on a stream that broke.
        late: whether its time was over before its answer.
    """

    sequence: int
    payload: PayloadT
    tenant: str
    timeout_s: float
    deadline: float
    traceparent: str
    repeatable: bool
    future: asyncio.Future[ResultT]
    sent: bool = False
    repeated: bool = False
    late: bool = False

    def fill(self, context: item_pb2.ItemContext, now: float) -> None:
        """Fill the context of a new item that is sent at `now`, on the loop's clock."""
        context.sequence = self.sequence
        context.tenant = self.tenant
        context.timeout_ms = max(1, int((self.deadline - now) * 1000))
        if self.traceparent:
            context.traceparent = self.traceparent
        if self.repeated:
            context.is_repeat = True


@dataclass(slots=True, eq=False)
class QueuedItem(Generic[PayloadT, ResultT]):
    """An item to send: the arm of its body, what that holds, and about what it takes on the way."""

    pending: PendingItem[PayloadT, ResultT]
    arm: str
    body: Message
    size: int
