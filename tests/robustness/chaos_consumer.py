"""Whoever stands behind a chaos run's rollouts: a consumer of rows, and a pusher of weights."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path

from callforest.capture.v1 import group_batch_pb2
from callforest_client.errors import RefusedError, UnavailableError
from callforest_client.finalizer import FinalizerClient, RowSubscription
from callforest_client.worker import WorkerClient
from tests.robustness.history import Faults
from tests.robustness.killer import until

CONSUMER = "chaos"
REACH_S = 120.0
PUSH_S = 0.5
"""Pause between two weight versions."""


@dataclass(slots=True)
class Consumer:
    """Takes groups and commits the cursor behind each, as a trainer would.

    Attributes:
        finalizer: gives the rows.
        delivered: by position, a group's name and the digest of its batch.
        batches: by position, what was delivered first.
        committed: the last position whose commit was confirmed.
        faults: what was lost or changed on the way.
    """

    finalizer: FinalizerClient
    delivered: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    batches: dict[int, group_batch_pb2.GroupBatch] = field(default_factory=dict)
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
        self.batches.setdefault(cursor, batch)
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
