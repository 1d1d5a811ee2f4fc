"""Services on a socket, within the process and in processes: the same tests run over all."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc.aio
import pytest

from callforest_client.channel import connect
from callforest_mesh.chassis.configuration import CONTROL_TOKEN_VARIABLE, MeshConfiguration
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer
from callforest_mesh.chassis.service import MeshService
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.integration.first_path_mesh import CONTROL_TOKEN, FirstPathMesh, running_mesh
from tests.integration.kinds_of_mesh import attached_mesh, embedded_mesh, mesh_in_processes

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


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshConfiguration]:
    """One mesh of processes for all tests that ask; each opens rollouts of its own."""
    with mesh_in_processes(tmp_path_factory.mktemp("processes")) as configuration:
        yield configuration


@pytest.fixture(params=["sockets", "embedded", "processes"])
async def mesh_of_each_kind(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FirstPathMesh]:
    """A mesh whose engine answers pseudo-randomly, in ChatML."""
    if request.param == "sockets":
        opened = running_mesh(tmp_path, ScriptedEngine())
    elif request.param == "embedded":
        monkeypatch.setenv(CONTROL_TOKEN_VARIABLE, CONTROL_TOKEN)
        opened = embedded_mesh(tmp_path, ScriptedEngine())
    else:
        opened = attached_mesh(request.getfixturevalue("processes"))
    async with opened as mesh:
        yield mesh
