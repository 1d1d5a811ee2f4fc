"""One timer for the deadlines of many items."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class DeadlineTimer:
    """Calls back when the earliest of many deadlines has come.

    A timer for each item would cost it a tenth of its whole way, and nearly none is ever due. A
    deadline that no longer matters is not taken back: the callback finds nothing due by then.

    Args:
        expire: ends what is due at a time of the loop's clock; gives the earliest deadline that is
            left, infinity when there is none.
    """

    def __init__(self, expire: Callable[[float], float]) -> None:
        self._expire = expire
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, deadline: float) -> None:
        """See to it that `expire` is called at a deadline, on the loop's clock."""
        if deadline >= self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = deadline
        self._timer = asyncio.get_running_loop().call_at(deadline, self._fire)

    def cancel(self) -> None:
        """Call back no more, until another deadline is watched."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, math.inf

    def _fire(self) -> None:
        self._timer, self._due = None, math.inf
        left = self._expire(asyncio.get_running_loop().time())
        if left < math.inf:
            self.watch(left)
