"""The Finalizer service's client."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from callforest.capture.v1 import group_batch_pb2, receipt_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import finalizer_service_pb2_grpc as rpc
from callforest_client import unary
from callforest_client.errors import (
    CallforestError,
    UnavailableError,
    error_of_stream,
)
from callforest_client.group_assembly import (
    GROUP_BYTES_MAX,
    GroupAssembler,
    GroupTooLargeError,
    check_bytes_max,
)
from callforest_core.refusal import Refusal

SUBSCRIPTION_S = 3600.0
"""A subscription is renewed after this long, since every RPC has a deadline."""
CREDIT_MAX = 1024
"""Most groups of one grant; larger ones are cut."""
WAITING_MAX = 16_384
"""Most groups that credit may be outstanding for, or that wait to be taken."""


class RowSubscription:
    """One stream of published groups.

    Iterate over it for the groups in order; grant credit for more; commit what is consumed. The
    stream ends with UnavailableError when it breaks: subscribe again behind the last cursor. What
    was sent and not yet taken waits here, at most as many groups as credit was granted. A group is
    given whole or not at all, however many parts it came in.

    Args:
        stub: the Finalizer's stub.
        start: names the consumer; that it takes parts is filled in.
        group_bytes_max: the most that one group in parts may have; a larger one ends the stream
            with GroupTooLargeError.
    """

    def __init__(
        self,
        stub: rpc.FinalizerServiceStub,
        start: pb.StartSubscription,
        *,
        group_bytes_max: int = GROUP_BYTES_MAX,
    ) -> None:
        self._assembler = GroupAssembler(group_bytes_max)
        self._call = stub.SubscribeRows(timeout=SUBSCRIPTION_S)
        start.takes_parts = True
        self._start: pb.StartSubscription | None = start
        self._writing = asyncio.Lock()
        self._committed: dict[int, asyncio.Future[None]] = {}
        # Credit keeps room for each group and for the end: a reader that waited for room would not
        # read what a commit waits for.
        self._batches: asyncio.Queue[group_batch_pb2.GroupBatch | None] = asyncio.Queue(
            WAITING_MAX + 1
        )
        self._outstanding = 0
        self._failure: CallforestError | None = None
        self._reader: asyncio.Task[None] | None = None

    async def credit(self, groups: int) -> None:
        """Allow this many more groups.

        Raises:
            ValueError: more than WAITING_MAX would be outstanding.
            CallforestError: the stream has ended.
        """
        if self._outstanding + self._batches.qsize() + groups > WAITING_MAX:
            raise ValueError(f"credit for more than {WAITING_MAX} groups at once")
        self._outstanding += groups
        while groups > 0:
            granted = min(groups, CREDIT_MAX)
            await self._write(pb.SubscribeRowsRequest(credit=pb.RowCredit(groups=granted)))
            groups -= granted

    async def commit(self, cursor: int, *, timeout_s: float = 30.0) -> None:
        """Mark groups as consumed; return when that is durable.

        Raises:
            RefusedError: the cursor may not be committed, or not here any more.
            UnavailableError: the stream broke, or nothing was confirmed in time.
        """
        confirmed = self._committed.setdefault(cursor, asyncio.get_running_loop().create_future())
        await self._write(pb.SubscribeRowsRequest(commit=pb.CommitCursor(cursor=cursor)))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(confirmed)
        except TimeoutError:
            raise UnavailableError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"cursor {cursor} was not confirmed in time"
            ) from None

    async def __aiter__(self) -> AsyncIterator[group_batch_pb2.GroupBatch]:
        """Give the groups in cursor order.

        Raises:
            CallforestError: the stream ended; every group that came before was given.
        """
        while True:
            batch = await self._batches.get()
            if batch is None:
                self._batches.put_nowait(None)  # for whoever iterates next
                raise self._failure or _ended()
            yield batch

    async def close(self) -> None:
        """End the stream."""
        self._call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._end(_ended())

    async def _write(self, request: pb.SubscribeRowsRequest) -> None:
        async with self._writing:
            if self._failure is not None:
                raise self._failure
            try:
                if self._start is not None:
                    start, self._start = self._start, None
                    await self._call.write(pb.SubscribeRowsRequest(start=start))
                    self._reader = asyncio.ensure_future(self._read())
                await self._call.write(request)
            except grpc.aio.AioRpcError as error:
                raise error_of_stream(error) from None
            except asyncio.InvalidStateError:
                raise self._failure or _ended() from None

    async def _read(self) -> None:
        failure: CallforestError = _ended()
        try:
            async for response in self._call:
                self._take(response)
        except grpc.aio.AioRpcError as error:
            failure = error_of_stream(error)
        except GroupTooLargeError as error:
            failure = error  # it comes no smaller on another stream
            self._call.cancel()
        except (Refusal, DecodeError, UnavailableError) as error:
            failure = _broke(f"a group broke: {error}")
            self._call.cancel()
        finally:
            self._end(failure)

    def _take(self, response: pb.SubscribeRowsResponse) -> None:
        if response.HasField("committed"):
            confirmed = self._committed.pop(response.committed.cursor, None)
            if confirmed is not None and not confirmed.done():
                confirmed.set_result(None)
            return
        if response.HasField("group_begin"):
            self._check_credit(response.group_begin.group_id)
        batch = self._assembler.take(response)
        if batch is not None:
            self._keep(batch)

    def _keep(self, batch: group_batch_pb2.GroupBatch) -> None:
        self._check_credit(batch.group_id)
        self._outstanding -= 1
        self._batches.put_nowait(batch)

    def _check_credit(self, group_id: str) -> None:
        if self._outstanding < 1:
            raise _broke(f"group {group_id} came without credit")

    def _end(self, failure: CallforestError) -> None:
        """Tell everyone who waits, once."""
        if self._failure is not None:
            return
        self._failure = failure
        for confirmed in self._committed.values():
            if not confirmed.done():
                confirmed.set_exception(failure)
                confirmed.exception()  # nobody may wait for it any more
        self._batches.put_nowait(None)


def _ended() -> UnavailableError:
    return _broke("the subscription has ended")


def _broke(message: str) -> UnavailableError:
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, message)


class FinalizerClient:
    """Finalizes rollouts and groups, and subscribes to rows.

    Args:
        channel: a channel to the Finalizer service.
        tenant: owns everything that is touched.
        timeout_s: the deadline of each call.
        group_bytes_max: the most that a group in parts may have that is put together here.

    Raises:
        ValueError: `group_bytes_max` is less than one payload holds.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        tenant: str = "default",
        timeout_s: float = 60.0,
        group_bytes_max: int = GROUP_BYTES_MAX,
    ) -> None:
        check_bytes_max(group_bytes_max)
        self._group_bytes_max = group_bytes_max
        self._stub = rpc.FinalizerServiceStub(channel)
        self._tenant = tenant
        self._timeout_s = timeout_s

    async def finalize_rollout(self, request: pb.FinalizeRolloutRequest) -> receipt_pb2.Receipt:
        """Fix the receipt of a rollout; the client's tenant is filled in."""
        named = pb.FinalizeRolloutRequest()
        named.CopyFrom(request)
        named.tenant = self._tenant
        response = await unary.call(self._stub.FinalizeRollout, named, timeout_s=self._timeout_s)
        return response.receipt

    async def finalize_group(
        self, group_id: str, rollout_count: int, *, abandon_reason: str = ""
    ) -> pb.FinalizeGroupResponse:
        """Publish a group, or drop it with a reason."""
        request = pb.FinalizeGroupRequest(
            tenant=self._tenant,
            group_id=group_id,
            rollout_count=rollout_count,
            abandon_reason=abandon_reason,
        )
        return await unary.call(self._stub.FinalizeGroup, request, timeout_s=self._timeout_s)

    async def group(
        self, group_id: str, *, timeout_s: float | None = None
    ) -> group_batch_pb2.GroupBatch:
        """Read a published group whole, without moving any cursor.

        Args:
            group_id: the group.
            timeout_s: instead of the client's own; a large group takes its time.

        Raises:
            RefusedError: it was not published, its staged calls are gone, or it is too large
                (GroupTooLargeError).
            UnavailableError: the service is away, or the group came broken.
        """
        request = pb.GetGroupRequest(tenant=self._tenant, group_id=group_id, takes_parts=True)

        async def once(left_s: float) -> group_batch_pb2.GroupBatch:
            assembler = GroupAssembler(self._group_bytes_max)
            batch: group_batch_pb2.GroupBatch | None = None
            async for message in self._stub.GetGroup(request, timeout=left_s):
                batch = assembler.take(message) or batch
            if batch is None:
                raise _broke(f"group {group_id} came without end")
            return batch

        try:
            return await unary.repeated(once, timeout_s or self._timeout_s)
        except (Refusal, DecodeError) as error:
            raise _broke(f"group {group_id} broke: {error}") from error

    def subscribe(self, consumer: str, *, after_cursor: int | None = None) -> RowSubscription:
        """Subscribe to the tenant's groups behind a cursor, by default the committed one."""
        start = pb.StartSubscription(
            tenant=self._tenant, consumer=consumer, after_cursor=after_cursor
        )
        return RowSubscription(self._stub, start, group_bytes_max=self._group_bytes_max)

    async def row_log(self) -> pb.GetRowLogResponse:
        """Learn how far the tenant's row log is."""
        request = pb.GetRowLogRequest(tenant=self._tenant)
        return await unary.call(self._stub.GetRowLog, request, timeout_s=self._timeout_s)

    async def receipt(self, rollout_id: str) -> receipt_pb2.Receipt:
        """Read the receipt of a rollout."""
        request = pb.GetReceiptRequest(tenant=self._tenant, rollout_id=rollout_id)
        response = await unary.call(self._stub.GetReceipt, request, timeout_s=self._timeout_s)
        return response.receipt

    def for_tenant(self, tenant: str) -> FinalizerClient:
        """Give the same client for another tenant."""
        other = copy.copy(self)
        other._tenant = tenant  # noqa: SLF001 - a copy of this very class
        return other
