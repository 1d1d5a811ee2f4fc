"""Places are given in the order of coming, and none is lost by whoever stops waiting."""

import asyncio

import pytest

from callforest_client.places import Places

HOUR_S = 3600.0


def waiting(places: Places, wait_s: float = HOUR_S) -> asyncio.Task[None]:
    loop = asyncio.get_running_loop()
    return loop.create_task(places.wait(loop.time() + wait_s))


async def test_a_place_goes_to_who_has_waited_longest() -> None:
    places = Places(1)
    assert places.take()
    assert not places.take()
    first, second = waiting(places), waiting(places)
    await asyncio.sleep(0)
    places.give_back()
    assert not places.take()
    await first
    assert not second.done()
    places.give_back()
    await second
    places.give_back()
    assert places.take()


async def test_who_waits_in_vain_leaves_the_queue() -> None:
    places = Places(1)
    assert places.take()
    with pytest.raises(TimeoutError):
        await waiting(places, 0.0)
    cancelled, patient = waiting(places), waiting(places)
    await asyncio.sleep(0)
    cancelled.cancel()
    places.give_back()
    await patient
    places.give_back()
    assert places.take()
    assert not places.take()


async def test_a_place_that_comes_together_with_a_cancel_is_not_lost() -> None:
    places = Places(1)
    assert places.take()
    unlucky, patient = waiting(places), waiting(places)
    await asyncio.sleep(0)
    places.give_back()
    unlucky.cancel()
    await patient
    assert unlucky.cancelled()
    assert not places.take()
