"""`callforest status`: what each service of a running mesh is at."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest.trainer.v1 import trainer_service_pb2_grpc as rpc
from callforest_mesh.assembly import EmbeddedMesh
from callforest_mesh.chassis.configuration import load
from callforest_mesh.cli import main
from callforest_mesh.terminal import AWAY, DONE, NO

SERVICES = ("staging", "ledger", "finalizer", "worker")


class Trainer(rpc.TrainerServiceServicer):
    """Says of itself what it is told."""

    def __init__(self, status: pb.GetStatusResponse) -> None:
        self._status = status

    async def GetStatus(self, *_: object) -> pb.GetStatusResponse:  # noqa: N802 - gRPC's
        return self._status


@asynccontextmanager
async def training(address: str, status: pb.GetStatusResponse) -> AsyncIterator[None]:
    server = grpc.aio.server()
    rpc.add_TrainerServiceServicer_to_server(Trainer(status), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    await healthy.set("trainer", health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(address)
    await server.start()
    yield
    await server.stop(0)


def settings(folder: Path, *names: str) -> list[str]:
    return [
        f"state_dir={folder}/state",
        f"services=[{', '.join(names)}]",
        *(f"addresses.{name}=unix:{folder}/{name}" for name in names),
        "worker.engine=scripted",
    ]


async def status(folder: Path, *names: str) -> int:
    words = [word for one in settings(folder, *names) for word in ("--set", one)]
    return await asyncio.to_thread(main, ["status", *words])


@pytest.mark.requirement("OPS-3")
async def test_every_service_says_what_it_is_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await status(tmp_path, *SERVICES) == AWAY
    assert capsys.readouterr().out.count("does not answer") == len(SERVICES)
    async with EmbeddedMesh(load(environment={}, settings=settings(tmp_path, *SERVICES))):
        assert await status(tmp_path, *SERVICES) == DONE
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines] == [[name, "SERVING"] for name in SERVICES]
        assert "0 calls of 0.0 MiB are staged" in lines[0]
        assert "0 groups are published, 0 consumed for good; no consumer yet" in lines[2]
        assert "scripted serves scripted, weights 0" in lines[3]


async def test_a_trainer_that_has_stopped_is_no_running_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"unix:{tmp_path}/trainer"
    stopped = pb.GetStatusResponse(
        phase=pb.TRAINER_PHASE_FAILED, step=7, failure="the loss is not finite"
    )
    async with training(address, stopped):
        assert await status(tmp_path, "trainer") == NO
        assert "STOPPED at step 7, for good: the loss is not finite" in capsys.readouterr().out
    waiting = pb.GetStatusResponse(phase=pb.TRAINER_PHASE_WAITING, step=7, waiting_group_count=2)
    async with training(address, waiting):
        assert await status(tmp_path, "trainer") == DONE
        assert "waiting; step 7, weights 0" in capsys.readouterr().out
