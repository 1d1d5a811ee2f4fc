"""The Trainer over a channel, and once with the learner that really learns."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from safetensors.numpy import load_file

from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest_client.errors import RefusedError, UnavailableError
from callforest_client.trainer import TrainerClient
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.trainer.learner.process import LearnerProcess
from callforest_mesh.trainer.service import TrainerService
from callforest_mesh.worker.tiny_model import make_tiny_model
from tests.integration.trainer_fakes import WAIT_S, FakeFinalizer, FakeWorker, World, lost
from tests.unit.trainer.batches import Call, Rollout, make_batch

ServiceOpener = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def serve(
    open_service: ServiceOpener, world: World, drain: Drain, **options: object
) -> TrainerClient:
    service = TrainerService(
        world.options(**options),
        drain,
        FakeFinalizer(world),
        world.workers,
        learner_factory=world.learner,
    )
    return TrainerClient(await open_service(service, drain), timeout_s=WAIT_S)


@pytest.mark.requirement("API-3")
async def test_steps_and_weights_stream_to_watchers(
    open_service: ServiceOpener, world: World
) -> None:
    client = await serve(open_service, world, Drain())
    weights = client.watch_weights()
    assert (await anext(weights)).weight_version == 0
    world.publish_groups(2)
    seen = [metrics async for metrics in until_step(client, 2)]
    assert [(one.step, one.weight_version) for one in seen] == [(1, 1), (2, 2)]
    behind = client.watch_metrics(after_step=1)
    assert (await anext(behind)).step == 2
    present = client.watch_weights()
    served = await anext(present)
    assert (served.weight_version, served.step) == (2, 2)
    checkpoint = await client.checkpoint(timeout_s=WAIT_S)
    assert (checkpoint.step, checkpoint.committed_cursor) == (2, 2)
    status = await client.status()
    assert (status.step, status.weight_version, status.committed_cursor) == (2, 2, 2)
    for stream in (weights, behind, present):
        await stream.aclose()


async def until_step(client: TrainerClient, last: int):
    async with asyncio.timeout(WAIT_S):
        async for metrics in client.watch_metrics():
            yield metrics
            if metrics.step == last:
                return


@pytest.mark.requirement("API-6")
async def test_what_stops_the_training_reaches_every_caller(
    open_service: ServiceOpener, world: World
) -> None:
    world.publish_groups(2)
    client = await serve(open_service, world, Drain(), learner_restarts=0)
    watch = client.watch_metrics()
    await anext(watch)
    world.faults["step"] = [lost]
    world.publish_groups(1)
    with pytest.raises(RefusedError) as stopped:
        await asyncio.wait_for(drained(watch), WAIT_S)
    late = client.watch_weights()
    await anext(late)
    with pytest.raises(RefusedError) as stopped_weights:
        await anext(late)
    with pytest.raises(RefusedError) as stopped_checkpoint:
        await client.checkpoint(timeout_s=WAIT_S)
    for caught in (stopped, stopped_weights, stopped_checkpoint):
        assert (caught.value.reason, caught.value.code) == (
            er.ERROR_REASON_LEARNER_FAILED,
            grpc.StatusCode.ABORTED,
        )
        assert caught.value.metadata["detail"] == "LearnerLostError: the process ended"
    status = await client.status()
    assert status.phase == pb.TRAINER_PHASE_FAILED
    assert status.failure == "LearnerLostError: the process ended"


async def drained(watch: AsyncIterator[pb.StepMetrics]) -> None:
    async for _ in watch:
        pass


@pytest.mark.requirement("API-6")
async def test_a_drain_ends_watches(open_service: ServiceOpener, world: World) -> None:
    drain = Drain()
    client = await serve(open_service, world, drain)
    weights, metrics = client.watch_weights(), client.watch_metrics()
    await anext(weights)
    waiting = [asyncio.ensure_future(anext(each)) for each in (weights, metrics)]
    await client.status()
    drain.begin()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), WAIT_S)
    assert [type(outcome) for outcome in outcomes] == [UnavailableError] * 2
    assert {outcome.reason for outcome in outcomes} == {er.ERROR_REASON_DRAINING}


class FileWorker(FakeWorker):
    """Takes weights as an engine does: a file with the announced digest."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.digests: list[bytes] = []

    async def update_weights(self, path: str, version: int, sha256: bytes) -> int:
        assert self._world.journal.issued_version() == version
        assert hashlib.sha256(Path(path).read_bytes()).digest() == sha256
        assert load_file(path)
        self.version = version
        self.versions.append(version)
        self.digests.append(sha256)
        return version


def synthetic_group(cursor: int, vocabulary: int) -> object:
    """Four chains of two calls, two of them rewarded."""
    chance = np.random.default_rng(cursor)

    def words(count: int) -> list[int]:
        return [int(token) for token in chance.integers(3, vocabulary, count)]

    rollouts = [
        Rollout(
            f"r{cursor}-{slot}",
            float(slot % 2),
            [Call("a", words(5), words(4)), Call("b", words(2), words(3), parent="a", prev=9)],
        )
        for slot in range(4)
    ]
    batch = make_batch(cursor, *rollouts, padding=0)
    for segment in batch.segments:
        count = len(segment.canonical.logprobs) // 4
        segment.canonical.logprobs = np.full(count, -5.0, "<f4").tobytes()
    return batch


@pytest.mark.engine
async def test_the_real_learner_steps_checkpoints_and_goes_on(tmp_path: Path) -> None:
    """Two groups of 28 loss tokens each: one optimizer step a group, over retained tokens alone."""
    world = World(tmp_path)
    worker = FileWorker(world)
    world.workers = [worker]
    make_tiny_model(tmp_path / "model", seed=1)
    masked = Rollout("masked", 1.0, mask="pending_call")

    def life() -> TrainerService:
        return TrainerService(
            world.options(learning_rate=1e-3, checkpoint_interval_steps=100),
            Drain(),
            FakeFinalizer(world),
            world.workers,
            learner_factory=LearnerProcess,
        )

    first, second, third = (synthetic_group(cursor, 60) for cursor in (1, 2, 3))
    second.receipts.add(
        group_id="g2",
        rollout_id=masked.rollout_id,
        slot=4,
        reward=1.0,
        masked=True,
        mask_reason=masked.mask,
    )
    placeholder = second.rows.add(row_id="g2_g4_s0", slot=4, kind=2)
    placeholder.spans.add(segment_index=0)
    world.publish(first, second)
    service = life()
    await service.start()
    try:
        seen = [each.metrics async for each in steps(service, 2)]
        assert [one.step for one in seen] == [1, 2]
        assert [one.valid_token_count for one in seen] == [28, 28], "a placeholder weighs nothing"
        for one in seen:
            assert math.isfinite(one.loss)
            assert one.grad_norm > 0
            assert one.token_mult_prob_error >= 1
        assert (seen[1].masked_count, seen[1].rollout_count) == (1, 5)
        assert await service._training.checkpoint() == (2, 2)
    finally:
        await service.stop()
    world.publish(third)
    again = life()
    await again.start()
    try:
        seen = [each.metrics async for each in steps(again, 3)]
        assert [one.step for one in seen] == [3], "the restored learner goes on behind step 2"
    finally:
        await again.stop()
    assert worker.versions == [1, 2, 3, 4]
    assert world.numbers("subscribe") == [0, 2]
    first_step, second_step, restored, third_step = worker.digests
    assert restored == second_step, "what serves again is what the checkpoint holds"
    assert len({first_step, second_step, third_step}) == 3


async def steps(service: TrainerService, last: int):
    async with asyncio.timeout(240):
        async for response in service._announcements.metrics(0):
            yield response
            if response.metrics.step == last:
                return
