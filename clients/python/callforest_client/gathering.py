"""How long a message waits for more items.

A message costs as much as twenty items. How many callers were at work lately says whether more are
to be expected: those that a message answers come back together.
"""

from __future__ import annotations

from typing import Final

_CROWD: Final = 4
"""Callers at work from which waiting for more of them pays; below it nothing ever waits."""
_CROWD_FULL: Final = 64
"""Callers at work from which the whole linger is waited; fewer wait in proportion."""
_CROWD_KEPT_S: Final = 0.1
"""How long a crowd counts after it was seen."""
_GATHERED_MAX: Final = 32
"""Items that are never kept waiting: their message's cost is shared well enough."""


class Gathering:
    """Watches the callers of a stream.

    Args:
        linger_s: how long to gather items at most; 0 never waits.
    """

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._crowd = 0
        self._until = 0.0

    def see(self, present: int, now: float) -> None:
        """Take note of how many callers wait for answers."""
        if present >= self._crowd or now > self._until:
            self._crowd, self._until = present, now + _CROWD_KEPT_S

    @property
    def enough(self) -> int:
        """How many items are worth a message at once."""
        if self._crowd < _CROWD or not self._linger_s:
            return 1
        return min(_GATHERED_MAX, self._crowd // 2)

    @property
    def linger_s(self) -> float:
        """How long fewer items may wait for others."""
        return self._linger_s * min(1.0, self._crowd / _CROWD_FULL)
