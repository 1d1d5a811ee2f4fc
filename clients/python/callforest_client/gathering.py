"""How long a message waits for more items.

A message costs as much as twenty items. Callers that one message answers are at work together, and
come back together: if every message on their way waits until all of them are there, they travel
as one from service to service, and nothing has to wait. So a message waits for those who were here
lately, or whom the stream's owner still expects; a time bounds the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_CROWD: Final = 4
"""Callers at work from which waiting for more of them pays; below it nothing ever waits."""
_CROWD_FULL: Final = 64
"""Callers at work from which the whole linger is waited; fewer wait in proportion."""
_CROWD_KEPT_S: Final = 0.5
"""How long a crowd counts after it was seen."""
_GATHERED_MAX: Final = 64
"""Items that are never kept waiting: their message's cost is shared well enough."""
_WORTH_LEAST: Final = 1 / 16
"""The part of the linger that is waited when waiting has shown to be in vain."""


class Gathering:
    """Watches the callers of a stream.

    Args:
        linger_s: how long to gather items at most; 0 never waits.
        expected: how many callers will come soon, when the stream's owner knows; None: as many as
            were here lately and have their answers.
    """

    def __init__(self, linger_s: float, expected: Callable[[], int] | None = None) -> None:
        self._linger_s = linger_s
        self._expected = expected
        self._crowd = self._coming = 0
        self._until = 0.0
        self._worth = 1.0

    def see(self, waiting: int, sent: int, now: float) -> None:
        """Take note of how many callers wait for answers, and of how many of them are sent."""
        if self._expected is not None:
            self._crowd = waiting + self._expected()
        elif waiting >= self._crowd or now > self._until:
            self._crowd, self._until = waiting, now + _CROWD_KEPT_S
        self._coming = self._crowd - sent

    def waited(self, gathered: int, waiting: int) -> None:
        """Take note of how many items a wait has gathered, and how many callers wait for answers.

        Who did not come in time is not on the way. Where few come, as from engines that answer a
        few calls a second however many they have in work, the next wait is shorter by half; where
        many come it is longer again.
        """
        if gathered >= self.enough:
            self._worth = 1.0
            return
        self._crowd = waiting
        factor = 0.5 if gathered < _CROWD else 2.0
        self._worth = min(1.0, max(_WORTH_LEAST, self._worth * factor))

    @property
    def enough(self) -> int:
        """How many items are worth a message at once."""
        if self._crowd < _CROWD or not self._linger_s:
            return 1
        return max(1, min(_GATHERED_MAX, self._coming))

    @property
    def linger_s(self) -> float:
        """How long fewer items may wait for others."""
        return self._linger_s * min(1.0, self._crowd / _CROWD_FULL) * self._worth
