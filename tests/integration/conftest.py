"""Services on a socket and within the process: the same tests run over both."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest

from callforest_client.channel import connect
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer
from callforest_mesh.chassis.service import MeshService

ServiceOpener = Callable[[MeshService, Drain], Awaitable[grpc.aio.Channel]]


@pytest.fixture(params=["socket", "local"])
async def open_service(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[ServiceOpener]:
    """Start services and give a channel to each; all end with the test, the last one first."""
    async with contextlib.AsyncExitStack() as stack:

        async def serve(service: MeshService, drain: Drain) -> grpc.aio.Channel:
            socket = request.param == "socket"
            address = f"unix:{tmp_path}/{service.name}.sock" if socket else ""
            server = MeshServer(service, address, drain)
            bound = await server.start()
            stack.push_async_callback(server.stop)
            channel = connect(bound) if socket else server.local_channel()
            stack.push_async_callback(channel.close)
            return channel

        yield serve
