"""The proxy does what it says, seen from both sides of it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from callforest_client.channel import connect
from callforest_client.errors import UnavailableError
from callforest_client.staging import StagingClient
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer
from callforest_mesh.staging.service import StagingOptions, StagingService
from tests.robustness.fault_proxy import FaultProxy, Faults
from tests.unit.staging.calls import KEY, Chain

MAP_BYTES = 16 << 20
SHORT_S = 1.5


@dataclass
class Sides:
    """A Staging service as it is seen through the proxy, and past it."""

    proxy: FaultProxy
    through: StagingClient
    past: StagingClient


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    with tempfile.TemporaryDirectory() as path:
        drain, address = Drain(), f"unix:{path}/s.sock"
        store = Path(path) / "store"
        options = StagingOptions(store, map_size_bytes=MAP_BYTES, quota_bytes=MAP_BYTES // 2)
        server = MeshServer(StagingService(options, drain), address, drain)
        await server.start()
        proxy = FaultProxy(address)
        async with connect(await proxy.start()) as far, connect(address) as near:
            clients = StagingClient(far), StagingClient(near)
            yield Sides(proxy, *clients)
            for client in clients:
                await client.close()
        proxy.calm()
        await proxy.stop()
        await server.stop()


async def test_what_passes_is_as_it_was(sides: Sides) -> None:
    calls = [Chain().add(tokens=400_000), Chain("other").add()]
    for call in calls:
        await sides.through.stage(call)
        assert await sides.through.fetch(call.capture_key, [call.call_id]) == [call]
    assert sides.proxy.counts["connections"] == 1


@pytest.mark.parametrize("kind", ["lost", "torn"])
async def test_an_answer_is_lost_and_what_was_asked_is_done(sides: Sides, kind: str) -> None:
    sides.proxy.answers = Faults(**{kind: 1.0})
    call = Chain().add()
    with pytest.raises(UnavailableError):
        await sides.through.stage(call, timeout_s=SHORT_S)
    assert sides.proxy.counts[f"answers {kind}"] >= 1
    assert await sides.past.fetch(KEY, [call.call_id]) == [call]


async def test_a_request_is_lost_and_nothing_is_done(sides: Sides) -> None:
    sides.proxy.requests = Faults(lost=1.0)
    with pytest.raises(UnavailableError):
        await sides.through.stage(Chain().add(), timeout_s=SHORT_S)
    assert sides.proxy.counts["requests lost"] >= 1
    assert (await sides.past.stat()).call_count == 0


async def test_a_replay_asks_the_server_again(sides: Sides) -> None:
    sides.proxy.answers, sides.proxy.replayed = Faults(lost=1.0), 1.0
    with pytest.raises(UnavailableError):
        await sides.through.stage(Chain().add(), timeout_s=SHORT_S)
    sides.proxy.calm()
    await sides.proxy.stop()
    assert sides.proxy.counts["replayed answers"] >= 1
    assert (await sides.past.stat()).call_count == 1
    await sides.proxy.start()


async def test_held_requests_arrive_afterwards_and_swallowed_ones_never(sides: Sides) -> None:
    chain = Chain()
    await sides.through.stage(chain.add())
    for number, begin in enumerate((sides.proxy.hold, sides.proxy.swallow), start=1):
        begin("requests")
        staging = asyncio.ensure_future(sides.through.stage(chain.add()))
        await asyncio.wait_for(sides.proxy.holding("requests"), 30)
        assert (await sides.past.stat()).call_count == number
        sides.proxy.release("requests")
        await staging  # the client sends again what was swallowed
        assert (await sides.past.stat()).call_count == number + 1
    assert sides.proxy.counts["requests held"] >= 1
    assert sides.proxy.counts["requests swallowed"] >= 1
