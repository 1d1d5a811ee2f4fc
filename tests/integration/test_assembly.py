"""One configuration, two ways to run: all services in this process, or each in its own."""

import asyncio
import json
import socket
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from callforest.capture.v1 import receipt_pb2
from callforest_client.rollout import Outcome, RolloutOwner
from callforest_mesh import inspection
from callforest_mesh.assembly import Clients, EmbeddedMesh, addressed
from callforest_mesh.chassis.configuration import SERVICES, MeshConfiguration, load
from callforest_mesh.cli import main
from callforest_mesh.supervisor import Supervisor
from callforest_mesh.worker.tiny_model import make_tiny_model

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
        yield Running(configuration, arguments, clients, url)


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


@pytest.mark.requirement("API-2")
@pytest.mark.parametrize("kind", ["embedded", "processes"])
async def test_a_rollout_runs_on_the_same_configuration(kind: str, tmp_path: Path) -> None:
    async with running(kind, tmp_path) as mesh:
        receipt = await roll_out(mesh, "r1")
        assert not receipt.masked, receipt
        assert [call.selected for call in receipt.calls] == [True] * 3
        lines, status = await asyncio.to_thread(
            inspection.show, mesh.configuration, "r1", tmp_path / "calls.svg"
        )
        assert status == 0
        text = "\n".join(lines)
        assert text.count("  trains") == 4, "three calls and the receipt"
        assert all(call.call_id in text for call in receipt.calls)
        assert receipt.digest.hex() in text
        drawing = ET.parse(tmp_path / "calls.svg").getroot()
        assert len([one for one in drawing.iter() if one.get("class") == "loss"]) == 3
        lines, status = await asyncio.to_thread(inspection.verify, mesh.configuration, "r1")
        assert (lines, status) == (
            [
                f"intact: 3 calls on 1 paths, the longest of {receipt.total_token_count} tokens",
            ],
            0,
        )


async def test_a_running_attempt_can_be_looked_at(tmp_path: Path) -> None:
    async with running("embedded", tmp_path) as mesh:
        rollout = await mesh.owner.open("r1")
        status = await asyncio.to_thread(main, ["verify", "r1", *mesh.arguments])
        assert status == 1, "nothing was committed"
        await play(rollout.base_url, 1)
        assert await asyncio.to_thread(main, ["verify", "r1", *mesh.arguments]) == 0
        assert await asyncio.to_thread(main, ["show", "r1", *mesh.arguments]) == 0
        again = await mesh.owner.open("r1")
        assert again.capture_key == "r1-a1"
        lines, _ = await asyncio.to_thread(inspection.show, mesh.configuration, "r1")
        assert "attempt r1  sealed" in lines[0]
        assert "superseded" in lines[0]
        assert any(line.startswith("attempt r1-a1  open") for line in lines)
        lines, _ = await asyncio.to_thread(inspection.show, mesh.configuration, "r1-a1")
        assert len([line for line in lines if line.startswith("attempt")]) == 1
        assert await asyncio.to_thread(main, ["show", "nobody", *mesh.arguments]) == 1


async def test_what_was_captured_survives_another_way_to_run(tmp_path: Path) -> None:
    async with running("embedded", tmp_path) as mesh:
        first = await roll_out(mesh, "r1")
    async with running("processes", tmp_path) as mesh:
        assert await mesh.clients.finalizer().receipt("r1") == first
        await roll_out(mesh, "r2")


@pytest.mark.requirement("API-2")
@pytest.mark.engine
@pytest.mark.parametrize("kind", ["embedded", "processes"])
async def test_the_trainer_runs_with_the_others(kind: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    every = (f"services=[{', '.join(SERVICES)}]", f"trainer.model_path={model}")
    async with running(kind, tmp_path, *every) as mesh:
        status = await mesh.clients.trainer().status()
        assert status.step == 0  # nothing was published
        assert not (await roll_out(mesh, "r1")).masked
