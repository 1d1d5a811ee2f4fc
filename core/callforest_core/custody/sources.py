"""Where the calls of a restored attempt are staged: each under its owner, an earlier attempt.

No digest covers who a call's owner or its parent's owner is said to be, so all that is said must
fit together (docs/protocol.md, "Restored attempts").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from callforest_core.custody.attempts import is_earlier_attempt
from callforest_core.custody.call import CallIdentity, CallRecord


def source_fault(
    capture_key: str, records: Mapping[str, CallRecord], identities: Sequence[CallIdentity]
) -> tuple[str, str] | None:
    """Give the first call whose sources do not fit, and why; None when all do.

    An owner must be an earlier attempt of the rollout and not later than the owner of a call that
    continues it; ledger row and staged call must name the parent's owner.

    Args:
        capture_key: the attempt.
        records: its ledger rows by call, each with its parent's row.
        identities: of the staged calls, one a row in the same order.
    """
    known: dict[tuple[str, str], bool] = {}

    def is_earlier(first: str, second: str) -> bool:
        if (first, second) not in known:
            known[first, second] = is_earlier_attempt(first, second)
        return known[first, second]

    for (call_id, record), identity in zip(records.items(), identities, strict=True):
        owner = record.owner_in(capture_key)
        if owner != capture_key and not is_earlier(owner, capture_key):
            return call_id, f"its owner {owner} is no earlier attempt of {capture_key}"
        if record.parent_call_id is None:
            if record.parent_capture_key or identity.parent_capture_key:
                return call_id, "a root names the owner of a parent"
            continue
        parent_owner = records[record.parent_call_id].owner_in(capture_key)
        if parent_owner != owner and not is_earlier(parent_owner, owner):
            return call_id, f"it is staged under {owner}, before its parent's {parent_owner}"
        for said in (record.parent_capture_key or capture_key, identity.parent_owner):
            if said != parent_owner:
                return call_id, f"its parent is staged under {parent_owner}, not {said}"
    return None
