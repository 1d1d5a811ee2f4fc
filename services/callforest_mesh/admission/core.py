"""What admission decides by itself: how long the ledger may take, and when it is not there.

Everything else is the ledger's, decided in its own transaction, so that admission can keep no
state and cache no "open" (docs/protocol.md, section "Parties and life of a call").
"""

from __future__ import annotations

from typing import Final

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal

WAY_BACK_S: Final = 0.05
"""What is kept of a caller's time for the answer's way back."""
_ABSENT: Final = frozenset(
    {
        er.ERROR_REASON_UNSPECIFIED,
        er.ERROR_REASON_DRAINING,
        er.ERROR_REASON_ITEM_DEADLINE,
        er.ERROR_REASON_PEER_UNAVAILABLE,
    }
)


def ledger_time_s(left_s: float) -> float:
    """Give how long the ledger may take when the caller waits `left_s` more."""
    return max(left_s / 2, left_s - WAY_BACK_S)


def is_absence(reason: er.ErrorReason.ValueType) -> bool:
    """Say whether an error of the ledger means that it is not there, rather than an answer."""
    return reason in _ABSENT


def ledger_absent() -> Refusal:
    """Make the refusal of a call that cannot be judged; it must not be generated."""
    return Refusal(
        er.ERROR_REASON_PEER_UNAVAILABLE, "the ledger did not answer in time; repeat", peer="ledger"
    )
