"""A world for the trainer that outlives it: a row log, workers, and a learner told what to do."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from callforest.capture.v1 import group_batch_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import learner_service_pb2 as lpb
from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest.worker.v1 import worker_service_pb2 as wpb
from callforest_client.errors import RefusedError, UnavailableError
from callforest_mesh.trainer.announcements import Announcements
from callforest_mesh.trainer.batch import BatchPlan, TrainingRow
from callforest_mesh.trainer.journal import TrainerJournal
from callforest_mesh.trainer.learner.process import LearnerLostError
from callforest_mesh.trainer.options import TrainerOptions
from callforest_mesh.trainer.training import Training
from tests.unit.trainer.batches import linear, make_batch

WAIT_S = 30.0
Fault = Callable[[], Exception]


@dataclass
class World:
    """What a trainer's death leaves: its directory, the row log, the workers, what happened.

    `hold` names a moment at which everything stops for good; `faults` are raised at moments, one
    after the other.
    """

    folder: Path
    log: list[group_batch_pb2.GroupBatch] = field(default_factory=list)
    committed: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)
    workers: list[FakeWorker] = field(default_factory=list)
    learners: list[FakeLearner] = field(default_factory=list)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    hold: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        self.held = asyncio.Event()
        self.grew = asyncio.Event()
        self.serves = asyncio.Event()
        self.workers = [FakeWorker(self), FakeWorker(self)]

    def publish(self, *batches: group_batch_pb2.GroupBatch) -> None:
        self.log.extend(batches)
        self.grew.set()

    def publish_groups(self, count: int) -> None:
        for _ in range(count):
            cursor = len(self.log) + 1
            self.publish(make_batch(cursor, linear(f"r{cursor}a", 1.0), linear(f"r{cursor}b", 0.0)))

    async def moment(self, name: str, number: int = 0) -> None:
        """Something is about to happen: say so, fail, or stop here for good."""
        self.events.append((name, number))
        if self.hold == (name, number):
            self.held.set()
            await asyncio.Event().wait()
        if waiting := self.faults.get(name):
            fault = waiting.pop(0)
            raise fault()

    async def reach(self, name: str, number: int) -> None:
        """Wait until something happened."""
        async with asyncio.timeout(WAIT_S):
            while (name, number) not in self.events:
                self.grew.clear()
                await self.grew.wait()

    async def serve(self, groups: int) -> None:
        """Wait until every worker serves weights that hold so many of `publish_groups`."""
        async with asyncio.timeout(WAIT_S):
            while any(len(worker.trained) < 2 * groups for worker in self.workers):
                self.serves.clear()
                await self.serves.wait()

    def numbers(self, name: str) -> list[int]:
        return [number for kind, number in self.events if kind == name]

    def options(self, **changes: object) -> TrainerOptions:
        options = TrainerOptions(
            self.folder / "trainer",
            self.folder / "model",
            groups_per_step=1,
            checkpoint_interval_steps=2,
            outage_s=WAIT_S,
        )
        return replace(options, **changes)

    def learner(self) -> FakeLearner:
        self.learners.append(FakeLearner(self))
        return self.learners[-1]

    @property
    def journal(self) -> TrainerJournal:
        return TrainerJournal(self.folder / "trainer")


class FakeWorker:
    """Takes weights as a worker does: each version once, the newest last."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.version = 0
        self.trained: list[str] = []
        self.versions: list[int] = []

    async def describe(self) -> wpb.DescribeResponse:
        await self._world.moment("describe")
        return wpb.DescribeResponse(weight_version=self.version)

    async def update_weights(self, path: str, version: int, sha256: bytes) -> int:
        assert self._world.journal.issued_version() >= version, "a version is durable first"
        await self._world.moment("push", version)
        content = Path(path).read_bytes()
        assert hashlib.sha256(content).digest() == sha256
        if version < self.version or (
            version == self.version and json.loads(content) != self.trained
        ):
            raise RefusedError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "stale",
                reason=er.ERROR_REASON_WEIGHT_VERSION_STALE,
            )
        self.version, self.trained = version, json.loads(content)
        self.versions.append(version)
        self._world.serves.set()
        await self._world.moment("pushed", version)
        return version


class FakeRows:
    """A subscription that keeps the Finalizer's rules."""

    def __init__(self, world: World, after: int) -> None:
        self._world = world
        self._sent = after
        self._credit = 0
        self._closed = False

    async def credit(self, groups: int) -> None:
        self._require_open()
        self._world.events.append(("credit", self._sent))
        self._credit += groups
        self._world.grew.set()

    async def commit(self, cursor: int) -> None:
        self._require_open()
        await self._world.moment("commit", cursor)
        assert cursor <= self._sent, "what was not sent cannot be committed"
        held = [_held_cursor(path) for path in self._world.journal.checkpoints()]
        assert max(held, default=0) >= cursor, "committed behind the checkpoint that holds it"
        self._world.committed = max(self._world.committed, cursor)
        await self._world.moment("committed", cursor)

    async def __aiter__(self) -> AsyncIterator[group_batch_pb2.GroupBatch]:
        while True:
            self._require_open()
            if self._credit > 0 and self._sent < len(self._world.log):
                self._credit -= 1
                self._sent += 1
                await self._world.moment("send", self._sent)
                yield self._world.log[self._sent - 1]
                continue
            self._world.grew.clear()
            await self._world.grew.wait()

    async def close(self) -> None:
        self._closed = True
        self._world.grew.set()

    def _require_open(self) -> None:
        if self._closed:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "the subscription has ended")


class FakeFinalizer:
    """The row log's one consumer is the trainer."""

    def __init__(self, world: World) -> None:
        self._world = world

    def subscribe(self, consumer: str, *, after_cursor: int) -> FakeRows:
        assert consumer == "trainer"
        assert self._world.committed <= after_cursor <= len(self._world.log)
        self._world.events.append(("subscribe", after_cursor))
        return FakeRows(self._world, after_cursor)


class FakeLearner:
    """Speaks LearnerProcess's methods; its weights are the rows that it trained, in order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.trained: list[str] = []
        self.step = 0
        self.stopped = False

    async def start(self) -> None:
        await self._world.moment("start")

    async def load_model(self, _model_path: Path, _options: lpb.LearnerOptions) -> int:
        await self._world.moment("load")
        return 1

    async def train_step(
        self, rows: Sequence[TrainingRow], plan: BatchPlan
    ) -> lpb.TrainStepResponse:
        await self._world.moment("step", self.step + 1)
        assert sum(int(row.retained_mask.sum()) for row in rows) == plan.retained_token_count
        self.trained += [row.row_id for row in rows if row.valid]
        self.step += 1
        await self._world.moment("stepped", self.step)
        return lpb.TrainStepResponse(
            loss=0.5, valid_token_count=plan.retained_token_count, step=self.step, grad_norm=1.0
        )

    async def export_weights(self, path: Path) -> int:
        await self._world.moment("export")
        return path.write_text(json.dumps(self.trained))

    async def save_checkpoint(self, path: Path, *, trained_cursor: int, weight_version: int) -> int:
        await self._world.moment("save", self.step)
        assert not path.exists()
        state = {
            "step": self.step,
            "cursor": trained_cursor,
            "version": weight_version,
            "trained": self.trained,
        }
        partial = path.with_name(f".{path.name}.partial")
        partial.mkdir(exist_ok=True)
        (partial / "state").write_text(json.dumps(state))
        partial.rename(path)
        await self._world.moment("saved", self.step)
        return self.step

    async def restore_checkpoint(self, path: Path) -> lpb.RestoreCheckpointResponse:
        await self._world.moment("restore")
        state = json.loads((path / "state").read_text())
        self.step, self.trained = state["step"], list(state["trained"])
        return lpb.RestoreCheckpointResponse(
            step=state["step"], trained_cursor=state["cursor"], weight_version=state["version"]
        )

    async def stop(self) -> None:
        self.stopped = True


def _held_cursor(checkpoint: Path) -> int:
    if (checkpoint / "state").exists():
        return json.loads((checkpoint / "state").read_text())["cursor"]
    return json.loads((checkpoint / "manifest.json").read_text())["trained_cursor"]


def lost() -> Exception:
    return LearnerLostError("the process ended")


def away() -> Exception:
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, "away")


@dataclass
class Life:
    """One life of a trainer."""

    training: Training
    announcements: Announcements
    task: asyncio.Task[None]

    async def until(self, reached: Callable[[pb.GetStatusResponse], bool]) -> None:
        """Wait until the trainer waits for groups and its status is the wanted one."""
        status, news = self.announcements.status, self.announcements._news
        async with asyncio.timeout(WAIT_S), news:
            await news.wait_for(
                lambda: status.phase == pb.TRAINER_PHASE_WAITING and reached(status)
            )

    async def steps(self, last: int) -> list[pb.StepMetrics]:
        """The metrics of every step up to one, as a watcher gets them."""
        seen: list[pb.StepMetrics] = []
        async with asyncio.timeout(WAIT_S):
            async for response in self.announcements.metrics(0):
                seen.append(response.metrics)
                if response.metrics.step >= last:
                    break
        return seen


@asynccontextmanager
async def trainer(world: World, **options: object) -> AsyncIterator[Life]:
    """Run a trainer in the world; it dies at the end."""
    announcements = Announcements()
    training = Training(
        world.options(**options),
        FakeFinalizer(world),
        world.workers,
        announcements,
        learner_factory=world.learner,
    )
    life = Life(training, announcements, asyncio.ensure_future(training.run()))
    try:
        yield life
    finally:
        life.task.cancel()
        await asyncio.gather(life.task, return_exceptions=True)
