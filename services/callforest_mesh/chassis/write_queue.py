"""What waits for the writer thread of a store, and how long the thread waits for more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Final, Generic, TypeVar

from callforest_mesh.chassis.errors import draining, overloaded
from callforest_mesh.chassis.failpoint import failpoint

JobT = TypeVar("JobT")

LINGER_S: Final = 0.005
"""Longest wait for further writes before a commit."""
LINGER_FROM: Final = 4
"""Writes in flight from which waiting pays; below it nothing ever waits."""
BATCH_MAX: Final = 1024
"""Most writes of one commit."""


class WriteQueue(Generic[JobT]):
    """A bounded queue between many callers and one writer thread.

    What queues during a commit is the next batch. When at least LINGER_FROM writes were in flight
    around the last commit, their callers are likely to write again at once: the thread then waits
    for as many, for LINGER_S at most.

    Args:
        name: names the store in refusals.
        limit: most writes that may wait.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[JobT] = deque()
        self._bursts: set[asyncio.AbstractEventLoop] = set()
        self._closed = False
        self._wanted = 1
        self._in_flight = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: JobT, loop: asyncio.AbstractEventLoop) -> None:
        """Queue a write from a running loop; what that queues in one go is not parted.

        Raises:
            Refusal: OVERLOADED at the limit; DRAINING once closed.
        """
        with self._lock:
            if self._closed:
                raise draining(self._name)
            if len(self._jobs) >= self._limit:
                raise overloaded("store_queue", self._limit, retry_after_ms=100)
            failpoint("store.before_enqueue")
            self._jobs.append(job)
            failpoint("store.after_enqueue")
            if loop in self._bursts:
                return
            self._bursts.add(loop)
        # Waking the thread for each write would cost more than the write, and it would take the
        # first of a burst away for a commit of its own.
        loop.call_soon(self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the thread: what a loop queues in one go is queued."""
        with self._lock:
            self._bursts.discard(loop)
            if len(self._jobs) >= self._wanted:
                self._changed.notify()

    def take(self, timeout_s: float) -> list[JobT] | None:
        """Wait for the next batch: empty when none came in time, None when closed and empty."""
        with self._changed:
            self._await(1, timeout_s)
            if self._in_flight >= LINGER_FROM and self._jobs:
                self._await(min(self._in_flight, BATCH_MAX), LINGER_S)
            self._wanted = 1
            if not self._jobs:
                return None if self._closed else []
            failpoint("store.before_begin")
            return [self._jobs.popleft() for _ in range(min(len(self._jobs), BATCH_MAX))]

    def _await(self, count: int, timeout_s: float) -> None:
        self._wanted = count
        end = time.monotonic() + timeout_s
        while len(self._jobs) < count and not self._closed:
            left = end - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def committed(self, count: int) -> None:
        """Tell that a batch of `count` writes was committed: its callers may come back."""
        with self._changed:
            self._in_flight = count + len(self._jobs)

    def close(self) -> list[JobT]:
        """Take nothing more; give what still waits (the thread takes it too, if it lives)."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            return list(self._jobs)

    def abandon(self) -> list[JobT]:
        """Take nothing more; remove and give what still waits."""
        with self._changed:
            self._closed = True
            abandoned = list(self._jobs)
            self._jobs.clear()
            return abandoned
