"""Views for reads: each answer is one snapshot's, whatever was told or evicted before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_event_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import core, durable_views
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.durable_views import Change, DurableViews
from callforest_mesh.ledger.outline import AttemptKey, AttemptOutline, AttemptSummary
from callforest_mesh.ledger.store import LogReader
from tests.unit.ledger.calls import KEY, REQUEST_ID, TENANT, failure, intent
from tests.unit.ledger.test_views import MemoryLog

pytestmark = pytest.mark.requirement("LED-2")

T = TypeVar("T")
ATTEMPT = AttemptKey(TENANT, KEY)


class CountedLog(MemoryLog):
    """Counts what is read of it."""

    taken = 0

    def read(
        self, attempt: AttemptKey, *, after: int = 0, limit: int | None = None
    ) -> Iterator[tuple[int, ledger_event_pb2.LedgerEvent]]:
        for found in super().read(attempt, after=after, limit=limit):
            self.taken += 1
            yield found


@dataclass
class Bench:
    """Durable logs, and what was not told of them yet."""

    log: CountedLog = field(default_factory=CountedLog)
    writers: dict[AttemptKey, AttemptView] = field(default_factory=dict)
    most_taken: int = 0
    steps: int = 0

    def read(self, fn: Callable[[LogReader], T]) -> T:
        """Be a LedgerStore whose logs never change within a read."""
        before = self.log.taken
        try:
            return fn(self.log)
        finally:
            self.steps += 1
            self.most_taken = max(self.most_taken, self.log.taken - before)

    def submit(self, *_: object, **__: object) -> object:
        raise AssertionError("a read never waits for the writer")

    def views(self, calls_max: int = 1000) -> DurableViews[AttemptOutline]:
        return DurableViews(AttemptOutline, self, calls_max)

    def grow(self, attempt: AttemptKey = ATTEMPT, calls: int = 1) -> Change:
        """Make calls of an attempt durable; give what is to be told of that."""
        view, events = self.writers.get(attempt), []
        before = 0 if view is None else view.revision
        if view is None:
            events.append(core.opened_event(TENANT, attempt.capture_key, 0, REQUEST_ID))
            view = self.writers[attempt] = AttemptView(events[0].attempt_opened)
        for _ in range(calls):
            name = f"c{view.intent_count}"
            said = intent(name, key=attempt.capture_key, body=name)
            (event,) = core.record_intent(view, said).events
            view.apply(event)
            events.append(event)
        self.log.append(attempt, before, events)
        return Change(attempt, before, tuple(events), view.summary())

    def forget(self, attempt: AttemptKey = ATTEMPT) -> None:
        self.log.logs.pop(attempt, None)
        self.writers.pop(attempt, None)

    def durable(self, attempt: AttemptKey = ATTEMPT) -> AttemptSummary | None:
        """Fold the whole log, as nothing else may answer."""
        view = AttemptView.replay(self.log.logs[attempt])
        return None if view is None else view.summary()


def summary(_: LogReader, view: AttemptOutline | None) -> AttemptSummary | None:
    return None if view is None else view.summary()


async def test_a_read_of_a_long_log_costs_what_one_of_a_short_log_does() -> None:
    bench = Bench()
    views = bench.views()
    for _ in range(40):
        views.advance(bench.grow(calls=25))
    assert await views.read(ATTEMPT, summary) == bench.durable()
    assert (bench.log.taken, bench.steps) == (0, 1), "everything was told: nothing is folded"


async def test_a_cold_log_is_folded_once_in_steps_that_let_others_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(durable_views, "EVENTS_MAX", 8)
    bench = Bench()
    bench.grow(calls=79)
    other = AttemptKey(TENANT, "r2")
    views = bench.views()
    views.advance(bench.grow(other))
    long = asyncio.ensure_future(views.read(ATTEMPT, summary))
    await asyncio.sleep(0)
    assert await views.read(other, summary) == bench.durable(other)
    assert not long.done(), "a short read passes a long one"
    assert await long == bench.durable()
    assert bench.most_taken == 8
    assert bench.log.taken == 80
    assert await views.read(ATTEMPT, summary) == bench.durable()
    assert bench.log.taken == 80


async def test_what_is_appended_while_a_log_is_folded_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(durable_views, "EVENTS_MAX", 8)
    bench = Bench()
    bench.grow(calls=31)
    views = bench.views()
    readers = [asyncio.ensure_future(views.read(ATTEMPT, summary)) for _ in range(3)]
    await asyncio.sleep(0)
    views.advance(bench.grow(calls=20))
    for reader in readers:
        assert await reader == bench.durable()


@pytest.mark.parametrize("calls", [3, 30])
async def test_a_large_change_is_taken_in_part_and_the_rest_by_the_next_read(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """As an attempt that begins with many restored calls."""
    monkeypatch.setattr(durable_views, "EVENTS_MAX", 8)
    bench = Bench()
    views = bench.views()
    views.advance(bench.grow(calls=calls))
    views.advance(bench.grow(calls=1))
    assert await views.read(ATTEMPT, summary) == bench.durable()
    assert bench.log.taken == (0 if calls == 3 else 2 + calls - 8)
    assert bench.most_taken <= 8


async def test_two_logs_longer_than_the_cache_do_not_starve_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(durable_views, "EVENTS_MAX", 4)
    bench = Bench()
    keys = [AttemptKey(TENANT, name) for name in ("r1", "r2", "r3")]
    for key in keys:
        bench.grow(key, calls=39)
    views = bench.views(calls_max=1)
    found = await asyncio.gather(*(views.read(key, summary) for key in keys))
    assert found == [bench.durable(key) for key in keys]
    assert bench.log.taken == 3 * 40, "each was folded once"


async def test_a_forgotten_log_is_gone_even_while_it_is_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(durable_views, "EVENTS_MAX", 8)
    bench = Bench()
    views = bench.views()
    bench.grow(calls=30)
    reader = asyncio.ensure_future(views.read(ATTEMPT, summary))
    await asyncio.sleep(0)
    bench.forget()
    assert await reader is None
    assert await views.read(ATTEMPT, summary) is None
    late = bench.grow()
    bench.forget()
    views.advance(late)  # told behind its removal
    assert await views.read(ATTEMPT, summary) is None
    assert views._views.find(ATTEMPT) is None, "nothing of it is kept"


async def test_a_log_that_cannot_be_one_is_refused_every_time() -> None:
    bench = Bench()
    views = bench.views()
    views.advance(bench.grow(calls=2))
    stray = ledger_event_pb2.LedgerEvent(failure=failure("nobody"))
    bench.log.append(ATTEMPT, 3, [stray])
    for _ in range(2):
        with pytest.raises(Refusal) as caught:
            await views.read(ATTEMPT, summary)
        assert caught.value.reason == er.ERROR_REASON_STORE_CORRUPT
        assert views._views.find(ATTEMPT) is None, "what could not be continued is thrown away"


async def test_a_refusal_of_the_function_is_the_readers() -> None:
    bench = Bench()
    views = bench.views()
    with pytest.raises(Refusal) as caught:
        await views.read(ATTEMPT, lambda _, view: core.require(view, KEY))
    assert caught.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 2), st.integers(1, 12)),
        st.tuples(st.just("tell"), st.integers(0, 5)),
        st.tuples(st.just("drop"), st.integers(0, 5)),
        st.tuples(st.just("read"), st.integers(0, 2)),
        st.tuples(st.just("forget"), st.integers(0, 2)),
    ),
    max_size=40,
)


async def test_a_whole_view_reads_what_is_new_and_no_more() -> None:
    bench = Bench()
    views = DurableViews(AttemptView, bench, 1000)
    for calls in (25, 1, 3):
        bench.grow(calls=calls)
        assert await views.read(ATTEMPT, summary) == bench.durable()
    assert bench.log.taken == 1 + 25 + 1 + 3


@pytest.mark.parametrize("kind", [AttemptOutline, AttemptView])
@given(steps=STEPS, calls_max=st.sampled_from([1, 12, 1000]))
@settings(max_examples=150, deadline=None)
def test_whatever_is_told_a_read_gives_what_the_log_gives(
    kind: type[AttemptOutline], steps: list[tuple[object, ...]], calls_max: int
) -> None:
    """Told late, out of order, twice or never, evicted or not: a read is a fold of the log."""
    bench = Bench()
    views = DurableViews(kind, bench, calls_max)
    keys = [AttemptKey(TENANT, f"r{number}") for number in range(3)]
    untold: list[Change] = []
    gone: set[AttemptKey] = set()

    async def play() -> None:
        for which, chosen, *more in steps:
            key = keys[chosen % 3]
            if which == "grow" and key not in gone:
                untold.append(bench.grow(key, *more))
            elif which in {"tell", "drop"} and untold:
                place = chosen % len(untold)
                change = untold[place] if chosen % 2 else untold.pop(place)
                if which == "tell":
                    views.advance(change)
            elif which == "forget":
                bench.forget(key)
                gone.add(key)  # its number is never given again
            assert await views.read(key, summary) == bench.durable(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable_views, "EVENTS_MAX", 5)
        asyncio.run(play())
