"""One timer calls back at each deadline that still matters."""

import asyncio
import math

from callforest_client.deadlines import DeadlineTimer

SOON_S = 0.01


class Deadlines:
    """Deadlines that end something, and what has been ended."""

    def __init__(self) -> None:
        self.left: set[float] = set()
        self.ended: list[float] = []
        self.changed = asyncio.Event()
        self.timer = DeadlineTimer(self.expire)

    def add(self, deadline: float) -> None:
        self.left.add(deadline)
        self.timer.watch(deadline)

    def expire(self, now: float) -> float:
        due = sorted(deadline for deadline in self.left if deadline <= now)
        self.left.difference_update(due)
        self.ended += due
        self.changed.set()
        return min(self.left, default=math.inf)

    async def until_none_is_left(self) -> None:
        async with asyncio.timeout(20):
            while self.left:
                self.changed.clear()
                await self.changed.wait()


async def test_each_deadline_comes_in_order_whatever_the_order_of_watching() -> None:
    deadlines = Deadlines()
    now = asyncio.get_running_loop().time()
    times = [now + SOON_S * step for step in (3, 1, 2, 1.5)]
    for time in times:
        deadlines.add(time)
    await deadlines.until_none_is_left()
    assert deadlines.ended == sorted(times)
    assert asyncio.get_running_loop().time() >= max(times)


async def test_a_deadline_that_no_longer_matters_hides_no_later_one() -> None:
    deadlines = Deadlines()
    now = asyncio.get_running_loop().time()
    deadlines.add(now + SOON_S)
    deadlines.add(now + 2 * SOON_S)
    deadlines.left.remove(now + SOON_S)
    await deadlines.until_none_is_left()
    assert deadlines.ended == [now + 2 * SOON_S]


async def test_a_cancelled_timer_calls_back_only_for_what_is_watched_later() -> None:
    deadlines = Deadlines()
    now = asyncio.get_running_loop().time()
    deadlines.add(now)
    deadlines.timer.cancel()
    deadlines.left.clear()
    await asyncio.sleep(0)
    assert not deadlines.changed.is_set()
    deadlines.add(now + SOON_S)
    await deadlines.until_none_is_left()
    assert deadlines.ended == [now + SOON_S]
