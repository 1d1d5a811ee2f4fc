"""A bare gRPC echo in a process of its own: the unit in which the mesh's cost is told."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import grpc
import grpc.aio

from benchmarks._processes import cpu_of

_METHOD = "/benchmark.Echo/Echo"
_PAYLOAD = b"12345678"
_IN_FLIGHT = 64
_CALLS = 6000


@dataclass(frozen=True)
class EchoFigures:
    """Calls a second with 64 in flight, and client and server time of one aio call."""

    aio_per_s: float
    sync_per_s: float
    aio_cpu_us: float


def _same(raw: bytes) -> bytes:
    return raw


async def _serve_aio() -> None:
    async def echo(request: bytes, _context: object) -> bytes:
        return request

    await _serve(grpc.aio.server(), grpc.unary_unary_rpc_method_handler(echo))


async def _serve(server: grpc.aio.Server, handler: grpc.RpcMethodHandler[bytes, bytes]) -> None:
    server.add_registered_method_handlers("benchmark.Echo", {"Echo": handler})
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("benchmark.Echo", {"Echo": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


def _serve_sync() -> None:
    def echo(request: bytes, _context: object) -> bytes:
        return request

    server = grpc.server(ThreadPoolExecutor(_IN_FLIGHT))
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("benchmark.Echo", {"Echo": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(0)


async def echo_figures() -> EchoFigures:
    """Measure both kinds of echo, each against a server of its own."""
    aio_per_s, aio_cpu_us = await _measure("aio")
    sync_per_s, _ = await _measure("sync")
    return EchoFigures(aio_per_s, sync_per_s, aio_cpu_us)


async def _measure(kind: str) -> tuple[float, float]:
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks._echo",
        kind,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdin is not None
    target = f"127.0.0.1:{int(await server.stdout.readline())}"
    drive = _drive_aio if kind == "aio" else _drive_sync
    await drive(target, 200)
    used = resource.getrusage(resource.RUSAGE_SELF)
    before = cpu_of(server.pid) + used.ru_utime + used.ru_stime
    began = time.perf_counter()
    await drive(target, _CALLS)
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = cpu_of(server.pid) + used.ru_utime + used.ru_stime - before
    server.stdin.close()
    await server.wait()
    return _CALLS / seconds, cpu_s / _CALLS * 1e6


async def _drive_aio(target: str, calls: int) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        method = channel.unary_unary(_METHOD, _same, _same)
        left = calls

        async def run() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await method(_PAYLOAD, timeout=30)

        await asyncio.gather(*(run() for _ in range(_IN_FLIGHT)))


async def _drive_sync(target: str, calls: int) -> None:
    await asyncio.to_thread(_drive_threads, target, calls)


def _drive_threads(target: str, calls: int) -> None:
    with grpc.insecure_channel(target) as channel, ThreadPoolExecutor(_IN_FLIGHT) as pool:
        method = channel.unary_unary(_METHOD, _same, _same)

        def run(count: int) -> None:
            for _ in range(count):
                method(_PAYLOAD, timeout=30)

        wait([pool.submit(run, calls // _IN_FLIGHT) for _ in range(_IN_FLIGHT)])


if __name__ == "__main__":
    if sys.argv[1] == "aio":
        asyncio.run(_serve_aio())
    else:
        _serve_sync()
