"""Prompt groups on real services: what is kept whole, what is dropped, what stops a run (FIN-7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from callforest.capture.v1 import attempt_pb2, group_batch_pb2, selection_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError
from callforest_client.failure_budget import (
    BudgetOptions,
    FailureBudget,
    RunStoppedError,
    StopReason,
)
from callforest_client.group_runner import GroupRunner, RolloutLostError, RunnerOptions
from callforest_client.rollout import OpenRollout, Outcome, RolloutOwner
from callforest_core.refusal import Refusal
from callforest_mesh.cli import main
from callforest_mesh.demo import run
from callforest_mesh.demo.harness import Played
from callforest_mesh.demo.loop import DemoLoop, LoopOptions
from callforest_mesh.staging import servicer
from callforest_mesh.terminal import NO
from tests.integration.running_mesh import Running, play, running

FOREST = attempt_pb2.CAPTURE_MODE_FOREST
LOSSY = BudgetOptions(max_consecutive_dropped_groups=2, min_step_batch_fraction=0.5)
FULL_STAGING = ("staging.disk_reserve_bytes=1000000000000000000", "worker.stage_timeout_s=0.2")
IN_FOREST = ("token_capture.forest_training=true", "token_capture.selection_policy=all_captured")


class Harness:
    """Plays two calls a rollout, and does else what its rollout's name is mapped to."""

    def __init__(self, **odd: str) -> None:
        self.odd = odd
        self.played: Counter[str] = Counter()
        self.ended: list[str] = []
        self.hanging = asyncio.Semaphore(0)

    async def __call__(self, _group_id: str, rollout: OpenRollout) -> Outcome:
        name = rollout.rollout_id
        self.played[name] += 1
        kind = self.odd.get(name.replace("-", "_"), "")
        try:
            last = await play(rollout.base_url, 2)
            if kind == "lost":
                raise RolloutLostError("the sandbox is gone")
            if kind == "hangs":
                self.hanging.release()
                await asyncio.Event().wait()
            if kind == "breaks":
                raise KeyError("a bug of the harness")
            if kind == "contradicts":
                chosen = selection_pb2.Selection(call_ids=["nobody"], terminal_call_id="nobody")
                return Outcome(1.0, selection=chosen)
        finally:
            self.ended.append(name)
        return Outcome(1.0, declared_response_id=last)


def runner(
    mesh: Running,
    budget: BudgetOptions | None = None,
    *,
    replacements: int = 0,
    **options: object,
) -> GroupRunner:
    clients = mesh.clients
    owner = RolloutOwner(
        clients.admission(),
        clients.ledger(),
        clients.finalizer(),
        mesh.gateway_url,
        replacement_budget=replacements,
    )
    chosen = {"rollouts_per_group": 2, "give_up_settle_s": 10.0} | options
    return GroupRunner(owner, FailureBudget(budget), RunnerOptions(**chosen))


async def delivered(mesh: Running, count: int) -> dict[str, group_batch_pb2.GroupBatch]:
    rows = mesh.clients.finalizer().subscribe("trainer")
    await rows.credit(count)
    found: dict[str, group_batch_pb2.GroupBatch] = {}
    async for batch in rows:
        found[batch.group_id] = batch
        if len(found) == count:
            break
    await rows.commit(max(batch.cursor for batch in found.values()))
    await rows.close()
    return found


@asynccontextmanager
async def forest(folder: Path, *more: str) -> AsyncIterator[Running]:
    async with running("embedded", folder, *IN_FOREST, *more) as mesh:
        yield mesh


@pytest.mark.requirement("FIN-7")
@pytest.mark.parametrize(
    ("kind", "reason"), [("lost", "transport_failure"), ("hangs", "rollout_timeout")]
)
async def test_a_rollout_without_a_result_drops_its_group_and_no_other(
    tmp_path: Path, kind: str, reason: str
) -> None:
    harness = Harness(b_r1=kind)
    async with forest(tmp_path) as mesh:
        timeout = 1.0 if kind == "hangs" else 60.0
        runs = runner(mesh, LOSSY, mode=FOREST, rollout_timeout_s=timeout)
        end = await runs.run_step(["a", "b"], harness)
        found = await delivered(mesh, 2)
    assert [(one.group_id, one.drop_reason) for one in end.groups] == [("a", ""), ("b", reason)]
    assert (end.dropped_prompt_groups, end.completed_count) == (1, 2)
    assert harness.played == Counter({f"{group}-r{slot}": 1 for group in "ab" for slot in (0, 1)})
    assert found["a"].drop_reason == ""
    assert [one.rollout_id for one in found["a"].receipts] == ["a-r0", "a-r1"], "all its siblings"
    assert (found["b"].drop_reason, len(found["b"].rows)) == (reason, 0)
    given_up = {one.rollout_id: one for one in found["b"].receipts}
    assert given_up["b-r1"].masked
    assert len(given_up["b-r1"].calls) == 2, "what it staged has a receipt, and is cleaned"


@pytest.mark.requirement("FIN-7")
async def test_below_the_floor_the_run_stops_with_what_failed_first(tmp_path: Path) -> None:
    async with forest(tmp_path) as mesh:
        with pytest.raises(RunStoppedError) as caught:
            await runner(mesh, mode=FOREST).run_step(["a", "b"], Harness(a_r0="lost"))
    assert caught.value.reason is StopReason.BELOW_STEP_FLOOR
    assert str(caught.value.first) == "a-r0: transport_failure: the sandbox is gone"


@pytest.mark.requirement("FIN-7")
async def test_chain_mode_plays_a_lost_rollout_again_as_another_attempt(tmp_path: Path) -> None:
    harness = Harness(a_r0="lost")
    async with running("embedded", tmp_path) as mesh:

        async def recovers(group_id: str, rollout: OpenRollout) -> Outcome:
            if rollout.capture_key == "a-r0-a1":
                harness.odd.clear()
            return await harness(group_id, rollout)

        end = await runner(mesh, attempts=2).run_step(["a"], recovers)
        found = await delivered(mesh, 1)
    assert harness.played["a-r0"] == 2
    assert end.completed_count == 2
    assert found["a"].receipts[0].capture_key == "a-r0-a1"


@pytest.mark.requirement("FIN-7")
@pytest.mark.parametrize("kind", ["contradicts", "breaks"])
async def test_what_contradicts_the_record_and_bugs_raise(tmp_path: Path, kind: str) -> None:
    """Neither is a loss: no budget covers it, and no group is dropped for it."""
    async with forest(tmp_path) as mesh:
        runs = runner(mesh, LOSSY, mode=FOREST)
        with pytest.raises((RefusedError, KeyError)) as caught:
            await runs.run_step(["a"], Harness(a_r0=kind, a_r1="hangs"))
        head = (await mesh.clients.finalizer().row_log()).head_cursor
    assert head == 0
    if kind == "contradicts":
        assert isinstance(caught.value, RefusedError)
        assert caught.value.reason == er.ERROR_REASON_SELECTION_REFUSED


@pytest.mark.requirement("FIN-7")
async def test_cancellation_goes_through_and_ends_every_rollout(tmp_path: Path) -> None:
    harness = Harness(a_r0="hangs", a_r1="hangs", b_r0="hangs", b_r1="hangs")
    async with forest(tmp_path) as mesh:
        task = asyncio.ensure_future(runner(mesh, mode=FOREST).run_step(["a", "b"], harness))
        async with asyncio.timeout(30):
            for _ in range(4):
                await harness.hanging.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        head = (await mesh.clients.finalizer().row_log()).head_cursor
    assert sorted(harness.ended) == ["a-r0", "a-r1", "b-r0", "b-r1"]
    assert head == 0, "a cancelled group is neither published nor dropped"


@pytest.mark.requirement("FIN-5", "FIN-7")
async def test_a_discarded_group_is_replaced_within_the_budget_and_then_counts(
    tmp_path: Path,
) -> None:
    options = BudgetOptions(
        max_consecutive_dropped_groups=1, min_step_batch_fraction=0.5, max_masked_fraction=None
    )

    async def unreadable(group_id: str, rollout: OpenRollout) -> Outcome:
        last = await play(rollout.base_url, 1)
        if group_id.startswith("bad"):
            return Outcome(1.0, mask_refused_selection=True)
        return Outcome(1.0, declared_response_id=last)

    async with forest(tmp_path, "token_capture.min_valid_fraction_per_group=0.5") as mesh:
        runs = runner(mesh, options, replacements=1, mode=FOREST)
        end = await runs.run_step(["good", "bad"], unreadable)
        found = await delivered(mesh, 4)
    assert end.dropped_prompt_groups == 1
    told = {name: (one.drop_reason, one.replacement_follows) for name, one in found.items()}
    assert told == {
        "good": ("", False),
        "bad": ("below_min_valid_fraction", True),
        "bad~1": ("below_min_valid_fraction", True),
        "bad~1~none": ("replacement_budget_spent", False),
    }


class NoSteps:
    """A trainer that never makes a step."""

    async def watch_metrics(self) -> AsyncIterator[object]:
        await asyncio.Event().wait()
        yield None


class RefusedHarness:
    """A harness whose every call is refused."""

    async def play(self, client: openai.AsyncOpenAI, model: str, opening: str) -> Played:
        first: list[ChatCompletionMessageParam] = [{"role": "user", "content": opening}]
        await client.chat.completions.create(model=model, messages=first)
        await client.chat.completions.create(model=model, messages=first, n=2)
        raise AssertionError("it was not refused")


@pytest.mark.bugcase("B23")
@pytest.mark.parametrize("settings", [(), IN_FOREST], ids=["chain", "forest"])
async def test_a_harness_that_is_always_refused_ends_the_run_too(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """Its captured calls never train with a reward that nobody gave."""
    mode = FOREST if settings else attempt_pb2.CAPTURE_MODE_CHAIN
    options = LoopOptions(
        run="demo",
        model="scripted",
        groups_per_step=1,
        rollouts_per_group=2,
        harness=RefusedHarness(),
        mode=mode,
    )
    async with running("embedded", tmp_path, *settings) as mesh:
        with pytest.raises(RunStoppedError) as caught:
            await anext(DemoLoop(options, mesh.owner, NoSteps()).run())
        group = await mesh.clients.finalizer().group("demo-s1-g0")
    assert caught.value.reason is StopReason.TOO_MANY_MASKED
    reason = "selection_refused" if settings else "terminal_not_attributed"
    assert {one.mask_reason for one in group.receipts} == {reason}


def refuse(_call: staged_call_pb2.StagedCall) -> None:
    """Be a Staging that takes no call, for a reason that no waiting mends."""
    message = "the call's digest is not that of its contents"
    raise Refusal(er.ERROR_REASON_DIGEST_MISMATCH, message, field="digest")


@pytest.mark.requirement("FIN-7", "CAP-7")
@pytest.mark.bugcase("B23")
async def test_a_staging_that_stays_full_ends_the_run_too(tmp_path: Path) -> None:
    """It pushes calls back, and says why to the harness, the owner and the run."""
    options = LoopOptions(
        run="demo", model="scripted", groups_per_step=1, rollouts_per_group=2, mode=FOREST
    )
    async with running("embedded", tmp_path, *FULL_STAGING, *IN_FOREST) as mesh:
        with pytest.raises(
            RunStoppedError, match="staging store is full: its disk is almost full"
        ) as caught:
            await anext(DemoLoop(options, mesh.owner, NoSteps()).run())
        head = (await mesh.clients.finalizer().row_log()).head_cursor
    assert caught.value.reason is StopReason.NO_GROUP_LEFT
    assert head == 1, "within one group"


@pytest.mark.requirement("FIN-7")
@pytest.mark.bugcase("B23")
@pytest.mark.parametrize("mode", ["chain", "forest"])
def test_a_mesh_that_captures_nothing_ends_the_run_within_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    """Every call is served and none is captured: nothing may look as if it trained."""
    chosen = FOREST if mode == "forest" else attempt_pb2.CAPTURE_MODE_CHAIN
    settings = IN_FOREST if mode == "forest" else ()
    monkeypatch.setattr(servicer, "check_call", refuse)
    heads: list[int] = []

    async def run_broken() -> None:
        async with running("embedded", tmp_path, *settings) as mesh:
            options = LoopOptions(
                run="demo", model="scripted", groups_per_step=1, rollouts_per_group=3, mode=chosen
            )
            try:
                async for _ in DemoLoop(options, mesh.owner, NoSteps()).run():
                    raise AssertionError("a step was reported")
            finally:
                heads.append((await mesh.clients.finalizer().row_log()).head_cursor)
                group = await mesh.clients.finalizer().group("demo-s1-g0")
                assert group.drop_reason == "no_valid_layout"
                assert all(one.masked for one in group.receipts), "none counts as completed"

    monkeypatch.setattr(run, "main", lambda _options: asyncio.run(run_broken()))
    assert main(["demo"]) == NO != 0
    told = capsys.readouterr().err
    assert "too_many_masked: 3 of the last 3 rollouts are masked" in told
    assert "the first to fail was demo-s1-g0-r" in told
    assert "capture_poisoned/worker_capture_failed/stage_failed" in told
    assert "DIGEST_MISMATCH: the call's digest is not that of its contents" in told
    assert heads == [1], "within one group"
