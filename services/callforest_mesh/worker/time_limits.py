"""Time limits of work that the event loop does, with one timer for all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from callforest_client.deadlines import DeadlineTimer

_Answer = TypeVar("_Answer")


@dataclass(slots=True, eq=False)
class _Work:
    """Work that is being done, by the task that waits for it."""

    task: asyncio.Task[object]
    until: float
    late: bool = False


class TimeLimits:
    """Ends work whose time is up.

    It does what `asyncio.timeout_at` does, which makes and takes back a timer each time; and the
    time of nearly no work is ever up.
    """

    def __init__(self) -> None:
        self._works: set[_Work] = set()
        self._timer = DeadlineTimer(self._expire)

    async def keep(self, work: Awaitable[_Answer], until: float) -> _Answer:
        """Do work, as a part of the present task, until a time of the loop's clock at most.

        Raises:
            TimeoutError: its time was up; it was cancelled.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be cancelled")
        one = _Work(task, until)
        self._works.add(one)
        self._timer.watch(until)
        try:
            return await work
        except asyncio.CancelledError:
            if one.late and task.cancelling() == 1:  # nobody else wants it to end
                raise TimeoutError from None
            raise
        finally:
            self._works.discard(one)
            if one.late:
                task.uncancel()

    def _expire(self, now: float) -> float:
        """Cancel the work whose time is up; give the earliest limit that is left."""
        for one in self._works:
            if one.until <= now and not one.late:
                one.late = True
                one.task.cancel()
        return min((one.until for one in self._works if not one.late), default=math.inf)
