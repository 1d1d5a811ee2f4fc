"""A mesh of real processes for benchmarks, with its processor time and its durable commits."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import SERVICES, MeshConfiguration, load
from callforest_mesh.supervisor import Supervisor

_TRACER_S = 20.0
_SYNCED = re.compile(r"\bfdatasync\(\d+\) += 0")


@dataclass
class Mesh:
    """Running services.

    Attributes:
        configuration: where they are.
        supervisor: keeps them.
        clients: typed clients of them.
    """

    configuration: MeshConfiguration
    supervisor: Supervisor
    clients: Clients

    def cpu_s(self) -> dict[str, float]:
        """Give the processor seconds that each service has used."""
        return {name: cpu_of(self.supervisor.pid(name)) for name in self.configuration.services}

    @asynccontextmanager
    async def counted_commits(self, names: Sequence[str]) -> AsyncIterator[dict[str, int]]:
        """Count the durable commits of services while the block runs, by their fdatasync calls."""
        counts = dict.fromkeys(names, 0)
        folder = Path(tempfile.mkdtemp())
        tracers = {}
        for name in names:
            command = ["strace", "-f", "-q", "-e", "trace=fdatasync", "-o", str(folder / name)]
            command += ["-p", str(self.supervisor.pid(name))]
            tracers[name] = await asyncio.create_subprocess_exec(
                *command, stderr=asyncio.subprocess.DEVNULL
            )
        await asyncio.to_thread(_wait_traced, [self.supervisor.pid(name) for name in names])
        yield counts
        for name, tracer in tracers.items():
            tracer.send_signal(signal.SIGINT)
            await tracer.wait()
            counts[name] = len(_SYNCED.findall((folder / name).read_text()))
        shutil.rmtree(folder)


def _wait_traced(pids: Sequence[int]) -> None:
    """Return once every process has its tracer."""
    until = time.monotonic() + _TRACER_S
    while any("TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text() for pid in pids):
        if time.monotonic() > until:
            raise TimeoutError("strace did not attach")


def cpu_of(pid: int) -> float:
    """Give the processor seconds that a process has used, to the nanosecond.

    The clock of another process has no name in Python; its number is that of linux/posix-timers.h
    (CPUCLOCK_SCHED). What /proc says is counted in hundredths of a second.
    """
    return time.clock_gettime((~pid << 3) | 2)


@asynccontextmanager
async def running_mesh(
    services: Sequence[str], sections: Mapping[str, object]
) -> AsyncIterator[Mesh]:
    """Run services as processes in a directory of their own, which goes with them."""
    folder = Path(tempfile.mkdtemp())
    file = _write_configuration(folder, services, sections)
    loaded = load(file)
    supervisor = Supervisor(loaded, ["--config", str(file)])
    async with AsyncExitStack() as closers:
        closers.callback(shutil.rmtree, folder)
        closers.push_async_callback(supervisor.stop)
        await supervisor.start()
        yield Mesh(loaded, supervisor, Clients(loaded, addressed(loaded), closers))


def _write_configuration(
    folder: Path, services: Sequence[str], sections: Mapping[str, object]
) -> Path:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    configuration = {
        "state_dir": str(folder / "mesh"),
        "services": list(services),
        "addresses": {name: f"unix:{folder}/{name}" for name in SERVICES},
        "log": {"level": "warning"},
        "gateway": {"port": port},
        **sections,
    }
    file = folder / "callforest.yaml"
    file.write_text(yaml.safe_dump(configuration))
    return file
