"""Rollouts against a mesh whose processes die: an ordinary harness, tried again when it fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import openai
from openai.types.chat import ChatCompletionMessageParam

from callforest.capture.v1 import receipt_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.errors import RefusedError, UnavailableError
from callforest_client.ledger import LedgerClient, Manifest
from callforest_client.rollout import OpenRollout, Outcome, RolloutOwner
from callforest_client.staging import StagingClient
from tests.robustness.history import History, Look, ServedCall

T = TypeVar("T")
REPEAT_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How much is played.

    Attributes:
        groups: groups of rollouts.
        group_size: rollouts of one group.
        turns: calls of one rollout.
        at_once: rollouts that are played at the same time.
        attempts_most: tries at a rollout.
        away_s: how long a service may be away.
    """

    groups: int = 25
    group_size: int = 8
    turns: int = 3
    at_once: int = 16
    attempts_most: int = 12
    away_s: float = 120.0

    @property
    def calls(self) -> int:
        """Calls that the harnesses need at least."""
        return self.groups * self.group_size * self.turns


class LoadError(Exception):
    """A rollout cannot be finished."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A rollout that has a receipt, and what it was finished with."""

    rollout: OpenRollout
    outcome: Outcome
    group_id: str
    slot: int


def group_name(number: int) -> str:
    """Name a group."""
    return f"kill-g{number}"


def rollout_name(group_id: str, slot: int) -> str:
    """Name a rollout of a group."""
    return f"{group_id}-r{slot}"


@dataclass(slots=True)
class RolloutLoad:
    """Plays groups of rollouts and writes down what was acknowledged.

    Attributes:
        options: how much.
        owner: opens, finishes and publishes.
        ledger: asked what it has of each attempt.
        staging: asked for the tokens.
        wait_gateway: returns when harnesses can be served again.
        history: what was acknowledged.
        finished: by rollout.
        attempts: capture keys in the order in which they were opened.
    """

    options: LoadOptions
    owner: RolloutOwner
    ledger: LedgerClient
    staging: StagingClient
    wait_gateway: Callable[[], Awaitable[None]]
    history: History = field(default_factory=History)
    finished: dict[str, Finished] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    _places: asyncio.Semaphore = field(init=False)
    _openai: openai.AsyncOpenAI = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.options.at_once)
        # No repeats of its own: a repeat without a key is another call.
        self._openai = openai.AsyncOpenAI(
            api_key="none", base_url="http://unused.invalid", max_retries=0, timeout=120.0
        )

    async def run(self) -> None:
        """Play everything; return when every group has its position."""
        async with self._openai, asyncio.TaskGroup() as tasks:
            for number in range(self.options.groups):
                tasks.create_task(self._group(group_name(number)))

    def rollout_ids(self) -> list[str]:
        """Name every rollout that is played."""
        return [
            rollout_name(group_name(number), slot)
            for number in range(self.options.groups)
            for slot in range(self.options.group_size)
        ]

    async def repeat_receipts(self) -> dict[str, receipt_pb2.Receipt]:
        """Finish every rollout once more."""
        places = asyncio.Semaphore(self.options.at_once)

        async def again(one: Finished) -> receipt_pb2.Receipt:
            async with places:
                return await self._finish(one)

        answers = await asyncio.gather(*(again(one) for one in self.finished.values()))
        return dict(zip(self.finished, answers, strict=True))

    async def repeat_groups(self) -> dict[str, pb.FinalizeGroupResponse]:
        """Publish every group once more."""
        return {group_id: await self._publish(group_id) for group_id in self.history.groups}

    async def _group(self, group_id: str) -> None:
        slots = range(self.options.group_size)
        await asyncio.gather(*(self._placed(group_id, slot) for slot in slots))
        self.history.groups[group_id] = await self._publish(group_id)

    async def _placed(self, group_id: str, slot: int) -> None:
        async with self._places:
            await self._rollout(group_id, slot)

    async def _rollout(self, group_id: str, slot: int) -> None:
        """Play until an attempt goes through; then finish it."""
        rollout_id = rollout_name(group_id, slot)
        for _ in range(self.options.attempts_most):
            rollout = await self._open(rollout_id)
            self.attempts.append(rollout.capture_key)
            try:
                response_id = await self._play(rollout, group_id)
            except openai.OpenAIError:
                self.history.looks[rollout.capture_key] = await self.look(rollout.capture_key)
                await self.wait_gateway()
                continue
            break
        else:
            raise LoadError(f"{rollout_id} failed {self.options.attempts_most} times")
        outcome = self._outcome(rollout, response_id)
        one = self.finished[rollout_id] = Finished(rollout, outcome, group_id, slot)
        self.history.receipts[rollout_id] = await self._finish(one)
        self.history.looks[rollout.capture_key] = await self.look(rollout.capture_key)

    async def _open(self, rollout_id: str) -> OpenRollout:
        return await self.owner.open(rollout_id)

    def _outcome(self, rollout: OpenRollout, response_id: str) -> Outcome:
        """Say how a rollout that was played ended."""
        reward = random.Random(rollout.rollout_id).random()
        return Outcome(reward, declared_response_id=response_id)

    async def _play(self, rollout: OpenRollout, group_id: str) -> str:
        """Play the turns of a rollout; give the id of the last response."""
        client = self._openai.with_options(base_url=rollout.base_url)
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": "Say something."},
            {"role": "user", "content": f"{group_id} begins"},
        ]
        chance = random.Random(rollout.rollout_id)
        response_id = ""
        for turn in range(self.options.turns):
            raw = await client.chat.completions.with_raw_response.create(
                model="scripted", messages=messages, seed=chance.getrandbits(31)
            )
            completion = raw.parse()
            response_id = completion.id
            self.history.served.append(
                ServedCall(
                    capture_key=rollout.capture_key,
                    call_id=raw.headers["x-callforest-call-id"],
                    response_id=response_id,
                    body=raw.http_response.content,
                )
            )
            answer = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": f"turn {turn}: go on"})
        return response_id

    async def _finish(self, one: Finished) -> receipt_pb2.Receipt:
        return await self._patiently(
            lambda: self.owner.finish(
                one.rollout, one.outcome, group_id=one.group_id, slot=one.slot
            )
        )

    async def _publish(self, group_id: str) -> pb.FinalizeGroupResponse:
        return await self._patiently(lambda: self.owner.publish(group_id, self.options.group_size))

    async def rows(self, capture_key: str) -> Manifest:
        """Read an attempt's rows."""
        return await self._patiently(lambda: self.ledger.manifest(capture_key))

    async def look(self, capture_key: str) -> Look:
        """Read an attempt's rows and the tokens of its records."""
        manifest = await self.rows(capture_key)
        call_ids = [record.coords.call_id for record in manifest.records]
        found = await asyncio.gather(*(self._tokens(capture_key, one) for one in call_ids))
        return Look(manifest, {call.call_id: call for calls in found for call in calls})

    async def _tokens(self, capture_key: str, call_id: str) -> list[staged_call_pb2.StagedCall]:
        """Read a staged call; none if it is missing, which the history's check will say."""
        try:
            return await self._patiently(lambda: self.staging.fetch(capture_key, [call_id]))
        except RefusedError as error:
            if error.reason == er.ERROR_REASON_CALL_NOT_FOUND:
                return []
            raise

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask again while a service is away: every one of these may be repeated."""
        deadline = asyncio.get_running_loop().time() + self.options.away_s
        while True:
            try:
                return await ask()
            except UnavailableError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(REPEAT_S)
