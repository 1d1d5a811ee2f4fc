"""How fast calls are answered, and whether one more can be taken.

An engine takes every request and lets it wait; so when calls come faster than they are made, each
waits longer than the one before, until all of them are made for callers that have left. A call that
would come to that is pushed back before anything is done for it.

Each call that was answered tells how many were in work before it, and how long it took:
their quotient is a rate, and by Little's law a call that comes now is answered after the number in
work over the rate. The highest rate of late counts, of calls that came when at least as many were
in work: whoever comes to no more than were answered well in time is taken.

But calls that are long by themselves look like this as well, and an engine that is not full takes
twice as many in the same time. So whoever comes to more is pushed back only if there is a queue:
with more in work the rate rose by less than the root of their number. What is not known is taken.
Callers are judged by what became of those that had about as much time, since one caller's long
calls are no other caller's queue.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final, NamedTuple

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError
from callforest_mesh.gateway.life import Life
from callforest_mesh.gateway.refusals import of_service, overloaded

_LATELY_S: Final = 60.0
"""How long answers count, or as long as their callers would have waited, if that is longer."""
_ANSWERS: Final = 16
"""Answers that count of those that came to about as many in work."""
_ENOUGH: Final = 8
"""Answers from which on they say anything against a call."""
_MOST: Final = 0.5
"""Part of its time that a call may be expected to take; the rest is for what nobody foresees."""
_DELAY_MOST_S: Final = 30.0
_TOOK_LEAST_S: Final = 1e-3


class _Answer(NamedTuple):
    """A call that was answered: how many were in work before it, and calls a second."""

    ahead: int
    rate: float


@dataclass(slots=True)
class _Level:
    """Callers with about as much time that came to about as many in work, both within a factor 2.

    Attributes:
        best: the one with the highest rate of those that count; of equals the first.
        used: when one came, or was needed to push a call back.
        answers: those that count.
    """

    best: _Answer
    used: float
    answers: deque[_Answer] = field(default_factory=lambda: deque(maxlen=_ANSWERS))

    @property
    def is_known(self) -> bool:
        """Whether it says anything against a call."""
        return len(self.answers) >= _ENOUGH

    def add(self, answer: _Answer, now: float) -> None:
        """Count one more; the oldest may count no more."""
        is_best_gone = len(self.answers) == _ANSWERS and self.answers[0] is self.best
        self.answers.append(answer)
        if is_best_gone:
            self.best = max(self.answers, key=_rate_of)
        elif answer.rate > self.best.rate:
            self.best = answer
        self.used = now

    def shows_queue(self, best: _Answer) -> bool:
        """Say whether there is a queue if `best` is the most that more in work came to."""
        rate = median_low(one.rate for one in self.answers)
        ahead = median_low(one.ahead for one in self.answers)
        return best.rate < rate * math.sqrt(best.ahead / ahead)


class Pace:
    """The pace of one gateway; every time is one of the caller's clock, in seconds.

    Args:
        calls_max: most calls in work, whatever their pace.
    """

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._classes: dict[int, dict[int, _Level]] = {}  # by allowed time, by number in work
        self._full: CallforestError | None = None
        self._full_until = 0.0

    def require_place(
        self, in_work: int, allowed_s: float, now: float, *, may_repeat: bool = False
    ) -> None:
        """Let a call in, or push it back before anything is done for it.

        Args:
            in_work: calls that are in work already.
            allowed_s: how long this one may take.
            now: when it came.
            may_repeat: whether it may be answered with what is kept, at no cost of the engine.

        Raises:
            HttpRefusal: too many are in work, at all or for the time that it has; or it could not
                be staged.
        """
        if in_work >= self._calls_max:
            raise overloaded("calls_in_work", self._calls_max)
        if self._full is not None and now < self._full_until and not may_repeat:
            raise of_service(self._full)
        delay_s = None if may_repeat else self.delay_s(in_work, allowed_s, now)
        if delay_s is not None:
            raise overloaded("answer_ms", round(1000 * allowed_s), retry_after_s=delay_s)

    def hold(self, error: CallforestError, now: float) -> None:
        """Push new calls back for as long as a store that was full said.

        Each of them would be announced and withdrawn, which are two durable events of the ledger.
        """
        if error.reason == er.ERROR_REASON_STORE_FULL and error.retry_after_ms is not None:
            self._full, self._full_until = error, now + error.retry_after_ms / 1000

    def keep(self, life: Life, now: float) -> None:
        """Learn from a call that was generated and answered how long calls take now."""
        if life.is_served and life.generated and not life.abandoned:
            self.note(life.ahead, now - life.begun, life.allowed_s, now)

    def note(self, ahead: int, took_s: float, allowed_s: float, now: float) -> None:
        """Note a call that was answered. One that came to nobody says nothing of a queue.

        Nor does one that was late, unless others with as much time were not: theirs may be less
        than any call takes.

        Args:
            ahead: calls that were in work when it came.
            took_s: how long it was in work.
            allowed_s: how long it might have been.
            now: when it was answered.
        """
        levels = self._classes.setdefault(_class_of(allowed_s), {})
        is_late = took_s > allowed_s
        if ahead < 1 or (is_late and not any(level.is_known for level in levels.values())):
            return
        answer = _Answer(ahead, ahead / max(took_s, _TOOK_LEAST_S))
        level = levels.get(ahead.bit_length())
        if level is None:
            level = levels[ahead.bit_length()] = _Level(answer, now)
        level.add(answer, now)

    def delay_s(self, in_work: int, allowed_s: float, now: float) -> float | None:
        """Say when a call may come again that would not be answered in time; None: it would be.

        Args:
            in_work: calls that are in work already.
            allowed_s: how long this one may take.
            now: when it came.
        """
        levels = self._recent(allowed_s, now)
        known = [number for number, level in levels.items() if level.is_known]
        if in_work < 1 or not known:
            return None
        here = min(in_work.bit_length(), max(known))
        best = max([level.best for number, level in levels.items() if number >= here], key=_rate_of)
        excess_s = in_work / best.rate - _MOST * allowed_s
        if excess_s <= 0:
            return None
        below = [levels[number] for number in known if number < here]
        shown = [level for level in below if level.shows_queue(best)]
        for level in shown:  # as long as calls are pushed back, few in work are not seen again
            level.used = now
        return min(max(1.0, excess_s), _DELAY_MOST_S) if shown else None

    def _recent(self, allowed_s: float, now: float) -> dict[int, _Level]:
        """Give what is known of callers with about as much time, and forget what is old."""
        levels = self._classes.get(_class_of(allowed_s), {})
        oldest = now - max(_LATELY_S, allowed_s)
        for number in [one for one, level in levels.items() if level.used < oldest]:
            del levels[number]
        return levels


def _rate_of(answer: _Answer) -> float:
    return answer.rate


def _class_of(allowed_s: float) -> int:
    """Give the class of a time: those of one class differ by less than a factor of 2."""
    return math.frexp(allowed_s)[1]
