"""Work that is late is ended, as by a timer of its own."""

import asyncio
import math

import pytest

from callforest_mesh.worker.time_limits import TimeLimits

SOON_S = 0.01
BOUND_S = 20


class Work:
    """Something that never ends by itself."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.was_cancelled = False

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def soon(steps: int = 1) -> float:
    return asyncio.get_running_loop().time() + steps * SOON_S


async def test_work_that_is_late_is_cancelled_and_the_task_goes_on() -> None:
    limits, work = TimeLimits(), Work()
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(TimeoutError):
            await limits.keep(work.run(), soon())
    assert work.was_cancelled
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    await asyncio.sleep(0)  # nothing is left that would cancel it now


async def test_work_in_time_gives_its_answer() -> None:
    limits = TimeLimits()

    async def work() -> int:
        await asyncio.sleep(0)
        return 5

    assert await limits.keep(work(), math.inf) == 5
    with pytest.raises(KeyError):
        await limits.keep(failing(), soon(1000))


async def failing() -> None:
    raise KeyError


async def test_one_timer_ends_each_work_when_its_own_time_is_up() -> None:
    limits, ended = TimeLimits(), []

    async def work(number: int) -> None:
        with pytest.raises(TimeoutError):
            await limits.keep(Work().run(), soon(number))
        ended.append(number)

    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*map(work, (3, 1, 2)))
    assert ended == [1, 2, 3]


async def test_who_cancels_the_task_gets_a_cancelled_task() -> None:
    limits, work = TimeLimits(), Work()
    task = asyncio.ensure_future(limits.keep(work.run(), soon(100_000)))
    await work.begun.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=BOUND_S)
    assert task.cancelled()
    assert work.was_cancelled


async def test_work_that_is_late_and_no_longer_wanted_is_cancelled() -> None:
    """A limit that comes at the same time hides nobody's wish to end the task."""
    limits, ended = TimeLimits(), asyncio.Event()

    async def unwanted() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            task.cancel()
            ended.set()

    task = asyncio.ensure_future(limits.keep(unwanted(), soon()))
    await asyncio.wait({task}, timeout=BOUND_S)
    assert ended.is_set()
    assert task.cancelled()
