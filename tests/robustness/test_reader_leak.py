"""A snapshot that is read for an hour: it is said, and the file does not grow beyond its content.

Time is virtual; the writes and the reader are LMDB's. `DEPTH=4` writes four times as often.
"""

import asyncio
import json
import logging
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.chassis.reader_watch import ReaderWatch, Snapshot, snapshots
from tests.unit.chassis.stores import getting, make, putting

DEPTH = int(os.environ.get("DEPTH", "1"))
HOUR_S = 3600.0
STEP_S = 4.0 / DEPTH
KEYS = 100
VALUE_BYTES = 30_000
ALARM_S = 60.0
ROOM_BYTES = 1 << 20


@dataclass
class Clock:
    """A clock that stands until someone sets it on."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Hour:
    """What an hour with a reader that never ends came to.

    Attributes:
        alarm_s: when the log named the reader, from when it began; None for never.
        shown_s: the highest age of a reader that the statistics showed.
        growth: the file's size over that of the content, at its most.
        written: how many writes were taken.
        refused: which bounds pushed the others back, with the delay.
        deleted: how many deletes were made; they may go on.
    """

    alarm_s: float | None = None
    shown_s: float = 0.0
    growth: float = 0.0
    written: int = 0
    refused: list[tuple[str, int | None]] = field(default_factory=list)
    deleted: int = 0


def open_store(path: Path, clock: Clock, **options: object) -> LmdbStore:
    sizes = {"map_size_bytes": 1 << 29, "quota_bytes": 1 << 28, "room_bytes": ROOM_BYTES}
    return make(path, clock=clock, **sizes, **options)


def looks_away(watch: ReaderWatch, used_bytes: int) -> None:
    """Be a watch that never looks."""


async def fill(store: LmdbStore) -> None:
    """Let the store have some content, and free pages of its own."""
    for number in range(KEYS):
        await store.write(putting(b"%d" % number, random.Random(number).randbytes(VALUE_BYTES)))


async def play(
    store: LmdbStore, clock: Clock, seconds: float, caplog: pytest.LogCaptureFixture
) -> Hour:
    """Write some of the content anew, step by step; its size stays the same."""
    hour, began = Hour(), clock.now
    chance = random.Random(1)
    while clock.now - began < seconds:
        clock.now += STEP_S
        key = b"%d" % chance.randrange(KEYS)
        try:
            await store.write(putting(key, chance.randbytes(VALUE_BYTES)))
            hour.written += 1
        except Refusal as refusal:
            if refusal.reason != er.ERROR_REASON_OVERLOADED:
                raise
            hour.refused.append((refusal.facts["limit"], refusal.retry_after_ms))
            # What ends old work goes on.
            hour.deleted += await store.write(lambda txn: txn.delete("names", b"x"), reserve=True)
        now = store.statistics()
        hour.growth = max(hour.growth, now.file_bytes / now.used_bytes)
        hour.shown_s = max(hour.shown_s, now.oldest_reader_s)
        if hour.alarm_s is None and any("one snapshot" in one.message for one in caplog.records):
            hour.alarm_s = clock.now - began
    return hour


@pytest.mark.requirement("OPS-3")
async def test_a_leaked_reader_is_said_and_the_file_stays_small(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """P8 bounded, row 24."""
    caplog.set_level(logging.ERROR)
    clock = Clock()
    store = open_store(tmp_path / "store", clock)
    await fill(store)
    leaked = store._env.begin(buffers=True)
    hour = await play(store, clock, HOUR_S, caplog)
    figures = {
        "alarm_s": hour.alarm_s,
        "shown_s": hour.shown_s,
        "growth": round(hour.growth, 2),
        "written": hour.written,
        "pushed_back": len(hour.refused),
    }
    print("RESULT " + json.dumps(figures))
    assert hour.alarm_s is not None
    assert hour.alarm_s <= ALARM_S
    assert hour.growth <= 2.0
    assert set(hour.refused) == {("store_snapshot_s", 5000)}
    assert hour.shown_s > HOUR_S - ALARM_S, "the statistics show its age"
    assert store.read(getting(b"1")) is not None, "reads go on"

    leaked.abort()
    caplog.clear()
    clock.now += STEP_S
    after = await play(store, clock, 10 * ALARM_S, caplog)
    assert after.refused == [], "it is over at once"
    assert after.growth <= 2.0
    assert store.statistics().oldest_reader_s == 0.0
    assert after.alarm_s is None
    await store.close()


async def test_a_file_that_nobody_holds_up_would_be_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReaderWatch, "look", looks_away)
    clock = Clock()
    store = open_store(tmp_path / "store", clock)
    await fill(store)
    leaked = store._env.begin(buffers=True)
    hour = await play(store, clock, HOUR_S, caplog)
    leaked.abort()
    await store.close()
    assert hour.alarm_s is None
    assert hour.growth > 2.0


async def test_readers_that_begin_anew_are_no_leak(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each look finds a reader, and each time another snapshot: nothing is held."""
    clock = Clock()
    store = open_store(tmp_path / "store", clock)
    await fill(store)
    for _ in range(40):
        with store._env.begin(buffers=True):
            hour = await play(store, clock, 20.0, caplog)
            assert (hour.refused, hour.alarm_s) == ([], None)
    await store.close()


async def test_a_reader_of_an_idle_store_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("callforest_mesh.chassis.reader_watch.LOOK_EVERY_S", 0.0)
    clock = Clock()
    store = open_store(tmp_path / "store", clock)
    await fill(store)
    with store._env.begin(buffers=True):
        clock.now += HOUR_S
        await asyncio.to_thread(store._readers.look, 0)
        assert store.statistics().oldest_reader_s == 0.0
        assert caplog.records == []
    await store.close()


def test_the_table_of_readers_is_read() -> None:
    table = "    pid     thread     txnid\n  7 7f00aa 12\n  8 7f00bb -\n"
    assert list(snapshots(table)) == [Snapshot(7, "7f00aa", 12)]
    assert list(snapshots("(no active readers)\n")) == []
