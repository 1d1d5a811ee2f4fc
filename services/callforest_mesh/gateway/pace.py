"""How fast calls are answered, and whether one more can be taken.

An engine takes every request and lets it wait; so when calls come faster than they are made, each
waits longer than the one before, until all of them are made for callers that have left. A call that
would come to that is pushed back before anything is done for it.

By Little's law a call that comes now is answered when those before it are: after their number over
the rate of answers. The rate is the highest of late, so that the estimate errs towards taking
calls; and nothing is pushed back unless a call has just taken a good part of its time: a crowd that
begins together is no evidence of a queue.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from callforest_mesh.gateway.life import Life
from callforest_mesh.gateway.refusals import overloaded

_WINDOW_S: Final = 10
"""Seconds whose rates count."""
_SLOW: Final = 0.25
"""Part of its time from which an answered call says that there is a queue."""
_MOST: Final = 0.5
"""Part of its time that a call may be expected to take; the rest is for what nobody foresees."""
_DELAY_MOST_S: Final = 30.0


class Pace:
    """The pace of one gateway; every time is one of the caller's clock, in seconds.

    Args:
        calls_max: most calls in work, whatever their pace.
    """

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._answered: deque[tuple[int, int]] = deque()  # (second, calls), the present one last
        self._slow_until = -math.inf

    def require_place(self, in_work: int, allowed_s: float, now: float) -> None:
        """Let a call in, or push it back before anything is done for it.

        Args:
            in_work: calls that are in work already.
            allowed_s: how long this one may take.
            now: when it came.

        Raises:
            HttpRefusal: too many are in work, at all or for the time that it has.
        """
        if in_work >= self._calls_max:
            raise overloaded("calls_in_work", self._calls_max)
        delay_s = self.delay_s(in_work, allowed_s, now)
        if delay_s is not None:
            raise overloaded("answer_ms", round(1000 * allowed_s), retry_after_s=delay_s)

    def keep(self, life: Life, now: float) -> None:
        """Learn from a call that was answered, or left, how long calls take now."""
        if life.joined or not (life.is_served or life.abandoned):
            return
        self.note(now - life.begun, life.allowed_s, now, served=life.is_served)

    def note(self, took_s: float, allowed_s: float, now: float, *, served: bool) -> None:
        """Note a call that has ended.

        Args:
            took_s: how long it was in work.
            allowed_s: how long it might have been.
            now: when it ended.
            served: whether it was answered; one that its caller left tells of the queue alone.
        """
        if took_s > _SLOW * allowed_s:
            self._slow_until = now + max(1.0, _MOST * allowed_s)
        if not served:
            return
        second, count = int(now), 0
        if self._answered and self._answered[-1][0] == second:
            _, count = self._answered.pop()
        self._answered.append((second, count + 1))
        self._forget(second)

    def delay_s(self, in_work: int, allowed_s: float, now: float) -> float | None:
        """Say when a call may come again that would not be answered in time; None: it would be.

        Args:
            in_work: calls that are in work already.
            allowed_s: how long this one may take.
            now: when it came.
        """
        if now > self._slow_until:
            return None
        second = int(now)
        self._forget(second)
        rate = max((count for at, count in self._answered if at < second), default=0)
        if not rate:
            return None
        excess_s = (in_work + 1) / rate - _MOST * allowed_s
        return min(max(1.0, excess_s), _DELAY_MOST_S) if excess_s > 0 else None

    def _forget(self, second: int) -> None:
        while self._answered and self._answered[0][0] < second - _WINDOW_S:
            self._answered.popleft()
