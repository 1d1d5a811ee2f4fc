"""What is durable of the attempts in use: reads are answered from it and never wait for the writer.

The writer's views are ahead of the disk, and another thread must not look at them. So reads have
views of their own, on the event loop. What a read says is decided by one snapshot of the store that
is opened after the read began: the view is brought to the snapshot's revision, and only then looked
at, in one step of the loop. Hence

- what was acknowledged before the read is seen: every later snapshot has it;
- what is not durable is not seen: no snapshot has it, and a commit that fails takes nothing back;
- what is read beside the view, such as the rollout's latest attempt, is of the same moment.

A view here is a prefix of its log, and a log only grows, until all of it is forgotten, and then its
number is never given again. Therefore any view can be continued out of any later snapshot: it may
have been evicted while it was being folded, two readers may fold it at once, and what became
durable may be told late, twice, in part, or never. Being told is for the cost alone: a read then
finds a view that is at the log's end, however long that log is. Outlines are told of every event,
since every rollout's end asks for them; whole views, which cost ten times as much and are seldom
asked for, are told nothing and read what is new since they were last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

from callforest.ledger.v1 import ledger_event_pb2
from callforest_mesh.ledger.outline import AttemptKey, AttemptOutline, AttemptSummary
from callforest_mesh.ledger.store import LedgerStore, LogReader
from callforest_mesh.ledger.views import AttemptViews, ViewT, fold

T = TypeVar("T")

EVENTS_MAX: Final = 512
"""Most events taken into a view at once, so that no long log holds the event loop for long."""


class Change(NamedTuple):
    """What a transaction appended to one log.

    Attributes:
        attempt: whose log.
        revision: events in the log before.
        events: what was appended.
        summary: the attempt afterwards.
    """

    attempt: AttemptKey
    revision: int
    events: Sequence[ledger_event_pb2.LedgerEvent]
    summary: AttemptSummary


class _Answer(NamedTuple, Generic[T]):
    """What a read found; a view instead of it says that the log is longer than that."""

    value: T


class DurableViews(Generic[ViewT]):
    """Views by attempt, none of them ahead of the disk. Lives on the event loop.

    Args:
        kind: what is kept of an attempt.
        store: where the logs are.
        calls_max: most calls of all views together; a single attempt may exceed it.
    """

    def __init__(self, kind: type[ViewT], store: LedgerStore, calls_max: int) -> None:
        self._kind = kind
        self._store = store
        self._views = AttemptViews(kind, calls_max)

    def advance(self, change: Change) -> None:
        """Take what has become durable.

        What does not continue the kept view, because a read was faster, and what is too much at
        once is left to the next read.
        """
        view = self._views.find(change.attempt)
        if (0 if view is None else view.revision) != change.revision:
            return
        events = islice(change.events, EVENTS_MAX)
        if view is None:
            view = self._kind(next(events).attempt_opened)
        for event in events:
            view.apply(event)
        self._views.keep(change.attempt, view)

    async def read(self, attempt: AttemptKey, fn: Callable[[LogReader, ViewT | None], T]) -> T:
        """Run a function over an attempt and the logs, as one snapshot has them.

        The view is None when the attempt was never opened, or is forgotten; the function must not
        keep it. What the kept view was not told is read from the log, in steps between which others
        are served; all of it when the view is cold (the ledger was started anew, the cache was too
        small, many calls were restored).

        Raises:
            Refusal: STORE_CORRUPT, OVERLOADED, DRAINING, or the function's own.
        """
        held: ViewT | None = None
        while True:
            look = partial(self._step, attempt=attempt, held=held, fn=fn)
            found = self._store.read(look)
            if not isinstance(found, AttemptOutline):
                return found.value
            held = found
            await asyncio.sleep(0)

    def _step(
        self,
        log: LogReader,
        attempt: AttemptKey,
        held: ViewT | None,
        fn: Callable[[LogReader, ViewT | None], T],
    ) -> _Answer[T] | ViewT:
        """Take a view further; give what the function says once that is at the end of the log.

        Args:
            log: the snapshot.
            attempt: whose log.
            held: how far the read came before. The cache may have evicted it meanwhile: were it
                begun anew, two logs that are longer than the cache could starve each other.
            fn: what the read asks.
        """
        view = self._views.find(attempt)
        if view is None or (held is not None and held.revision > view.revision):
            view = held
        self._views.forget(attempt)  # kept again below, unless the log cannot follow it
        revision = log.revision(attempt)
        if view is not None and view.revision > revision:
            view = None  # its log was forgotten
        if revision > (0 if view is None else view.revision):
            view = fold(self._kind, log, attempt, view, limit=EVENTS_MAX)
        if view is not None:
            self._views.keep(attempt, view)
            if view.revision < revision:
                return view
        return _Answer(fn(log, view))
