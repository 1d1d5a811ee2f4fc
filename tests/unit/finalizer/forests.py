"""Whole groups of forest mode, from staged calls to the delivered batch, without a service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from callforest.capture.v1 import attempt_pb2, completion_pb2, group_batch_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest_client.codec import staged_call_to_proto
from callforest_core.custody.call import CallIdentity, CallRecord, StagedCall
from callforest_core.custody.completion import complete_call
from callforest_core.custody.tokens import TokenIds
from callforest_core.forest.reconstruction import Forest
from callforest_mesh.finalizer import core, forest, groups
from callforest_mesh.finalizer.policies import resolve_policy
from tests.unit.finalizer.rollouts import evidence, request, sealed

FOREST = attempt_pb2.CAPTURE_MODE_FOREST
POLICY = resolve_policy("returned_history")
COMPLETION = completion_pb2.Completion(
    status=completion_pb2.COMPLETION_STATUS_COMPLETED, finish_reason="stop"
)


class Grown:
    """The calls of one rollout; every token of it is another one.

    Args:
        rollout_id: names the rollout and its first attempt.
        slot: its place in the group.
    """

    def __init__(self, rollout_id: str, slot: int) -> None:
        self.rollout_id = rollout_id
        self.slot = slot
        self.key = rollout_id
        self.calls: dict[str, StagedCall] = {}
        self.paths: dict[str, TokenIds] = {}
        self._next = 1_000_000 * (slot + 1)

    def goes_on_in(self, capture_key: str) -> None:
        """Have later calls be those of an attempt that restored the present ones."""
        self.key = capture_key

    def call(self, call_id: str, parent: str | None = None, *, carry: int = 2, gen: int = 3) -> str:
        before = self.paths[parent] if parent else np.empty(0, np.uint32)
        delta = np.arange(self._next, self._next + carry + gen, dtype=np.uint32)
        self._next += carry + gen
        self.calls[call_id] = complete_call(
            self._identity(call_id, parent),
            prefix=before if parent else None,
            parent_chain_hash=self.calls[parent].chain_hash if parent else None,
            prompt_ids=np.concatenate((before, delta[:carry])),
            generated_ids=delta[carry:],
            logprobs=np.linspace(-2, -0.1, gen, dtype=np.float32),
            weight_version=1,
        )
        self.paths[call_id] = np.concatenate((before, delta))
        return call_id

    def _identity(self, call_id: str, parent: str | None) -> CallIdentity:
        owner = self.calls[parent].identity.capture_key if parent else self.key
        return CallIdentity(self.key, call_id, parent, "" if owner == self.key else owner)

    def chain(self, *names: str, parent: str | None = None) -> list[str]:
        for name in names:
            parent = self.call(name, parent)
        return list(names)

    def records(self, order: Sequence[str] | None = None) -> tuple[CallRecord, ...]:
        """The manifest, in the order in which the calls became durable."""
        announced = {call_id: float(place) for place, call_id in enumerate(self.calls)}
        made = []
        for name in order or list(self.calls):
            identity = self.calls[name].identity
            record = replace(
                CallRecord.of(self.calls[name], f"chatcmpl-{name}", status="completed"),
                finish_reason="stop",
                admitted_at=announced[name],
            )
            if identity.capture_key != self.key:
                owner = identity.parent_owner if identity.parent_call_id else ""
                record = replace(
                    record, source_capture_key=identity.capture_key, parent_capture_key=owner
                )
            made.append(record)
        return tuple(made)

    def finalized(
        self,
        selection: Sequence[str],
        *,
        scored: str | None = None,
        order: Sequence[str] | None = None,
        mask: str = "",
        reward: float = 1.0,
    ) -> row_log_pb2.FinalizedRollout:
        """What the finalizer keeps of the rollout with this selection."""
        records = self.records(order)
        asked = request(
            rollout_id=self.rollout_id,
            capture_key=self.key,
            slot=self.slot,
            reward=reward,
            selection={"call_ids": selection, "terminal_call_id": scored or selection[-1]},
        )
        attempt = sealed(rollout_id=self.rollout_id, capture_key=self.key, mode=FOREST)
        given = evidence(attempt, records)
        choice = forest.choose(asked, records, POLICY)
        calls = [self.calls[record.call_id] for record in records]
        grown = forest.verify(self.key, records, choice, calls)
        assert isinstance(grown, Forest), grown
        masked = core.Mask(mask) if mask else forest.mask_of_selection(given, choice.selection)
        made = row_log_pb2.FinalizedRollout(
            receipt=forest.make_receipt(asked, given, choice, grown, masked)
        )
        for row in grown.rows if masked is None else ():
            made.paths.add(call_ids=row.line.call_ids)
        return made


def batch_of(
    rollouts: Sequence[tuple[Grown, row_log_pb2.FinalizedRollout]], *, row_multiple: int = 1
) -> group_batch_pb2.GroupBatch:
    """Publish and deliver a group."""
    finalized = [one for _, one in rollouts]
    logged = groups.log_group("g", finalized, row_multiple=row_multiple, abandon_reason="")
    assert not logged.drop_reason, logged.drop_reason
    logged.cursor = 1
    calls = {
        (call.identity.capture_key, name): call
        for player, _ in rollouts
        for name, call in player.calls.items()
    }
    segments = [
        staged_call_to_proto(calls[part.capture_key, part.call_id], b"", COMPLETION)
        for part in logged.segments
    ]
    return groups.make_batch(logged, [one.receipt for one in finalized], segments)
