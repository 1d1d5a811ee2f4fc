"""`callforest demo`: sets everything up on real parts, trains, and shows it.

All services as processes of their own, vLLM in a child of the worker, Megatron in a child of the
trainer, and an ordinary harness.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from callforest.capture.v1 import attempt_pb2
from callforest_client.rollout import RolloutOwner
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.call_graph import draw
from callforest_mesh.chassis.configuration import (
    SERVICES,
    MeshConfiguration,
    load,
)
from callforest_mesh.chassis.log_lines import write_log
from callforest_mesh.demo.bars import Bars
from callforest_mesh.demo.curve import draw_curve
from callforest_mesh.demo.loop import (
    DemoFailedError,
    DemoLoop,
    LoopOptions,
    StepReport,
    count_masked,
    reward_gain,
)
from callforest_mesh.demo.policy import TINY, Policy
from callforest_mesh.supervisor import Supervisor

_LOG = logging.getLogger("callforest")
_MARKER = ".demo"
"""Says that a demo made a directory, and may empty it."""
_HEADER = (
    "step  rollouts  rows  masked  reward    loss     token_mult_prob_error  gen_kl_error"
    "  weights  capture_ms"
)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """How the demo runs.

    Attributes:
        policy: the model that is served and trained.
        state: its state directory; what an earlier demo left there is removed, but for a
            checkpoint that takes long to make.
        out: where the pictures go.
        learning_rate: instead of the policy's; 0 shows that nothing is learnt without one.
        steps: optimizer steps, instead of the policy's.
        seed: of a random model, the engine and the learner.
    """

    policy: Policy = TINY
    state: Path = Path(".state/demo")
    out: Path = Path("build/demo")
    learning_rate: float | None = None
    steps: int | None = None
    seed: int = 0

    @property
    def loop(self) -> LoopOptions:
        """How much is played."""
        steps = self.policy.loop.steps if self.steps is None else self.steps
        return replace(self.policy.loop, steps=steps)

    @property
    def bars(self) -> Bars | None:
        """What the run must reach, if it must."""
        loop = self.loop
        if not self.policy.has_bars:
            return None
        return Bars(loop.steps, loop.groups_per_step, loop.rollouts_per_group)

    @property
    def rate(self) -> float:
        """The learning rate in use."""
        return self.policy.learning_rate if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """What a demo comes to.

    Attributes:
        reports: one a step.
        seconds: from the first rollout to the last step.
        setup_seconds: until everything was ready.
    """

    reports: tuple[StepReport, ...]
    seconds: float
    setup_seconds: float

    def result(self) -> dict[str, object]:
        """Give the figures of the RESULT line."""
        metrics = [report.metrics for report in self.reports]
        rewards = [report.reward_mean for report in self.reports]
        return {
            "steps": len(metrics),
            "rollouts": sum(one.rollout_count for one in metrics),
            "rows": sum(one.row_count for one in metrics),
            "max_rows": max(one.row_count for one in metrics),
            "completed": sum(report.completed for report in self.reports),
            "dropped_prompt_groups": sum(one.dropped_prompt_groups for one in self.reports),
            "finalized_groups": sum(report.finalized_groups for report in self.reports),
            "context_boundaries": sum(report.context_boundaries for report in self.reports),
            "masked": count_masked(list(self.reports)),
            "reward_first": round(rewards[0], 4),
            "reward_last": round(rewards[-1], 4),
            "max_reward": round(max(rewards), 4),
            "reward_gain": round(reward_gain(rewards), 4),
            "max_tmpe": _largest([one.token_mult_prob_error for one in metrics]),
            "max_gen_kl_error": _largest([one.gen_kl_error for one in metrics]),
            "capture_ms_p50": sorted(r.overhead_ms_p50 for r in self.reports)[len(metrics) // 2],
            "setup_s": round(self.setup_seconds, 1),
            "train_s": round(self.seconds, 1),
            "step_s": round(self.seconds / len(metrics), 1),
        }


def _largest(errors: list[float]) -> float:
    """Give the largest; not a number if one is none, which `max` could pass over."""
    return max(errors, key=lambda error: (math.isnan(error), error))


def main(options: DemoOptions) -> int:
    """Run the demo and print it; give the exit status: 1 when it missed a bar."""
    write_log("demo", style="text", level=logging.WARNING)
    summary = asyncio.run(run_demo(options))
    result = summary.result()
    missed = [] if options.bars is None else options.bars.missed(result)
    print()
    print(f"pictures: {options.out / 'reward.svg'} and {options.out / 'rollout.svg'}")
    for one in missed:
        print(f"MISSED {one}")
    print("RESULT " + json.dumps(result))
    return 1 if missed else 0


async def run_demo(options: DemoOptions) -> DemoSummary:
    """Set up, train, draw; print progress on the way.

    Raises:
        DemoFailedError: training stopped.
        RunStoppedError: more rollouts were lost than the run may lose.
        SupervisionError: a service cannot be kept running; its log on standard error says why.
    """
    began = time.monotonic()
    _clear(options.state, keep=options.policy.kept)
    if options.policy.note:
        _say(options.policy.note)
    model = options.policy.make(options.state, options.seed)
    file = _write_configuration(options, model)
    configuration = load(file)
    supervisor = Supervisor(configuration, ["--config", str(file)])
    count = len(configuration.services)
    _say(f"starting {count} services, vLLM and Megatron (half a minute or so)")
    async with AsyncExitStack() as closers:
        closers.push_async_callback(supervisor.stop)
        await _start(supervisor, configuration)
        clients = Clients(configuration, addressed(configuration), closers)
        owner = RolloutOwner(
            clients.admission(),
            clients.ledger(),
            clients.finalizer(),
            f"http://127.0.0.1:{configuration.gateway['port']}",
        )
        loop = DemoLoop(options.loop, owner, clients.trainer())
        ready = time.monotonic()
        _say(f"ready after {ready - began:.0f} s")
        _say(_HEADER)
        reports: list[StepReport] = []
        async for report in loop.run():
            reports.append(report)
            _show(report)
        await clients.trainer().checkpoint()
        done = time.monotonic()
        _say(f"{len(reports)} steps in {done - ready:.0f} s")
        await _draw(options, clients, reports)
    return DemoSummary(tuple(reports), done - ready, ready - began)


async def _start(supervisor: Supervisor, configuration: MeshConfiguration) -> None:
    """Start everything and name each service once it is ready."""
    starting = asyncio.ensure_future(supervisor.start())
    began = time.monotonic()

    async def watch(name: str) -> None:
        await supervisor.wait_ready(name, 600.0)
        _say(f"  {name} is ready ({time.monotonic() - began:.0f} s)")

    await asyncio.sleep(0)  # lets the supervisor begin
    watches = [asyncio.ensure_future(watch(name)) for name in configuration.services]
    try:
        await starting
        await asyncio.gather(*watches)
    finally:
        for task in watches:
            task.cancel()


def _clear(state: Path, *, keep: str) -> None:
    """Make the directory, and empty it but for the entry of this name, if a demo made it.

    Raises:
        DemoFailedError: it holds something else, which nobody may have meant to lose.
    """
    state.mkdir(parents=True, exist_ok=True)
    marker = state / _MARKER
    if not marker.exists() and any(entry.name != keep for entry in state.iterdir()):
        raise DemoFailedError(
            f"{state} holds what no demo wrote: name another --state, or empty it"
        )
    marker.touch()
    for entry in state.iterdir():
        if entry.name in (keep, _MARKER):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _write_configuration(options: DemoOptions, model: Path) -> Path:
    """Write the mesh's configuration, on ports that are free now."""
    ports = _free_ports(len(SERVICES) + 1)
    loop = options.loop
    sections = {
        "state_dir": str((options.state / "mesh").absolute()),
        "addresses": {name: f"127.0.0.1:{ports[i]}" for i, name in enumerate(SERVICES)},
        "log": {"level": "warning"},
        "token_capture": {"forest_training": loop.mode == attempt_pb2.CAPTURE_MODE_FOREST},
        "gateway": {"port": ports[-1]},
        "worker": {
            "engine": "vllm",
            "vllm": {
                "model": str(model.absolute()),
                "served_model_name": loop.model,
                "dtype": "float32",
                "context_token_count": options.policy.context_token_count,
                "seed": options.seed,
            },
        },
        "trainer": {
            "groups_per_step": loop.groups_per_step,
            "min_step_batch_fraction": loop.budget.min_step_batch_fraction,
            "learning_rate": options.rate,
            "seed": options.seed,
        },
    }
    file = options.state / "callforest.yaml"
    file.write_text(yaml.safe_dump(sections, sort_keys=False))
    return file


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


async def _draw(options: DemoOptions, clients: Clients, reports: list[StepReport]) -> None:
    """Write the reward curve and the call graph of one rollout."""
    options.out.mkdir(parents=True, exist_ok=True)
    rewards = [report.reward_mean for report in reports]
    curve = draw_curve(rewards, title="Reward of the demo", axis="mean reward of its rollouts")
    (options.out / "reward.svg").write_text(curve)
    example = reports[-1].example
    manifest = await clients.ledger().manifest(example)
    receipt = await clients.finalizer().receipt(manifest.attempt.rollout_id)
    (options.out / "rollout.svg").write_text(draw(manifest, receipt))


def _show(report: StepReport) -> None:
    one = report.metrics
    _say(
        f"{one.step:4d}  {one.rollout_count:8d}  {one.row_count:4d}  {one.masked_count:6d}"
        f"  {report.reward_mean:6.4f}  {one.loss:+.4f}  {one.token_mult_prob_error:21.7f}"
        f"  {one.gen_kl_error:12.2e}  {one.weight_version:7d}  {report.overhead_ms_p50:10.2f}"
    )
    for rollout_id, reason in report.masked.items():
        _say(f"      masked {rollout_id}: {reason}")


def _say(line: str) -> None:
    print(line, flush=True)
