"""Delivery: one subscription sends groups in order, as its credit allows, and commits its cursor.

Contract: docs/protocol.md, section 8. Groups are read from Staging when they are sent; what cannot
be read any more becomes a dropped group at its position, so that the log moves on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

import grpc

from callforest.capture.v1 import frame_pb2, group_batch_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.errors import RefusedError
from callforest_client.frames import FRAME_BYTES, Frame, frames_of
from callforest_client.staging import StagingClient
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.errors import draining
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.validation import malformed
from callforest_mesh.finalizer.cleanup import Cleanup
from callforest_mesh.finalizer.core import dropped
from callforest_mesh.finalizer.store import RowLog

_LOG = logging.getLogger("callforest")


class Subscriptions:
    """All live subscriptions: at most one a tenant, and the news that a log grew.

    Args:
        row_log: the log.
        staging: where the tokens are.
        cleanup: removes what was consumed.
        drain: ends all subscriptions once begun.
    """

    def __init__(
        self, row_log: RowLog, staging: StagingClient, cleanup: Cleanup, drain: Drain
    ) -> None:
        self.row_log = row_log
        self.staging = staging
        self.cleanup = cleanup
        self.drain = drain
        self._live: dict[str, Subscription] = {}

    def published(self, tenant: str) -> None:
        """Tell the tenant's subscription that its log grew."""
        if (live := self._live.get(tenant)) is not None:
            live.wake()

    async def serve(
        self, requests: AsyncIterator[pb.SubscribeRowsRequest]
    ) -> AsyncIterator[pb.SubscribeRowsResponse]:
        """Serve one subscription from its first message to its end."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("action") != "start":
            raise malformed("SubscribeRows", "the first message must be `start`")
        start = first.start
        state = await self.row_log.bind(start.tenant, start.consumer)
        after = state.committed_cursor
        if start.HasField("after_cursor"):
            after = start.after_cursor
            if not state.committed_cursor <= after <= state.head_cursor:
                raise cursor_invalid(after, state.committed_cursor, state.head_cursor)
        subscription = Subscription(self, start.tenant, start.consumer, after)
        if (older := self._live.get(start.tenant)) is not None:
            older.supersede()
        self._live[start.tenant] = subscription
        try:
            async for response in subscription.run(requests):
                yield response
        finally:
            if self._live.get(start.tenant) is subscription:
                del self._live[start.tenant]


class Subscription:
    """One live subscription.

    Args:
        home: what all subscriptions share.
        tenant: owns the rows.
        consumer: the consumer's name.
        after: the position to go on behind.
    """

    def __init__(self, home: Subscriptions, tenant: str, consumer: str, after: int) -> None:
        self._home = home
        self._tenant = tenant
        self._consumer = consumer
        self._sent = after
        self._credit = 0
        self._confirmed: deque[int] = deque()
        self._news = asyncio.Event()
        self._superseded = False
        self._frames: deque[pb.SubscribeRowsResponse] = deque()

    def wake(self) -> None:
        """Look again whether there is something to send."""
        self._news.set()

    def supersede(self) -> None:
        """End this subscription, since its consumer opened a newer one."""
        self._superseded = True
        self.wake()

    async def run(
        self, requests: AsyncIterator[pb.SubscribeRowsRequest]
    ) -> AsyncIterator[pb.SubscribeRowsResponse]:
        """Send groups and confirmations until the consumer ends its side."""
        reader = asyncio.ensure_future(self._read(requests))
        drained = asyncio.ensure_future(self._home.drain.wait())
        reader.add_done_callback(lambda _: self.wake())
        drained.add_done_callback(lambda _: self.wake())
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while (response := await self._next()) is not None:
                    yield response
                    async for frame in self._rest():
                        yield frame
                if self._superseded:
                    raise _superseded(self._consumer)
                if reader.done():
                    reader.result()
                    return
                if self._home.drain.begun:
                    raise draining("finalizer")
        finally:
            reader.cancel()
            drained.cancel()

    async def _read(self, requests: AsyncIterator[pb.SubscribeRowsRequest]) -> None:
        async for request in requests:
            action = request.WhichOneof("action")
            if action == "credit":
                self._credit += request.credit.groups
            elif action == "commit":
                await self._commit(request.commit.cursor)
            else:
                raise malformed("SubscribeRows", "`start` comes once")
            self.wake()

    async def _commit(self, cursor: int) -> None:
        if self._superseded:
            raise _superseded(self._consumer)
        state = self._home.row_log.state(self._tenant)
        if cursor > max(self._sent, state.committed_cursor):
            raise cursor_invalid(cursor, state.committed_cursor, self._sent)
        state = await self._home.row_log.commit(self._tenant, cursor)
        self._confirmed.append(cursor)
        self._home.cleanup.wake(self._tenant)

    async def _next(self) -> pb.SubscribeRowsResponse | None:
        """Give the next event, confirmations first; None when there is none now."""
        if self._confirmed:
            cursor = self._confirmed.popleft()
            return pb.SubscribeRowsResponse(committed=pb.CommitCursor(cursor=cursor))
        if self._superseded or self._credit < 1 or self._home.drain.begun:
            return None
        logged = self._home.row_log.at(self._tenant, self._sent + 1)
        if logged is None:
            return None
        batch = await self._batch(logged)
        self._credit -= 1
        self._sent += 1
        if batch.ByteSize() <= FRAME_BYTES:
            return pb.SubscribeRowsResponse(batch=batch)
        self._frames = deque(_framed(part) for part in frames_of(batch.SerializeToString()))
        return self._frames.popleft()

    async def _rest(self) -> AsyncIterator[pb.SubscribeRowsResponse]:
        """Give what is left of a framed batch; nothing may come between its frames."""
        frames, self._frames = self._frames, deque()
        for frame in frames:
            yield frame

    async def _batch(self, logged: row_log_pb2.LoggedGroup) -> group_batch_pb2.GroupBatch:
        """Assemble a batch from its references; drop it durably when that is impossible."""
        segments: list[staged_call_pb2.StagedCall] = []
        if not logged.drop_reason:
            try:
                segments = await self._segments(logged)
            except RefusedError as error:
                _LOG.error("group %s cannot be read: %s", logged.group_id, error)
                logged = dropped(logged, f"unreadable: {error.message}"[:256])
                await self._home.row_log.replace(self._tenant, logged)
        receipts = self._home.row_log.group_rollouts(self._tenant, logged.group_id)
        return group_batch_pb2.GroupBatch(
            cursor=logged.cursor,
            group_id=logged.group_id,
            receipts=[receipts[slot].receipt for slot in sorted(receipts)],
            segments=segments,
            rows=logged.rows,
            drop_reason=logged.drop_reason,
            row_multiple=logged.row_multiple,
            heuristic_fraction=logged.heuristic_fraction,
        )

    async def _segments(self, logged: row_log_pb2.LoggedGroup) -> list[staged_call_pb2.StagedCall]:
        staging = self._home.staging.for_tenant(self._tenant)
        by_key: dict[str, list[str]] = {}
        for reference in logged.segments:
            by_key.setdefault(reference.capture_key, []).append(reference.call_id)
        found: dict[tuple[str, str], staged_call_pb2.StagedCall] = {}
        for capture_key, call_ids in by_key.items():
            for call in await staging.fetch(capture_key, call_ids):
                call.ClearField("served_response")
                found[capture_key, call.call_id] = call
        segments = []
        for reference in logged.segments:
            call = found[reference.capture_key, reference.call_id]
            if call.digest != reference.digest:
                raise RefusedError(
                    grpc.StatusCode.DATA_LOSS,
                    f"call {reference.call_id} is not the one that was verified",
                    reason=er.ERROR_REASON_DIGEST_MISMATCH,
                )
            segments.append(call)
        return segments


def cursor_invalid(cursor: int, low: int, high: int) -> Refusal:
    """Make the refusal of a cursor outside what may be named."""
    return Refusal(
        er.ERROR_REASON_CURSOR_INVALID,
        f"cursor {cursor} is not between {low} and {high}",
        cursor=cursor,
        low=low,
        high=high,
    )


def _framed(frame: Frame) -> pb.SubscribeRowsResponse:
    if isinstance(frame, frame_pb2.FrameBegin):
        return pb.SubscribeRowsResponse(begin=frame)
    if isinstance(frame, frame_pb2.FrameChunk):
        return pb.SubscribeRowsResponse(chunk=frame)
    return pb.SubscribeRowsResponse(end=frame)


def _superseded(consumer: str) -> Refusal:
    return Refusal(
        er.ERROR_REASON_SUBSCRIPTION_SUPERSEDED,
        f"the consumer {consumer} opened a newer subscription",
        consumer=consumer,
    )
