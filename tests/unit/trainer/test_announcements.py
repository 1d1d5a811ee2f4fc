"""What watchers of the trainer see."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest_core.refusal import Refusal
from callforest_mesh.trainer.announcements import METRICS_KEPT, Announcements

T = TypeVar("T")
WAIT_S = 20


async def done(announce: Announcements, *steps: int) -> None:
    for step in steps:
        await announce.step_done(pb.StepMetrics(step=step, weight_version=step), cursor=2 * step)


async def take(source: AsyncIterator[T], count: int) -> list[T]:
    async with asyncio.timeout(WAIT_S):
        return [await anext(source) for _ in range(count)]


def waiting(source: AsyncIterator[T]) -> "asyncio.Task[T]":
    return asyncio.ensure_future(anext(source))


async def settled(task: "asyncio.Task[T]") -> bool:
    """Whether a task is done once everything that was ready has run."""
    for _ in range(10):
        await asyncio.sleep(0)
    return task.done()


async def test_metrics_come_from_behind_the_asked_step_and_then_as_they_are_made() -> None:
    announce = Announcements()
    await done(announce, 1, 2, 3)
    watch = announce.metrics(1)
    assert [one.metrics.step for one in await take(watch, 2)] == [2, 3]
    coming = waiting(watch)
    assert not await settled(coming)
    await done(announce, 4)
    assert (await asyncio.wait_for(coming, WAIT_S)).metrics.step == 4
    assert (announce.status.step, announce.status.trained_cursor) == (4, 8)


async def test_only_so_many_metrics_are_kept() -> None:
    announce = Announcements()
    await done(announce, *range(1, METRICS_KEPT + 3))
    (first,) = await take(announce.metrics(0), 1)
    assert first.metrics.step == 3


async def test_a_watcher_that_is_slow_misses_no_step_that_is_kept() -> None:
    announce = Announcements()
    await done(announce, 1)
    watch = announce.metrics(0)
    await take(watch, 1)
    await done(announce, *range(2, 40))
    assert [one.metrics.step for one in await take(watch, 38)] == list(range(2, 40))


async def test_steps_that_were_lost_are_forgotten_and_sent_once() -> None:
    announce = Announcements()
    await done(announce, 1, 2, 3)
    seen = announce.metrics(0)
    await take(seen, 3)
    announce.go_back(1, 2)
    assert (announce.status.step, announce.status.trained_cursor) == (1, 2)
    late = announce.metrics(0)
    await announce.step_done(pb.StepMetrics(step=2, weight_version=7), cursor=4)
    assert [one.metrics.weight_version for one in await take(late, 2)] == [1, 7]
    coming = waiting(seen)
    await done(announce, 3)
    assert not await settled(coming), "step 3 was sent to this watcher before"
    await done(announce, 4)
    assert (await asyncio.wait_for(coming, WAIT_S)).metrics.step == 4


async def test_weights_come_with_the_present_version_first() -> None:
    announce = Announcements()
    early = announce.weights()
    coming = waiting(early)
    assert not await settled(coming)
    await announce.weights_serve(3, 2)
    assert (await asyncio.wait_for(coming, WAIT_S)).weight_version == 3
    await announce.weights_serve(4, 3)
    await announce.weights_serve(5, 4)
    assert (await take(early, 1))[0].weight_version == 5, "the present one, not each"
    (late,) = await take(announce.weights(), 1)
    assert (late.weight_version, late.step) == (5, 4)
    assert announce.status.weight_version == 5


async def test_a_failure_is_reported_after_what_was_made() -> None:
    announce = Announcements()
    await done(announce, 1)
    await announce.weights_serve(1, 1)
    metrics, weights = announce.metrics(0), announce.weights()
    await announce.fail("LearnerLostError: gone")
    assert (await take(metrics, 1))[0].metrics.step == 1
    assert (await take(weights, 1))[0].weight_version == 1
    for watch in (metrics, weights):
        with pytest.raises(Refusal) as refused:
            await take(watch, 1)
        assert refused.value.reason == er.ERROR_REASON_LEARNER_FAILED
        assert refused.value.facts == {"step": "1", "detail": "LearnerLostError: gone"}
    assert announce.status.phase == pb.TRAINER_PHASE_FAILED
    assert announce.status.failure == "LearnerLostError: gone"


async def test_watches_end_when_the_service_drains() -> None:
    announce = Announcements()
    tasks = [waiting(announce.metrics(0)), waiting(announce.weights())]
    assert not await settled(tasks[0])
    await announce.drain()
    for task in tasks:
        with pytest.raises(Refusal) as refused:
            await asyncio.wait_for(task, WAIT_S)
        assert refused.value.reason == er.ERROR_REASON_DRAINING
