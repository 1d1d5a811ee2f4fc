"""The Staging service's RPCs: request to core and store to response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import cast

from callforest.capture.v1 import item_pb2, staged_call_pb2
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest.staging.v1 import staging_service_pb2_grpc as rpc
from callforest_client.frames import FRAME_BYTES, FRAME_FIELDS, frames_of
from callforest_client.streams import FETCH_PREFIX, STAGE
from callforest_mesh.chassis.call_attributes import prefix_attributes, stage_attributes
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.instruments import Description
from callforest_mesh.chassis.item_server import Drain, ItemServer
from callforest_mesh.chassis.telemetry import SILENT, ServiceTelemetry
from callforest_mesh.staging.core import check_call, strip_columns
from callforest_mesh.staging.store import StagedCalls


class StagingServicer(rpc.StagingServiceServicer):
    """Answers Staging's callers. Token bytes are read on threads: the event loop acknowledges.

    Args:
        calls: the staged calls.
        drain: when begun, item streams end after the items they had taken.
        service: names the service in errors.
        telemetry: what it says of its work.
    """

    def __init__(
        self,
        calls: StagedCalls,
        drain: Drain,
        *,
        service: str,
        telemetry: ServiceTelemetry = SILENT,
    ) -> None:
        self._calls = calls
        self._stage = ItemServer(
            STAGE,
            self._stage_call,
            service=service,
            drain=drain,
            telemetry=telemetry,
            describe=stage_attributes,
        )
        self._prefix = ItemServer(
            FETCH_PREFIX,
            self._fetch_prefix,
            service=service,
            drain=drain,
            telemetry=telemetry,
            describe=prefix_attributes,
        )
        self._staged_bytes = telemetry.metrics.counter(
            Description("callforest.staging.bytes", "By", "Bytes of staged calls.")
        )
        self._teardowns: set[asyncio.Task[int]] = set()

    async def Stage(
        self, request_iterator: AsyncIterator[pb.StageRequest], context: object
    ) -> AsyncIterator[pb.StageResponse]:
        """Store calls."""
        async for response in self._stage.serve(request_iterator):
            yield cast("pb.StageResponse", response)

    async def FetchPrefix(
        self, request_iterator: AsyncIterator[pb.FetchPrefixRequest], context: object
    ) -> AsyncIterator[pb.FetchPrefixResponse]:
        """Read the deltas that lead to calls."""
        async for response in self._prefix.serve(request_iterator):
            yield cast("pb.FetchPrefixResponse", response)

    async def Fetch(
        self, request: pb.FetchRequest, context: object
    ) -> AsyncIterator[pb.FetchResponse]:
        """Read staged calls in the asked order."""
        call_ids = list(request.call_ids)
        self._calls.require(request.tenant, request.capture_key, call_ids)
        done = 0
        while done < len(call_ids):
            calls = await asyncio.to_thread(
                self._calls.some, request.tenant, request.capture_key, call_ids[done:]
            )
            for call in calls:
                if request.without_columns:
                    strip_columns(call)
                for part in _parts(call):
                    yield part
            done += len(calls)

    async def DeleteCalls(
        self, request: pb.DeleteCallsRequest, context: object
    ) -> pb.DeleteCallsResponse:
        """Remove staged calls."""
        failpoint("staging.before_delete")
        deleted = await self._calls.delete(
            request.tenant, request.capture_key, list(request.call_ids)
        )
        failpoint("staging.after_delete")
        return pb.DeleteCallsResponse(deleted_count=deleted)

    async def DropPartition(
        self, request: pb.DropPartitionRequest, context: object
    ) -> pb.DropPartitionResponse:
        """Tear an attempt down. A caller that goes away does not stop it half-way."""
        failpoint("staging.before_drop")
        teardown = asyncio.ensure_future(self._calls.drop(request.tenant, request.capture_key))
        self._teardowns.add(teardown)
        teardown.add_done_callback(self._teardowns.discard)
        return pb.DropPartitionResponse(deleted_count=await asyncio.shield(teardown))

    async def Stat(self, request: pb.StatRequest, context: object) -> pb.StatResponse:
        """Count what a tenant has staged."""
        return self._calls.stat(request.tenant)

    async def settle(self) -> None:
        """Wait until the teardowns that have begun are done."""
        await asyncio.gather(*self._teardowns, return_exceptions=True)

    def _stage_call(
        self, context: item_pb2.ItemContext, call: staged_call_pb2.StagedCall
    ) -> asyncio.Future[pb.StagedReceipt]:
        failpoint("staging.before_check")
        check_call(call)
        failpoint("staging.after_check")
        return self._calls.put(context.tenant, call, self._staged_bytes.add)

    async def _fetch_prefix(
        self, context: item_pb2.ItemContext, query: pb.PrefixQuery
    ) -> pb.Prefix:
        return await asyncio.to_thread(self._calls.prefix, context.tenant, query)


def _parts(call: staged_call_pb2.StagedCall) -> Iterator[pb.FetchResponse]:
    if call.ByteSize() <= FRAME_BYTES:
        yield pb.FetchResponse(call=call)
        return
    for frame in frames_of(call.SerializeToString()):
        part = pb.FetchResponse()
        arm = getattr(part, FRAME_FIELDS[type(frame)])
        arm.CopyFrom(frame)
        arm.SetInParent()  # FrameEnd has no field whose copy would choose the arm
        yield part
