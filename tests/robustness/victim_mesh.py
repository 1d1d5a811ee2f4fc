"""A mesh of victims: every service a process of its own, and clients for whoever drives them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from callforest_client.admission import AdmissionClient
from callforest_client.channel import connect
from callforest_client.finalizer import FinalizerClient
from callforest_client.gateway import GatewayClient
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_client.trainer import TrainerClient
from callforest_client.worker import WorkerClient
from callforest_mesh.chassis.configuration import SERVICES, Addresses, load
from callforest_mesh.worker.tiny_model import make_tiny_model
from tests.robustness.killer import Victims

ANSWER_S = 60.0
"""How long an answer may take, a restart of the service included."""
CONTEXT_TOKENS = 2048
GAUGES = "gauges"


@dataclass(slots=True)
class VictimMesh:
    """The processes, and clients of them.

    Attributes:
        victims: keeps the processes.
        url: the gateway's.
        gauges: directory of the gauges and of the trainer's diary.
        addresses: of the services.
    """

    victims: Victims
    url: str
    gauges: Path
    admission: AdmissionClient
    ledger: LedgerClient
    staging: StagingClient
    finalizer: FinalizerClient
    trainer: TrainerClient
    worker: WorkerClient
    gateway: GatewayClient
    http: httpx.AsyncClient
    addresses: Addresses

    async def gateway_serves(self) -> None:
        """Return when the gateway answers."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                if await self._healthy():
                    return
                await asyncio.sleep(0.05)

    async def _healthy(self) -> bool:
        try:
            return (await self.http.get(f"{self.url}/healthz")).status_code == 200
        except httpx.TransportError:
            return False


def settings(directory: Path, port: int) -> list[str]:
    """Configure the mesh: patient peers, a quick engine, small steps with many checkpoints."""
    return [
        f"state_dir={directory}/state",
        *(f"addresses.{name}=unix:{directory}/{name}.sock" for name in SERVICES),
        "log.level=warning",
        *(f"{name}.map_size_bytes={1 << 28}" for name in ("staging", "ledger", "finalizer")),
        *(f"{name}.quota_bytes={200_000_000}" for name in ("staging", "ledger", "finalizer")),
        f"gateway.port={port}",
        "gateway.commit_timeout_s=60",
        "worker.engine=scripted",
        "worker.stage_timeout_s=60",
        "worker.prefix_timeout_s=60",
        "worker.scripted.latency_s=[0.1, 0.4]",
        f"worker.scripted.context_token_count={CONTEXT_TOKENS}",
        f"trainer.model_path={directory}/model",
        "trainer.groups_per_step=1",
        "trainer.checkpoint_interval_steps=2",
        "trainer.learning_rate=0.0001",
    ]


@asynccontextmanager
async def running_mesh(
    directory: Path,
    services: Sequence[str] = SERVICES,
    *,
    flaw: str = "",
    changed: Sequence[str] = (),
    kind: type[Victims] = Victims,
) -> AsyncIterator[VictimMesh]:
    """Run the mesh until the block ends.

    Args:
        directory: short enough for a socket.
        services: which.
        flaw: a fault that the processes are given.
        changed: settings that override those of this mesh.
        kind: keeps the processes.
    """
    if "trainer" in services:
        await asyncio.to_thread(
            make_tiny_model, directory / "model", seed=1, context_token_count=CONTEXT_TOKENS
        )
    gauges, scratch = directory / GAUGES, directory / "tmp"
    gauges.mkdir(exist_ok=True)
    scratch.mkdir()
    port = free_port()
    chosen = [*settings(directory, port), *changed, f"services=[{', '.join(services)}]"]
    arguments = [word for one in chosen for word in ("--set", one)]
    configuration = load(environment={}, settings=chosen)
    victims = kind(configuration, arguments, gauges, scratch, flaw=flaw)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(victims.stop)
        await victims.start()
        channels = {name: connect(configuration.addresses.of(name)) for name in SERVICES}
        for channel in channels.values():
            stack.push_async_callback(channel.close)
        mesh = VictimMesh(
            victims=victims,
            url=f"http://127.0.0.1:{port}",
            gauges=gauges,
            admission=AdmissionClient(channels["admission"], timeout_s=ANSWER_S),
            ledger=LedgerClient(channels["ledger"], timeout_s=ANSWER_S),
            staging=StagingClient(channels["staging"], timeout_s=ANSWER_S),
            finalizer=FinalizerClient(channels["finalizer"], timeout_s=ANSWER_S),
            trainer=TrainerClient(channels["trainer"], timeout_s=ANSWER_S),
            worker=WorkerClient(channels["worker"], timeout_s=ANSWER_S),
            gateway=GatewayClient(channels["gateway"], timeout_s=ANSWER_S),
            http=await stack.enter_async_context(httpx.AsyncClient(timeout=5.0)),
            addresses=configuration.addresses,
        )
        for client in (mesh.admission, mesh.ledger, mesh.staging, mesh.worker, mesh.gateway):
            stack.push_async_callback(client.close)
        yield mesh


def free_port() -> int:
    """Give a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
