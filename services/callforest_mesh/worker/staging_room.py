"""Whether Staging takes more, as far as it said: what cannot be staged is not generated (CAP-7)."""

from __future__ import annotations

import asyncio
from typing import Final

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, RefusedError
from callforest_client.staging import StagingClient
from callforest_core.refusal import Refusal

_DELAY_MS: Final = 5000
"""After which Staging is asked again, unless it named another delay."""


class StagingRoom:
    """Remembers that Staging is full, and asks it from time to time whether it still is.

    The calls at work when it fills up are served without capture; later ones are pushed back. Once
    it has room for the largest that it refused, one call at a time may try, until a call as large
    is staged: it may have room for no more than one. A Staging that does not answer is not taken
    for full: the call that asked then has the bound of the staging itself.

    Args:
        staging: is asked.
        timeout_s: how long its answer may take.
    """

    def __init__(self, staging: StagingClient, timeout_s: float) -> None:
        self._staging = staging
        self._timeout_s = timeout_s
        self._refused: RefusedError | None = None
        self._needed_bytes = 0
        self._ask_at = 0.0

    @property
    def is_full(self) -> bool:
        """Whether Staging refused a call, and has not staged one as large since."""
        return self._refused is not None

    def note(self, error: RefusedError, size_bytes: int) -> None:
        """Take note of why a call of that size was not staged."""
        if error.reason != er.ERROR_REASON_STORE_FULL:
            return
        self._refused = error
        self._needed_bytes = max(self._needed_bytes, size_bytes)
        self._ask_at = asyncio.get_running_loop().time() + self._delay_ms(error) / 1000

    def staged(self, size_bytes: int) -> None:
        """Take note of a call of that size that was staged."""
        if size_bytes >= self._needed_bytes:
            self._refused, self._needed_bytes = None, 0

    async def require(self, tenant: str) -> None:
        """Let a call be generated, if it could be staged.

        Raises:
            Refusal: STORE_FULL, with the delay and the facts that Staging gave.
        """
        error = self._refused
        if error is None:
            return
        now = asyncio.get_running_loop().time()
        if now >= self._ask_at:
            # The others go on being pushed back until this one is staged, or the delay is over.
            self._ask_at = now + self._delay_ms(error) / 1000
            if await self._has_room(tenant):
                return
        raise Refusal(
            er.ERROR_REASON_STORE_FULL,
            error.message,
            retry_after_ms=self._delay_ms(error),
            violations=(),
            **error.metadata,
        )

    async def _has_room(self, tenant: str) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                stat = await self._staging.for_tenant(tenant).stat()
        except (CallforestError, TimeoutError):
            return True
        # One of an earlier release does not say: then a call has to try.
        return not stat.HasField("room_bytes") or stat.room_bytes >= self._needed_bytes

    @staticmethod
    def _delay_ms(error: RefusedError) -> int:
        return _DELAY_MS if error.retry_after_ms is None else error.retry_after_ms
