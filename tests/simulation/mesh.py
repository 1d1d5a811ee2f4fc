"""The services as simulated processes: built, started, killed, drained, started again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from callforest_client.admission import AdmissionClient
from callforest_client.finalizer import FinalizerClient
from callforest_client.gateway import GatewayClient
from callforest_client.ledger import LedgerClient
from callforest_client.staging import StagingClient
from callforest_client.worker import WorkerClient
from callforest_mesh.admission.service import AdmissionOptions, AdmissionService
from callforest_mesh.chassis.call_limits import CallCounter, CallLimits
from callforest_mesh.chassis.interceptors import EdgeInterceptor
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.service import MeshService
from callforest_mesh.chassis.token_capture import ALL_CAPTURED, RETURNED_HISTORY
from callforest_mesh.finalizer import store as row_log
from callforest_mesh.finalizer.service import FinalizerOptions, FinalizerService
from callforest_mesh.gateway.service import GatewayOptions, GatewayService
from callforest_mesh.ledger import store as ledger_log
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from callforest_mesh.staging import store as staged_calls
from callforest_mesh.staging.service import StagingOptions, StagingService
from callforest_mesh.worker.engine import EngineRequest, EngineResult
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedOptions
from callforest_mesh.worker.service import WorkerOptions, WorkerService
from tests.simulation.disk import Disk, MemoryStore
from tests.simulation.loop import Life
from tests.simulation.network import Host, Network, Registry

SERVICES = ("staging", "ledger", "admission", "worker", "finalizer", "gateway")
STORES = ("staging", "ledger", "finalizer")
CALLS = (
    *(("harness", name) for name in ("gateway", "admission", "ledger", "finalizer")),
    *(("gateway", name) for name in ("admission", "ledger", "worker")),
    *(("finalizer", name) for name in ("ledger", "staging")),
    *(("admission", "ledger"), ("worker", "staging"), ("consumer", "finalizer")),
)
"""Who calls whom."""
GRACE_S = 1.0
NOWHERE = Path("simulated")
EPOCH_NS = 1_800_000_000_000_000_000
"""Where the gateway's wall clock begins."""
Generated = Callable[[EngineRequest, EngineResult], None]


class SimulatedLedger(LedgerService):
    """A Ledger on a disk in memory."""

    def __init__(self, disk: Disk, drain: Drain) -> None:
        super().__init__(LedgerOptions(NOWHERE), drain)
        self.disk = disk

    def _open_store(self):
        self.memory = MemoryStore(self.disk, ledger_log.DATABASES, self.name)
        return self.memory


class SimulatedStaging(StagingService):
    """A Staging on a disk in memory."""

    def __init__(self, disk: Disk, drain: Drain) -> None:
        super().__init__(StagingOptions(NOWHERE), drain)
        self.disk = disk

    def open_store(self, _options: StagingOptions):
        self.memory = MemoryStore(self.disk, staged_calls.DATABASES, self.name)
        return self.memory


class SimulatedFinalizer(FinalizerService):
    """A Finalizer on a disk in memory."""

    def __init__(
        self, disk: Disk, drain: Drain, ledger: LedgerClient, staging: StagingClient, policy: str
    ) -> None:
        options = FinalizerOptions(NOWHERE, row_multiple=2, selection_policy=policy)
        super().__init__(options, drain, ledger, staging)
        self.disk = disk

    def _open_store(self):
        self.memory = MemoryStore(self.disk, row_log.DATABASES, self.name)
        return self.memory


class SimulatedGateway(GatewayService):
    """A gateway without its HTTP edge: calls come over gRPC."""

    async def start(self) -> None:
        """Listen nowhere."""


class WatchedEngine(ScriptedEngine):
    """A scripted engine that tells what it sampled."""

    def __init__(self, options: ScriptedOptions, generated: Generated) -> None:
        super().__init__(options)
        self.generated = generated

    async def generate(self, request: EngineRequest) -> EngineResult:
        result = await super().generate(request)
        self.generated(request, result)
        return result


@dataclass(slots=True)
class Process:
    """One life of a service.

    Attributes:
        service: the service.
        drain: ends its work.
        counter: counts its calls.
        registry: serves them.
    """

    life: Life
    service: MeshService
    drain: Drain
    counter: CallCounter
    registry: Registry


@dataclass(slots=True)
class Mesh:
    """All services, their disks, and what survives their lives.

    Attributes:
        network: joins them.
        chance: draws ids and engines' seeds.
        generated: is told what the engine sampled.
        forest: whether attempts are of forest mode, else of chain mode.
        disks: of the services with a store.
        processes: the present ones by name.
        weight_version: that a started engine has.
        clock_offset_ns: of the gateway's wall clock.
        engine: the present one.
    """

    network: Network
    chance: random.Random
    generated: Generated
    forest: bool = False
    disks: dict[str, Disk] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    weight_version: int = 1
    clock_offset_ns: int = 0
    engine: WatchedEngine | None = None
    _starting: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name in SERVICES:
            self.network.hosts[name] = Host(name)
        for name in STORES:
            seed = self.chance.getrandbits(64)
            self.disks[name] = Disk(random.Random(seed))

    async def start(self, name: str) -> None:
        """Start a service, unless it runs or is being started."""
        if name in self.processes or name in self._starting:
            return
        self._starting.add(name)
        life = Life(name)
        process = life.run(lambda: self._build(name, life))
        await life.start(process.service.start())
        self._starting.discard(name)
        self.processes[name] = process
        host = self.network.hosts[name]
        host.life, host.registry = life, process.registry
        self.network.note("started", name)

    def kill(self, name: str) -> bool:
        """End a service as kill -9 does; say whether it ran."""
        process = self._take(name)
        if process is None:
            return False
        process.life.kill()
        if (store := getattr(process.service, "memory", None)) is not None:
            store.crash()
        self.network.lost_life(process.life)
        self.network.note("killed", name)
        return True

    async def drain(self, name: str) -> bool:
        """End a service as SIGTERM does; say whether it ran."""
        process = self.processes.get(name)
        if process is None or process.life.paused or process.drain.begun:
            return False
        stopping = process.life.start(self._stop(process))
        while process.life.alive and not stopping.done():
            await asyncio.wait({stopping}, timeout=0.1)  # whoever is killed ends no task
        if self.processes.get(name) is process:
            self._take(name)
            process.life.kill()
            self.network.lost_life(process.life)
        self.network.note("drained", name)
        return True

    def channel(self, life: Life, target: str):
        """Open a channel from a process to a service."""
        return self.network.channel(life, target)

    def _take(self, name: str) -> Process | None:
        host = self.network.hosts[name]
        host.life = host.registry = None
        return self.processes.pop(name, None)

    async def _stop(self, process: Process) -> None:
        """Do what MeshServer.stop does."""
        process.drain.begin()
        try:
            async with asyncio.timeout(GRACE_S):
                await process.counter.idle()
        except TimeoutError:
            await process.registry.close()
        await process.service.stop()

    def _build(self, name: str, life: Life) -> Process:
        drain = Drain()
        service = getattr(self, f"_{name}")(life, drain)
        counter = CallCounter(CallLimits(), own=service.full_names)
        edge = EdgeInterceptor(name, drain, own=service.full_names)
        registry = Registry(life, (edge, counter))
        service.attach(registry)
        return Process(life, service, drain, counter, registry)

    def _staging(self, _life: Life, drain: Drain) -> MeshService:
        return SimulatedStaging(self.disks["staging"], drain)

    def _ledger(self, _life: Life, drain: Drain) -> MeshService:
        return SimulatedLedger(self.disks["ledger"], drain)

    def _admission(self, life: Life, drain: Drain) -> MeshService:
        return AdmissionService(AdmissionOptions(forest=self.forest), drain, self.ledger_of(life))

    def _worker(self, life: Life, drain: Drain) -> MeshService:
        options = WorkerOptions(NOWHERE, stage_timeout_s=3.0, prefix_timeout_s=2.0)
        scripted = ScriptedOptions(
            weight_version=self.weight_version,
            latency_s=(0.001, 0.1),
            seed=self.chance.getrandbits(31),
        )
        self.engine = WatchedEngine(scripted, self.generated)
        return WorkerService(options, drain, self.engine, self.staging_of(life))

    def _finalizer(self, life: Life, drain: Drain) -> MeshService:
        disk = self.disks["finalizer"]
        policy = ALL_CAPTURED if self.forest else RETURNED_HISTORY
        return SimulatedFinalizer(disk, drain, self.ledger_of(life), self.staging_of(life), policy)

    def _gateway(self, life: Life, drain: Drain) -> MeshService:
        options = GatewayOptions(
            generate_timeout_s=10.0,
            commit_timeout_s=6.0,
            repeat_grace_s=1.0,
            grace_s=GRACE_S,
            forest=self.forest,
        )
        return SimulatedGateway(
            options,
            drain,
            AdmissionClient(self.channel(life, "admission"), timeout_s=5.0),
            self.ledger_of(life),
            WorkerClient(self.channel(life, "worker")),
            self.staging_of(life),
            new_id=lambda: f"{self.chance.getrandbits(128):032x}",
            now_ns=self.now_ns,
        )

    def now_ns(self) -> int:
        """Give the gateway's wall clock."""
        return EPOCH_NS + int(self.network.loop.now * 1e9) + self.clock_offset_ns

    def ledger_of(self, life: Life) -> LedgerClient:
        """Make a client of the Ledger."""
        return LedgerClient(self.channel(life, "ledger"), timeout_s=5.0)

    def staging_of(self, life: Life) -> StagingClient:
        """Make a client of Staging."""
        return StagingClient(self.channel(life, "staging"), timeout_s=5.0)

    def finalizer_of(self, life: Life) -> FinalizerClient:
        """Make a client of the Finalizer."""
        return FinalizerClient(self.channel(life, "finalizer"), timeout_s=8.0)

    def admission_of(self, life: Life) -> AdmissionClient:
        """Make a client of Admission."""
        return AdmissionClient(self.channel(life, "admission"), timeout_s=5.0)

    def gateway_of(self, life: Life) -> GatewayClient:
        """Make a client of the gateway."""
        return GatewayClient(self.channel(life, "gateway"), timeout_s=25.0)
