"""One call on its way over the network, and what becomes of its messages."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import grpc

from callforest_client import streams
from callforest_mesh.chassis.local_exchange import (
    WITHDRAWN,
    Exchange,
    LocalLimits,
    Outcome,
    PipeEndedError,
)
from tests.simulation.loop import Life

if TYPE_CHECKING:
    from tests.simulation.network import Network

KEEPALIVE_S = 8.0
"""How long a connection outlives a block."""
CONNECT_S = 2.0
"""How long a connection may take to be made."""
_MEASURE = "Measure"
SPECS = {
    spec.name: spec
    for spec in vars(streams).values()
    if isinstance(spec, streams.StreamSpec) and spec.name != _MEASURE
}
"""The item streams by the names of their RPCs. Three services have a Measure; the one that is
called here, Admission's, is no stream."""
_ORDERED = frozenset({"SubscribeRows", "GetManifest", "Fetch"})
_REFUSED = Outcome(grpc.StatusCode.UNAVAILABLE, "connection refused")
_RESET = Outcome(grpc.StatusCode.UNAVAILABLE, "connection reset")
Deliver: TypeAlias = Callable[[], None]


class Lane:
    """One direction of one call: what is under way, by the time at which it is due."""

    def __init__(self, wire: Wire, source: str, target: str) -> None:
        self._wire, self._source, self._target = wire, source, target
        self._under_way: list[tuple[float, int, Deliver]] = []
        self._number = 0
        self._last_due = 0.0

    def send(self, deliver: Deliver, *, late_s: float = 0.0, last: bool = False) -> None:
        """Have something delivered; behind what was sent before, unless it is late."""
        network = self._wire.network
        due = network.loop.now + network.chance.expovariate(1 / network.weather.latency_s)
        if late_s:
            due += late_s
        else:
            due = self._last_due = max(due, self._last_due)
        if last:
            due = max([due, *(one[0] for one in self._under_way)])
        self._number += 1
        heapq.heappush(self._under_way, (due, self._number, deliver))
        self._arm(due)

    def _arm(self, when: float) -> None:
        network = self._wire.network
        network.loop.call_at(when, self._fire, context=network.context)

    def _fire(self) -> None:
        network = self._wire.network
        opens = network.open_at(self._source, self._target)
        if opens > network.loop.now:
            if self._under_way:
                self._wire.blocked(opens)
                self._arm(opens)
            return
        while self._under_way and self._under_way[0][0] <= network.loop.now:
            heapq.heappop(self._under_way)[2]()


class Wire:
    """One call on its way: two exchanges, and what happens between them.

    Args:
        network: carries it.
        life: the calling process.
        target: the called service.
        exchange: the caller's side.
    """

    def __init__(self, network: Network, life: Life, target: str, exchange: Exchange) -> None:
        self.network, self.client_life, self.client = network, life, exchange
        self.source, self.target = life.name, target
        self.server: Exchange | None = None
        self.server_life: Life | None = None
        self.lossy = False
        self._name = exchange.method.rpartition("/")[2]
        self._spec = SPECS.get(self._name)
        self._ordered = self._name in _ORDERED
        self._ending = False
        self._up = Lane(self, self.source, target)
        self._down = Lane(self, target, self.source)
        network.wires[self] = None
        exchange.add_done_callback(self._client_done)
        self._up.send(self._connect)

    def blocked(self, opens: float) -> None:
        """Note that nothing passes until a moment; too long a block ends the call."""
        now = self.network.loop.now
        patience_s = CONNECT_S if self.server is None else KEEPALIVE_S
        if not self._ending and opens - now > patience_s:
            self._ending = True
            self.network.loop.call_later(patience_s, self.cut, context=self.network.context)

    def cut(self) -> None:
        """End the call on both sides, as a reset connection does."""
        if self not in self.network.wires:
            return
        del self.network.wires[self]
        self._note("cut")
        if self.client_life.alive:
            self.client.give_up(_RESET)
        if self.server is not None:
            self.server.give_up(WITHDRAWN)

    def client_gone(self) -> None:
        """Tell the server that its caller died."""
        self.network.wires.pop(self, None)
        if (server := self.server) is not None:
            self._up.send(lambda: server.give_up(WITHDRAWN) and None, last=True)

    def _connect(self) -> None:
        host = self.network.hosts[self.target]
        if host.life is None or host.registry is None or not host.life.alive:
            self._down.send(lambda: self.client.give_up(_REFUSED) and None)
            return
        self.server_life = host.life
        self.server = host.registry.host(self.client, LocalLimits())
        for pump in (self._pump_up(self.server), self._pump_down(self.server)):
            self.network.tasks.start(pump)

    def _client_done(self) -> None:
        if self in self.network.wires:
            self.client_gone()

    async def _pump_up(self, server: Exchange) -> None:
        while (raw := await self.client.requests.get()) is not None:
            self._send_up(raw, server)
        if self.client.outcome is None:
            self._up.send(server.requests.end, last=True)

    async def _pump_down(self, server: Exchange) -> None:
        arrived = True
        while (raw := await server.responses.get()) is not None:
            arrived = self._send_down(raw)
        outcome = await server.ended()
        if arrived or self._spec is not None:
            self._down.send(lambda: self._end(outcome), last=True)

    def _end(self, outcome: Outcome) -> None:
        self._note("ended", outcome.code.name)
        self.network.wires.pop(self, None)
        self.client.complete(outcome)

    def _send_up(self, raw: bytes, server: Exchange) -> None:
        fate = self._fate("request")
        if fate == "doubled" and self._spec is None:
            self._serve_again(raw)
        elif fate == "doubled":
            self._up.send(lambda: self._arrive_up(raw, server))
        if fate != "lost":
            late_s = self.network.chance.uniform(0.002, 0.05) if fate == "overtaken" else 0.0
            self._up.send(lambda: self._arrive_up(raw, server), late_s=late_s)

    def _send_down(self, raw: bytes) -> bool:
        """Send an answer; say whether it will arrive."""
        fate = self._fate("answer")
        if fate == "doubled" and self._spec is not None:
            self._down.send(lambda: self._arrive_down(raw))
        if fate != "lost":
            late_s = self.network.chance.uniform(0.002, 0.05) if fate == "overtaken" else 0.0
            self._down.send(lambda: self._arrive_down(raw), late_s=late_s)
        return fate != "lost"

    def _fate(self, what: str) -> str:
        """Draw what happens to a message, as far as the protocol of its call allows for it."""
        weather, drawn = self.network.weather, self.network.chance.random()
        fate = "arrives"
        for name in ("lost", "doubled", "overtaken"):
            share: float = getattr(weather, name)
            if 0 <= drawn < share:
                fate = name
                break
            drawn -= share
        if self._ordered:
            if fate == "lost":
                self.network.faults["connection lost"] += 1
                self.network.loop.call_soon(self.cut, context=self.network.context)
                return fate
            return "arrives"
        if self._spec is None and fate != "lost" and (fate, what) != ("doubled", "request"):
            return "arrives"
        if fate == "lost":
            self.lossy = True
        if fate != "arrives":
            self.network.faults[f"{what} {fate}"] += 1
        return fate

    def _serve_again(self, raw: bytes) -> None:
        """Serve a unary call a second time; nobody gets that answer."""
        host = self.network.hosts[self.target]
        if host.registry is not None and host.life is not None and host.life.alive:
            twin = host.registry.host(self.client, LocalLimits())
            twin.requests.offer(raw)
            twin.requests.end()

    def _arrive_up(self, raw: bytes, server: Exchange) -> None:
        if self.server_life is None or not self.server_life.alive:
            return
        self._note("request", len(raw))
        if self._spec is None:
            self.network.items += 1
        else:
            items = self._spec.request.FromString(raw).items
            self.network.items += sum(1 for item in items if item.WhichOneof("body") != "cancel")
        _offer(server, raw, up=True)

    def _arrive_down(self, raw: bytes) -> None:
        if self.client_life.alive:
            self._note("answer", len(raw))
            _offer(self.client, raw, up=False)

    def _note(self, *words: object) -> None:
        self.network.note(self.source, self.target, self._name, *words)


def _offer(exchange: Exchange, raw: bytes, *, up: bool) -> None:
    try:
        if up:
            exchange.requests.offer(raw)
        else:
            exchange.begin_answer()
            exchange.responses.offer(raw)
    except PipeEndedError:
        return  # that side has ended the call meanwhile
