"""Who waits until an attempt has no pending calls. Lives on the event loop; nothing polls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from callforest_mesh.chassis.errors import draining, overloaded
from callforest_mesh.ledger.outline import AttemptKey, AttemptSummary


class _Waiter:
    """One caller that waits."""

    __slots__ = ("latest", "wake")

    def __init__(self) -> None:
        self.latest: AttemptSummary | None = None
        self.wake = asyncio.Event()


class SettlementWatch:
    """Tells waiters when their attempt became final.

    Args:
        service: names the service in refusals.
        waits_max: most callers that wait at once.
    """

    def __init__(self, service: str, *, waits_max: int) -> None:
        self._service = service
        self._waits_max = waits_max
        self._waiters: dict[AttemptKey, dict[_Waiter, None]] = {}
        self._wait_count = 0
        self._ended = False

    @property
    def wait_count(self) -> int:
        """How many callers wait."""
        return self._wait_count

    def publish(self, attempt: AttemptKey, summary: AttemptSummary) -> None:
        """Tell what has become durable."""
        if not summary.is_final:
            return
        for waiter in self._waiters.get(attempt, ()):
            if waiter.latest is None or waiter.latest.revision < summary.revision:
                waiter.latest = summary
                waiter.wake.set()

    def end(self) -> None:
        """Send every caller away, and later ones too: the service drains."""
        self._ended = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.wake.set()

    async def wait(
        self,
        attempt: AttemptKey,
        look: Callable[[], Awaitable[AttemptSummary]],
        *,
        wait_s: float,
    ) -> bool:
        """Wait until the attempt is final; say whether it was, at `wait_s` the latest.

        Args:
            attempt: the attempt.
            look: gives what is durable now.
            wait_s: the longest wait.

        Raises:
            Refusal: OVERLOADED at the bound; DRAINING.
        """
        if self._ended:
            raise draining(self._service)
        if self._wait_count >= self._waits_max:
            raise overloaded("settlement_waits", self._waits_max)
        # Registered before the look, so that nothing committed between the two is missed.
        waiter = _Waiter()
        self._wait_count += 1
        self._waiters.setdefault(attempt, {})[waiter] = None
        try:
            seen = await look()
            return seen.is_final or await self._woken(waiter, behind=seen.revision, wait_s=wait_s)
        finally:
            self._wait_count -= 1
            waiters = self._waiters[attempt]
            del waiters[waiter]
            if not waiters:
                del self._waiters[attempt]

    async def _woken(self, waiter: _Waiter, *, behind: int, wait_s: float) -> bool:
        """Wait for a final state behind a revision; say whether it came in time."""
        try:
            async with asyncio.timeout(wait_s):
                while waiter.latest is None or waiter.latest.revision <= behind:
                    if self._ended:
                        raise draining(self._service)
                    await waiter.wake.wait()
                    waiter.wake.clear()
        except TimeoutError:
            return False
        return True
