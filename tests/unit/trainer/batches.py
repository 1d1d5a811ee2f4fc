"""Published groups as the trainer gets them, built call by call."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from callforest.capture.v1 import group_batch_pb2, staged_call_pb2
from callforest_core.custody.extras import EMPTY_EXTRAS

TRAINING = group_batch_pb2.ROW_KIND_TRAINING
PLACEHOLDER = group_batch_pb2.ROW_KIND_PLACEHOLDER
PADDING = group_batch_pb2.ROW_KIND_PADDING


@dataclass
class Call:
    """A call of a rollout: whom it continues, its carry, what was sampled."""

    call_id: str
    carry: Sequence[int]
    generated: Sequence[int]
    parent: str | None = None
    prev: int = 0


@dataclass
class Rollout:
    """A logical rollout; masked when it has a reason."""

    rollout_id: str
    reward: float
    calls: Sequence[Call] = ()
    mask: str = ""
    cause: str = ""
    paths: Sequence[Sequence[str]] = field(default_factory=list)


def staged(rollout_id: str, call: Call) -> staged_call_pb2.StagedCall:
    message = staged_call_pb2.StagedCall(
        extras=EMPTY_EXTRAS,
        capture_key=rollout_id,
        call_id=call.call_id,
        parent_call_id=call.parent,
        prev_token_count=call.prev,
        digest=call.call_id.encode().ljust(32, b"."),
    )
    ids = np.array([*call.carry, *call.generated], "<u4")
    message.canonical.carry_token_count = len(call.carry)
    message.canonical.token_ids = ids.tobytes()
    message.canonical.logprobs = np.array(
        [-token / 100 for token in call.generated], "<f4"
    ).tobytes()
    return message


def make_batch(
    cursor: int, *rollouts: Rollout, group_id: str = "", padding: int = 0, heuristic: float = 0.0
) -> group_batch_pb2.GroupBatch:
    """A group in which each path of a rollout is a row."""
    batch = group_batch_pb2.GroupBatch(
        cursor=cursor, group_id=group_id or f"g{cursor}", heuristic_fraction=heuristic
    )
    places: dict[tuple[str, str], int] = {}
    for slot, rollout in enumerate(rollouts):
        receipt = batch.receipts.add(
            group_id=batch.group_id,
            rollout_id=rollout.rollout_id,
            slot=slot,
            capture_key=rollout.rollout_id,
            reward=rollout.reward,
            masked=bool(rollout.mask),
            mask_reason=rollout.mask,
            mask_cause=rollout.cause,
        )
        for call in rollout.calls:
            places[rollout.rollout_id, call.call_id] = len(batch.segments)
            batch.segments.append(staged(rollout.rollout_id, call))
            receipt.calls.add(call_id=call.call_id, digest=batch.segments[-1].digest, selected=True)
    for slot, rollout in enumerate(rollouts):
        owned: set[int] = set()
        paths = rollout.paths or [[call.call_id for call in rollout.calls]]
        for number, path in enumerate(paths if rollout.calls else []):
            row = batch.rows.add(
                row_id=f"{batch.group_id}_g{slot}_s{number}", slot=slot, kind=TRAINING
            )
            for name in path:
                place = places[rollout.rollout_id, name]
                row.spans.add(segment_index=place, owns_loss=place not in owned)
                owned.add(place)
        if not rollout.calls:
            row = batch.rows.add(row_id=f"{batch.group_id}_g{slot}_s0", slot=slot, kind=PLACEHOLDER)
            row.spans.add(segment_index=0)
    for number in range(padding):
        row = batch.rows.add(row_id=f"{batch.group_id}_pad{number}", kind=PADDING)
        row.spans.add(segment_index=0)
    return batch


def dropped(cursor: int, reason: str, *rollouts: Rollout) -> group_batch_pb2.GroupBatch:
    batch = make_batch(cursor, *rollouts)
    del batch.rows[:]
    del batch.segments[:]
    batch.drop_reason = reason
    return batch


def linear(rollout_id: str, reward: float, start: int = 10) -> Rollout:
    """A rollout of two calls in a chain: 2 carried, 2 sampled, 1 carried, 1 sampled."""
    return Rollout(
        rollout_id,
        reward,
        [
            Call("a", [start, start + 1], [start + 2, start + 3]),
            Call("b", [start + 4], [start + 5], parent="a", prev=4),
        ],
    )


def fork(rollout_id: str, reward: float) -> Rollout:
    """A rollout of a root with two children: two rows that share the root."""
    return Rollout(
        rollout_id,
        reward,
        [
            Call("a", [1], [2, 3]),
            Call("b", [4], [5, 6, 7], parent="a", prev=3),
            Call("c", [8], [9], parent="a", prev=3),
        ],
        paths=[["a", "b"], ["a", "c"]],
    )
