"""Services as real processes: health, reflection, an orderly end, and a start after a death."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from callforest_client.admission import AdmissionClient
from callforest_client.channel import connect
from callforest_client.errors import UnavailableError
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_mesh.chassis.configuration import MeshConfiguration, load
from callforest_mesh.supervisor import SupervisionError, Supervisor, SupervisorOptions
from tests.unit.staging.calls import KEY, Chain

WAIT_S = 60.0
NAMES = ("staging", "ledger", "admission")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def settings(folder: Path) -> list[str]:
    return [
        f"state_dir={folder}/state",
        f"services=[{', '.join(NAMES)}]",
        *(f"addresses.{name}=unix:{folder}/{name}.sock" for name in NAMES),
        "staging.map_size_bytes=268435456",
        "staging.quota_bytes=200000000",
    ]


def arguments(folder: Path) -> list[str]:
    return [word for one in settings(folder) for word in ("--set", one)]


def configured(folder: Path) -> MeshConfiguration:
    return load(environment={}, settings=settings(folder))


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(configured(tmp_path), arguments(tmp_path))
    await supervisor.start()
    yield supervisor
    await supervisor.stop()


def channel_of(tmp_path: Path, name: str) -> grpc.aio.Channel:
    return connect(f"unix:{tmp_path}/{name}.sock")


@pytest.mark.requirement("API-2")
async def test_each_service_runs_as_its_own_process(supervisor: Supervisor, tmp_path: Path) -> None:
    pids = {supervisor.pid(name) for name in NAMES}
    assert len(pids) == 3
    assert os.getpid() not in pids
    async with channel_of(tmp_path, "admission") as channel:
        admission = AdmissionClient(channel)
        first = await admission.open_attempt("r", request_id="0b0c3b6e-6d5c-4a3e-9a43-2f1a9e6e0001")
        assert first.capture_key == "r"
        await admission.close()
    async with channel_of(tmp_path, "ledger") as channel:
        manifest = await LedgerClient(channel).manifest("r")
        assert manifest.attempt == first


@pytest.mark.requirement("API-6")
async def test_health_and_reflection_name_the_services(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    full = "callforest.ledger.v1.LedgerService"
    async with channel_of(tmp_path, "ledger") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "ledger", full):
            request = health_pb2.HealthCheckRequest(service=name)
            assert (await health.Check(request, timeout=WAIT_S)).status == SERVING
        unknown = health_pb2.HealthCheckRequest(service="nobody")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(unknown, timeout=WAIT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        questions = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=full),
        ]
        answers = reflection.ServerReflectionInfo(iter(questions), timeout=WAIT_S)
        listed, described = [answer async for answer in answers]
        assert full in {one.name for one in listed.list_services_response.service}
        assert described.file_descriptor_response.file_descriptor_proto


@pytest.mark.requirement("API-6", "LED-4")
async def test_sigterm_loses_nothing_acknowledged(supervisor: Supervisor, tmp_path: Path) -> None:
    """P10: the service is told to end while it is at work, and starts again on the same store."""
    pid = supervisor.pid("staging")
    chain = Chain()
    calls = [chain.add() for _ in range(400)]
    async with channel_of(tmp_path, "staging") as channel:
        client = StagingClient(channel, tenant="tenant", timeout_s=WAIT_S)
        acknowledged = 0
        told_after = 0

        async def stage(index: int) -> None:
            nonlocal acknowledged, told_after
            await client.stage(calls[index])
            acknowledged += 1
            if acknowledged == 40:
                os.kill(pid, signal.SIGTERM)
                told_after = acknowledged

        places = asyncio.Semaphore(8)

        async def bounded(index: int) -> None:
            async with places:
                await stage(index)

        await asyncio.gather(*(bounded(index) for index in range(len(calls))))
        assert told_after == 40, "it was at work when it was told to end"
        fetched = await client.fetch(KEY, [call.call_id for call in calls])
        assert fetched == calls
        await client.close()
    assert supervisor.exit_status("staging") == 0, "an orderly end"
    assert supervisor.restarts("staging") == 1
    assert supervisor.pid("staging") != pid


@pytest.mark.requirement("API-6")
async def test_health_says_not_serving_while_a_wait_is_drained(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    async with channel_of(tmp_path, "ledger") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="ledger"), timeout=WAIT_S
        )
        assert (await watch.read()).status == SERVING
        os.kill(supervisor.pid("ledger"), signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING


async def test_a_killed_service_is_started_again(supervisor: Supervisor, tmp_path: Path) -> None:
    call = Chain().add()
    pid = supervisor.pid("staging")
    async with channel_of(tmp_path, "staging") as channel:
        client = StagingClient(channel, tenant="tenant", timeout_s=WAIT_S)
        await client.stage(call)
        os.kill(pid, signal.SIGKILL)
        assert (await client.stat()).call_count == 1, "a call outlives the restart"
        await supervisor.wait_ready("staging", WAIT_S)
        assert await client.fetch(KEY, [call.call_id]) == [call]
        await client.close()
    assert supervisor.exit_status("staging") == -signal.SIGKILL
    assert supervisor.restarts("staging") == 1
    assert supervisor.pid("staging") != pid


async def test_stopped_services_are_gone(tmp_path: Path) -> None:
    supervisor = Supervisor(configured(tmp_path), arguments(tmp_path))
    await supervisor.start()
    await supervisor.stop()
    await supervisor.stop()
    assert [supervisor.exit_status(name) for name in NAMES] == [0, 0, 0]
    for name in NAMES:
        with pytest.raises(SupervisionError):
            supervisor.pid(name)
    async with channel_of(tmp_path, "staging") as channel:
        client = StagingClient(channel, timeout_s=0.5)
        with pytest.raises(UnavailableError):
            await client.stat()


async def test_a_service_that_cannot_start_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "staging").write_text("in the way")
    options = SupervisorOptions(backoff_s=0.01, deaths_most=1)
    supervisor = Supervisor(configured(tmp_path), arguments(tmp_path), options)
    with pytest.raises(SupervisionError, match="staging"):
        await supervisor.start()
    assert supervisor.restarts("staging") == 1
    assert supervisor.exit_status("ledger") == 0, "the others are stopped in order"


async def test_a_child_that_cannot_be_run_is_given_up(tmp_path: Path) -> None:
    options = SupervisorOptions(command=(str(tmp_path / "nowhere"),))
    supervisor = Supervisor(configured(tmp_path), arguments(tmp_path), options)
    with pytest.raises(SupervisionError, match="cannot be run"):
        await supervisor.start()


async def test_a_child_that_was_told_wrong_is_not_started_again(tmp_path: Path) -> None:
    wrong = [*arguments(tmp_path), "--set", "staging.pth=x"]
    supervisor = Supervisor(configured(tmp_path), wrong)
    with pytest.raises(SupervisionError, match="status 2"):
        await supervisor.start()
    assert supervisor.restarts("staging") == 0


async def test_a_service_is_not_taken_for_who_listens_at_its_address(tmp_path: Path) -> None:
    """Another mesh would be SERVING there, and get this one's calls."""
    first = Supervisor(configured(tmp_path), arguments(tmp_path))
    await first.start()
    second = Supervisor(configured(tmp_path), arguments(tmp_path))
    with pytest.raises(SupervisionError, match=r"the address of .*, unix:.* is taken: stop what"):
        await second.start()
    assert all(second.restarts(name) == 0 for name in NAMES)
    await first.stop()


async def spawn(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "callforest_mesh.cli",
        *words,
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_child_ends_with_its_supervisor(tmp_path: Path) -> None:
    child = await spawn("serve", "staging", "--supervised", *arguments(tmp_path))
    assert child.stdin is not None
    assert child.stderr is not None
    async with asyncio.timeout(WAIT_S):
        while b"serves" not in await child.stderr.readline():
            pass
        child.stdin.close()  # as when its supervisor is killed
        await child.stderr.read()
        assert await child.wait() == 0


async def test_two_processes_do_not_share_an_address(tmp_path: Path) -> None:
    first = await spawn("serve", "staging", *arguments(tmp_path))
    assert first.stderr is not None
    async with asyncio.timeout(WAIT_S):
        while b"serves" not in await first.stderr.readline():
            pass
        second = await spawn("serve", "staging", *arguments(tmp_path))
        _, errors = await second.communicate()
        assert second.returncode == 1
        assert b"another process does" in errors
        first.terminate()
        await first.communicate()
        assert first.returncode == 0
