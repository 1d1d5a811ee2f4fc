"""The trainer's side of delivery: takes groups, makes them durable, commits its cursor, dies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from callforest.capture.v1 import group_batch_pb2
from callforest_client.errors import CallforestError
from callforest_client.finalizer import FinalizerClient, RowSubscription
from tests.simulation.judge import Judge
from tests.simulation.loop import Life
from tests.simulation.mesh import Mesh

NAME = "trainer"
TRAINING = group_batch_pb2.ROW_KIND_TRAINING


@dataclass(slots=True)
class Consumer:
    """One consumer over all its lives.

    Attributes:
        trained: cursors whose groups are in its checkpoint, in order; survives its lives.
        confirmed: the highest cursor whose commit was confirmed to it.
        delivered: a group's bytes as they came first, by cursor.
        owned: how often a call's tokens had loss, over all that was trained.
    """

    mesh: Mesh
    judge: Judge
    group_size: int
    seed: int
    trained: list[int] = field(default_factory=list)
    confirmed: int = 0
    delivered: dict[int, bytes] = field(default_factory=dict)
    owned: Counter[tuple[str, str]] = field(default_factory=Counter)
    redelivered: int = 0
    life: Life | None = None
    _sleeper: tuple[RowSubscription, int] | None = None

    def start(self) -> None:
        """Begin a life, if there is none."""
        if self.life is None:
            self.life = Life("consumer")
            self.life.start(self._live(self.life))

    def kill(self) -> bool:
        """End its life; say whether there was one."""
        life, self.life, self._sleeper = self.life, None, None
        if life is None:
            return False
        life.kill()
        self.mesh.network.lost_life(life)
        return True

    async def _live(self, life: Life) -> None:
        chance = random.Random(f"{self.seed} {self.mesh.network.loop.now}")
        client = self.mesh.finalizer_of(life)
        while True:
            try:
                await self._subscribe(client, chance)
            except CallforestError:
                await asyncio.sleep(chance.uniform(0.05, 0.5))

    async def _subscribe(self, client: FinalizerClient, chance: random.Random) -> None:
        known = self._trained_to
        after = known if chance.random() < 0.5 else None
        confirmed = self.confirmed
        subscription = client.subscribe(NAME, after_cursor=after)
        try:
            await subscription.credit(chance.randint(1, 3))
            expected = None if after is None else after + 1
            async for batch in subscription:
                await self._wake_sleeper()
                if expected is None:
                    expected = batch.cursor
                    behind = batch.cursor <= known + 1
                    self.judge.demand(behind, "no position is skipped", batch.cursor, known)
                in_order = batch.cursor == expected and batch.cursor > confirmed
                self.judge.demand(in_order, "groups come in order", batch.cursor, expected)
                expected += 1
                if (
                    self._sleeper is None
                    and batch.cursor > self._trained_to
                    and self._dozes(chance)
                ):
                    self._sleeper = (subscription, batch.cursor)
                    return
                await self._take(batch, subscription, chance)
        finally:
            if self._sleeper is None or self._sleeper[0] is not subscription:
                await subscription.close()

    async def _wake_sleeper(self) -> None:
        """Let a consumer go on that slept while this one subscribed: it must not commit."""
        if self._sleeper is None:
            return
        (subscription, cursor), self._sleeper = self._sleeper, None
        try:
            await subscription.commit(cursor, timeout_s=8.0)
        except CallforestError:
            self.judge.counts["stale commits refused"] += 1
        else:
            self.judge.wrong("a superseded consumer commits nothing", cursor)
        await subscription.close()

    @property
    def _trained_to(self) -> int:
        return self.trained[-1] if self.trained else 0

    @staticmethod
    def _dozes(chance: random.Random) -> bool:
        return chance.random() < 0.1

    async def _take(
        self,
        batch: group_batch_pb2.GroupBatch,
        subscription: RowSubscription,
        chance: random.Random,
    ) -> None:
        raw = batch.SerializeToString(deterministic=True)
        self.redelivered += batch.cursor in self.delivered
        same = self.delivered.setdefault(batch.cursor, raw) == raw
        self.judge.demand(same, "P5 a group comes again byte for byte", batch.cursor)
        if batch.cursor > self._trained_to:
            await asyncio.sleep(chance.uniform(0, 0.2))
            self._train(batch)
        await subscription.credit(1)
        if chance.random() < 0.7:
            await subscription.commit(batch.cursor, timeout_s=8.0)
            self.confirmed = max(self.confirmed, batch.cursor)

    def _train(self, batch: group_batch_pb2.GroupBatch) -> None:
        """Hold a group against the model, and take it into the checkpoint."""
        where = (batch.group_id, batch.cursor)
        self.trained.append(batch.cursor)
        self.judge.counts["trained groups"] += 1
        if batch.drop_reason:
            self.judge.demand(not batch.segments, "nothing of a dropped group trains", *where)
            return
        slots = [receipt.slot for receipt in batch.receipts]
        whole = slots == list(range(self.group_size))
        self.judge.demand(whole, "FIN-4 a group is whole", *where, slots)
        masked = {receipt.slot for receipt in batch.receipts if receipt.masked}
        rows = Counter(row.slot for row in batch.rows if row.HasField("slot"))
        self.judge.demand(set(rows) == set(slots), "each rollout has a row", *where)
        for row in batch.rows:
            if row.kind == TRAINING:
                self.judge.demand(row.slot not in masked, "masked is masked", *where)
                self._train_row(batch, row)
        present = {(one.capture_key, one.call_id) for one in batch.segments}
        for receipt in batch.receipts:
            chosen = {
                (one.source_capture_key or receipt.capture_key, one.call_id)
                for one in receipt.calls
                if one.selected
            }
            self.judge.demand(chosen <= present, "every selected call trains", *where)
        for number, segment in enumerate(batch.segments):
            owner = [
                row.row_id
                for row in batch.rows
                for span in row.spans
                if span.segment_index == number and span.owns_loss
            ]
            self.judge.demand(len(owner) == 1, "P4 loss once", segment.call_id, owner)
            self.owned[segment.capture_key, segment.call_id] += 1

    def _train_row(self, batch: group_batch_pb2.GroupBatch, row: group_batch_pb2.Row) -> None:
        segments = [batch.segments[span.segment_index] for span in row.spans]
        tokens = b"".join(segment.canonical.token_ids for segment in segments)
        last = segments[-1]
        path = self.judge.paths.get((last.capture_key, last.call_id))
        self.judge.demand(tokens == path, "P7 rows are what was sampled", row.row_id)
        self.judge.counts["trained rows"] += 1

    def final_check(self, head: int) -> None:
        """Everything was trained, once."""
        every = list(range(1, head + 1))
        self.judge.demand(self.trained == every, "each group trains once", len(self.trained), head)
        twice = [call for call, count in self.owned.items() if count > 1]
        self.judge.demand(not twice, "P4 loss once over all groups", twice[:3])
