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
import threading
import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from callforest_client.finalizer import RowSubscription
from callforest_client.streams import FETCH_PREFIX
from callforest_core.refusal import Refusal
from callforest_mesh import cli
from callforest_mesh.chassis.call_limits import CallCounter
from callforest_mesh.chassis.item_server import ItemServer
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.chassis.write_job import answer
from tests.robustness.gauge import Gauge, gauge_file
from tests.robustness.training_diary import Diary

DIARY = "trainer.diary"
CALL_DIARY = "calls.diary"
FLAW_VARIABLE = "VICTIM_FLAW"
EARLY_S = 0.15
"""How much too early the flawed gateway serves, and the flawed store acknowledges."""


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


class CallDiary:
    """Which calls were sampled and staged, and when: a line each, which kill -9 does not undo."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, deed: str, call_id: str, moment: float | None = None) -> None:
        moment = time.monotonic() if moment is None else moment
        os.write(self._descriptor, f"{deed} {call_id} {moment:.6f}\n".encode())


def note_samples(diary: CallDiary) -> None:
    """Note each call that the engine begins to sample."""
    from callforest_mesh.worker.scripted import ScriptedEngine

    generate = ScriptedEngine.generate

    async def noted(self, request):
        diary.note("sampled", request.call_id)
        return await generate(self, request)

    ScriptedEngine.generate = noted


def note_stagings(diary: CallDiary) -> None:
    """Note each call whose tokens have become durable, or were looked for in vain."""
    from callforest_mesh.staging.store import StagedCalls

    put, require = StagedCalls.put, StagedCalls.require

    def noted(self, tenant, call, *staged):
        receipt = put(self, tenant, call, *staged)
        receipt.add_done_callback(lambda one: durable(one, call.call_id))
        return receipt

    def durable(receipt, call_id) -> None:
        if not receipt.cancelled() and receipt.exception() is None:
            diary.note("staged", call_id)

    def looked_for(self, tenant, capture_key, call_ids) -> None:
        began = time.monotonic()
        try:
            require(self, tenant, capture_key, call_ids)
        except Refusal:
            if len(call_ids) == 1:
                diary.note("missing", call_ids[0], began)
            raise

    StagedCalls.put, StagedCalls.require = noted, looked_for


def choose_by_evidence() -> None:
    """Let a rollout without a returned history select all that is captured.

    A mesh has one policy, by its configuration; so one run has both.
    """
    from callforest_mesh.finalizer import forest
    from callforest_mesh.finalizer.policies import resolve_policy

    choose, everything = forest.choose, resolve_policy(forest.ALL_CAPTURED)

    def chosen(request, records, policy, *lost):
        return choose(request, records, policy if request.result else everything, *lost)

    forest.choose = chosen


def serve_too_early() -> None:
    """Let responses leave the gateway before their record is durable."""
    from callforest_mesh.gateway.rows import Rows

    append = Rows._append

    async def later(self, life, record) -> None:
        await asyncio.sleep(EARLY_S)
        await append(self, life, record)

    async def at_once(self, life, record) -> None:
        self._watch(asyncio.ensure_future(later(self, life, record)))

    Rows._append = at_once


def acknowledge_before_commit() -> None:
    """Let a store tell its callers that their writes are durable before they are."""
    fill = LmdbStore._fill

    def told_too_early(self, raw, jobs) -> None:
        fill(self, raw, jobs)
        answer([job for job in jobs if job.error is None])
        threading.Event().wait(EARLY_S)  # a slow disk: the answers leave meanwhile

    LmdbStore._fill = told_too_early


def end_badly() -> None:
    """Let a gateway that ends forget its calls, and say of a request that it is wrong.

    Responses leave before their record, so that what it forgets was acknowledged.
    """
    from callforest_mesh.gateway.calls import Calls
    from callforest_mesh.gateway.edge import Edge
    from callforest_mesh.gateway.refusals import HttpRefusal

    async def end(self, timeout_s) -> None:
        self._lives.end()

    def refuse(self) -> None:
        if self._drain.begun:
            raise HttpRefusal(400, "invalid_request", "The gateway is shutting down.")

    serve_too_early()
    Calls.finish = Calls.settle = end
    Edge._refuse_when_draining = refuse


def forget_histories() -> None:
    """Let the ledger not know every other history: what continues it is a silent root."""
    from callforest_core.lineage.forest_view import ForestRoot, ForestView, RootReason

    resolve = ForestView.resolve

    def forgetful(self, probe):
        if probe.boundaries and probe.boundaries[0].source_digest[0] % 2 == 0:
            return ForestRoot(RootReason.HISTORY_NOT_RECORDED)
        return resolve(self, probe)

    ForestView.resolve = forgetful


def own_twice() -> None:
    """Let every row own the loss of all that it holds, whichever rows hold it too."""
    from callforest_core.forest import layout

    owning = layout._owning_spans
    layout._owning_spans = lambda path, places, _: owning(path, places, set())


FLAWS = {
    "": lambda: None,
    "serves-too-early": serve_too_early,
    "acknowledges-before-commit": acknowledge_before_commit,
    "ends-badly": end_badly,
    "forgets-histories": forget_histories,
    "owns-twice": own_twice,
}


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
        choose_by_evidence()
    else:
        count_items(gauge)
    if name == "worker":
        note_samples(CallDiary(directory / CALL_DIARY))
    elif name == "staging":
        note_stagings(CallDiary(directory / CALL_DIARY))
    FLAWS[os.environ[FLAW_VARIABLE]]()
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
