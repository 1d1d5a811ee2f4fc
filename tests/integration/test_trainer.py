"""The trainer's order: version, push, metrics, checkpoint, cursor, whatever dies in between."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.capture.v1 import group_part_pb2
from callforest.trainer.v1 import trainer_service_pb2 as pb
from callforest_client.group_assembly import GroupTooLargeError
from callforest_mesh.trainer.learner.process import LearnerLostError
from tests.integration.trainer_fakes import WAIT_S, World, away, lost, trainer
from tests.unit.trainer.batches import Rollout, dropped, linear, make_batch


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    assert all(learner.stopped for learner in world.learners)


def rows_of(*cursors: int) -> list[str]:
    """The rows of `publish_groups`."""
    return [f"g{cursor}_g{slot}_s0" for cursor in cursors for slot in (0, 1)]


async def test_a_step_goes_from_groups_to_a_committed_cursor(world: World) -> None:
    del world.workers[1:]
    world.publish_groups(2)
    async with trainer(world) as life:
        first, second = await life.steps(2)
        await life.training.checkpoint()
    quiet = {"send", "describe", "credit"}
    order = [event for event in world.events if event[0] not in quiet]
    assert order[:17] == [
        ("start", 0),
        ("load", 0),
        ("subscribe", 0),
        ("step", 1),
        ("stepped", 1),
        ("export", 0),
        ("push", 1),
        ("pushed", 1),
        ("step", 2),
        ("stepped", 2),
        ("export", 0),
        ("push", 2),
        ("pushed", 2),
        ("save", 2),
        ("saved", 2),
        ("commit", 2),
        ("committed", 2),
    ]
    assert (first.step, first.weight_version, first.row_count) == (1, 1, 2)
    assert (second.rollout_count, second.reward_mean, second.loss) == (2, 0.5, 0.5)
    assert first.valid_token_count == 6
    assert world.workers[0].trained == rows_of(1, 2)
    status = life.announcements.status
    assert (status.step, status.trained_cursor, status.committed_cursor) == (2, 2, 2)


async def test_metrics_come_once_the_weights_serve(world: World) -> None:
    world.publish_groups(1)
    world.hold = ("push", 1)
    async with trainer(world) as life:
        await asyncio.wait_for(world.held.wait(), WAIT_S)
        assert life.announcements.status.phase == pb.TRAINER_PHASE_PUSHING
        assert life.announcements.status.step == 0
        assert world.journal.issued_version() == 1


MOMENTS = [
    *[(name, 3) for name in ("send", "step", "stepped", "push", "pushed", "commit", "committed")],
    *[(name, 4) for name in ("step", "stepped", "push", "pushed", "save", "saved", "commit")],
    ("committed", 4),
    ("export", 0),
    ("load", 0),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda one: f"{one[0]}-{one[1]}")
@pytest.mark.parametrize("interval", [1, 2, 3])
async def test_death_at_any_moment_repeats_no_version_and_skips_no_group(
    world: World, moment: tuple[str, int], interval: int
) -> None:
    """Die there, live again, train six groups: each stands once in the surviving weights."""
    world.publish_groups(6)
    options = {"checkpoint_interval_steps": interval}
    world.hold = moment
    async with trainer(world, **options):
        held = asyncio.ensure_future(world.held.wait())
        done = asyncio.ensure_future(world.serve(6))
        await asyncio.wait({held, done}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert held.done() or done.done()
        for task in (held, done):
            task.cancel()
    world.hold = None
    world.events.clear()
    async with trainer(world, **options) as life:
        await life.until(lambda status: status.step == 6)
        step, cursor = await asyncio.wait_for(life.training.checkpoint(), WAIT_S)
    assert (step, cursor, world.committed) == (6, 6, 6)
    assert world.learners[-1].trained == rows_of(1, 2, 3, 4, 5, 6)
    for worker in world.workers:
        assert worker.trained == rows_of(1, 2, 3, 4, 5, 6)
        assert all(one < two for one, two in itertools.pairwise(worker.versions))
    assert world.workers[0].version == world.journal.issued_version()


async def test_a_second_life_begins_where_the_checkpoint_ends(world: World) -> None:
    world.publish_groups(5)
    async with trainer(world, checkpoint_interval_steps=2):
        await world.serve(5)
    assert world.committed == 4
    world.events.clear()
    async with trainer(world, checkpoint_interval_steps=2) as life:
        await life.until(lambda status: status.step == 5)
    assert world.numbers("subscribe") == [4]
    assert world.numbers("step") == [5]
    assert world.numbers("push") == [6, 6, 7, 7], "restored weights first, under a new version"


async def test_a_commit_that_was_not_made_is_made_by_the_next_life(world: World) -> None:
    world.publish_groups(2)
    world.hold = ("saved", 2)
    async with trainer(world):
        await asyncio.wait_for(world.held.wait(), WAIT_S)
    assert world.committed == 0
    world.hold = ("committed", 2)
    world.held.clear()
    async with trainer(world):
        await asyncio.wait_for(world.held.wait(), WAIT_S)
    assert world.numbers("step") == [1, 2], "the second life trained nothing"
    assert world.committed == 2


async def test_a_lost_learner_is_restored_and_the_rows_come_again(world: World) -> None:
    world.publish_groups(5)
    async with trainer(world, checkpoint_interval_steps=2) as life:
        await world.serve(5)
        world.faults["step"] = [lost]
        world.publish_groups(1)
        seen = await life.steps(6)
        assert world.numbers("subscribe") == [0, 4]
        assert world.learners[0].stopped
        assert world.learners[-1].trained == rows_of(1, 2, 3, 4, 5, 6)
        assert [metrics.step for metrics in seen] == [1, 2, 3, 4, 5, 6]
        assert life.announcements.status.phase != pb.TRAINER_PHASE_FAILED
    for worker in world.workers:
        assert all(one < two for one, two in itertools.pairwise(worker.versions))
        assert worker.trained == rows_of(1, 2, 3, 4, 5, 6)


async def test_a_learner_that_is_lost_too_often_in_a_row_stops_the_training(world: World) -> None:
    world.publish_groups(3)
    world.faults["step"] = [lost, lost, lost]
    async with trainer(world, learner_restarts=2) as life:
        await asyncio.wait_for(life.task, WAIT_S)
        status = life.announcements.status
        assert status.phase == pb.TRAINER_PHASE_FAILED
        assert status.failure == "LearnerLostError: the process ended"
    assert len(world.learners) == 3


async def test_a_checkpoint_ends_the_row_of_losses(world: World) -> None:
    world.publish_groups(1)
    world.faults["step"] = [lost]
    async with trainer(world, learner_restarts=1, checkpoint_interval_steps=1) as life:
        await world.serve(1)
        await life.training.checkpoint()
        world.faults["step"] = [lost]
        world.publish_groups(1)
        await world.serve(2)


async def test_a_checkpoint_that_a_lost_learner_owes_is_written_by_the_next(world: World) -> None:
    world.publish_groups(1)
    async with trainer(world, checkpoint_interval_steps=100) as life:
        await life.steps(1)
        world.faults["save"] = [lost]
        step, cursor = await asyncio.wait_for(life.training.checkpoint(), WAIT_S)
    assert (step, cursor) in {(0, 0), (1, 1)}
    assert world.numbers("start") == [0, 0]


async def test_a_checkpoint_is_answered_only_behind_its_cursor(world: World) -> None:
    """The stream breaks under the commit: the next one makes it, and only then is it answered."""
    world.publish_groups(1)
    async with trainer(world, checkpoint_interval_steps=100) as life:
        await life.steps(1)
        world.faults["commit"] = [away, away]
        step, cursor = await asyncio.wait_for(life.training.checkpoint(), WAIT_S)
        assert (step, cursor, world.committed) == (1, 1, 1)
        assert len(world.numbers("subscribe")) == 3


async def test_a_checkpoint_of_an_idle_trainer_is_written_at_once_and_once(world: World) -> None:
    async with trainer(world) as life:
        answers = await asyncio.wait_for(
            asyncio.gather(*(life.training.checkpoint() for _ in range(3))), WAIT_S
        )
        assert answers == [(0, 0)] * 3
        world.publish_groups(1)
        await life.steps(1)
        assert await asyncio.wait_for(life.training.checkpoint(), WAIT_S) == (1, 1)
        assert await asyncio.wait_for(life.training.checkpoint(), WAIT_S) == (1, 1)
    assert world.numbers("save") == [0, 1]


async def test_a_broken_stream_goes_on_behind_the_last_group(world: World) -> None:
    world.publish_groups(3)
    world.faults["send"] = [away]
    async with trainer(world, groups_per_step=2) as life:
        await life.steps(1)
        assert world.learners[0].trained == rows_of(1, 2)
    assert world.numbers("subscribe") == [0, 0]


async def test_a_worker_that_is_away_is_waited_for(world: World) -> None:
    world.publish_groups(1)
    world.faults["push"] = [away]
    async with trainer(world) as life:
        (metrics,) = await life.steps(1)
    assert metrics.weight_version == 1
    assert [worker.versions for worker in world.workers] == [[1], [1]]


@pytest.mark.parametrize(
    ("name", "says"),
    [("step", "ZeroDivisionError"), ("send", "ZeroDivisionError"), ("push", "ZeroDivisionError")],
)
async def test_a_fault_of_any_kind_is_said_without_its_words(
    world: World, name: str, says: str
) -> None:
    world.publish_groups(1)
    world.faults[name] = [lambda: ZeroDivisionError("a secret")]
    async with trainer(world) as life:
        await asyncio.wait_for(life.task, WAIT_S)
        status = life.announcements.status
        assert (status.phase, status.failure) == (pb.TRAINER_PHASE_FAILED, says)


async def test_what_waits_for_a_checkpoint_hears_of_the_end(world: World) -> None:
    async with trainer(world) as life:
        world.faults["save"] = [OSError]
        with pytest.raises(LearnerLostError):
            await asyncio.wait_for(life.training.checkpoint(), WAIT_S)


async def test_a_group_that_is_too_large_stops_the_training_with_its_name(world: World) -> None:
    """It comes no smaller on another stream."""
    world.publish_groups(1)
    begin = group_part_pb2.GroupBegin(cursor=1, group_id="g1", size_bytes=9 << 30)
    world.faults["send"] = [lambda: GroupTooLargeError(begin, 9 << 30, 4 << 30)]
    async with trainer(world) as life:
        await asyncio.wait_for(life.task, WAIT_S)
        failure = life.announcements.status.failure
    assert world.numbers("subscribe") == [0]
    assert failure.startswith("GroupTooLargeError: RESOURCE_EXHAUSTED")
    assert "trainer.group_bytes_max" in failure
    assert f"group_id=g1 cursor=1 size_bytes={9 << 30} limit_bytes={4 << 30}" in failure


async def test_a_position_that_is_left_out_stops_the_training(world: World) -> None:
    world.publish(make_batch(2, linear("a", 1.0), linear("b", 0.0)))
    async with trainer(world) as life:
        await asyncio.wait_for(life.task, WAIT_S)
        assert "has position 2 behind 0" in life.announcements.status.failure
    assert world.numbers("step") == []


async def test_dropped_groups_fill_no_step_and_move_the_cursor(world: World) -> None:
    masked = Rollout("m", 1.0, mask="pending_call")
    world.publish(dropped(1, "no_valid_layout", masked), dropped(2, "agent_lost"))
    async with trainer(world, checkpoint_interval_steps=1) as life:
        await world.reach("credit", 2)
        assert world.numbers("step") == []
        world.publish(make_batch(3, linear("a", 1.0), linear("b", 0.0), padding=2))
        (metrics,) = await life.steps(1)
        await life.training.checkpoint()
    assert (metrics.dropped_group_count, metrics.rollout_count, metrics.masked_count) == (2, 3, 1)
    assert metrics.mask_reasons == {"pending_call": 1}
    assert (metrics.row_count, world.committed) == (2, 3)


@pytest.mark.requirement("FIN-7")
async def test_a_permitted_drop_makes_a_smaller_step_and_too_many_stop_training(
    world: World,
) -> None:
    pair = [make_batch(3 * n + 2, linear(f"a{n}", 1.0), linear(f"b{n}", 0.0)) for n in range(2)]
    world.publish(dropped(1, "rollout_timeout"), pair[0])
    options = {"groups_per_step": 2, "min_step_batch_fraction": 0.5}
    async with trainer(world, checkpoint_interval_steps=1, **options) as life:
        (metrics,) = await life.steps(1)
        assert (metrics.dropped_group_count, metrics.row_count) == (1, 2)
        await life.training.checkpoint()
        assert world.committed == 2
        world.publish(dropped(3, "transport_failure"), dropped(4, "no_valid_layout"))
        await asyncio.wait_for(life.task, WAIT_S)
        failure = life.announcements.status.failure
    assert failure == (
        "StepRefusedError: no_group_left: a step of 2 groups must keep 1; dropped are"
        " g3: transport_failure, g4: no_valid_layout"
    )
    assert world.numbers("step") == [1], "nothing was trained of what is below the floor"


async def test_old_checkpoints_and_weights_go(world: World) -> None:
    world.publish_groups(5)
    async with trainer(world, checkpoint_interval_steps=1, checkpoints_kept=2) as life:
        await life.steps(5)
        await life.training.checkpoint()
    journal = world.journal
    assert journal.checkpoints() == [journal.checkpoint_path(5), journal.checkpoint_path(4)]
    assert list((world.folder / "trainer" / "weights").iterdir()) == [journal.weights_path(5)]
