"""One write on its way through a store, and the caller that waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.transaction import WriteTxn

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")
_LOG = logging.getLogger("callforest")


@dataclass(slots=True, eq=False)
class WriteJob(Generic[T, AnswerT]):
    """One write and its waiter.

    Attributes:
        fn: what runs inside the transaction.
        records: how many records it writes, as its caller says.
        reserve: whether it may go beyond the quota.
        answer_of: makes what the caller gets of what the function returned, on the caller's loop,
            once that is durable; runs even if nobody waits any more.
        future: what the caller waits for.
        loop: the caller's event loop.
        result: what the function returned, unless error is set.
        error: what the caller gets instead.
        answered: whether the caller was told.
    """

    fn: Callable[[WriteTxn], T]
    records: int
    reserve: bool
    answer_of: Callable[[T], AnswerT]
    future: asyncio.Future[AnswerT]
    loop: asyncio.AbstractEventLoop
    result: T | None = None
    error: Exception | None = None
    answered: bool = False

    def tell(self) -> None:
        """Tell the waiter, on its loop; one that was cancelled changes nothing."""
        answer: AnswerT | None = None
        error = self.error
        if error is None:
            try:
                answer = self.answer_of(cast("T", self.result))
            except Exception as raised:  # noqa: BLE001 - the waiter gets it
                error = raised
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(cast("AnswerT", answer))


@dataclass(slots=True)
class Blame:
    """Which write runs, and so is at fault if anything fails; None when it is not one alone."""

    job: WriteJob[Any, Any] | None = None


class SpoiledError(Exception):
    """A batch was aborted.

    Attributes:
        by: the write at fault, or None when it is not known which.
        error: what the write at fault gets.
    """

    def __init__(self, by: WriteJob[Any, Any] | None, error: Exception) -> None:
        super().__init__()
        self.by = by
        self.error = error


def answer(jobs: Sequence[WriteJob[Any, Any]]) -> None:
    """Tell the waiters from the writer thread, in one hop for each event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[WriteJob[Any, Any]]] = {}
    for job in jobs:
        job.answered = True
        loops.setdefault(job.loop, []).append(job)
    for loop, theirs in loops.items():
        try:
            loop.call_soon_threadsafe(_tell_all, theirs)
        except RuntimeError:
            _LOG.info("%d waiters of a store are gone with their event loop", len(theirs))
    failpoint("store.after_ack")


def _tell_all(jobs: Sequence[WriteJob[Any, Any]]) -> None:
    for job in jobs:
        job.tell()
