"""A network between simulated processes: it delays, loses, doubles, reorders, holds and cuts.

Every message is serialised. The network carries a call as two exchanges, one on each side, and
moves bytes between them. What it may do to a message depends on what the protocol allows for:

* items of item streams may be lost, doubled and overtaken, as if some proxy repeated them;
* unary calls may lose their request or their answer, or be served twice;
* other streams are in order, as TCP is: what would be lost there cuts the connection.

A direction can be blocked. What is sent meanwhile arrives afterwards; if that takes too long, both
sides lose the connection, as keepalive does. What lost something is cut at the latest when the
network is healed.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass

import grpc

from callforest_mesh.chassis.local_channel import LocalChannel, LocalRegistry
from callforest_mesh.chassis.local_exchange import (
    WITHDRAWN,
    Exchange,
    LocalLimits,
)
from tests.simulation.loop import Life, VirtualLoop
from tests.simulation.wire import Wire


@dataclass(slots=True)
class Weather:
    """How bad the network is.

    Attributes:
        latency_s: mean of a message's delay.
        lost: share of messages that are lost.
        doubled: share of messages that arrive twice.
        overtaken: share of messages that later ones overtake.
    """

    latency_s: float = 0.001
    lost: float = 0.0
    doubled: float = 0.0
    overtaken: float = 0.0


FAIR = Weather()


@dataclass(slots=True, eq=False)
class Host:
    """Where a process listens, over all its lives.

    Attributes:
        life: the present one; None while there is none.
        registry: serves its calls.
    """

    name: str
    life: Life | None = None
    registry: LocalRegistry | None = None


class Registry(LocalRegistry):
    """Serves calls as tasks of one life.

    Args:
        life: the process.
        interceptors: what every call passes.
    """

    def __init__(self, life: Life, interceptors) -> None:
        super().__init__(interceptors)
        self._life = life

    def serve(self, exchange: Exchange) -> None:
        task = self._life.start(self._serve(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.attach(task)

    def host(self, exchange: Exchange, limits: LocalLimits) -> Exchange:
        """Begin to serve a call that came over the network; give the server's side of it."""

        def begin() -> Exchange:
            left_s = exchange.time_remaining()
            server = Exchange(exchange.method, exchange.metadata, left_s, limits)
            self.serve(server)
            return server

        return self._life.run(begin)


class Network:
    """All connections.

    Args:
        loop: the time.
        chance: draws what happens to messages.

    Attributes:
        hosts: by name.
        weather: what happens to messages now.
        faults: how often what happened.
        items: items and calls that reached a service.
        trace: a digest of everything that happened, in order.
    """

    def __init__(self, loop: VirtualLoop, chance: random.Random) -> None:
        self.loop, self.chance = loop, chance
        self.hosts: dict[str, Host] = {}
        self.weather = FAIR
        self.faults: Counter[str] = Counter()
        self.items = 0
        self.trace = hashlib.sha256()
        self.tasks = Life("network")
        self.context = self.tasks.context
        self.wires: dict[Wire, None] = {}
        self._blocked: dict[tuple[str, str], float] = {}

    def note(self, *words: object) -> None:
        """Add an event to the trace."""
        self.trace.update(f"{self.loop.now:.9f} {words}\n".encode())

    def block(self, source: str, target: str, until: float) -> None:
        """Let nothing pass in one direction until a moment."""
        self._blocked[source, target] = until

    def open_at(self, source: str, target: str) -> float:
        """Say when a direction passes messages again; a moment in the past if it does now."""
        return self._blocked.get((source, target), 0.0)

    def heal(self) -> None:
        """Let everything pass, and cut what lost something."""
        self.weather = FAIR
        self._blocked.clear()
        for wire in [wire for wire in self.wires if wire.lossy]:
            wire.cut()

    def cut(self, source: str, target: str) -> int:
        """Cut the connections from one process to another; say how many calls they had."""
        hit = [wire for wire in self.wires if (wire.source, wire.target) == (source, target)]
        for wire in hit:
            wire.cut()
        return len(hit)

    def lost_life(self, life: Life) -> None:
        """Cut everything that a dead process was part of."""
        for wire in list(self.wires):
            if wire.client_life is life:
                wire.client_gone()
            elif wire.server_life is life:
                wire.cut()

    def channel(self, life: Life, target: str) -> Channel:
        """Open a channel from a process to a service."""
        return Channel(self, life, target)


class Channel(LocalChannel):
    """A channel over the network."""

    def __init__(self, network: Network, life: Life, target: str) -> None:
        super().__init__(LocalRegistry())
        self._network, self._life, self._target = network, life, target

    def open(self, method, timeout_s, metadata, _credentials) -> Exchange:
        exchange = Exchange(method, metadata_of(metadata), timeout_s, self._limits)
        network = self._network
        network.tasks.run(lambda: Wire(network, self._life, self._target, exchange))
        return exchange

    async def close(self, _grace: float | None = None) -> None:
        for wire in list(self._network.wires):
            if wire.client_life is self._life and wire.target == self._target:
                wire.client.give_up(WITHDRAWN)


def metadata_of(metadata) -> grpc.aio.Metadata:
    return grpc.aio.Metadata(*(tuple(metadata) if metadata else ()))
