"""The calls in work by their names, and who waits for which: one call has one generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from callforest_mesh.gateway import core
from callforest_mesh.gateway.asked import Identity
from callforest_mesh.gateway.life import Life, Served
from callforest_mesh.gateway.refusals import call_mismatch, overloaded

WAITERS_MAX: Final = 16
"""Requests that wait for one call; more are refused as overloaded."""


class Lives:
    """The calls in work at one gateway.

    Args:
        grace_s: how long a call goes on when nobody waits for it any more.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._all: dict[Life, None] = {}  # in the order in which they came
        self._named: dict[tuple[str, str], Life] = {}
        self._unjudged: dict[tuple[str, bytes], dict[Life, None]] = {}
        self._is_ending = False

    def enter(self, life: Life) -> PendingCall:
        """Take a new call into work, behind what is left of another of its name."""
        self._all[life] = None
        self._take_name(life)
        if not life.identity.call_id:
            alike = self._unjudged.setdefault(_alike(life), {})
            if life.identity.is_marked:
                life.behind = list(alike)
            alike[life] = None
        return self.join(life)

    def leave(self, life: Life) -> None:
        """Forget a call that has ended."""
        self.judged(life)
        self._all.pop(life, None)
        if self._named.get((life.capture_key, life.call_id)) is life:
            del self._named[life.capture_key, life.call_id]
        if life.farewell is not None:
            life.farewell.cancel()
        life.ended.set()

    def find(self, capture_key: str, call_id: str) -> Life | None:
        """Give the call in work of a name."""
        return self._named.get((capture_key, call_id))

    def same(self, capture_key: str, identity: Identity, body_digest: bytes) -> PendingCall | None:
        """Wait for the call in work that a request with a key repeats; None when there is none.

        Raises:
            HttpRefusal: its key is in work with another request, or too many wait already.
        """
        life = self._named.get((capture_key, identity.call_id)) if identity.call_id else None
        if life is None:
            return None
        if life.request.body_digest != body_digest:
            raise call_mismatch(capture_key, identity.call_id)
        return self.join(life) if life.takes_waiters else None

    def join(self, life: Life) -> PendingCall:
        """Wait for a call in work.

        Raises:
            HttpRefusal: too many wait already.
        """
        if life.waiters >= WAITERS_MAX:
            raise overloaded("waiters_of_a_call", WAITERS_MAX)
        life.waiters += 1
        if life.farewell is not None:
            life.farewell.cancel()
            life.farewell = None
        return PendingCall(life, self)

    def part(self, life: Life) -> None:
        """Note that one waiter of a call has left; after the last, a repeat has the grace."""
        life.waiters -= 1
        if life.waiters or not life.takes_waiters:
            return
        if life.joined or self._is_ending or not self._grace_s:
            life.abandon()
        else:
            loop = asyncio.get_running_loop()
            life.farewell = loop.call_later(self._grace_s, life.abandon)

    def rename(self, life: Life, call_id: str) -> None:
        """Give a marked repeat the name of its call, behind what is left of another of that."""
        if self._named.get((life.capture_key, life.call_id)) is life:
            del self._named[life.capture_key, life.call_id]
        life.call_id, life.is_named = call_id, True
        self._take_name(life)

    def judged(self, life: Life) -> None:
        """Note that the ledger knows a call, or never will."""
        alike = self._unjudged.get(_alike(life))
        if alike is not None:
            alike.pop(life, None)
            if not alike:
                del self._unjudged[_alike(life)]

    async def grace(self, life: Life) -> None:
        """Leave a call to its repeats for the grace; returns when one came, too."""
        if self._is_ending:
            return
        try:
            async with asyncio.timeout(self._grace_s):
                await life.grace_ended.wait()
        except TimeoutError:
            return

    def end(self) -> None:
        """Wait no more: no repeat can come in."""
        self._is_ending = True
        for life in list(self._all):
            life.grace_ended.set()
            if not life.waiters and life.takes_waiters:
                life.abandon()

    def _take_name(self, life: Life) -> None:
        name = life.capture_key, life.call_id
        before = self._named.get(name)
        if before is not None:
            before.retake()
        life.before = before
        self._named[name] = life


class PendingCall:
    """A call in work, as one who waits for it sees it.

    Args:
        life: the call.
        lives: is told when the waiter leaves.
    """

    def __init__(self, life: Life, lives: Lives) -> None:
        self._life = life
        self._lives = lives
        self._has_left = False

    @property
    def call_id(self) -> str:
        """The call."""
        return self._life.call_id

    @property
    def created(self) -> int:
        """When it was admitted, in seconds since the epoch."""
        return self._life.admit_time.seconds

    @property
    def request(self) -> core.NormalisedRequest:
        """What was asked."""
        return self._life.request

    @property
    def done(self) -> bool:
        """Whether there is an answer, or a refusal."""
        return self._life.answer.done()

    async def served(self) -> Served:
        """Wait for the response; cancelling this leaves the call.

        Raises:
            HttpRefusal: the call was refused, or something behind the gateway is away; then
                nothing was served.
        """
        try:
            return await asyncio.shield(self._life.answer)
        except asyncio.CancelledError:
            self.leave()
            raise

    def when_answered(self, told: Callable[[asyncio.Future[Served]], None]) -> None:
        """Have the answer, or the refusal, told to one who waits in no task of his own."""
        self._life.answer.add_done_callback(told)

    async def done_within(self, seconds: float) -> bool:
        """Wait for an answer, at most so long; say whether there is one."""
        await asyncio.wait({self._life.answer}, timeout=seconds)
        return self.done

    async def admitted_or_done(self) -> None:
        """Wait until the call is admitted, or has ended without."""
        await self._life.admitted.wait()

    def leave(self) -> None:
        """Wait no more. When nobody does, the call is given up after the grace. Idempotent."""
        if not self._has_left:
            self._has_left = True
            self._lives.part(self._life)


def _alike(life: Life) -> tuple[str, bytes]:
    return life.capture_key, life.request.body_digest
