"""Named points at which a test ends this very process; in service each costs one look.

Nothing in the configuration reaches them: they are armed by the environment alone, before the
process starts, as in `CALLFOREST_FAILPOINTS="ledger.after_commit=exit@3"`: kill -9 of the process
itself when it passes the point for the third time (the first when no number is said). A name that
is not in POINTS, or a spelling that is not read, ends the start.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "CALLFOREST_FAILPOINTS"
DIARY_VARIABLE: Final = "CALLFOREST_FAILPOINTS_DIARY"
"""A file that gets a line `NAME PID` when a point ends the process."""

POINTS: Final[Mapping[str, str]] = {
    "gateway.before_engine": "a call is admitted; its worker has not been asked",
    "gateway.after_engine": "the worker has answered; nothing of its answer is read",
    "gateway.after_staging": "the answer is read and its coordinates are in hand; no row was sent",
    "gateway.after_append": "the ledger has answered the row; the call does not know yet",
    "gateway.after_commit_ack": "the call knows that its row is durable; nothing has left",
    "gateway.after_keep_alive": "a stream's status line and first comment have left; no answer yet",
    "gateway.after_reply_began": "the response's status line has left, its body has not",
}
"""Every point by its name, with what is true when it is passed."""

_SPELLING: Final = re.compile(r"(?P<name>[a-z_.]+)=exit(?:@(?P<nth>[1-9]\d*))?")


class Trap:
    """What an armed point does at one of its passings.

    Args:
        name: the point.
        nth: the passing that springs it, from 1.
    """

    def __init__(self, name: str, nth: int) -> None:
        self.name = name
        self.nth = nth
        self._passings = itertools.count(1)

    def passed(self) -> None:
        """Count a passing, on whichever thread; at the right one end the process."""
        if next(self._passings) == self.nth:
            _note(self.name)
            os.kill(os.getpid(), signal.SIGKILL)


def read_traps(armed: str) -> dict[str, Trap]:
    """Read what is armed: `NAME=exit` or `NAME=exit@N`, with commas between.

    Raises:
        ValueError: a spelling is not read, or a name is unknown or comes twice.
    """
    traps: dict[str, Trap] = {}
    for part in filter(None, armed.split(",")):
        found = _SPELLING.fullmatch(part)
        if found is None or found["name"] not in POINTS or found["name"] in traps:
            raise ValueError(f"{VARIABLE}: {part!r} does not arm a point")
        traps[found["name"]] = Trap(found["name"], int(found["nth"] or 1))
    return traps


_TRAPS: Final = read_traps(os.environ.get(VARIABLE, "")) or None


def failpoint(name: str) -> None:
    """Pass a point: nothing happens unless it is armed."""
    if _TRAPS is not None and (trap := _TRAPS.get(name)) is not None:
        trap.passed()


def is_armed(name: str) -> bool:
    """Say whether a point would do anything, now or at a later passing."""
    return _TRAPS is not None and name in _TRAPS


def _note(name: str) -> None:
    """Leave a line that outlives the process; one write, so that lines never mix."""
    if diary := os.environ.get(DIARY_VARIABLE):
        descriptor = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{name} {os.getpid()}\n".encode())
        finally:
            os.close(descriptor)
