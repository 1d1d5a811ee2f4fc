"""A collector of telemetry in a process of its own, which throws away what it gets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import ExitStack
from typing import Final

import grpc
import grpc.aio

EXPORT_METHODS: Final = (
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
)


class Discard(grpc.GenericRpcHandler):
    """Takes every export, parses nothing, answers that all is well."""

    def service(self, details: grpc.HandlerCallDetails) -> object:
        async def answer(_request: bytes, _context: object) -> bytes:
            return b""

        known = details.method in EXPORT_METHODS
        return grpc.unary_unary_rpc_method_handler(answer) if known else None


async def collect() -> None:
    """Be the collector until standard input ends."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Discard(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def start_collector(stack: ExitStack) -> str:
    """Start the collector; give its endpoint. It ends with the stack."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._collector"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(child)
    assert child.stdout is not None
    assert child.stdin is not None
    stack.callback(child.stdin.close)
    return f"http://127.0.0.1:{int(child.stdout.readline())}"


if __name__ == "__main__":
    asyncio.run(collect())
