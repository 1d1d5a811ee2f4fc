"""Rollouts of forest mode, played as gateway and worker would, without an engine."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Sequence
from pathlib import Path

import pytest

from callforest.capture.v1 import attempt_pb2, group_batch_pb2
from callforest_client.codec import call_record_to_proto, staged_call_to_proto
from callforest_client.errors import RefusedError
from callforest_client.source_codec import output_summary_to_proto, source_summary_to_proto
from callforest_core.custody.call import CallRecord
from callforest_core.lineage.source import EMPTY_HISTORY, output_summary
from tests.integration.finalizer_mesh import FinalizerMesh, Made, Player
from tests.unit.ledger.calls import said
from tests.unit.ledger.forest_calls import FOREST, RENDER, decided, forest_intent
from tests.unit.staging.calls import COMPLETION


class ForestPlayer(Player):
    """Plays a rollout of forest mode.

    Attributes:
        tick_s: by how much the gateway's clock moves on with each call.
    """

    tick_s = 1

    async def open(self) -> attempt_pb2.Attempt:
        attempt = await self._mesh.admission.open_attempt(
            self.rollout_id, request_id=str(uuid.uuid4()), mode=FOREST
        )
        self.key = attempt.capture_key
        return attempt

    async def stage(self, call_id: str, parent: str | None = None, *, tokens: int = 6) -> Made:
        made = self._complete(call_id, parent, tokens)
        asked = forest_intent(call_id, made.items, key=self.key)
        asked.admit_time.FromSeconds(1_700_000_000 + self.tick_s * len(self.made))
        verdict = await self._mesh.admission.admit(asked)
        if parent is None:
            assert verdict.HasField("root"), verdict
        else:
            assert verdict.continuation.parent_call_id == parent, verdict
            owner = verdict.continuation.parent_capture_key
            assert owner == made.call.identity.parent_capture_key
        response = json.dumps({"id": f"chatcmpl-{call_id}"}).encode()
        await self._mesh.staging.stage(staged_call_to_proto(made.call, response, COMPLETION))
        return made

    async def commit(self, call_id: str, *, finish: str = "stop") -> None:
        """Commit a call that was staged."""
        await self._mesh.ledger.record(self._record(self.made[call_id], finish))

    async def admit(self, call_id: str) -> None:
        items = [{"role": "user", "content": call_id}]
        await self._mesh.admission.admit(forest_intent(call_id, items, key=self.key))

    def answer(self, call_id: str) -> dict[str, object]:
        """What a call said, as a Responses item with its native id."""
        part = {"type": "output_text", "text": self.made[call_id].answer}
        own = {"id": f"msg_{call_id}", "type": "message", "role": "assistant"}
        return {**own, "content": [part]}

    def result(self, *accepted: str) -> bytes:
        """The harness's result: the accepted answers, one response after the other."""
        output = [self.answer(call_id) for call_id in accepted]
        return json.dumps({"response": {"output": output}}).encode()

    def _record(self, made: Made, finish: str):
        served = [said(made.answer)]
        identity = made.call.identity
        place = 1 + list(self.made).index(identity.call_id)
        record = CallRecord.of(
            made.call,
            f"chatcmpl-{identity.call_id}",
            admitted_at=1_700_000_000.0 + self.tick_s * place,
            finish_reason=finish,
            status="completed" if finish != "length" else "incomplete",
        )
        message = call_record_to_proto(record, self.key, generation_len=made.call.generation_len)
        history = EMPTY_HISTORY.extended(made.items).extended(served)
        message.replay.CopyFrom(source_summary_to_proto(history.summary(RENDER)))
        message.output.CopyFrom(output_summary_to_proto(output_summary(served)))
        message.decision.CopyFrom(decided(spliced=identity.parent_call_id is not None))
        return message


async def play(player: ForestPlayer, *calls: tuple[str, str | None]) -> None:
    """Open an attempt and play calls, each with its parent."""
    await player.open()
    for call_id, parent in calls:
        await player.call(call_id, parent)


def chain(names: Sequence[str]) -> list[tuple[str, str | None]]:
    """Calls each of which continues the one before it."""
    return list(zip(names, [None, *names], strict=False))


async def opened(folder: Path, **options: object) -> FinalizerMesh:
    mesh = FinalizerMesh(folder, "local", **options)
    await mesh.start()
    return mesh


async def refused(asked: Awaitable[object]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await asked
    return caught.value


def paths(batch: group_batch_pb2.GroupBatch, slot: int | None = None) -> list[list[str]]:
    return [
        [batch.segments[span.segment_index].call_id for span in row.spans]
        for row in batch.rows
        if slot is None or (row.HasField("slot") and row.slot == slot)
    ]


def owned(batch: group_batch_pb2.GroupBatch, slot: int) -> list[str]:
    return [
        batch.segments[span.segment_index].call_id
        for row in batch.rows
        if row.HasField("slot") and row.slot == slot
        for span in row.spans
        if span.owns_loss
    ]
