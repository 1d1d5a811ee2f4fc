"""Views beside their logs: forgotten, rebuilt, never served for another's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_event_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import core
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.ledger.store import RevisionConflictError
from callforest_mesh.ledger.views import ATTEMPT_WEIGHT, AttemptViews
from tests.unit.ledger.calls import REQUEST_ID, TENANT, intent


class MemoryLog:
    """A log that forgets everything: for tests alone."""

    def __init__(self) -> None:
        self.logs: dict[AttemptKey, list[ledger_event_pb2.LedgerEvent]] = defaultdict(list)
        self.reads = 0

    def revision(self, attempt: AttemptKey) -> int:
        return len(self.logs[attempt])

    def read(
        self, attempt: AttemptKey, *, after: int = 0, limit: int | None = None
    ) -> Iterator[tuple[int, ledger_event_pb2.LedgerEvent]]:
        self.reads += 1
        end = None if limit is None else after + limit
        yield from enumerate(self.logs[attempt][after:end], after + 1)

    def latest_attempt(self, tenant: str, rollout_id: str) -> int | None:
        raise NotImplementedError

    def attempt_opened_by(self, tenant: str, rollout_id: str, request_id: str) -> int | None:
        raise NotImplementedError

    def append(
        self,
        attempt: AttemptKey,
        expected_revision: int,
        events: Sequence[ledger_event_pb2.LedgerEvent],
    ) -> None:
        if self.revision(attempt) != expected_revision:
            raise RevisionConflictError
        self.logs[attempt].extend(events)


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


def opened(log: MemoryLog, name: str, calls: int = 0) -> AttemptKey:
    """Open an attempt with some calls, in the log alone."""
    key = AttemptKey(TENANT, name)
    events = [core.opened_event(TENANT, name, 0, REQUEST_ID)]
    view = AttemptView(events[0].attempt_opened)
    for number in range(calls):
        decision = core.record_intent(view, intent(f"c{number}", key=name))
        view.apply(decision.events[0])
        events += decision.events
    log.append(key, 0, events)
    return key


def loaded(views: AttemptViews[AttemptView], log: MemoryLog, key: AttemptKey) -> AttemptView:
    view = views.load(log, key)
    assert view is not None
    return view


def test_a_view_is_folded_once(log: MemoryLog) -> None:
    key, views = opened(log, "r1", 3), AttemptViews(AttemptView, 100)
    first = loaded(views, log, key)
    assert first.call_count == 3
    assert views.load(log, key) is first
    assert log.reads == 1


def test_an_attempt_that_was_never_opened_has_no_view(log: MemoryLog) -> None:
    views = AttemptViews(AttemptView, 100)
    assert views.load(log, AttemptKey(TENANT, "r1")) is None
    assert len(views) == 0


def test_a_view_that_left_its_log_is_folded_anew(log: MemoryLog) -> None:
    """An aborted commit takes its events back; the view had them already."""
    key, views = opened(log, "r1", 1), AttemptViews(AttemptView, 100)
    view = loaded(views, log, key)
    view.apply(core.record_intent(view, intent("lost")).events[0])
    again = loaded(views, log, key)
    assert again is not view
    assert again.call("lost") is None
    assert again.revision == log.revision(key)


def test_the_least_recently_used_are_forgotten(log: MemoryLog) -> None:
    names = ["r1", "r2", "r3"]
    keys = [opened(log, name, 4) for name in names]
    views = AttemptViews(AttemptView, 2 * (4 + ATTEMPT_WEIGHT))
    first = loaded(views, log, keys[0])
    loaded(views, log, keys[1])
    assert views.load(log, keys[0]) is first
    loaded(views, log, keys[2])
    assert len(views) == 2
    assert views.load(log, keys[0]) is first, "used last but one"
    reads = log.reads
    loaded(views, log, keys[1])
    assert log.reads == reads + 1, "forgotten and folded anew"


def test_one_attempt_may_exceed_the_limit_and_growth_counts(log: MemoryLog) -> None:
    views = AttemptViews(AttemptView, 1)
    small, large = opened(log, "r1"), opened(log, "r2", 20)
    kept = loaded(views, log, large)
    assert views.load(log, large) is kept
    loaded(views, log, small)
    assert len(views) == 1
    assert loaded(views, log, large) is not kept


@pytest.mark.parametrize("harm", ["another's", "headless"])
def test_what_is_not_the_attempts_log_is_never_served(log: MemoryLog, harm: str) -> None:
    key = opened(log, "r1", 1)
    stranger = AttemptKey("other", "r1")
    log.logs[stranger] = log.logs[key][1:] if harm == "headless" else log.logs[key]
    with pytest.raises(Refusal) as caught:
        AttemptViews(AttemptView, 100).load(log, stranger)
    assert caught.value.reason == er.ERROR_REASON_STORE_CORRUPT
    assert TENANT not in str(caught.value)
    assert caught.value.facts == {"store": "ledger", "key": "r1"}
