"""A small service behind a socket or within the process, for the tests of channels."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest.staging.v1 import staging_service_pb2_grpc as rpc
from callforest_client.channel import connect
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer, ServerOptions
from callforest_mesh.chassis.service import ServerLike

NAME = "callforest.staging.v1.StagingService"
SECRET = "a secret path"
CALLER = contextvars.ContextVar("caller", default="nobody")
WAIT_S = 20.0


class FakeStaging(rpc.StagingServiceServicer):
    """Answers by what the tenant's name asks for."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.released = asyncio.Event()
        self.stored = asyncio.Event()
        self.received = 0
        self.produced = 0
        self.request: pb.StatRequest | None = None
        self.metadata: dict[str, str | bytes] = {}
        self.callers: list[str] = []
        self._durable: set[asyncio.Task[None]] = set()

    async def Stat(self, request, context):  # noqa: N802 - gRPC's name
        self.request = request
        self.callers.append(CALLER.get())
        self.metadata = dict(context.invocation_metadata())
        await self._act(request.tenant)
        context.set_trailing_metadata((("served-by", "fake"),))
        return pb.StatResponse(call_count=7)

    async def Fetch(self, request, context):  # noqa: N802 - gRPC's name
        for _ in request.call_ids:
            await context.write(pb.FetchResponse())

    async def Stage(self, request_iterator, _context):  # noqa: N802 - gRPC's name
        async for request in request_iterator:
            self.received += 1
            sequence = request.items[0].context.sequence
            if request.items[0].context.tenant == "stall":
                self.started.set()
                await self.released.wait()
            if request.items[0].context.tenant == "flood":
                async for response in self._flood():
                    yield response
            yield pb.StageResponse(results=[pb.StageResult(sequence=sequence)])
            if sequence == 13:
                raise Refusal(er.ERROR_REASON_STORE_FULL, "thirteen", retry_after_ms=250)

    async def _flood(self) -> AsyncIterator[pb.StageResponse]:
        receipt = pb.StagedReceipt(winner=pb.StagedWinner(served_response=bytes(256 << 10)))
        response = pb.StageResponse(results=[pb.StageResult(sequence=1, receipt=receipt)])
        while not self.released.is_set():
            self.produced += 1
            yield response
            await asyncio.sleep(0)

    async def _act(self, tenant: str) -> None:
        if tenant == "refused":
            raise Refusal(er.ERROR_REASON_CALL_NOT_FOUND, "no such call", call_id="c1")
        if tenant == "broken":
            raise RuntimeError(SECRET)
        if tenant == "slow":
            await self._wait()
        if tenant == "durable":
            task = asyncio.ensure_future(self._store())
            self._durable.add(task)
            self.started.set()
            await asyncio.shield(task)

    async def _wait(self) -> None:
        self.started.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _store(self) -> None:
        await self.released.wait()
        self.stored.set()


class FakeService:
    """The fake servicer as a service of the mesh, with a client-streaming method besides."""

    name = "staging"
    full_names = frozenset({NAME})

    def __init__(self) -> None:
        self.servicer = FakeStaging()
        self.stops = 0

    def attach(self, server: ServerLike) -> None:
        rpc.add_StagingServiceServicer_to_server(self.servicer, server)

        async def count(requests, context):
            names = [request.tenant async for request in requests]
            if "broken" in names:
                raise RuntimeError(SECRET)
            return pb.StatResponse(call_count=len(names))

        handler = grpc.stream_unary_rpc_method_handler(
            count,
            request_deserializer=pb.StatRequest.FromString,
            response_serializer=pb.StatResponse.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(NAME, {"Count": handler})
        server.add_generic_rpc_handlers((generic,))

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.stops += 1


class Rig:
    """The fake service, its server, and a channel to it."""

    def __init__(self, kind: str, folder: Path, options: ServerOptions) -> None:
        self.kind = kind
        self.drain = Drain()
        self.service = FakeService()
        self.fake = self.service.servicer
        self.address = f"unix:{folder}/staging.sock" if kind == "socket" else ""
        self.server = MeshServer(self.service, self.address, self.drain, options)

    async def open(self) -> None:
        bound = await self.server.start()
        self.channel = connect(bound) if bound else self.server.local_channel()
        self.stub = rpc.StagingServiceStub(self.channel)

    async def close(self) -> None:
        self.fake.released.set()
        await self.channel.close()
        await self.server.stop()

    def raw(self, method: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
        return self.channel.unary_unary(f"/{NAME}/{method}")

    def count(self) -> grpc.aio.StreamUnaryMultiCallable[pb.StatRequest, pb.StatResponse]:
        return self.channel.stream_unary(
            f"/{NAME}/Count",
            request_serializer=pb.StatRequest.SerializeToString,
            response_deserializer=pb.StatResponse.FromString,
        )


async def soon(awaitable: Awaitable[object]) -> None:
    async with asyncio.timeout(WAIT_S):
        await awaitable


def stage(sequence: int, tenant: str = "t") -> pb.StageRequest:
    request = pb.StageRequest()
    request.items.add().context.sequence = sequence
    request.items[0].context.tenant = tenant
    return request


async def failure(awaitable: Awaitable[Message]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value
