"""The engine's process: `python -m callforest_mesh.worker.vllm.child --socket S --options JSON`.

It serves `EngineService` on the unix socket once the engine can generate. It ends when its standard
input does (then its parent is gone, whatever became of it), on SIGTERM, or when the engine breaks.
The exit status is 0 unless the engine broke.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import grpc.aio

from callforest.worker.v1 import engine_service_pb2, engine_service_pb2_grpc
from callforest_mesh.chassis.child_server import child_server
from callforest_mesh.chassis.lifeline import end_with_parent
from callforest_mesh.worker.engine import Engine
from callforest_mesh.worker.vllm.host import VllmHost
from callforest_mesh.worker.vllm.options import VllmOptions
from callforest_mesh.worker.vllm.servicer import EngineServicer

_END_S = 15.0
SERVICE_NAME = engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name


class HostedEngine(Engine, Protocol):
    """An engine in this process, which may break for good."""

    @property
    def broken(self) -> str:
        """Why it will never answer again; "" while it may."""
        ...


async def serve(socket: Path, make_engine: Callable[[Callable[[], None]], HostedEngine]) -> int:
    """Serve one engine until the parent leaves or the engine breaks; return the exit status.

    Args:
        socket: path of the unix socket.
        make_engine: makes the engine, given what to call when it breaks.
    """
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    end_with_parent(ended)
    engine = make_engine(ended.set)
    server = make_server(engine)
    try:
        await engine.start()
        # Only now: the engine forks, and gRPC's threads do not survive a fork.
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        await ended.wait()
    finally:
        _sweep_later()
        await server.stop(grace=1.0)
        broken = engine.broken
        await engine.stop()
    return 1 if broken else 0


def make_server(engine: Engine) -> grpc.aio.Server:
    """Make the server of an engine; it listens nowhere yet."""
    server = child_server("engine", SERVICE_NAME)
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(EngineServicer(engine), server)
    return server


def _sweep_later() -> None:
    """See to it that ending takes no longer than `_END_S`, the engine's own children included."""
    if os.getpgrp() != os.getpid():
        return  # Started by hand, in the group of a shell.
    sweep = threading.Timer(_END_S, os.killpg, (os.getpgrp(), signal.SIGKILL))
    sweep.daemon = True
    sweep.start()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="Serve one vLLM engine on a unix socket.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--options", type=VllmOptions.from_json, required=True)
    arguments = parser.parse_args()
    make_host = functools.partial(VllmHost, arguments.options)
    sys.exit(asyncio.run(serve(arguments.socket, make_host)))


if __name__ == "__main__":
    main()
