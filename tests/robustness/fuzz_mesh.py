"""Every service of the mesh in one process, listening: what the fuzz test sends its messages to.

`python -m tests.robustness.fuzz_mesh DIRECTORY` says on standard output where it listens, answers
each line `measure` with the memory that it holds, and ends when its standard input does. The engine
is scripted, and the trainer's learner and row log are played: neither takes bytes from outside.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import json
import sys
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio

from callforest_mesh.assembly import EmbeddedMesh
from callforest_mesh.chassis.configuration import SERVICES, MeshConfiguration, load
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer
from callforest_mesh.trainer.service import TrainerService
from callforest_mesh.worker.scripted import RecordedPrompt, ScriptedEngine, ScriptedOptions
from callforest_mesh.worker.vllm.child import make_server
from tests.integration.trainer_fakes import FakeFinalizer, World

ENGINE = "engine"
CONTEXT_TOKENS = 4096
CONTROL_TOKEN = "control-token"


def configuration(directory: Path, port: int) -> MeshConfiguration:
    """Configure the mesh: small stores; caches that are soon full, so that none seems to leak."""
    services = [name for name in SERVICES if name != "trainer"]
    settings = [
        f"state_dir={directory}/state",
        f"services=[{', '.join(services)}]",
        *(f"addresses.{name}=unix:{directory}/{name}.sock" for name in SERVICES),
        *(f"{name}.map_size_bytes={1 << 28}" for name in ("staging", "ledger", "finalizer")),
        *(f"{name}.quota_bytes={200_000_000}" for name in ("staging", "ledger", "finalizer")),
        f"gateway.port={port}",
        "worker.engine=scripted",
        "ledger.cached_calls_max=256",
        "worker.prefix_cache_bytes=65536",
        "log.level=warning",
    ]
    return load(environment={}, settings=settings)


def memory_kib() -> dict[str, int]:
    """Say what this process holds, once everything that can be given back is.

    The resident pages of mapped store files are told apart: they are the kernel's cache of what
    is stored, and it drops them at need.
    """
    for one in gc.get_objects():
        if isinstance(one, functools._lru_cache_wrapper) and one.__module__.startswith(
            "callforest"
        ):
            one.cache_clear()  # bounded, but not yet full
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    total = stores = 0
    of_store = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            of_store = line.endswith("data.mdb")
        elif name == "Rss":
            size = int(rest.split()[0])
            total += size
            stores += size if of_store else 0
    return {"rss": total - stores, "stores": stores}


def _engine() -> ScriptedEngine:
    options = ScriptedOptions(context_token_count=CONTEXT_TOKENS)
    prompts: deque[RecordedPrompt] = deque(maxlen=16)
    return ScriptedEngine(options, prompts=prompts, cancelled_call_ids=deque(maxlen=16))


async def _serve_trainer(directory: Path, address: str, stack: AsyncExitStack) -> None:
    world = World(directory)
    drain = Drain()
    service = TrainerService(
        world.options(), drain, FakeFinalizer(world), world.workers, learner_factory=world.learner
    )
    server = MeshServer(service, address, drain)
    stack.push_async_callback(server.stop)
    await server.start()


async def _serve_engine(address: str, stack: AsyncExitStack) -> None:
    engine = _engine()
    await engine.start()
    server: grpc.aio.Server = make_server(engine)
    server.add_insecure_port(address)
    stack.push_async_callback(server.stop, 0)
    await server.start()


async def serve(directory: Path, port: int) -> None:
    """Serve until standard input ends."""
    chosen = configuration(directory, port)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    engine = _engine()
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(EmbeddedMesh(chosen, engine=engine))
        await _serve_trainer(directory, chosen.addresses.trainer, stack)
        await _serve_engine(f"unix:{directory}/{ENGINE}.sock", stack)
        _say({"url": mesh.gateway_url})
        while await reader.readline():
            _say(memory_kib())


def _say(fact: object) -> None:
    sys.stdout.write(f"{json.dumps(fact)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import logging
    import os

    os.environ["CALLFOREST_CONTROL_TOKEN"] = CONTROL_TOKEN
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
