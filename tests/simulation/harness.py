"""Who uses the mesh: harnesses that play rollouts and their owner, impatient as people are."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from callforest.capture.v1 import attempt_pb2, receipt_pb2, selection_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.gateway.v1 import gateway_service_pb2 as gateway_pb
from callforest_client.admission import AdmissionClient
from callforest_client.errors import CallforestError, RefusedError, UnavailableError
from callforest_client.finalizer import FinalizerClient
from callforest_client.gateway import GatewayClient
from callforest_client.ledger import LedgerClient
from callforest_client.restore_point import restore_point
from callforest_client.rollout import OpenRollout, Outcome, RolloutOwner
from tests.robustness.history import ServedCall
from tests.simulation.judge import Judge
from tests.simulation.loop import Life
from tests.simulation.mesh import Mesh
from tests.simulation.model import Messages

T = TypeVar("T")
ATTEMPTS_MOST = 40
"""Tries at a rollout; then it is finished as it is."""
SETTLE_S = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is played.

    Attributes:
        groups: groups of rollouts.
        group_size: rollouts of one.
        at_once: rollouts that are played at the same time.
        straggling: share of rollouts that are finished with a call still in work.
        insisting: share of failures after which the same request is sent again.
        settling: share of failures after which a rollout is finished as it is.
        repeating: share of the owner's calls that are made twice at the same time.
    """

    groups: int
    group_size: int
    at_once: int
    straggling: float
    insisting: float
    settling: float
    repeating: float


@dataclass(slots=True)
class Harness:
    """Plays every rollout of a plan.

    Attributes:
        served: what harnesses got.
        receipts: what the owner got, by rollout.
        groups: what the owner got, by group.
        finishes: how each rollout was finished, to be repeated.
        done: rollouts that have a receipt.
    """

    mesh: Mesh
    judge: Judge
    life: Life
    plan: Plan
    seed: int
    served: list[ServedCall] = field(default_factory=list)
    receipts: dict[str, receipt_pb2.Receipt] = field(default_factory=dict)
    groups: dict[str, pb.FinalizeGroupResponse] = field(default_factory=dict)
    finishes: dict[str, Callable[[], Awaitable[receipt_pb2.Receipt]]] = field(default_factory=dict)
    failures: int = 0
    gateway: GatewayClient = field(init=False)
    admission: AdmissionClient = field(init=False)
    ledger: LedgerClient = field(init=False)
    finalizer: FinalizerClient = field(init=False)
    owner: RolloutOwner = field(init=False)
    chance: random.Random = field(init=False)
    places: asyncio.Semaphore = field(init=False)
    stragglers: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        mesh, life = self.mesh, self.life
        self.gateway = mesh.gateway_of(life)
        self.admission = mesh.admission_of(life)
        self.ledger = mesh.ledger_of(life)
        self.finalizer = mesh.finalizer_of(life)
        self.owner = RolloutOwner(
            self.admission, self.ledger, self.finalizer, "", settle_wait_s=SETTLE_S
        )
        self.chance = random.Random(f"harness {self.seed}")
        self.places = asyncio.Semaphore(self.plan.at_once)

    @property
    def rollout_count(self) -> int:
        return self.plan.groups * self.plan.group_size

    async def run(self) -> None:
        """Play everything; return when each group has its position."""
        await asyncio.gather(*(self._group(f"g{number}") for number in range(self.plan.groups)))

    async def _group(self, group_id: str) -> None:
        size = self.plan.group_size
        await asyncio.gather(*(self._placed(group_id, slot) for slot in range(size)))
        self.groups[group_id] = await self.publish(group_id)

    async def publish(self, group_id: str) -> pb.FinalizeGroupResponse:
        """Publish a group, until it is."""
        return await self.repeated(lambda: self.owner.publish(group_id, self.plan.group_size))

    async def _placed(self, group_id: str, slot: int) -> None:
        async with self.places:
            await Rollout(self, group_id, slot).play()

    async def patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer; a refusal without a delay is one."""
        while True:
            try:
                return await ask()
            except UnavailableError:
                await asyncio.sleep(self.chance.uniform(0.01, 0.3))
            except RefusedError as error:
                if error.retry_after_ms is None:
                    raise
                await asyncio.sleep(error.retry_after_ms / 1000)

    async def repeated(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask, at times twice at once: both answers must be the same (P5)."""
        if self.chance.random() >= self.plan.repeating:
            return await self.patiently(ask)
        first, second = await asyncio.gather(self.patiently(ask), self.patiently(ask))
        self.judge.demand(first == second, "P5 same request, same answer", first, second)
        return first

    async def finish(
        self, rollout: OpenRollout, outcome: Outcome, group_id: str, slot: int
    ) -> receipt_pb2.Receipt:
        """Finish a rollout, until it is."""

        def ask() -> Awaitable[receipt_pb2.Receipt]:
            return self.owner.finish(rollout, outcome, group_id=group_id, slot=slot)

        self.finishes[rollout.rollout_id] = lambda: self.patiently(ask)
        return await self.repeated(ask)


class Rollout:
    """One rollout: attempts until one goes through, or its owner has had enough."""

    def __init__(self, harness: Harness, group_id: str, slot: int) -> None:
        self._harness = harness
        self._group_id, self._slot = group_id, slot
        self._id = f"{group_id}-r{slot}"
        self._chance = random.Random(f"{harness.seed} {self._id}")
        self._last_response: str | None = None
        self._answered: list[str] = []
        self._capture_key = ""
        self._messages: Messages = []

    async def play(self) -> None:
        harness = self._harness
        attempt: attempt_pb2.Attempt | None = None
        for number in itertools.count():
            request_id = str(uuid.UUID(int=self._chance.getrandbits(128), version=4))
            before = attempt
            attempt = await self._restore(before, request_id) if before else None
            restored = attempt is not None
            if attempt is None:
                request_id = str(uuid.UUID(int=self._chance.getrandbits(128), version=4))
                attempt = await self._open(request_id)
            if before is not None and self._chance.random() < 0.15:
                await self._finish_stale(before)
            goes_on = await self._attempt(attempt.capture_key, number, restored=restored)
            if not goes_on:
                break
        assert attempt is not None
        rollout = OpenRollout(self._id, attempt, "")
        outcome = Outcome(
            self._chance.random(),
            declared_response_id=self._last_response,
            selection=self._selection(),
        )
        receipt = await harness.finish(rollout, outcome, self._group_id, self._slot)
        harness.receipts[self._id] = receipt

    def _selection(self) -> selection_pb2.Selection | None:
        """Select what was answered, in forest mode; at times leave it to the policy."""
        if not self._harness.mesh.forest or self._chance.random() < 0.5:
            return None
        terminal = (self._last_response or "").removeprefix("chatcmpl-")
        return selection_pb2.Selection(call_ids=self._answered, terminal_call_id=terminal)

    async def _open(self, request_id: str) -> attempt_pb2.Attempt:
        admission = self._harness.admission
        return await self._harness.patiently(
            lambda: admission.open_attempt(self._id, request_id=request_id)
        )

    async def _restore(
        self, before: attempt_pb2.Attempt, request_id: str
    ) -> attempt_pb2.Attempt | None:
        """At times go on from the last answer instead of beginning anew; None when that cannot be.

        What was answered without a record cannot be named, and what failed is not restored.
        """
        harness, answered = self._harness, list(self._answered)
        if not answered or self._chance.random() < 0.3:
            return None
        point = restore_point(before, answered)
        try:
            attempt = await harness.repeated(
                lambda: harness.admission.restore_attempt(
                    self._id, request_id=request_id, point=point
                )
            )
        except RefusedError as error:
            fault = error.metadata.get("fault", "")
            known = fault in ("capture_poisoned", "call_not_restorable")
            harness.judge.demand(known, "a restore is refused for a reason", self._id, error)
            harness.judge.counts["restores refused"] += 1
            return None
        harness.judge.demand(
            attempt.restored_count >= len(set(answered)), "all that was named is restored", self._id
        )
        harness.judge.counts["restores"] += 1
        return attempt

    async def _finish_stale(self, attempt: attempt_pb2.Attempt) -> None:
        """Be an owner that slept: finish an attempt that another one has followed."""
        harness = self._harness
        sealed = await harness.patiently(lambda: harness.ledger.seal(attempt.capture_key))
        request = pb.FinalizeRolloutRequest(
            group_id=self._group_id,
            rollout_id=self._id,
            slot=self._slot,
            capture_key=attempt.capture_key,
            epoch=sealed.epoch,
            revision=sealed.revision,
            reward=1.0,
        )
        try:
            await harness.patiently(lambda: harness.finalizer.finalize_rollout(request))
        except RefusedError:
            harness.judge.counts["stale finishes refused"] += 1
        else:
            harness.judge.wrong("a superseded attempt is never finished", attempt.capture_key)

    async def _attempt(self, capture_key: str, number: int, *, restored: bool) -> bool:
        """Play one attempt; say whether another one must follow."""
        self._capture_key = capture_key
        if not restored:
            self._last_response, self._answered = None, []
            self._messages = [{"role": "user", "content": f"{capture_key} begins"}]
        messages = self._messages
        for turn in range(self._chance.randint(1, 5)):
            if self._chance.random() < 0.2:
                self._aside(capture_key, messages, turn)
            answer = await self._turn(capture_key, messages)
            if answer is None:
                settles = self._chance.random() < self._harness.plan.settling
                if self._harness.mesh.forest and self._last_response is None:
                    return True  # there is nothing to select, and so nothing to finish
                return not settles and number < ATTEMPTS_MOST - 1
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": f"turn {turn}: go on"})
        if self._chance.random() < self._harness.plan.straggling:
            self._aside(capture_key, messages, -1)
            await asyncio.sleep(self._chance.uniform(0, 0.05))
        return False

    def _aside(self, capture_key: str, messages: Messages, turn: int) -> None:
        """Ask something else beside the conversation, as a helping agent would; do not wait."""
        asked = [*messages, {"role": "user", "content": f"aside at {turn}"}]
        self._harness.stragglers.append(asyncio.ensure_future(self._ask_aside(capture_key, asked)))

    async def _ask_aside(self, capture_key: str, messages: Messages) -> None:
        await self._ask(capture_key, messages, self._body(messages))

    async def _turn(self, capture_key: str, messages: Messages) -> str | None:
        """Get the next answer; None when it cannot be had in this attempt.

        Half of the requests have a key, and are repeated as they are.
        """
        is_keyed = self._chance.random() < 0.5
        key = f"{self._chance.getrandbits(128):032x}" if is_keyed else ""
        body = self._body(messages)
        while True:
            answer = await self._ask(capture_key, messages, body, key)
            if answer is not None:
                self._last_response = answer[1]
                return answer[0]
            if self._chance.random() >= self._harness.plan.insisting:
                return None
            await asyncio.sleep(self._chance.uniform(0.01, 0.5))
            if not key:
                body = self._body(messages)

    def _body(self, messages: Messages) -> bytes:
        seed = self._chance.getrandbits(31)
        request = {"model": "scripted", "messages": messages, "seed": seed}
        return json.dumps(request).encode()

    async def _repeat(
        self, capture_key: str, body: bytes, key: str, served: gateway_pb.ServedCompletion
    ) -> None:
        """Ask again what was answered: a call that has a record is answered alike (P5)."""
        harness = self._harness
        try:
            again = await harness.gateway.complete(
                capture_key, body, idempotency_key=key, timeout_s=5.0
            )
        except CallforestError:
            return
        call = harness.judge.attempts[capture_key].calls[served.call_id]
        same = (again.call_id, again.response) == (served.call_id, served.response)
        harness.judge.demand(same or not call.record, "P5 same request, same answer", key)
        harness.judge.counts["repeats answered"] += 1

    async def _ask(
        self, capture_key: str, messages: Messages, body: bytes, key: str = ""
    ) -> tuple[str, str] | None:
        """Make one call; give the answer and its response id."""
        harness = self._harness
        harness.judge.asked(body, messages)
        patience_s = self._chance.choice((0.2, 2.0, 25.0, 25.0, 25.0))
        try:
            served = await harness.gateway.complete(
                capture_key, body, idempotency_key=key, timeout_s=patience_s
            )
        except CallforestError:
            harness.failures += 1
            return None
        if key and self._chance.random() < 0.3:
            await self._repeat(capture_key, body, key, served)
        response = json.loads(served.response)
        if capture_key == self._capture_key:
            self._answered.append(served.call_id)
        harness.served.append(
            ServedCall(capture_key, served.call_id, response["id"], served.response)
        )
        return response["choices"][0]["message"]["content"], response["id"]
