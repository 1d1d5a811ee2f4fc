"""Simulated runs of the whole mesh: faults first, then everything heals and must come to its end.

Each seed is one run: real services and clients on virtual time, a network and disks that misbehave
as the seed says, and a model that judges every commit. The same seed gives the same trace.

Usage: python -m tests.simulation.run [--items 50000] [--seed 1] [--flaw NAME] [--only]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from callforest.capture.v1 import attempt_pb2
from callforest_client.errors import CallforestError
from callforest_client.ledger import Manifest
from tests.robustness.history import History, Look, check_calls
from tests.simulation import loop as virtual
from tests.simulation.consumer import Consumer
from tests.simulation.flaws import FLAWS
from tests.simulation.harness import Harness, Plan
from tests.simulation.judge import Judge
from tests.simulation.loop import Life, VirtualLoop
from tests.simulation.mesh import SERVICES, STORES, Mesh
from tests.simulation.nemesis import Nemesis
from tests.simulation.network import Network

FAULTS_S = 180.0
"""Longest time of faults, in virtual seconds."""
FINISH_S = 60.0
"""Time in which every rollout must be finished once all is healed."""
CLEANUP_S = 200.0
"""Time for the trainer to consume and the finalizer to clean up; its pauses grow to a minute."""
VIOLATIONS_SHOWN = 5


@dataclass(slots=True)
class Run:
    """What became of one seed.

    Attributes:
        trace: digest of everything that happened.
        items: items and calls that reached a service.
        finish_s: virtual time from the healing to the last group.
    """

    seed: int
    trace: str = ""
    items: int = 0
    finish_s: float = 0.0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class LoggedFaults(logging.Handler):
    """Takes note of exceptions that a service did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def play(seed: int, flaw: str = "") -> Run:
    """Play one seed from its first fault to its last check."""
    log = logging.getLogger("callforest")
    unexpected = LoggedFaults()
    log.handlers, log.propagate = [unexpected], False
    log.setLevel(logging.ERROR)
    return virtual.run(lambda loop: _Play(loop, seed, flaw, unexpected).whole(), seed)


class _Play:
    def __init__(self, loop: VirtualLoop, seed: int, flaw: str, unexpected: LoggedFaults) -> None:
        self.loop, self.run, self.unexpected = loop, Run(seed), unexpected
        chance = random.Random(f"run {seed}")
        self.network = Network(loop, random.Random(chance.getrandbits(64)))
        self.judge = Judge()
        self.mesh = Mesh(
            self.network,
            random.Random(chance.getrandbits(64)),
            self.judge.generated,
            forest=seed % 2 == 0,
        )
        self.judge.watch(self.mesh.disks)
        plan = Plan(
            groups=chance.choice((10, 20)),
            group_size=4,
            at_once=chance.choice((4, 16, 40)),
            straggling=chance.choice((0.0, 0.1, 0.4)),
            insisting=chance.choice((0.0, 0.3)),
            settling=chance.choice((0.0, 0.2)),
            repeating=chance.choice((0.0, 0.3)),
        )
        self.harness = Harness(self.mesh, self.judge, Life("harness"), plan, seed)
        self.consumer = Consumer(self.mesh, self.judge, plan.group_size, seed)
        self.nemesis = Nemesis(self.mesh, self.consumer, random.Random(chance.getrandbits(64)))
        FLAWS[flaw](self.mesh)

    async def whole(self) -> Run:
        for name in SERVICES:
            await self.mesh.start(name)
        self.consumer.start()
        playing = self.harness.life.start(self.harness.run())
        harming = Life("nemesis").start(self.nemesis.run())
        await self._suffer(playing)
        harming.cancel()
        await self.nemesis.heal()
        self.network.note("healed")
        healed = self.loop.now
        await asyncio.wait({playing}, timeout=FINISH_S)
        self.run.finish_s = self.loop.now - healed
        if not playing.done():
            self._stuck()
        elif (error := playing.exception()) is not None:
            self.judge.wrong("the owner is never refused", repr(error))
        else:
            await self._consume()
            await self._look_back()
        return self._told()

    async def _suffer(self, playing: asyncio.Task[None]) -> None:
        """Let faults come until most rollouts are done, or for long enough."""
        most = self.harness.rollout_count * 4 // 5
        while not playing.done() and self.loop.now < FAULTS_S:
            if len(self.harness.receipts) >= most:
                return
            await asyncio.sleep(0.05)

    def _stuck(self) -> None:
        harness = self.harness
        left = [
            f"g{number}-r{slot}"
            for number in range(harness.plan.groups)
            for slot in range(harness.plan.group_size)
            if f"g{number}-r{slot}" not in harness.receipts
        ]
        self.judge.wrong("every rollout finishes once all is healed", left[:8], len(left))

    async def _consume(self) -> None:
        """Let the trainer take everything, and the cleanup remove what was consumed."""
        end = self.loop.now + CLEANUP_S
        head = self.harness.plan.groups
        while self.loop.now < end and self.judge.state.cleaned_cursor < head:
            await asyncio.sleep(0.2)
            if self.consumer.trained == list(range(1, head + 1)):
                # What was not committed for want of chance is committed in another life.
                self.consumer.kill()
                self.consumer.start()
                await asyncio.sleep(1.0)
        state = self.judge.state
        self.judge.demand(state.head_cursor == head, "each group has a position", state)
        self.judge.demand(state.cleaned_cursor == head, "what was consumed is cleaned", state)
        self.consumer.final_check(head)
        await asyncio.sleep(30.0)  # calls that nobody waits for come to their ends

    async def _look_back(self) -> None:
        """Ask stores that know only their disks for everything that was acknowledged."""
        for name in STORES:
            self.mesh.kill(name)
            await self.mesh.start(name)
        try:
            await Life("auditor").start(self._audit())
        except CallforestError as error:
            self.judge.wrong("the owner is never refused", error)
        self.judge.counts["forest runs"] += self.mesh.forest

    async def _audit(self) -> None:
        harness, judge = self.harness, self.judge
        history = History(served=harness.served)
        manifests = {}
        for capture_key, attempt in judge.attempts.items():
            manifest = await harness.patiently(lambda key=capture_key: harness.ledger.manifest(key))
            manifests[capture_key] = manifest
            records = [one.coords.call_id for one in manifest.records]
            same = records == attempt.order and manifest.attempt.revision == attempt.revision
            judge.demand(same, "the ledger is what became durable", capture_key)
            history.looks[capture_key] = Look(manifest, {})
        for fault in _acknowledged(history, manifests, judge).all():
            judge.wrong("P1 acknowledged is durable", fault)
        for one in harness.served:
            # A call without a record was served without capture: what is staged never trains.
            recorded = one.call_id in judge.attempts[one.capture_key].order
            body = judge.responses.get((one.capture_key, one.call_id))
            same = body == one.body or not recorded
            judge.demand(same, "P5 the staged response is served", one.call_id)
        for rollout_id, receipt in harness.receipts.items():
            again = await harness.finishes[rollout_id]()
            judge.demand(again == receipt, "P5 same request, same receipt", rollout_id)
        for group_id, published in harness.groups.items():
            again = await harness.publish(group_id)
            judge.demand(again == published, "P5 same request, same group", group_id)
        self._check_left()

    def _check_left(self) -> None:
        """What is still staged was never recorded, or came again when its group was cleaned."""
        judge = self.judge
        for capture_key, call_id in judge.staged:
            attempt = judge.attempts[capture_key]
            last = judge.latest[attempt.rollout_id] is attempt
            judge.demand(last, "LED-8 abandoned attempts are swept", capture_key, call_id)
            call = attempt.calls.get(call_id)
            kept = call is not None and call.record and call_id not in judge.restaged
            judge.demand(not kept, "consumed tokens are cleaned", capture_key, call_id)

    def _told(self) -> Run:
        run, judge = self.run, self.judge
        run.trace = self.network.trace.hexdigest()
        run.items, run.virtual_s = self.network.items, self.loop.now
        run.faults = self.network.faults
        run.counts = judge.counts + Counter(
            served=len(self.harness.served),
            refused=self.harness.failures,
            attempts=len(judge.attempts),
            masked=sum(one.receipt.masked for one in judge.receipts.values()),
            redelivered=self.consumer.redelivered,
            commits_lost=sum(disk.lost for disk in self.mesh.disks.values()),
            commits_kept=sum(disk.kept for disk in self.mesh.disks.values()),
        )
        for fault in [*self.unexpected.found, *self.loop.faults]:
            judge.wrong("no service meets what it does not expect", fault)
        run.violations = judge.violations
        return run


def _acknowledged(history: History, manifests, judge: Judge):
    """Hold what harnesses got against the rows. A call that the seal left pending may be served."""
    sealed_over = {(key, call_id) for key, one in judge.attempts.items() for call_id in one.pending}
    history.served = [
        one for one in history.served if (one.capture_key, one.call_id) not in sealed_over
    ]
    for look in history.looks.values():
        look.manifest = Manifest(look.manifest.attempt, ())  # tokens are gone by now
    return check_calls(history, {key: _without_kept(one) for key, one in manifests.items()})


def _without_kept(manifest: Manifest) -> Manifest:
    """Leave out the failures beside records, which forest mode keeps: the records stand."""
    if manifest.attempt.mode != attempt_pb2.CAPTURE_MODE_FOREST:
        return manifest
    recorded = {record.coords.call_id for record in manifest.records}
    entries = (one for one in manifest.entries if one.failure.call_id not in recorded)
    return Manifest(manifest.attempt, tuple(entries))


def result(runs: list[Run], cpu_s: float) -> dict[str, object]:
    """Give the figures of the RESULT line."""
    faults: Counter[str] = sum((run.faults for run in runs), Counter())
    counts: Counter[str] = sum((run.counts for run in runs), Counter())
    return {
        "seeds": [run.seed for run in runs],
        "rpcs": sum(run.items for run in runs),
        "violations": sum(len(run.violations) for run in runs),
        "faults": dict(sorted(faults.items())),
        "judged": dict(sorted(counts.items())),
        "finish_s_max": round(max(run.finish_s for run in runs), 2),
        "virtual_s": round(sum(run.virtual_s for run in runs)),
        "cpu_s": round(cpu_s, 1),
        "traces": {run.seed: run.trace[:16] for run in runs},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    depth = int(os.environ.get("DEPTH", "1"))
    parser.add_argument("--items", type=int, default=50_000 * depth)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--flaw", choices=sorted(FLAWS), default="")
    parser.add_argument("--only", action="store_true", help="play this seed alone")
    chosen = parser.parse_args()
    began, runs = time.process_time(), []
    while not runs or (not chosen.only and sum(run.items for run in runs) < chosen.items):
        run = play(chosen.seed + len(runs), chosen.flaw)
        runs.append(run)
        print(f"seed {run.seed}: {run.items} items, {len(run.violations)} violations", flush=True)
        for violation in run.violations[:VIOLATIONS_SHOWN]:
            print(f"  {violation[:400]}", flush=True)
        if run.violations and chosen.flaw:
            break  # found
    print("RESULT " + json.dumps(result(runs, time.process_time() - began)), flush=True)
    return bool(any(run.violations for run in runs))


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # an orderly end would let the dead lives run
