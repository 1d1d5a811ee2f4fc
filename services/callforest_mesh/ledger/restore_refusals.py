"""Why an attempt is not restored, each with what to do (docs/protocol.md, "Restored attempts")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.custody.restore import CAPTURE_SCHEMA
from callforest_core.refusal import Refusal

FAULTS: Final = (
    *("capture_schema", "repeat_differs", "in_use", "not_latest", "log_forgotten"),
    *("capture_poisoned", "call_not_restorable", "too_many_calls"),
)
"""Every `fault` of RESTORE_REFUSED."""
NAMED_MAX: Final = 16
"""Most calls that a refusal names."""
_ANEW: Final = (
    "begin anew: with a new attempt, and with the episode from its beginning, since an attempt"
    " without restore takes the history of a checkpoint as its prompt"
)


def foreign_schema(capture_key: str, found: int) -> Refusal:
    """Refuse a point of another capture schema; nothing is migrated (LED-10)."""
    said = f"capture schema {found}" if found else "no capture schema"
    return _refused(
        capture_key,
        "capture_schema",
        f"the restore point is of {said}; this release restores from points of capture schema"
        f" {CAPTURE_SCHEMA}, and from no staged checkpoints of version 2. It migrates nothing:"
        f" {_ANEW}",
    )


def repeat_differs(capture_key: str) -> Refusal:
    """Refuse a request id that opened an attempt otherwise."""
    return _refused(
        capture_key,
        "repeat_differs",
        f"the request_id opened {capture_key}, from another point or without one; a repeat must"
        " bring the point that was written down with it, and another restore a request_id of its"
        " own",
    )


def in_use(capture_key: str) -> Refusal:
    """Refuse to hand an attempt out again that was used since."""
    return _refused(
        capture_key,
        "in_use",
        f"the request_id restored {capture_key}, which was used since; a request_id belongs to one"
        f" start of the harness. Make a restore point on {capture_key}, and restore from that under"
        " a request_id of its own",
    )


def not_latest(capture_key: str, latest_capture_key: str) -> Refusal:
    """Refuse an attempt that another took the place of."""
    return _refused(
        capture_key,
        "not_latest",
        f"{capture_key} is not the latest attempt of the rollout, {latest_capture_key} is; another"
        " owner may be at work. Stop, and have a person look",
        latest_capture_key=latest_capture_key,
    )


def log_forgotten(capture_key: str) -> Refusal:
    """Refuse an attempt whose log was removed."""
    return _refused(capture_key, "log_forgotten", f"the log of {capture_key} was removed; {_ANEW}")


def poisoned(capture_key: str, call_ids: Sequence[str]) -> Refusal:
    """Refuse an attempt whose harness may have answers that were not captured (LED-7)."""
    return _refused(
        capture_key,
        "capture_poisoned",
        f"the answers of {len(call_ids)} calls of {capture_key} were served without being captured;"
        f" {_ANEW}",
        call_ids=",".join(call_ids[:NAMED_MAX]),
    )


def not_restorable(capture_key: str, missing: Sequence[str]) -> Refusal:
    """Refuse named calls that have no record."""
    shown = ",".join(missing[:NAMED_MAX])
    return _refused(
        capture_key,
        "call_not_restorable",
        f"{len(missing)} named calls have no record in {capture_key}; restore from a point that"
        f" names only accepted answers, or {_ANEW}",
        call_ids=shown,
    )


def other_rules(capture_key: str, call_ids: Sequence[str]) -> Refusal:
    """Refuse calls that nothing could continue: histories are digested by other rules now."""
    return _refused(
        capture_key,
        "call_not_restorable",
        f"{len(call_ids)} calls of {capture_key} were recorded under other rules of normalization"
        " than this release's, so that no request would continue them; finish with the release"
        f" that recorded them, or {_ANEW}",
        call_ids=",".join(call_ids[:NAMED_MAX]),
    )


def too_many(capture_key: str, found: int, limit: int) -> Refusal:
    """Refuse to copy more calls than one transaction should."""
    return _refused(
        capture_key,
        "too_many_calls",
        f"the named calls and all that they continue are {found}, of at most {limit}; name the ends"
        f" of fewer conversations, or {_ANEW}",
    )


def _refused(
    capture_key: str,
    fault: str,
    message: str,
    *,
    call_ids: str = "",
    latest_capture_key: str = "",
) -> Refusal:
    return Refusal(
        er.ERROR_REASON_RESTORE_REFUSED,
        f"{message}. Nothing was opened and nothing sealed",
        capture_key=capture_key,
        fault=fault,
        call_ids=call_ids,
        latest_capture_key=latest_capture_key,
    )
