"""The Staging service's client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import grpc.aio

from callforest.capture.v1 import staged_call_pb2
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest.staging.v1 import staging_service_pb2_grpc as rpc
from callforest_client import unary
from callforest_client.frames import FrameAssembler
from callforest_client.item_stream import ItemStream
from callforest_client.streams import FETCH_PREFIX, STAGE

CALLS_MAX = 4096
"""Most calls of one Fetch or DeleteCalls; longer lists are cut."""


def by_owner(names: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Group calls by the attempt under which they are staged, each group in the order given."""
    grouped: dict[str, list[str]] = {}
    for owner, call_id in names:
        grouped.setdefault(owner, []).append(call_id)
    return grouped


class StagingClient:
    """Stages the tokens of calls and reads them back.

    Args:
        channel: a channel to the Staging service.
        tenant: owns everything that is touched.
        timeout_s: the deadline of each call.
    """

    def __init__(
        self, channel: grpc.aio.Channel, *, tenant: str = "default", timeout_s: float = 30.0
    ) -> None:
        self._stub = rpc.StagingServiceStub(channel)
        self._tenant = tenant
        self._timeout_s = timeout_s
        self._stages = ItemStream(STAGE, self._stub.Stage)
        self._prefixes = ItemStream(FETCH_PREFIX, self._stub.FetchPrefix)

    async def stage(
        self,
        call: staged_call_pb2.StagedCall,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> pb.StagedReceipt:
        """Store a call; the answer means that a power cut cannot undo it."""
        return await self._stages.send(
            call,
            tenant=self._tenant,
            timeout_s=timeout_s or self._timeout_s,
            traceparent=traceparent,
        )

    def expect(self, coming: Callable[[], int], linger_s: float) -> None:
        """Have calls that are staged wait for others that will be staged soon; see `ItemStream`."""
        self._stages.expect(coming, linger_s)

    async def fetch_prefix(
        self,
        query: pb.PrefixQuery,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> pb.Prefix:
        """Read the deltas from a root to a call, less what the caller holds."""
        return await self._prefixes.send(
            query,
            tenant=self._tenant,
            timeout_s=timeout_s or self._timeout_s,
            traceparent=traceparent,
        )

    async def fetch(
        self,
        capture_key: str,
        call_ids: Sequence[str],
        *,
        without_columns: bool = False,
        timeout_s: float | None = None,
    ) -> list[staged_call_pb2.StagedCall]:
        """Read staged calls in the asked order.

        Args:
            capture_key: the attempt.
            call_ids: the calls.
            without_columns: leave tokens, log-probabilities and extras out. What is left proves
                nothing; it serves a repeat, and makes its record.
            timeout_s: instead of the client's own.

        Raises:
            RefusedError: one is missing (CALL_NOT_FOUND) or damaged (STORE_CORRUPT).
            UnavailableError: the service is away.
        """
        bound_s = timeout_s or self._timeout_s
        calls: list[staged_call_pb2.StagedCall] = []
        assembler = FrameAssembler()
        for start in range(0, len(call_ids), CALLS_MAX):
            request = pb.FetchRequest(
                tenant=self._tenant,
                capture_key=capture_key,
                call_ids=call_ids[start : start + CALLS_MAX],
                without_columns=without_columns,
            )
            parts = await unary.read_all(self._stub.Fetch, request, timeout_s=bound_s)
            for part in parts:
                which = part.WhichOneof("part")
                if which == "call":
                    calls.append(part.call)
                elif which == "begin":
                    assembler.begin(0, part.begin)
                elif which == "chunk":
                    assembler.chunk(0, part.chunk)
                else:
                    calls.append(staged_call_pb2.StagedCall.FromString(assembler.end(0)))
        return calls

    async def fetch_owned(
        self, names: Sequence[tuple[str, str]]
    ) -> list[staged_call_pb2.StagedCall]:
        """Read calls that are staged under several attempts, in the asked order.

        Args:
            names: of each call the attempt under which it is staged, and the call.
        """
        found: dict[tuple[str, str], staged_call_pb2.StagedCall] = {}
        for owner, call_ids in by_owner(names).items():
            calls = await self.fetch(owner, call_ids)
            found.update(
                ((owner, call_id), call) for call_id, call in zip(call_ids, calls, strict=True)
            )
        return [found[name] for name in names]

    async def delete(self, capture_key: str, call_ids: Sequence[str]) -> int:
        """Remove staged calls by their exact keys; give how many were there."""
        deleted = 0
        for start in range(0, len(call_ids), CALLS_MAX):
            request = pb.DeleteCallsRequest(
                tenant=self._tenant,
                capture_key=capture_key,
                call_ids=call_ids[start : start + CALLS_MAX],
            )
            response = await unary.call(self._stub.DeleteCalls, request, timeout_s=self._timeout_s)
            deleted += response.deleted_count
        return deleted

    async def drop_partition(self, capture_key: str) -> int:
        """Remove all staged calls of an attempt and refuse later ones."""
        request = pb.DropPartitionRequest(tenant=self._tenant, capture_key=capture_key)
        response = await unary.call(self._stub.DropPartition, request, timeout_s=self._timeout_s)
        return response.deleted_count

    async def stat(self) -> pb.StatResponse:
        """Count what the tenant has staged."""
        request = pb.StatRequest(tenant=self._tenant)
        return await unary.call(self._stub.Stat, request, timeout_s=self._timeout_s)

    def for_tenant(self, tenant: str) -> StagingClient:
        """Give the same client for another tenant; streams are shared."""
        if tenant == self._tenant:
            return self
        other = copy.copy(self)
        other._tenant = tenant  # noqa: SLF001 - a copy of this very class
        return other

    async def close(self) -> None:
        """End the client's streams; the channel stays open."""
        await self._stages.close()
        await self._prefixes.close()
