"""Honest attempts for the custody tests, and edits of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from callforest_core.custody.call import CallIdentity, CallRecord, Receipt, StagedCall
from callforest_core.custody.completion import complete_call

KEY = "rollout-1"


@dataclass(frozen=True)
class Turn:
    """One call to make: whom it continues, what it carries, what is sampled."""

    call_id: str
    parent: str | None
    carry: Sequence[int]
    generated: Sequence[int]
    weight_version: int = 7


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


class Attempt:
    """Calls of one attempt, completed one after the other."""

    def __init__(self, *turns: Turn) -> None:
        self.calls: dict[str, StagedCall] = {}
        self.paths: dict[str, np.ndarray] = {}
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn) -> StagedCall:
        parent = None if turn.parent is None else self.calls[turn.parent]
        prefix = None if turn.parent is None else self.paths[turn.parent]
        prompt = np.concatenate((ids() if prefix is None else prefix, ids(*turn.carry)))
        call = complete_call(
            CallIdentity(KEY, turn.call_id, turn.parent),
            prefix=prefix,
            parent_chain_hash=None if parent is None else parent.chain_hash,
            prompt_ids=prompt,
            generated_ids=ids(*turn.generated),
            logprobs=[-0.25 * (position + 1) for position in range(len(turn.generated))],
            weight_version=turn.weight_version,
        )
        self.calls[turn.call_id] = call
        self.paths[turn.call_id] = np.concatenate((prompt, ids(*turn.generated)))
        return call

    def staged(self) -> list[StagedCall]:
        return list(self.calls.values())

    def receipt(self, terminal: str | None) -> Receipt:
        return receipt_of(self.staged(), terminal)


def receipt_of(calls: Sequence[StagedCall], terminal: str | None) -> Receipt:
    records = tuple(CallRecord.of(call, f"resp-{call.identity.call_id}") for call in calls)
    return Receipt(KEY, records, terminal, terminal_selection="declared")


def branching() -> Attempt:
    """c1 has an abandoned retry c2 and a continuation c3, which c4 continues; r is another root."""
    return Attempt(
        Turn("c1", None, [1, 2, 3], [10, 11]),
        Turn("c2", "c1", [4], [12, 13]),
        Turn("c3", "c1", [4], [14], weight_version=8),
        Turn("r", None, [5, 6], [15]),
        Turn("c4", "c3", [7, 8], [16, 17, 18], weight_version=9),
    )
