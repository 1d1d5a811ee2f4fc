"""An event loop on virtual time, and the lives of the processes that run on it.

Nothing waits: when no callback is ready, the clock jumps to the next timer. Callbacks run in the
order in which they were scheduled, timers by time and then by number, so that a run depends on
nothing but its seed.

A life is what one simulated process is from its start to its end. Every task and timer belongs to
the life in whose context it was made. After kill -9 nothing of a life ever runs again: no handler,
no `finally`; while it is paused its callbacks wait.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import logging
import random
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
LIFE: ContextVar[Life] = ContextVar("life")
GRAVEYARD: list[Life] = []
"""Dead lives. Their tasks must never be collected: that would run their `finally` blocks."""
_COLLECT_EVERY = 200_000
"""Callbacks between two garbage collections, which happen at no other moment."""


class Life:
    """One process from its start to its end.

    Args:
        name: the process's name.

    Attributes:
        alive: false from kill -9 on.
        context: everything of the process runs in a copy of it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.context = Context()
        self.context.run(LIFE.set, self)
        self.held: deque[asyncio.Handle] = deque()
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 64

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task of this process."""
        loop = asyncio.get_running_loop()
        return loop.create_task(work, context=self.context.copy())

    def run(self, make: Callable[[], T]) -> T:
        """Run a function as this process would."""
        return self.context.copy().run(make)

    def kill(self) -> None:
        """Let nothing of this process ever run again."""
        self.alive = False
        self.held.clear()
        GRAVEYARD.append(self)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Keep a task from being collected while it may be part of a dead process."""
        self._tasks.append(task)
        if len(self._tasks) >= self._prune_at:
            self._tasks = [one for one in self._tasks if not one.done()]
            self._prune_at = 2 * len(self._tasks) + 64


class VirtualTask(asyncio.Task):
    """A task whose place in a set depends on its number, not on its address."""

    def __init__(self, number: int, coro, *, loop: VirtualLoop, name, context) -> None:
        self.number = number  # first: making a task puts it into the set of all tasks
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class VirtualFuture(asyncio.Future):
    """A future whose place in a set depends on its number, not on its address."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class StuckError(Exception):
    """Nothing is scheduled any more, and the run has not ended."""


class VirtualLoop(base_events.BaseEventLoop):
    """Runs callbacks on virtual time.

    Args:
        chance: draws how long work on a thread takes.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.now = 0.0
        self.callbacks = 0
        self.faults: list[str] = []
        self._chance = chance
        self._number = self._made = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self.set_exception_handler(self._note_fault)

    def time(self) -> float:
        """Give the virtual time in seconds."""
        return self.now

    def call_at(self, when, callback, *args, context=None):
        """Schedule a callback; timers of one moment run in the order of their making."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, timer))
        timer._scheduled = True
        return timer

    def create_task(self, coro, *, name=None, context=None):
        """Make a task; the life in whose context it runs keeps it."""
        self._made += 1
        task = VirtualTask(self._made, coro, loop=self, name=name, context=context)
        life = LIFE.get(None) if context is None else context.get(LIFE)
        if life is not None:
            life.adopt(task)
        return task

    def create_future(self):
        """Make a future."""
        future = VirtualFuture(loop=self)
        self._made += 1
        future.number = self._made
        return future

    def call_soon_threadsafe(self, callback, *args, context=None):
        """Schedule a callback; there is no other thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, _executor, func, *args):
        """Do a thread's work in one step of the loop, a little later."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - the waiter gets it
                future.set_exception(error)

        self.call_later(self._chance.uniform(0, 0.001), work)
        return future

    def resume(self, life: Life) -> None:
        """Let a paused process go on with all that came due meanwhile."""
        life.paused = False
        self._ready.extend(life.held)
        life.held.clear()

    def _timer_handle_cancelled(self, _handle) -> None:
        self._cancelled_timers += 1

    def _run_once(self) -> None:
        if self._cancelled_timers > 1000 and self._cancelled_timers * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0
        if not self._ready:
            self._go_on()
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            life = handle._context.get(LIFE)
            if life is not None:
                if not life.alive:
                    continue
                if life.paused:
                    life.held.append(handle)
                    continue
            self.callbacks += 1
            if self.callbacks % _COLLECT_EVERY == 0:
                gc.collect()
            handle._run()

    def _go_on(self) -> None:
        """Move the clock to the next timer, and make ready what is due."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
            self._cancelled_timers -= 1
        if not timers:
            raise StuckError("nothing is scheduled")
        self.now = max(self.now, timers[0][0])
        while timers and timers[0][0] <= self.now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._cancelled_timers -= 1
            else:
                self._ready.append(timer)

    def _note_fault(self, _loop, context) -> None:
        error = context.get("exception")
        self.faults.append(f"{context['message']}: {error!r}")

    def _write_to_self(self) -> None:
        """Wake nobody: the loop never sleeps."""

    def _process_events(self, event_list) -> None:
        """Look at no sockets: there are none."""


def run(work: Callable[[VirtualLoop], Coroutine[Any, Any, T]], seed: int) -> T:
    """Run a coroutine on a loop of its own, from a seed to its end.

    The loop is not cleaned up: its dead lives would run. A process that has done its runs ends by
    `os._exit`.
    """
    chance = random.Random(f"loop {seed}")
    random.seed(f"backoff {seed}")  # what the clients' back-off draws from
    loop = VirtualLoop(chance)
    gc.collect()
    gc.disable()
    logging.getLogger("asyncio").disabled = True
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(work(loop))
