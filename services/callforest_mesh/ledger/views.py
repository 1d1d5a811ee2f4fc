"""The views of the attempts in use, kept beside their logs.

A cache may forget and may be wrong about the end of a log (a commit that was aborted took its
events back), so each use compares revisions and folds the log anew where they differ. Each belongs
to one thread: the writer has one, and the event loop another (see `durable_views`).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError

from callforest_mesh.ledger import refusals
from callforest_mesh.ledger.outline import (
    AttemptKey,
    AttemptOutline,
    LogError,
    UnknownLogError,
)
from callforest_mesh.ledger.store import LogReader

ViewT = TypeVar("ViewT", bound=AttemptOutline)

ATTEMPT_WEIGHT: Final = 8
"""What an attempt weighs besides its calls."""


class AttemptViews(Generic[ViewT]):
    """Views by attempt; the least recently used are forgotten.

    Args:
        kind: what is folded from a log.
        calls_max: most calls of all views together; a single attempt may exceed it.
    """

    def __init__(self, kind: type[ViewT], calls_max: int) -> None:
        self._kind = kind
        self._calls_max = calls_max
        self._views: OrderedDict[AttemptKey, ViewT] = OrderedDict()
        self._weights: dict[AttemptKey, int] = {}
        self._weight = 0

    def __len__(self) -> int:
        return len(self._views)

    def load(self, log: LogReader, attempt: AttemptKey) -> ViewT | None:
        """Give the view of an attempt as of the log's end; None when it was never opened.

        Raises:
            Refusal: STORE_CORRUPT when the events are not the attempt's log.
        """
        revision = log.revision(attempt)
        view = self._views.get(attempt)
        if view is None or view.revision != revision:
            self.forget(attempt)
            view = fold(self._kind, log, attempt)
            if view is None:
                return None
        self.keep(attempt, view)
        return view

    def find(self, attempt: AttemptKey) -> ViewT | None:
        """Give the view that is kept of an attempt, wherever in its log that is."""
        return self._views.get(attempt)

    def keep(self, attempt: AttemptKey, view: ViewT) -> None:
        """Take a view in place of the attempt's kept one: it is the one that was used last."""
        self._views[attempt] = view
        self._views.move_to_end(attempt)
        self._weigh(attempt, view)

    def forget(self, attempt: AttemptKey) -> None:
        """Forget the view of an attempt, if there is one."""
        self._views.pop(attempt, None)
        self._weight -= self._weights.pop(attempt, 0)

    def _weigh(self, attempt: AttemptKey, view: ViewT) -> None:
        weight, before = view.call_count + ATTEMPT_WEIGHT, self._weights.get(attempt, 0)
        if weight == before:
            return
        self._weight += weight - before
        self._weights[attempt] = weight
        while self._weight > self._calls_max and len(self._views) > 1:
            self.forget(next(iter(self._views)))


def fold(
    kind: type[ViewT],
    log: LogReader,
    attempt: AttemptKey,
    view: ViewT | None = None,
    *,
    limit: int | None = None,
) -> ViewT | None:
    """Continue a view with what the log has behind it; None when the attempt was never opened.

    Args:
        kind: into what is folded.
        log: what is folded.
        attempt: whose log.
        view: of its first events; None to begin. It must be thrown away when this raises.
        limit: most events to take.

    Raises:
        Refusal: STORE_CORRUPT when the events are not the attempt's log.
    """
    after = 0 if view is None else view.revision
    events = (event for _, event in log.read(attempt, after=after, limit=limit))
    try:
        view = kind.continued(view, events)
        if view is not None and view.revision >= log.revision(attempt):
            view.require_whole()
    except UnknownLogError as error:
        raise refusals.log_unknown(attempt.capture_key, str(error)) from error
    except (LogError, DecodeError) as error:
        raise refusals.log_corrupt(attempt.capture_key, str(error)) from error
    if view is None:
        return None
    found = AttemptKey(view.opened.tenant, view.opened.capture_key)
    if found != attempt:
        # Never name the other: it may be another tenant's.
        raise refusals.log_corrupt(attempt.capture_key, "it is another attempt's")
    return view
