"""The configured mesh in this process, and in processes that many tests share."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from callforest_client.channel import connect
from callforest_client.gateway import GatewayClient
from callforest_mesh.assembly import Clients, EmbeddedMesh, addressed
from callforest_mesh.chassis.configuration import (
    CONTROL_TOKEN_VARIABLE,
    MeshConfiguration,
    load,
)
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.integration.first_path_mesh import CONTROL_TOKEN, FirstPathMesh
from tests.integration.running_mesh import WAIT_S, settings


@asynccontextmanager
async def embedded_mesh(folder: Path, engine: ScriptedEngine) -> AsyncIterator[FirstPathMesh]:
    """Run all services in this process, as `callforest up` does, on an engine at hand.

    The environment must have the control token.
    """
    configuration = load(environment={}, settings=settings(folder))
    async with (
        EmbeddedMesh(configuration, engine=engine) as running,
        _joined(configuration, running.clients(), engine) as mesh,
    ):
        yield mesh


@asynccontextmanager
async def attached_mesh(configuration: MeshConfiguration) -> AsyncIterator[FirstPathMesh]:
    """Join a mesh whose services are processes of their own; its engine cannot be looked at."""
    async with AsyncExitStack() as stack:
        clients = Clients(configuration, addressed(configuration), stack)
        async with _joined(configuration, clients, None) as mesh:
            yield mesh


@contextmanager
def mesh_in_processes(folder: Path, *more: str) -> Iterator[MeshConfiguration]:
    """Run each service in a process of its own, as `callforest up --processes` does.

    Args:
        folder: holds stores and sockets.
        more: settings, for instance `services=[ledger]`.
    """
    chosen = settings(folder, *more)
    configuration = load(environment={}, settings=chosen)
    words = [word for one in chosen for word in ("--set", one)]
    command = [sys.executable, "-m", "callforest_mesh.cli", "up", "--processes", *words]
    process = subprocess.Popen(command, env=os.environ | {CONTROL_TOKEN_VARIABLE: CONTROL_TOKEN})
    try:
        for name in configuration.services:
            _wait_serving(configuration.addresses.of(name), name)
        yield configuration
    finally:
        process.terminate()
        status = process.wait(WAIT_S)
    assert status == 0


def _wait_serving(address: str, name: str) -> None:
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S, wait_for_ready=True
        )
        serving = health_pb2.HealthCheckResponse.SERVING
        assert any(response.status == serving for response in watch), name


@asynccontextmanager
async def _joined(
    configuration: MeshConfiguration, clients: Clients, engine: ScriptedEngine | None
) -> AsyncIterator[FirstPathMesh]:
    mesh = FirstPathMesh(engine, url=f"http://127.0.0.1:{configuration.gateway['port']}")
    mesh.staging, mesh.ledger = clients.staging(), clients.ledger()
    mesh.admission, mesh.worker = clients.admission(), clients.worker()
    async with (
        connect(configuration.addresses.gateway) as channel,
        httpx.AsyncClient(timeout=30.0) as mesh.http,
    ):
        mesh.gateway = GatewayClient(channel)
        yield mesh
        await mesh.gateway.close()
