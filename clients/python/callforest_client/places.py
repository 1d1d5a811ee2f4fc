"""A bounded number of places, which costs next to nothing while some are free."""

from __future__ import annotations

import asyncio
from collections import deque


class Places:
    """Gives places away; who finds none waits, in the order of coming.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take(self) -> bool:
        """Take a place if one is free."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def wait(self, deadline: float) -> None:
        """Wait for a place and take it.

        Raises:
            TimeoutError: there was none by the deadline, on the loop's clock.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout_at(deadline):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give_back()  # it came too late
            raise

    def give_back(self) -> None:
        """Give a place back, to who has waited longest for one."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
