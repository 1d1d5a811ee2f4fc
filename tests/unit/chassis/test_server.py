"""A service's process: where it listens, and how signals end it."""

import asyncio
import re
import signal
import sys
from pathlib import Path

import pytest

from callforest_client.channel import CLIENT_OPTIONS, MESSAGE_BYTES_MAX, SERVER_OPTIONS
from callforest_mesh.chassis.call_limits import CallLimits
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.local_channel import LocalLimits
from callforest_mesh.chassis.server import MeshServer, ServerOptions, ServerStartError
from tests.unit.chassis.slow_process import SlowService

WAIT_S = 30.0
ROOT = Path(__file__).parents[3]


async def spawn(part: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.unit.chassis.slow_process",
        part,
        "127.0.0.1:0",
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )


async def read_until(process: asyncio.subprocess.Process, word: bytes) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(WAIT_S):
        while word not in (line := await process.stderr.readline()):
            assert line, f"it ended before it said {word!r}"


@pytest.mark.requirement("API-6")
async def test_a_second_signal_ends_the_process_at_once() -> None:
    process = await spawn("stop")
    await read_until(process, b"serves")
    process.send_signal(signal.SIGTERM)
    await read_until(process, b"stopping")
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_ends_the_process_in_order(number: signal.Signals) -> None:
    process = await spawn("nothing")
    await read_until(process, b"serves")
    process.send_signal(number)
    _, errors = await process.communicate()
    assert process.returncode == 0
    assert errors.index(b"stopping") < errors.index(b"closed"), "clients outlive their service"


async def test_a_signal_ends_a_process_that_still_starts() -> None:
    process = await spawn("start")
    await read_until(process, b"starting")
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert process.returncode == 0
    assert b"stopping" in errors, "what was half opened is closed"


async def test_the_bound_address_has_the_port() -> None:
    server = MeshServer(SlowService("nothing"), "127.0.0.1:0", Drain())
    bound = await server.start()
    assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", bound)
    other = MeshServer(SlowService("nothing"), bound, Drain())
    with pytest.raises(ServerStartError, match=re.escape(bound)):
        await other.start()
    await server.stop()


async def test_a_socket_that_somebody_listens_on_is_not_taken_away(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/x.sock"
    server = MeshServer(SlowService("nothing"), address, Drain())
    assert await server.start() == address
    with pytest.raises(ServerStartError, match="another process"):
        await MeshServer(SlowService("nothing"), address, Drain()).start()
    await server.stop()


async def test_a_socket_that_a_dead_process_left_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert path.exists()
    server = MeshServer(SlowService("nothing"), f"unix:{path}", Drain())
    await server.start()
    await server.stop()


@pytest.mark.parametrize("limits", [{"calls": 0}, {"waits": 0}])
def test_limits_that_let_nothing_pass_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        CallLimits(**limits)


def test_a_negative_grace_is_refused() -> None:
    with pytest.raises(ValueError, match="grace_s"):
        ServerOptions(grace_s=-1)


@pytest.mark.requirement("API-6")
def test_both_ends_keep_connections_alive_alike() -> None:
    """A client that pings more often than its server permits is told to go away."""
    client, server = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
    permitted = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert 0 < permitted < client["grpc.keepalive_time_ms"]
    assert client["grpc.keepalive_timeout_ms"] > 0
    for name in ("grpc.max_receive_message_length", "grpc.max_send_message_length"):
        assert client[name] == server[name] == MESSAGE_BYTES_MAX
    assert LocalLimits().message_bytes == MESSAGE_BYTES_MAX
