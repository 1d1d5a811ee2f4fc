"""Delivery: one subscription sends groups in order, as its credit allows, and commits its cursor.

Contract: docs/protocol.md, section 8. Groups are read from Staging when they are sent; what cannot
be read any more becomes a dropped group at its position, so that the log moves on. Of a group in
parts confirmations go between the parts: a commit does not wait for the end of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence

from callforest.capture.v1 import group_batch_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.staging import StagingClient
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.errors import draining
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.validation import check, malformed
from callforest_mesh.finalizer.cleanup import Cleanup
from callforest_mesh.finalizer.groups import comes_in_parts, dropped, make_batch
from callforest_mesh.finalizer.parts import PartedGroup, needs_parts
from callforest_mesh.finalizer.segments import LostCallError, parts_of, read_proven
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
        check(first)
        start = first.start
        _check_start(start, await self.row_log.bind(start.tenant, start.consumer))
        subscription = Subscription(
            self, start.tenant, start.consumer, takes_parts=start.takes_parts
        )
        if (older := self._live.get(start.tenant)) is not None:
            older.supersede()
        self._live[start.tenant] = subscription
        try:
            # Behind every commit that the older subscription got through.
            state = await self.row_log.bind(start.tenant, start.consumer)
            subscription.begin_behind(_check_start(start, state))
            self.cleanup.wake(start.tenant)
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
        takes_parts: whether it puts groups in parts together.
    """

    def __init__(
        self, home: Subscriptions, tenant: str, consumer: str, *, takes_parts: bool
    ) -> None:
        self._home = home
        self._tenant = tenant
        self._consumer = consumer
        self._takes_parts = takes_parts
        self._parted: PartedGroup[pb.SubscribeRowsResponse] | None = None
        self._sent = 0
        self._credit = 0
        self._confirmed: deque[int] = deque()
        self._committing = asyncio.Lock()
        self._news = asyncio.Event()
        self._superseded = False

    def begin_behind(self, cursor: int) -> None:
        """Go on behind a position."""
        self._sent = cursor

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
                while (responses := await self._next()) is not None:
                    for response in responses:
                        yield response
                    if reader.done():
                        reader.result()  # a message that is refused ends the stream at once
                if self._superseded:
                    async with self._committing:
                        confirmed = self._confirmations()  # of a commit that got through
                    for response in confirmed:
                        yield response
                    raise _superseded(self._consumer)
                if reader.done():
                    reader.result()
                    return
                if self._home.drain.begun:
                    raise draining("finalizer")
        finally:
            reader.cancel()
            drained.cancel()
            await asyncio.gather(reader, drained, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.SubscribeRowsRequest]) -> None:
        async for request in requests:
            check(request)
            action = request.WhichOneof("action")
            if action == "credit":
                self._credit += request.credit.groups
            elif action == "commit":
                await self._commit(request.commit.cursor)
            else:
                raise malformed("SubscribeRows", "`start` comes once")
            self.wake()

    async def _commit(self, cursor: int) -> None:
        state = self._home.row_log.state(self._tenant)
        if cursor > max(self._sent, state.committed_cursor):
            raise cursor_invalid(cursor, state.committed_cursor, self._sent)
        async with self._committing:
            failpoint("finalizer.before_cursor")
            moved = await self._home.row_log.commit(
                self._tenant, cursor, allowed=lambda: not self._superseded
            )
            failpoint("finalizer.after_cursor")
            if moved is None:
                raise _superseded(self._consumer)
            self._confirmed.append(cursor)
        self._home.cleanup.wake(self._tenant)

    async def _next(self) -> Iterator[pb.SubscribeRowsResponse] | None:
        """Give what to send next, confirmations first; None when there is nothing now."""
        if not self._confirmed and (payload := await self._next_payload()) is not None:
            return payload
        return self._confirmations() if self._confirmed else None

    def _confirmations(self) -> Iterator[pb.SubscribeRowsResponse]:
        """Say which commits are durable."""
        while self._confirmed:
            cursor = self._confirmed.popleft()
            yield pb.SubscribeRowsResponse(committed=pb.CommitCursor(cursor=cursor))

    async def _next_payload(self) -> Iterator[pb.SubscribeRowsResponse] | None:
        """Give the next group, or what comes next of one; None when nothing may be sent."""
        if self._superseded or self._home.drain.begun:
            return None
        if self._parted is not None:
            return await self._next_part(self._parted)
        if self._credit < 1:
            return None
        logged = self._home.row_log.at(self._tenant, self._sent + 1)
        if logged is None:
            return None
        if comes_in_parts(logged):
            return await self._begin_parts(logged)
        batch = await self._batch(logged)
        self._spend_credit()
        self._sent += 1
        return parts_of(batch, pb.SubscribeRowsResponse)

    def _spend_credit(self) -> None:
        """Count a group that is sent now, or begun."""
        failpoint("finalizer.before_delivery")
        self._credit -= 1

    async def _begin_parts(
        self, logged: row_log_pb2.LoggedGroup
    ) -> Iterator[pb.SubscribeRowsResponse] | None:
        """Announce a group in parts.

        Returns:
            None when confirmations go first.

        Raises:
            Refusal: GROUP_NEEDS_PARTS, the consumer does not take them.
        """
        if not self._takes_parts:
            async with self._committing:
                pass  # what is being committed is confirmed before the stream ends
            if self._confirmed:
                return None
            raise needs_parts(logged)
        rollouts = self._home.row_log.rollouts(self._tenant, logged)
        self._spend_credit()
        self._parted = PartedGroup(
            logged,
            [rollout.receipt for rollout in rollouts],
            self._home.staging.for_tenant(self._tenant),
            pb.SubscribeRowsResponse,
        )
        return await self._parted.next_payload()

    async def _next_part(
        self, parted: PartedGroup[pb.SubscribeRowsResponse]
    ) -> Iterator[pb.SubscribeRowsResponse]:
        """Give the next part, the end, or the dropped group that stands there from now on."""
        try:
            payload = await parted.next_payload()
        except LostCallError as error:
            payload = parts_of(await self._drop(parted.logged, error), pb.SubscribeRowsResponse)
        else:
            if not parted.has_ended:
                return payload
        self._parted = None
        self._sent += 1
        return payload

    async def _batch(self, logged: row_log_pb2.LoggedGroup) -> group_batch_pb2.GroupBatch:
        """Assemble a group from its references; drop it durably when that is impossible.

        Raises:
            Refusal: PEER_UNAVAILABLE, Staging is away: nothing is known of the group.
        """
        staging = self._home.staging.for_tenant(self._tenant)
        try:
            segments = await read_proven(staging, logged.segments)
        except LostCallError as error:
            return await self._drop(logged, error)
        return self._put_together(logged, segments)

    async def _drop(
        self, logged: row_log_pb2.LoggedGroup, error: LostCallError
    ) -> group_batch_pb2.GroupBatch:
        """Put a dropped group in the place of one that cannot be read any more."""
        _LOG.error("group %s cannot be read: %s", logged.group_id, error)
        tombstone = dropped(logged, str(error))
        if not await self._home.row_log.replace(self._tenant, tombstone):
            raise _superseded(self._consumer) from error  # consumed meanwhile, so cleaned
        return self._put_together(tombstone, ())

    def _put_together(
        self,
        logged: row_log_pb2.LoggedGroup,
        segments: Sequence[staged_call_pb2.StagedCall],
    ) -> group_batch_pb2.GroupBatch:
        rollouts = self._home.row_log.rollouts(self._tenant, logged)
        return make_batch(logged, [rollout.receipt for rollout in rollouts], segments)


def _check_start(start: pb.StartSubscription, state: row_log_pb2.RowLogState) -> int:
    """Give the position to go on behind.

    Raises:
        Refusal: CURSOR_INVALID.
    """
    if not start.HasField("after_cursor"):
        return state.committed_cursor
    if not state.committed_cursor <= start.after_cursor <= state.head_cursor:
        raise cursor_invalid(start.after_cursor, state.committed_cursor, state.head_cursor)
    return start.after_cursor


def cursor_invalid(cursor: int, low: int, high: int) -> Refusal:
    """Make the refusal of a cursor outside what may be named."""
    return Refusal(
        er.ERROR_REASON_CURSOR_INVALID,
        f"cursor {cursor} is not between {low} and {high}",
        cursor=cursor,
        low=low,
        high=high,
    )


def _superseded(consumer: str) -> Refusal:
    return Refusal(
        er.ERROR_REASON_SUBSCRIPTION_SUPERSEDED,
        f"the consumer {consumer} opened a newer subscription",
        consumer=consumer,
    )
