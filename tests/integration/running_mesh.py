"""A whole mesh with a scripted engine, in this process or in many, and a harness for it."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from callforest.capture.v1 import receipt_pb2
from callforest_client.rollout import Outcome, RolloutOwner
from callforest_mesh.assembly import Clients, EmbeddedMesh, addressed
from callforest_mesh.chassis.configuration import SERVICES, MeshConfiguration, load
from callforest_mesh.supervisor import Supervisor

WAIT_S = 60.0
WITHOUT_TRAINER = tuple(name for name in SERVICES if name != "trainer")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def settings(folder: Path, *more: str) -> list[str]:
    return [
        f"state_dir={folder}/state",
        f"services=[{', '.join(WITHOUT_TRAINER)}]",
        *(f"addresses.{name}=unix:{folder}/{name}.sock" for name in SERVICES),
        f"gateway.port={free_port()}",
        "worker.engine=scripted",
        *(f"{name}.map_size_bytes=268435456" for name in ("staging", "ledger", "finalizer")),
        *(f"{name}.quota_bytes=200000000" for name in ("staging", "ledger", "finalizer")),
        *more,
    ]


@dataclass
class Running:
    """A mesh that runs."""

    configuration: MeshConfiguration
    arguments: list[str]
    clients: Clients
    gateway_url: str
    supervisor: Supervisor | None = None

    @property
    def owner(self) -> RolloutOwner:
        return RolloutOwner(
            self.clients.admission(),
            self.clients.ledger(),
            self.clients.finalizer(),
            self.gateway_url,
        )


@asynccontextmanager
async def running(kind: str, folder: Path, *more: str) -> AsyncIterator[Running]:
    chosen = settings(folder, *more)
    configuration = load(environment={}, settings=chosen)
    arguments = [word for one in chosen for word in ("--set", one)]
    async with AsyncExitStack() as stack:
        if kind == "embedded":
            mesh = await stack.enter_async_context(EmbeddedMesh(configuration))
            yield Running(configuration, arguments, mesh.clients(), mesh.gateway_url)
            return
        supervisor = Supervisor(configuration, arguments)
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        clients = Clients(configuration, addressed(configuration), stack)
        url = f"http://127.0.0.1:{configuration.gateway['port']}"
        yield Running(configuration, arguments, clients, url, supervisor)


async def play(base_url: str, turns: int = 3) -> str:
    """Be an ordinary harness; give the last response's id."""
    messages: list[object] = [{"role": "user", "content": "begin"}]
    answer: dict[str, object] = {}
    async with aiohttp.ClientSession() as http:
        for turn in range(turns):
            body = {"model": "scripted", "messages": messages, "seed": turn}
            async with http.post(f"{base_url}/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                answer = json.loads(await response.text())
            choices = answer["choices"]
            assert isinstance(choices, list)
            messages += [choices[0]["message"], {"role": "user", "content": f"go on {turn}"}]
    return str(answer["id"])


async def roll_out(mesh: Running, rollout_id: str) -> receipt_pb2.Receipt:
    rollout = await mesh.owner.open(rollout_id)
    last = await play(rollout.base_url)
    outcome = Outcome(reward=1.0, declared_response_id=last)
    return await mesh.owner.finish(rollout, outcome, group_id=f"g-{rollout_id}", slot=0)
