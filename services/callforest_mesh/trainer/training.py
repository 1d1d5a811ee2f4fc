"""The training run: groups in, one optimizer step, weights out, a checkpoint, then the cursor.

Order is everything: a version is durable before it is pushed, a step's metrics come after its
weights serve, a cursor is committed only behind the checkpoint that holds it. A trainer that dies
anywhere goes on from the newest checkpoint; groups behind its cursor come again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from callforest.capture.v1 import group_batch_pb2
from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest_client.errors import CallforestError, UnavailableError
from callforest_client.finalizer import FinalizerClient, RowSubscription
from callforest_client.worker import WorkerClient
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.telemetry import SILENT, Tracer
from callforest_mesh.trainer.announcements import Announcements
from callforest_mesh.trainer.batch import BatchRefusedError, plan_step
from callforest_mesh.trainer.core import AdvantageRefusedError
from callforest_mesh.trainer.journal import TrainerJournal
from callforest_mesh.trainer.learner.process import LearnerLostError, LearnerProcess
from callforest_mesh.trainer.measures import batch_links, step_attributes
from callforest_mesh.trainer.options import TrainerOptions
from callforest_mesh.trainer.rows import (
    GroupDefectError,
    SamplingMismatchError,
    StepInput,
    gather_step,
)
from callforest_mesh.trainer.step_groups import StepGroups, StepRefusedError

_LOG = logging.getLogger("callforest")
_REPEAT_S = 0.5
_T = TypeVar("_T")
_Wanted: TypeAlias = "asyncio.Future[tuple[int, int]]"
"""Someone who waits for a checkpoint: its step and the cursor committed behind it."""

_SAYABLE = (
    AdvantageRefusedError,
    BatchRefusedError,
    CallforestError,
    GroupDefectError,
    SamplingMismatchError,
    LearnerLostError,
    StepRefusedError,
    OSError,
    ValueError,
)
"""What may end a training run; of anything else only the log has the words."""


class Training:
    """One trainer's work, from its newest checkpoint on.

    Args:
        options: how to train.
        finalizer: where groups come from.
        workers: where weights go to.
        announcements: what watchers see.
        learner_factory: makes a learner process; each runs once.
        tracer: makes a span of each step.
    """

    def __init__(
        self,
        options: TrainerOptions,
        finalizer: FinalizerClient,
        workers: Sequence[WorkerClient],
        announcements: Announcements,
        *,
        learner_factory: Callable[[], LearnerProcess] = LearnerProcess,
        tracer: Tracer = SILENT.tracer,
    ) -> None:
        self._options = options
        self._finalizer = finalizer
        self._workers = workers
        self._announce = announcements
        self._learner_factory = learner_factory
        self._tracer = tracer
        self._journal = TrainerJournal(options.path)
        self._learner: LearnerProcess | None = None
        self._subscription: RowSubscription | None = None
        self._step = 0
        self._cursor = 0
        self._version = 0
        self._losses = 0
        self._checkpointed: tuple[int, int] | None = None
        self._wanted: list[_Wanted] = []
        self._uncommitted: list[_Wanted] = []
        self._want = asyncio.Event()

    async def run(self) -> None:
        """Train until cancelled, or until nothing can go on; then say why."""
        while True:
            try:
                await self._session()
            except LearnerLostError as error:
                self._losses += 1
                if self._losses > self._options.learner_restarts:
                    await self._stop_for_good(error)
                    return
                _LOG.error("the learner was lost (%d); starting it again: %s", self._losses, error)
            except Exception as error:  # noqa: BLE001 - the watchers must hear of it
                await self._stop_for_good(error)
                return
            finally:
                await self._end_session()

    async def checkpoint(self) -> tuple[int, int]:
        """Write a checkpoint at the next chance; give its step and the committed cursor.

        Raises:
            LearnerLostError: training stopped for good before.
        """
        wanted: _Wanted = asyncio.get_running_loop().create_future()
        self._wanted.append(wanted)
        self._want.set()
        return await wanted

    async def _session(self) -> None:
        """Load or restore, then train until something breaks."""
        await self._announce.enter(pb.TRAINER_PHASE_LOADING)
        learner = self._learner = self._learner_factory()
        await learner.start()
        await learner.load_model(self._options.model_path, self._options.learner())
        self._step = self._cursor = 0
        restored_version = 0
        if (checkpoint := self._journal.newest_checkpoint()) is not None:
            restored = await learner.restore_checkpoint(checkpoint)
            self._step, self._cursor = restored.step, restored.trained_cursor
            restored_version = restored.weight_version
            self._checkpointed = (self._step, self._cursor)
        self._announce.go_back(self._step, self._cursor)
        await self._align_workers(learner, restored_version)
        async with aclosing(self._groups()) as groups:
            while True:
                await self._announce.enter(pb.TRAINER_PHASE_WAITING)
                batches = await self._collect(groups, learner)
                await self._train(learner, batches)

    async def _align_workers(self, learner: LearnerProcess, restored_version: int) -> None:
        """See to it that every worker serves what the learner holds.

        A fresh run needs nothing: the workers loaded the same model as version 0. Otherwise the
        learner's weights get a version that was never issued.
        """
        described = await asyncio.gather(
            *(self._persist(worker.describe) for worker in self._workers)
        )
        known = max(
            self._journal.issued_version(),
            restored_version,
            *(one.weight_version for one in described),
            0,
        )
        self._version = known
        if known > 0:
            await self._push(learner)
        else:
            await self._announce.weights_serve(0, 0)

    async def _groups(self) -> AsyncGenerator[group_batch_pb2.GroupBatch, None]:
        """Give groups behind the trained cursor, over as many streams as it takes.

        Raises:
            GroupDefectError: a position was left out.
            CallforestError: refused, or away for longer than `outage_s`.
        """
        after = self._cursor
        away_since: float | None = None
        while True:
            opened = time.monotonic()
            subscription = self._finalizer.subscribe(self._options.consumer, after_cursor=after)
            self._subscription = subscription
            try:
                await self._commit_cursor(subscription)
                await subscription.credit(2 * self._options.groups_per_step)
                async for batch in subscription:
                    away_since = None
                    if batch.cursor != after + 1:
                        raise GroupDefectError(
                            batch.group_id, f"has position {batch.cursor} behind {after}"
                        )
                    after = batch.cursor
                    yield batch
                    await subscription.credit(1)
            except CallforestError as error:
                if not (isinstance(error, UnavailableError) or error.retry_after_ms is not None):
                    raise
                now = time.monotonic()
                # A stream that stood for longer than any outage may last was none.
                steady = now - opened > self._options.outage_s
                away_since = now if away_since is None or steady else away_since
                if now - away_since > self._options.outage_s:
                    raise
                _LOG.warning("rows are away, subscribing again: %s", error)
                await asyncio.sleep(_REPEAT_S)  # bounded by outage_s
            finally:
                await subscription.close()

    async def _commit_cursor(self, subscription: RowSubscription) -> None:
        """Commit what the checkpoint holds, and answer who waited for that.

        Said at the head of every stream too: the last trainer, or the last stream, may have died
        between the checkpoint and its commit.
        """
        if self._checkpointed is None:
            return
        step, cursor = self._checkpointed
        if cursor > 0:
            await subscription.commit(cursor)
            failpoint("trainer.after_cursor")
            self._announce.status.committed_cursor = cursor
        answered, self._uncommitted = self._uncommitted, []
        for future in answered:
            if not future.done():
                future.set_result((step, cursor))

    async def _collect(
        self,
        groups: AsyncGenerator[group_batch_pb2.GroupBatch, None],
        learner: LearnerProcess,
    ) -> list[group_batch_pb2.GroupBatch]:
        """Take groups until a step is full; write wanted checkpoints meanwhile."""
        step = StepGroups(self._options.groups_per_step, self._options.min_step_batch_fraction)
        coming: asyncio.Task[group_batch_pb2.GroupBatch] | None = None
        try:
            while not step.is_full:
                coming = coming or asyncio.ensure_future(_next(groups))
                await self._first_of(coming)
                if self._want.is_set():
                    await self._write_checkpoint(learner)
                if coming.done():
                    step.add(coming.result())
                    coming = None
                    self._announce.status.waiting_group_count = len(step.batches)
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        self._announce.status.waiting_group_count = 0
        return step.batches

    async def _first_of(self, coming: asyncio.Task[group_batch_pb2.GroupBatch]) -> None:
        """Wait for a group or for a wanted checkpoint."""
        wanted = asyncio.ensure_future(self._want.wait())
        try:
            await asyncio.wait({coming, wanted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            wanted.cancel()

    async def _train(
        self, learner: LearnerProcess, batches: list[group_batch_pb2.GroupBatch]
    ) -> None:
        """Make one step and let its weights serve."""
        with self._tracer.linked("optimizer step", batch_links(batches)) as span:
            metrics = await self._make_step(learner, batches)
            if span.recording:
                span.describe(step_attributes(metrics))
        await self._announce.step_done(metrics, self._cursor)
        if self._step % self._options.checkpoint_interval_steps == 0 or self._want.is_set():
            await self._write_checkpoint(learner)

    async def _make_step(
        self, learner: LearnerProcess, batches: list[group_batch_pb2.GroupBatch]
    ) -> pb.StepMetrics:
        await self._announce.enter(pb.TRAINER_PHASE_STEPPING)
        began = time.monotonic()
        step = await asyncio.to_thread(gather_step, batches, self._options.advantages)
        plan = await asyncio.to_thread(plan_step, step.rows, self._options.batch)
        made = await learner.train_step(step.rows, plan)
        stepped = time.monotonic()
        self._step, self._cursor = made.step, step.cursor
        await self._push(learner)
        metrics = _metrics(step, made.step, self._version)
        metrics.loss = made.loss
        metrics.valid_token_count = made.valid_token_count
        metrics.token_mult_prob_error = made.token_mult_prob_error
        metrics.gen_kl_error = made.gen_kl_error
        metrics.grad_norm = made.grad_norm
        metrics.step_seconds = stepped - began
        metrics.push_seconds = time.monotonic() - stepped
        return metrics

    async def _push(self, learner: LearnerProcess) -> None:
        """Export the weights under a version never issued before and load them everywhere."""
        await self._announce.enter(pb.TRAINER_PHASE_PUSHING)
        version = max(self._journal.issued_version(), self._version) + 1
        path = self._journal.weights_path(version)
        await learner.export_weights(path)
        sha256 = await asyncio.to_thread(_file_digest, path)
        self._journal.issue_version(version)
        pushes = await asyncio.gather(
            *(
                self._persist(partial(worker.update_weights, str(path), version, sha256))
                for worker in self._workers
            ),
            return_exceptions=True,
        )
        for failed in pushes:
            if isinstance(failed, BaseException):
                raise failed
        self._version = version
        self._journal.forget_weights_before(version)
        await self._announce.weights_serve(version, self._step)

    async def _write_checkpoint(self, learner: LearnerProcess) -> None:
        """Write a checkpoint unless this step has one, then commit the cursor behind it."""
        self._want.clear()
        answerable = len(self._wanted)
        if self._checkpointed != (self._step, self._cursor):
            await learner.save_checkpoint(
                self._journal.checkpoint_path(self._step),
                trained_cursor=self._cursor,
                weight_version=self._version,
            )
            self._checkpointed = (self._step, self._cursor)
            self._losses = 0
            await asyncio.to_thread(
                self._journal.forget_checkpoints, keep=self._options.checkpoints_kept
            )
        self._uncommitted += self._wanted[:answerable]
        del self._wanted[:answerable]
        if self._subscription is not None:
            try:
                await self._commit_cursor(self._subscription)
            except UnavailableError as error:
                _LOG.warning("the next stream commits the cursor: %s", error)
                await self._subscription.close()

    async def _persist(self, action: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat while a worker is away, at most `outage_s`."""
        deadline = time.monotonic() + self._options.outage_s
        while True:
            try:
                return await action()
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_REPEAT_S)  # bounded by outage_s

    async def _stop_for_good(self, error: Exception) -> None:
        failure = type(error).__name__
        if isinstance(error, _SAYABLE):
            failure = f"{failure}: {error}"
        _LOG.error("training stopped: %s", failure, exc_info=error)
        await self._announce.fail(failure)
        self._give_up(failure)

    def _give_up(self, failure: str) -> None:
        """Tell everyone who waits for a checkpoint that none will come."""
        for future in (*self._wanted, *self._uncommitted):
            if not future.done():
                future.set_exception(LearnerLostError(failure))
        self._wanted, self._uncommitted = [], []

    async def _end_session(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None
        if self._learner is not None:
            await self._learner.stop()
            self._learner = None
        if self._wanted:
            self._want.set()  # the next session owes it


async def _next(
    groups: AsyncGenerator[group_batch_pb2.GroupBatch, None],
) -> group_batch_pb2.GroupBatch:
    return await anext(groups)


def _metrics(step: StepInput, number: int, version: int) -> pb.StepMetrics:
    return pb.StepMetrics(
        step=number,
        weight_version=version,
        rollout_count=step.rollout_count,
        row_count=sum(row.valid for row in step.rows),
        masked_count=step.masked_count,
        mask_reasons=step.mask_reasons,
        reward_mean=step.reward_mean,
        dropped_group_count=step.dropped_group_count,
        heuristic_fraction=step.heuristic_fraction,
    )


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
