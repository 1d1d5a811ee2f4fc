"""Who waits for a call in work, and what becomes of it when nobody does."""

import asyncio
from collections.abc import Awaitable

import pytest
from google.protobuf import timestamp_pb2

from callforest_mesh.gateway.asked import Identity
from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.life import AbandonedError, Life, Served
from callforest_mesh.gateway.lives import WAITERS_MAX
from tests.unit.gateway.played_services import (
    REQUEST,
    RESPONSE,
    Played,
    calls_of,
)
from tests.unit.gateway.repeated_calls import (
    KEYED,
    OTHER,
    Held,
    began,
    hang_up,
    refusal_of,
    until,
)


@pytest.mark.requirement("CAP-13")
async def test_requests_of_one_key_wait_for_one_generation() -> None:
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, calls_max=1)
    first = began(calls)
    await held.begun.wait()
    others = [began(calls) for _ in range(WAITERS_MAX - 1)]
    await asyncio.sleep(0)
    too_many = await refusal_of(calls.serve("k", REQUEST, KEYED))
    assert (too_many.status, too_many.code) == (429, "overloaded")
    mismatch = await refusal_of(calls_of_other(calls))
    assert (mismatch.status, mismatch.code) == (422, "call_mismatch")
    held.go.set()
    served = await asyncio.gather(first, *others)
    assert {one.body for one in served} == {RESPONSE}
    assert len(played.calls) == len(played.records) == 1
    await calls.settle(5.0)


def calls_of_other(calls: Calls) -> Awaitable[object]:
    async def begin() -> Served:
        waiting = Identity("c0")
        return await calls.begin("k", OTHER, waiting).served()

    return begin()


@pytest.mark.requirement("CAP-13")
async def test_a_waiter_that_leaves_takes_nothing_from_the_others() -> None:
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, repeat_grace_s=0.0)
    first = began(calls)
    await held.begun.wait()
    second = began(calls)
    await asyncio.sleep(0)
    await hang_up(first)
    held.go.set()
    assert (await second).body == RESPONSE
    assert played.failures == []
    await calls.settle(5.0)


@pytest.mark.requirement("CAP-13", "LED-11")
@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_call_is_left_to_a_repeat_when_its_last_waiter_left(comes_back: bool) -> None:
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, repeat_grace_s=0.1 if not comes_back else 60.0)
    first = began(calls)
    await held.begun.wait()
    await hang_up(first)
    if comes_back:
        again = began(calls)
        await asyncio.sleep(0)
        held.go.set()
        assert (await again).body == RESPONSE
        assert len(played.calls) == 1
        assert played.failures == []
        return
    await until(lambda: bool(played.failures))
    told = [(one.worker_reason, one.detail) for one in played.failures]
    assert told == [("cancelled", "the harness went away")]
    assert played.order[-2:] == ["fetch", "failure"]


@pytest.mark.requirement("LED-11")
async def test_a_life_that_is_given_up_goes_on_behind_what_it_waited_for() -> None:
    life = Life("k", "c0", timestamp_pb2.Timestamp(), REQUEST, "")
    begun, ended = asyncio.Event(), []

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("generation")

    async def live() -> None:
        with pytest.raises(AbandonedError):
            await life.wait_for(forever())
        life.abandon()  # nothing is left to end
        async with asyncio.timeout(60.0):
            await asyncio.sleep(0)
        ended.append("life")

    living = asyncio.create_task(live())
    await begun.wait()
    life.abandon()
    await asyncio.wait_for(living, 60.0)
    assert ended == ["generation", "life"]
    assert living.cancelling() == 0


async def test_a_life_that_is_ended_from_outside_ends() -> None:
    life = Life("k", "c0", timestamp_pb2.Timestamp(), REQUEST, "")
    living = asyncio.create_task(life.wait_for(asyncio.sleep(3600.0)))
    await asyncio.sleep(0)
    living.cancel()
    with pytest.raises(asyncio.CancelledError):
        await living
    assert life.waiting is None
