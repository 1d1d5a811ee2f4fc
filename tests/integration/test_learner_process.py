"""The learner's process, from the trainer's side: what crosses, and what becomes of its ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.trainer.v1 import learner_service_pb2 as pb
from callforest_client.errors import CallforestError
from callforest_mesh.trainer.batch import (
    BatchMode,
    BatchOptions,
    BatchPlan,
    BatchRefusedError,
    Microbatch,
    TrainingRow,
    plan_step,
)
from callforest_mesh.trainer.learner.messages import (
    plan_from_message,
    row_from_message,
    row_to_message,
    step_to_messages,
)
from callforest_mesh.trainer.learner.process import (
    LearnerLimits,
    LearnerLostError,
    LearnerProcess,
)
from callforest_mesh.worker.tiny_model import make_tiny_model
from tests.processes import gone

OPTIONS = pb.LearnerOptions(
    learning_rate=1e-3,
    clip_grad_norm=1.0,
    ratio_clip_low=0.2,
    ratio_clip_high=0.2,
    importance_correction=True,
    seed=1,
    row_multiple=1,
)


def make_row(name: str, length: int = 12, advantage: float = 1.0) -> TrainingRow:
    tokens = np.arange(length, dtype=np.uint32) * 7 % 500
    mask = np.arange(length) >= length // 2
    logprobs = np.where(mask, np.float32(-5.5), 0).astype(np.float32)
    return TrainingRow(name, f"owner-{name}", tokens, mask, logprobs, advantage)


ROWS = [make_row("a"), make_row("b", 9, -0.5), make_row("c", 15, 0.25)]


def same_row(left: TrainingRow, right: TrainingRow) -> bool:
    return (
        left.row_id == right.row_id
        and left.advantage == right.advantage
        and np.array_equal(left.token_ids, right.token_ids)
        and np.array_equal(left.loss_mask, right.loss_mask)
        and np.array_equal(left.logprobs, right.logprobs)
    )


def test_rows_and_plans_cross_unchanged() -> None:
    plan = plan_step(ROWS, BatchOptions(BatchMode.PACKED, train_microbatch_tokens=24))
    first, *others = [
        pb.TrainStepRequest.FromString(each.SerializeToString())
        for each in step_to_messages(ROWS, plan)
    ]
    rows = [row_from_message(row) for message in others for row in message.rows.rows]
    assert all(same_row(*pair) for pair in zip(rows, ROWS, strict=True))
    assert plan_from_message(first.plan, rows) == plan


@pytest.mark.requirement("TRN-5")
def test_a_masked_row_crosses_without_loss() -> None:
    crossed = row_from_message(row_to_message(replace(ROWS[0], valid=False, advantage=np.nan)))
    assert not crossed.loss_mask.any()
    assert crossed.advantage == 0


def test_large_steps_cross_in_frames_of_about_a_mebibyte() -> None:
    rows = [make_row(f"row-{n}", 60_000) for n in range(5)]
    frames = [m.ByteSize() for m in step_to_messages(rows, plan_step(rows, BatchOptions()))]
    assert len(frames) == 1 + 3
    assert max(frames) < 2 * 1024 * 1024


@pytest.mark.parametrize(
    "columns", [{"token_ids": b"123"}, {"logprobs": b"12345"}, {"loss_mask": b"\x02"}]
)
def test_columns_that_are_no_words_are_refused(columns: dict[str, bytes]) -> None:
    message = pb.TrainingRow(row_id="odd")
    for name, column in columns.items():
        setattr(message, name, column)
    with pytest.raises(BatchRefusedError):
        row_from_message(message)


def test_the_plan_of_several_ranks_does_not_cross() -> None:
    with pytest.raises(BatchRefusedError):
        next(step_to_messages(ROWS, plan_step(ROWS, BatchOptions(rank_count=2))))


@contextlib.asynccontextmanager
async def learner_on(model_dir: Path | None) -> AsyncIterator[LearnerProcess]:
    process = LearnerProcess()
    await process.start()
    try:
        if model_dir is not None:
            await process.load_model(model_dir, OPTIONS)
        yield process
    finally:
        await process.stop()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=3)


def reason_of(refusal: pytest.ExceptionInfo[CallforestError]) -> er.ErrorReason.ValueType:
    return refusal.value.reason


@pytest.mark.engine
@pytest.mark.requirement("TRN-1", "TRN-7")
async def test_a_learner_trains_exports_saves_and_continues_in_another_process(
    model_dir: Path, tmp_path: Path
) -> None:
    plan = plan_step(ROWS, BatchOptions())
    async with learner_on(model_dir) as first:
        pid = first.pid
        step = await first.train_step(ROWS, plan)
        assert (step.step, step.valid_token_count) == (1, 6 + 5 + 8)
        assert step.grad_norm > 0
        assert step.token_mult_prob_error > 1
        assert (
            await first.save_checkpoint(tmp_path / "one", trained_cursor=9, weight_version=4) == 1
        )
        after = await first.train_step(ROWS, plan)
        size = await first.export_weights(tmp_path / "first.safetensors")
        assert size == (tmp_path / "first.safetensors").stat().st_size
        with pytest.raises(CallforestError) as refusal:
            await first.save_checkpoint(tmp_path / "one", trained_cursor=10, weight_version=5)
        assert reason_of(refusal) == er.ERROR_REASON_CHECKPOINT_REFUSED
        assert refusal.value.metadata == {"path": str(tmp_path / "one"), "field": "exists"}
    assert gone(pid)

    other = pb.LearnerOptions()
    other.CopyFrom(OPTIONS)
    other.forest = not OPTIONS.forest
    async with learner_on(None) as forest:
        await forest.load_model(model_dir, other)
        with pytest.raises(CallforestError, match="its forest is False, not True") as refusal:
            await forest.restore_checkpoint(tmp_path / "one")
        assert reason_of(refusal) == er.ERROR_REASON_CHECKPOINT_REFUSED
        assert refusal.value.metadata == {"path": str(tmp_path / "one"), "field": "other_run"}

    async with learner_on(model_dir) as second:
        restored = await second.restore_checkpoint(tmp_path / "one")
        assert (restored.step, restored.trained_cursor, restored.weight_version) == (1, 9, 4)
        assert await second.train_step(ROWS, plan) == after
        await second.export_weights(tmp_path / "second.safetensors")
    first_bytes = (tmp_path / "first.safetensors").read_bytes()
    assert first_bytes == (tmp_path / "second.safetensors").read_bytes()


@pytest.mark.engine
@pytest.mark.requirement("TRN-2")
async def test_refusals_are_typed_and_leave_the_learner_as_it_was(
    model_dir: Path, tmp_path: Path
) -> None:
    plan = plan_step(ROWS, BatchOptions())
    async with learner_on(None) as learner:
        with pytest.raises(CallforestError) as refusal:
            await learner.train_step(ROWS, plan)
        assert reason_of(refusal) == er.ERROR_REASON_TRAINER_CONFIGURATION
        with pytest.raises(CallforestError) as refusal:
            await learner.load_model(tmp_path, OPTIONS)
        assert reason_of(refusal) == er.ERROR_REASON_TRAINER_CONFIGURATION
        invalid = pb.LearnerOptions(clip_grad_norm=-1)
        with pytest.raises(CallforestError) as refusal:
            await learner.load_model(model_dir, invalid)
        assert reason_of(refusal) == er.ERROR_REASON_INVALID_MESSAGE

        await learner.load_model(model_dir, OPTIONS)
        await learner.train_step(ROWS, plan)
        for rows, detail in (
            ([replace(ROWS[0], advantage=3e38)], "non_finite_loss"),
            ([replace(ROWS[0], token_ids=ROWS[0].token_ids + np.uint32(512))], "out_of_vocabulary"),
        ):
            with pytest.raises(CallforestError) as refusal:
                await learner.train_step(rows, plan_step(rows, BatchOptions()))
            assert reason_of(refusal) == er.ERROR_REASON_LEARNER_FAILED
            assert refusal.value.metadata == {"step": "2", "detail": detail}
        with pytest.raises(CallforestError) as refusal:
            await learner.train_step(ROWS, BatchPlan(BatchMode.FIXED, ((Microbatch((0,)),),), 6))
        assert reason_of(refusal) == er.ERROR_REASON_LEARNER_FAILED
        with pytest.raises(CallforestError) as refusal:
            await learner.restore_checkpoint(tmp_path / "absent")
        assert reason_of(refusal) == er.ERROR_REASON_CHECKPOINT_REFUSED
        assert learner.alive
        assert (await learner.train_step(ROWS, plan)).step == 2


@pytest.mark.engine
async def test_a_killed_learner_is_lost_and_says_so(model_dir: Path) -> None:
    async with learner_on(model_dir) as learner:
        pid = learner.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LearnerLostError):
            await learner.train_step(ROWS, plan_step(ROWS, BatchOptions()))
        assert not learner.alive
        with pytest.raises(LearnerLostError):
            await learner.export_weights(model_dir / "never")
    assert gone(pid)


@pytest.mark.engine
async def test_a_call_that_is_given_up_kills_the_process(model_dir: Path) -> None:
    async with learner_on(model_dir) as learner:
        pid = learner.pid
        os.kill(pid, signal.SIGSTOP)  # so that the step cannot be done before the cancellation
        call = asyncio.create_task(learner.train_step(ROWS, plan_step(ROWS, BatchOptions())))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not learner.alive
    assert gone(pid)


@pytest.mark.engine
def test_the_learner_leaves_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "callforest_mesh.trainer.learner.child", "--socket", "sock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 0


@pytest.mark.parametrize("command", [["false"], ["no-such-learner"]])
async def test_a_learner_that_does_not_start_is_lost(command: list[str]) -> None:
    process = LearnerProcess(command=command)
    with pytest.raises(LearnerLostError):
        await process.start()
    assert not process.alive
    with pytest.raises(LearnerLostError, match=r"not started|cannot be run|did not start"):
        await process.load_model(Path("none"), OPTIONS)
    await process.stop()


async def test_a_learner_that_never_answers_is_killed() -> None:
    process = LearnerProcess(
        LearnerLimits(start_s=0.5), command=[sys.executable, "-c", "import sys; sys.stdin.read()"]
    )
    with pytest.raises(LearnerLostError, match=r"0\.5 s"):
        await process.start()
    assert not process.alive
