"""Rollouts without end on three edges: what chaos strikes.

A slot's number says on which edge its harness speaks. Everything that is acknowledged is written
down.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import openai
from openai.types.chat import ChatCompletionMessageParam

from callforest.capture.v1 import receipt_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.errors import RefusedError
from callforest_client.gateway import GatewayClient
from callforest_client.ledger import Manifest
from callforest_client.rollout import OpenRollout
from tests.robustness.chaos_edges import (
    HarnessError,
    Question,
    Said,
    is_transient,
    over_grpc,
    over_http,
    with_events,
)
from tests.robustness.history import Faults, ServedCall
from tests.robustness.rollout_load import RolloutLoad, group_name, rollout_name

T = TypeVar("T")
Edge: TypeAlias = Callable[[OpenRollout, Question, str], Awaitable[Said]]
RESTARTS = 1
"""The slot whose harness gives its first attempt up, so that attempts are torn down too."""


@dataclass(slots=True)
class ChaosLoad(RolloutLoad):
    """Plays groups until it is told to stop; then ends those that it has begun.

    Attributes:
        gateway: the gRPC edge.
        stop: set when no more groups are to begin.
        orders: of each attempt, the calls that its harness got, in order.
        faults: what a service refused that it had acknowledged.
        repeats: how many requests were made again under their key.
        counts: how often harnesses did what only some of them do.
    """

    gateway: GatewayClient = field(kw_only=True)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    orders: dict[str, list[str]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    repeats: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _begun: int = 0

    async def run(self) -> None:
        """Play groups, `options.groups` of them at a time, until `stop` is set."""
        async with self._openai, asyncio.TaskGroup() as tasks:
            for _ in range(self.options.groups):
                tasks.create_task(self._groups())

    def rollout_ids(self) -> list[str]:
        """Name every rollout that was played."""
        return [
            rollout_name(group_name(number), slot)
            for number in range(self._begun)
            for slot in range(self.options.group_size)
        ]

    async def _groups(self) -> None:
        while not self.stop.is_set():
            number = next(self._numbers)
            self._begun = max(self._begun, number + 1)
            name = group_name(number)
            await self._unrefused(self._group(name), f"group {name}")

    async def _placed(self, group_id: str, slot: int) -> None:
        playing = RolloutLoad._placed(self, group_id, slot)
        await self._unrefused(playing, rollout_name(group_id, slot))

    async def manifests(self) -> dict[str, Manifest]:
        """Read the rows of every attempt that was opened; those that are not there are missing."""
        return await self._each(self.attempts, "attempt", self.rows)

    async def repeated_receipts(self) -> dict[str, receipt_pb2.Receipt]:
        """Finish every rollout once more; what is refused now is missing."""
        return await self._each(
            self.finished, "the receipt of", lambda name: self._finish(self.finished[name])
        )

    async def repeated_groups(self) -> dict[str, pb.FinalizeGroupResponse]:
        """Publish every group once more; what is refused now is missing."""
        return await self._each(self.history.groups, "group", self._publish)

    async def _each(
        self, names: Iterable[str], what: str, ask: Callable[[str], Awaitable[T]]
    ) -> dict[str, T]:
        """Ask for each of some names, not all at the same time; leave out what is refused."""

        async def one(name: str) -> T | None:
            async with self._places:
                return await self._unrefused(ask(name), f"{what} {name}")

        asked = list(names)
        answers = await asyncio.gather(*(one(name) for name in asked))
        return {name: told for name, told in zip(asked, answers, strict=True) if told is not None}

    async def _unrefused(self, asked: Awaitable[T], what: str) -> T | None:
        """Await what cannot be refused if nothing was lost."""
        try:
            return await asked
        except RefusedError as error:
            self.faults.lost.append(f"{what}: {error}")
            return None

    async def _play(self, rollout: OpenRollout, group_id: str) -> str:
        """Play the turns of a rollout on the edge of its slot; give the last response's id."""
        messages = opening(group_id)
        slot, edge = slot_of(rollout), self.edge(rollout)
        chance = random.Random(rollout.rollout_id)
        order = self.orders[rollout.capture_key] = []
        response_id = ""
        for turn in range(self.options.turns):
            question = Question(messages, chance.getrandbits(31))
            said = await self.keyed(partial(edge, rollout, question), new_key())
            self.note(rollout, said)
            response_id = said.response_id
            order.append(said.call_id)
            if slot == RESTARTS and rollout.attempt.attempt_number == 0:
                raise HarnessError("the harness starts over")
            messages.append({"role": "assistant", "content": said.text})
            messages.append({"role": "user", "content": f"turn {turn}: go on"})
        return response_id

    def edge(self, rollout: OpenRollout) -> Edge:
        """Give the edge on which a rollout's harness speaks."""
        edges: tuple[Edge, ...] = (
            partial(over_http, self._openai),
            partial(over_grpc, self.gateway),
            partial(with_events, self._openai),
        )
        return edges[slot_of(rollout) % len(edges)]

    def note(self, rollout: OpenRollout, said: Said) -> None:
        """Write a response down."""
        self.history.served.append(
            ServedCall(rollout.capture_key, said.call_id, said.response_id, said.body)
        )

    async def keyed(self, ask: Callable[[str], Awaitable[Said]], key: str) -> Said:
        """Make one logical request under one key, again and again until it is answered.

        Raises:
            OpenAIError: it was refused, or not answered in `options.away_s`.
        """
        deadline = asyncio.get_running_loop().time() + self.options.away_s
        while True:
            try:
                return await ask(key)
            except openai.OpenAIError as error:
                if not is_transient(error) or asyncio.get_running_loop().time() > deadline:
                    raise
            self.repeats += 1
            await self.wait_gateway()


def opening(group_id: str) -> list[ChatCompletionMessageParam]:
    """Give what every conversation of a group begins with."""
    return [
        {"role": "system", "content": "Say something."},
        {"role": "user", "content": f"{group_id} begins"},
    ]


def slot_of(rollout: OpenRollout) -> int:
    """Give the slot that a rollout's name tells."""
    return int(rollout.rollout_id.rpartition("r")[2])


def new_key() -> str:
    """Mint the key of one logical request."""
    return secrets.token_hex(16)
