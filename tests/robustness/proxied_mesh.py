"""A mesh of real processes whose services reach each other through fault proxies alone.

Whoever drives it talks to the services directly, so that what it learns is what they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from callforest_client.channel import connect
from callforest_client.rollout import Outcome, RolloutOwner
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import Addresses, load
from callforest_mesh.supervisor import Supervisor, SupervisorOptions
from tests.integration.running_mesh import WITHOUT_TRAINER, settings
from tests.robustness.detour import DETOURS
from tests.robustness.fault_proxy import FaultProxy, Faults
from tests.robustness.history import ServedCall
from tests.robustness.rollout_load import LoadOptions, RolloutLoad

ROOT = Path(__file__).parents[2]
LINKS = (
    *(("gateway", name) for name in ("admission", "ledger", "worker")),
    *(("finalizer", name) for name in ("ledger", "staging")),
    *(("admission", "ledger"), ("worker", "staging")),
)
"""Who calls whom."""
DRIVER = "driver"
"""Whoever drives the mesh, as a caller."""
READY_S = 60.0


@dataclass
class ProxiedMesh:
    """The processes, the proxies between them, and clients that go past the proxies.

    Attributes:
        proxies: by caller and service.
        url: the gateway's.
        addresses: of the services themselves.
    """

    proxies: dict[tuple[str, str], FaultProxy]
    supervisor: Supervisor
    clients: Clients
    url: str
    http: aiohttp.ClientSession
    addresses: Addresses
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def owner(self) -> RolloutOwner:
        """The rollouts' owner."""
        clients = self.clients
        return RolloutOwner(
            clients.admission(), clients.ledger(), clients.finalizer(), self.url, settle_wait_s=30.0
        )

    def load(self, options: LoadOptions) -> RolloutLoad:
        """Make a load of rollouts."""
        clients = self.clients
        return RolloutLoad(options, self.owner, clients.ledger(), clients.staging(), self.serves)

    def harm(self, faults: Faults, *, replayed: float) -> None:
        """Let answers suffer on every link."""
        for proxy in self.proxies.values():
            proxy.answers, proxy.replayed = faults, replayed

    def calm(self) -> None:
        """Let everything pass."""
        for proxy in self.proxies.values():
            proxy.calm()

    def faults(self) -> Counter[str]:
        """Count what happened on all links."""
        return sum((proxy.counts for proxy in self.proxies.values()), Counter())

    async def serves(self) -> None:
        """Return when the gateway answers."""
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with self.http.get(f"{self.url}/healthz") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)

    async def ask(self, capture_key: str, said: Sequence[str]) -> ServedCall:
        """Be a harness: make one call of a conversation, questions and answers in turn."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        body = {"model": "scripted", "messages": messages, "seed": 1}
        url = f"{self.url}/rollouts/{capture_key}/v1/chat/completions"
        async with self.http.post(url, json=body) as response:
            raw = await response.read()
            assert response.status == 200, raw
            call_id = response.headers["x-callforest-call-id"]
            return ServedCall(capture_key, call_id, json.loads(raw)["id"], raw)

    async def play_one(self, rollout_id: str, group_id: str) -> None:
        """Play a rollout of one call to its published group of one."""
        rollout = await self.owner.open(rollout_id)
        served = await self.ask(rollout.capture_key, ["begin"])
        outcome = Outcome(1.0, declared_response_id=served.response_id)
        receipt = await self.owner.finish(rollout, outcome, group_id=group_id, slot=0)
        assert not receipt.masked, receipt
        await self.owner.publish(group_id, 1)


@asynccontextmanager
async def proxied_mesh(
    folder: Path,
    *more: str,
    make: Callable[..., FaultProxy] = FaultProxy,
    driven: Sequence[str] = (),
) -> AsyncIterator[ProxiedMesh]:
    """Run all services but the trainer until the block ends.

    Args:
        folder: short enough for a socket.
        more: settings.
        make: makes the proxy before an address, with the link's number as its seed.
        driven: services that the driver, too, reaches through a proxy.
    """
    chosen = settings(folder, "log.level=error", "worker.scripted.latency_s=[0.01, 0.05]", *more)
    configuration = load(environment={}, settings=chosen)
    async with AsyncExitStack() as stack:
        proxies = {}
        detours: dict[str, dict[str, str]] = {}
        links = (*LINKS, *((DRIVER, service) for service in driven))
        for number, (caller, service) in enumerate(links):
            proxy = make(configuration.addresses.of(service), seed=number)
            proxies[caller, service] = proxy
            detours.setdefault(caller, {})[service] = await proxy.start()
            stack.push_async_callback(proxy.stop)
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        variables = (f"PYTHONPATH={path}", f"{DETOURS}={json.dumps(detours)}")
        command = ("env", *variables, sys.executable, "-m", "tests.robustness.detour")
        arguments = [word for one in chosen for word in ("--set", one)]
        supervisor = Supervisor(configuration, arguments, SupervisorOptions(command=command))
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        for name in WITHOUT_TRAINER:
            await supervisor.wait_ready(name, READY_S)
        way = {name: connect(address) for name, address in detours.get(DRIVER, {}).items()}
        direct = addressed(configuration)
        clients = Clients(configuration, lambda name: way.get(name) or direct(name), stack)
        url = f"http://127.0.0.1:{configuration.gateway['port']}"
        http = await stack.enter_async_context(aiohttp.ClientSession())
        mesh = ProxiedMesh(proxies, supervisor, clients, url, http, configuration.addresses)
        stack.callback(mesh.calm)
        yield mesh
