"""A child that serves on a unix socket: how it starts, answers, ends, and what it leaves."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from callforest_client.errors import RefusedError
from callforest_mesh.chassis.child_process import ChildLostError, ChildProcess
from tests.processes import gone

CHILD = Path(__file__).with_name("health_child.py")


@contextlib.asynccontextmanager
async def child_that(how: str) -> AsyncIterator[ChildProcess]:
    child = await ChildProcess.spawn(
        [sys.executable, str(CHILD), how],
        name="oracle",
        environment=lambda scratch: {"GREETING": f"farewell from {scratch.name}"},
    )
    try:
        yield child
    finally:
        await child.end()


async def ask(child: ChildProcess, service: str) -> health_pb2.HealthCheckResponse:
    stub = health_pb2_grpc.HealthStub(child.channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return await child.answer_of(stub.Check(request, timeout=60))


async def test_errors_of_the_child_are_typed() -> None:
    async with child_that("serve") as child:
        await child.wait_ready(60)
        assert child.running
        with pytest.raises(RefusedError, match="weather is unknown") as refusal:
            await ask(child, "weather")
        assert refusal.value.code is grpc.StatusCode.NOT_FOUND


async def test_what_does_not_start_says_why() -> None:
    with pytest.raises(ChildLostError, match="the oracle cannot be run"):
        await ChildProcess.spawn(["no-such-oracle"], name="oracle")
    async with child_that("fail") as child:
        with pytest.raises(ChildLostError, match="status 1: these were its last words, farewell"):
            await child.wait_ready(60)
        assert await child.wait_ended() == 1
        assert not child.running
    async with child_that("mute") as child:
        with pytest.raises(ChildLostError, match=r"did not answer within 0\.2 s"):
            await child.wait_ready(0.2)


async def test_the_end_takes_everything_with_it() -> None:
    async with child_that("fork") as child:
        await child.wait_ready(60)
        grandchild = int(child.log_tail())
        waiting = asyncio.create_task(ask(child, ""))
        with pytest.raises(RefusedError):
            await ask(child, "weather")  # so the other call is on its way, too
        await child.end(grace_s=60)
        with pytest.raises(ChildLostError, match="ended before it answered"):
            await waiting
        assert await child.wait_ended() == 0, "it had its grace"
        assert await asyncio.to_thread(gone, grandchild)
        assert child.log_tail() == ""
        await child.end()


async def test_a_cancelled_caller_is_cancelled() -> None:
    async with child_that("serve") as child:
        await child.wait_ready(60)
        waiting = asyncio.create_task(ask(child, ""))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, str(CHILD), "mute", "--socket", str(tmp_path / "socket")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(b"a word does not end it")
        child.stdin.close()
        assert child.wait(60) == 0
