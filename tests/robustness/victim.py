"""A service's process as it always is, but that it counts what it has in work, to be killed.

It runs the project's own command line. What is counted are calls that change something: items of
the streams of staging, ledger, admission and worker, the finalizer's calls, the gateway's calls.
The trainer has no calls to answer, so its groups are counted: taken and not yet trained. What the
trainer does that its death could undo is written into a diary.

A victim can be given a flaw, so that the tests can prove that they would notice.

Usage: python -m tests.robustness.victim DIRECTORY serve NAME ...
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from callforest_client.finalizer import RowSubscription
from callforest_client.streams import FETCH_PREFIX
from callforest_mesh import cli
from callforest_mesh.chassis.call_limits import CallCounter
from callforest_mesh.chassis.item_server import ItemServer
from tests.robustness.gauge import Gauge, gauge_file
from tests.robustness.training_diary import Diary

DIARY = "trainer.diary"
FLAW_VARIABLE = "VICTIM_FLAW"
EARLY_S = 0.15
"""How much too early the flawed gateway serves."""


def count_items(gauge: Gauge) -> None:
    """Count the items of every stream that writes while their handler has them."""
    original = ItemServer.__init__

    def make(self, spec, handler, **named):
        if spec is FETCH_PREFIX:
            original(self, spec, handler, **named)
            return

        def counted(context, payload):
            answering = asyncio.ensure_future(handler(context, payload))
            gauge.follow(answering)
            return answering

        original(self, spec, counted, **named)

    ItemServer.__init__ = make


def count_calls(gauge: Gauge) -> None:
    """Count unary calls; a stream stays open without work, so it proves none."""
    original = CallCounter._place

    def place(self, *, waits: bool) -> AbstractContextManager[None]:
        stack = ExitStack()
        stack.enter_context(original(self, waits=waits))
        if not waits:
            stack.enter_context(gauge.call())
        return stack

    CallCounter._place = place


def count_lives(gauge: Gauge) -> None:
    """Count the calls of harnesses, from their intent to their row."""
    from callforest_mesh.gateway.calls import Calls

    original = Calls._live

    async def live(self, life):
        with gauge.call():
            return await original(self, life)

    Calls._live = live


def serve_too_early() -> None:
    """Let responses leave the gateway before their record is durable."""
    from callforest_mesh.gateway.calls import Calls

    append = Calls._append

    async def later(self, life, record) -> None:
        await asyncio.sleep(EARLY_S)
        await append(self, life, record)

    async def at_once(self, life, record) -> None:
        self._watch(asyncio.ensure_future(later(self, life, record)))

    Calls._append = at_once


FLAWS = {"": lambda: None, "serves-too-early": serve_too_early}


class Groups:
    """Where a trainer is in the row log: groups from their arrival to the end of their step."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._arrived = 0
        self._trained = 0
        self._steps = 0

    def arrived(self, cursor: int) -> None:
        self._arrived = max(self._arrived, cursor)
        self._show()

    def trained(self, cursor: int) -> None:
        self._steps += 1
        self.restored(cursor)

    def restored(self, cursor: int) -> None:
        self._trained = cursor
        self._show()

    def _show(self) -> None:
        self._gauge.show(max(0, self._arrived - self._trained), self._steps)


def count_groups(groups: Groups, diary: Diary) -> None:
    """Follow the groups, and keep the diary."""
    from callforest_mesh.trainer.announcements import Announcements
    from callforest_mesh.trainer.journal import TrainerJournal
    from callforest_mesh.trainer.learner.process import LearnerProcess

    take, step_done = RowSubscription._take, Announcements.step_done
    load, restore = LearnerProcess.load_model, LearnerProcess.restore_checkpoint
    train, issue = LearnerProcess.train_step, TrainerJournal.issue_version

    def taken(self, response):
        take(self, response)
        if response.WhichOneof("event") == "batch":
            groups.arrived(response.batch.cursor)

    async def done(self, metrics, cursor):
        groups.trained(cursor)
        await step_done(self, metrics, cursor)

    async def loaded(self, *given):
        count = await load(self, *given)
        diary.loaded()
        return count

    async def restored(self, path):
        progress = await restore(self, path)
        groups.restored(progress.trained_cursor)
        diary.restored(progress.step)
        return progress

    async def stepped(self, rows, plan):
        made = await train(self, rows, plan)
        diary.trained(made.step, [row.row_id for row in rows])
        return made

    def issued(self, version):
        issue(self, version)
        diary.issued(version)

    RowSubscription._take, Announcements.step_done = taken, done
    LearnerProcess.load_model, LearnerProcess.restore_checkpoint = loaded, restored
    LearnerProcess.train_step, TrainerJournal.issue_version = stepped, issued


def main() -> int:
    directory, name = Path(sys.argv[1]), sys.argv[3]
    gauge = Gauge(gauge_file(directory, name, os.getpid()))
    if name == "gateway":
        count_lives(gauge)
    elif name == "trainer":
        count_groups(Groups(gauge), Diary(directory / DIARY))
    elif name == "finalizer":
        count_calls(gauge)
    else:
        count_items(gauge)
    FLAWS[os.environ[FLAW_VARIABLE]]()
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
