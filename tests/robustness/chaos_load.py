"""Rollouts without end on three edges, a consumer and a pusher of weights: what chaos strikes.

A slot's number says on which edge its harness speaks: HTTP, gRPC, or HTTP with events, which must
be kept alive. Everything that is acknowledged is written down.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import openai
from openai.types.chat import ChatCompletionMessageParam

from callforest.capture.v1 import group_batch_pb2, receipt_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.errors import CallforestError, RefusedError, UnavailableError
from callforest_client.finalizer import FinalizerClient, RowSubscription
from callforest_client.gateway import GatewayClient
from callforest_client.ledger import Manifest
from callforest_client.rollout import OpenRollout
from callforest_client.worker import WorkerClient
from tests.robustness.history import Faults, ServedCall
from tests.robustness.killer import until
from tests.robustness.rollout_load import RolloutLoad, group_name, rollout_name

T = TypeVar("T")
CONSUMER = "chaos"
KEY_HEADER = "Idempotency-Key"
REACH_S = 120.0
RESTARTS = 1
"""The slot whose harness gives its first attempt up, so that attempts are torn down too."""
PUSH_S = 0.5
"""Pause between two weight versions."""


class HarnessError(openai.OpenAIError):
    """A harness's call failed where the SDK has no error for it: over gRPC, or within events.

    Attributes:
        is_transient: whether the same request may be answered later.
    """

    def __init__(self, what: str, *, is_transient: bool = True) -> None:
        super().__init__(what)
        self.is_transient = is_transient


@dataclass(frozen=True, slots=True)
class Said:
    """One response, whichever edge it came over.

    Attributes:
        call_id: what the edge called the call.
        response_id: what the body calls it.
        text: the assistant's message.
        body: the response byte for byte; b"" when it came as events.
    """

    call_id: str
    response_id: str
    text: str
    body: bytes


@dataclass(slots=True)
class ChaosLoad(RolloutLoad):
    """Plays groups until it is told to stop; then ends those that it has begun.

    Attributes:
        gateway: the gRPC edge.
        stop: set when no more groups are to begin.
        orders: of each attempt, the calls that its harness got, in order.
        faults: what a service refused that it had acknowledged.
        repeats: how many requests were made again under their key.
    """

    gateway: GatewayClient = field(kw_only=True)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    orders: dict[str, list[str]] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    repeats: int = 0
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
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": "Say something."},
            {"role": "user", "content": f"{group_id} begins"},
        ]
        edges = (self._over_http, self._over_grpc, self._with_events)
        slot = int(rollout.rollout_id.rpartition("r")[2])
        edge = edges[slot % len(edges)]
        chance = random.Random(rollout.rollout_id)
        order = self.orders[rollout.capture_key] = []
        response_id = ""
        for turn in range(self.options.turns):
            seed = chance.getrandbits(31)
            said = await self._keyed(partial(edge, rollout, messages, seed))
            response_id = said.response_id
            order.append(said.call_id)
            self.history.served.append(
                ServedCall(rollout.capture_key, said.call_id, response_id, said.body)
            )
            if slot == RESTARTS and rollout.attempt.attempt_number == 0:
                raise HarnessError("the harness starts over")
            messages.append({"role": "assistant", "content": said.text})
            messages.append({"role": "user", "content": f"turn {turn}: go on"})
        return response_id

    async def _keyed(self, ask: Callable[[str], Awaitable[Said]]) -> Said:
        """Make one logical request under one key, again and again until it is answered.

        Raises:
            OpenAIError: it was refused, or not answered in `options.away_s`.
        """
        key = secrets.token_hex(16)
        deadline = asyncio.get_running_loop().time() + self.options.away_s
        while True:
            try:
                return await ask(key)
            except openai.OpenAIError as error:
                if not _is_transient(error) or asyncio.get_running_loop().time() > deadline:
                    raise
            self.repeats += 1
            await self.wait_gateway()

    async def _over_http(
        self,
        rollout: OpenRollout,
        messages: Sequence[ChatCompletionMessageParam],
        seed: int,
        key: str,
    ) -> Said:
        client = self._openai.with_options(base_url=rollout.base_url)
        raw = await client.chat.completions.with_raw_response.create(
            model="scripted", messages=messages, seed=seed, extra_headers={KEY_HEADER: key}
        )
        completion = raw.parse()
        text = completion.choices[0].message.content or ""
        call_id = raw.headers["x-callforest-call-id"]
        return Said(call_id, completion.id, text, raw.http_response.content)

    async def _with_events(
        self,
        rollout: OpenRollout,
        messages: Sequence[ChatCompletionMessageParam],
        seed: int,
        key: str,
    ) -> Said:
        client = self._openai.with_options(base_url=rollout.base_url)
        raw = await client.chat.completions.with_raw_response.create(
            model="scripted",
            messages=messages,
            seed=seed,
            stream=True,
            extra_headers={KEY_HEADER: key},
        )
        response_id, text, finished = "", "", False
        try:
            async for chunk in raw.parse():
                response_id = chunk.id
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finished = finished or choice.finish_reason is not None
        except Exception as error:
            raise HarnessError(f"the events broke off: {error!r}") from error
        if not finished:
            raise HarnessError("the events ended before the response")
        return Said(raw.headers["x-callforest-call-id"], response_id, text, b"")

    async def _over_grpc(
        self,
        rollout: OpenRollout,
        messages: Sequence[ChatCompletionMessageParam],
        seed: int,
        key: str,
    ) -> Said:
        body = json.dumps({"model": "scripted", "messages": list(messages), "seed": seed})
        try:
            served = await self.gateway.complete(
                rollout.capture_key, body.encode(), idempotency_key=key
            )
        except CallforestError as error:
            transient = isinstance(error, UnavailableError) or error.retry_after_ms is not None
            raise HarnessError(str(error), is_transient=transient) from error
        completion = json.loads(served.response)
        text = completion["choices"][0]["message"]["content"] or ""
        return Said(served.call_id, completion["id"], text, served.response)


def _is_transient(error: openai.OpenAIError) -> bool:
    """Say whether the same request may be answered later."""
    if isinstance(error, HarnessError):
        return error.is_transient
    if isinstance(error, openai.APIStatusError):
        return error.status_code >= 500 or error.status_code == 429
    return isinstance(error, openai.APIConnectionError)


@dataclass(slots=True)
class Consumer:
    """Takes groups and commits the cursor behind each, as a trainer would.

    Attributes:
        finalizer: gives the rows.
        delivered: by position, a group's name and the digest of its batch.
        committed: the last position whose commit was confirmed.
        faults: what was lost or changed on the way.
    """

    finalizer: FinalizerClient
    delivered: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    committed: int = 0
    faults: Faults = field(default_factory=Faults)
    _asked: int = 0

    async def run(self) -> None:
        """Consume until cancelled, over as many subscriptions as it takes."""
        while True:
            subscription = self.finalizer.subscribe(CONSUMER)
            try:
                await self._consume(subscription)
            except UnavailableError:
                await asyncio.sleep(0.05)  # the finalizer was killed: subscribe to the next one
            except RefusedError as error:
                if error.retry_after_ms is None:
                    raise
                await asyncio.sleep(error.retry_after_ms / 1000)
            finally:
                await subscription.close()

    async def _consume(self, subscription: RowSubscription) -> None:
        await subscription.credit(2)
        before = 0
        async for batch in subscription:
            self.take(batch, before)
            before = batch.cursor
            self._asked = batch.cursor
            await subscription.commit(batch.cursor)
            self.committed = batch.cursor
            await subscription.credit(1)

    def take(self, batch: group_batch_pb2.GroupBatch, before: int) -> None:
        """Write a group down.

        Args:
            batch: the group.
            before: the position that this subscription delivered before; 0 at its beginning.
        """
        cursor = batch.cursor
        if cursor <= self.committed:
            self.faults.lost.append(f"the commit of position {self.committed}")
        if cursor > (before or self._asked) + 1:
            self.faults.lost.append(f"the delivery of position {cursor - 1}")
        if batch.drop_reason:
            self.faults.lost.append(f"the rows of {batch.group_id}: {batch.drop_reason}")
        told = (
            batch.group_id,
            hashlib.sha256(batch.SerializeToString(deterministic=True)).digest(),
        )
        if self.delivered.setdefault(cursor, told) != told:
            self.faults.changed.append(f"the group at position {cursor}")

    async def reach(self, cursor: int) -> None:
        """Wait until a position was consumed and its commit confirmed."""
        await until(
            lambda: self.committed >= cursor or None, REACH_S, f"position {cursor} is consumed"
        )


@dataclass(slots=True)
class Pusher:
    """Pushes weights to the worker; the scripted engine takes any.

    Attributes:
        worker: takes them.
        directory: where the files are.
        acknowledged: the last version that the worker said serves.
        faults: what was lost.
    """

    worker: WorkerClient
    directory: Path
    acknowledged: int = 0
    faults: Faults = field(default_factory=Faults)

    async def run(self) -> None:
        """Push a version after the other until cancelled."""
        self.directory.mkdir()
        for version in itertools.count(1):
            file = self.directory / f"version-{version}"
            file.write_bytes(b"weights %d" % version)
            while self.acknowledged < version:
                await self._push(file, version)
                await asyncio.sleep(PUSH_S)

    async def _push(self, file: Path, version: int) -> None:
        digest = hashlib.sha256(file.read_bytes()).digest()
        try:
            served = (await self.worker.describe()).weight_version
            if served < self.acknowledged:
                self.faults.lost.append(f"weight version {self.acknowledged}; {served} serves")
            self.acknowledged = await self.worker.update_weights(str(file), version, digest)
        except UnavailableError:
            return  # the worker was killed: once more
        except RefusedError as error:
            if error.retry_after_ms is None:
                raise
