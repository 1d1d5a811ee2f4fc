"""What the ledger refuses, each with its facts."""

from __future__ import annotations

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal

_RETRY_AFTER_MS = 1000


def attempt_not_found(capture_key: str) -> Refusal:
    """Refuse an attempt that was never opened."""
    return Refusal(
        er.ERROR_REASON_ATTEMPT_NOT_FOUND, "no such attempt was opened", capture_key=capture_key
    )


def attempt_sealed(capture_key: str, call_id: str) -> Refusal:
    """Refuse a row that comes after the seal (LED-8, P9)."""
    return Refusal(
        er.ERROR_REASON_ATTEMPT_SEALED,
        "the attempt is sealed; its manifest is final",
        capture_key=capture_key,
        call_id=call_id,
    )


def attempt_not_sealed(capture_key: str, state: attempt_pb2.AttemptState.ValueType) -> Refusal:
    """Refuse to forget an attempt that may still get rows."""
    return Refusal(
        er.ERROR_REASON_ATTEMPT_NOT_SEALED,
        "only a sealed attempt can be forgotten",
        capture_key=capture_key,
        state=attempt_pb2.AttemptState.Name(state),
    )


def call_not_admitted(capture_key: str, call_id: str) -> Refusal:
    """Refuse a row of a call that has no intent."""
    return Refusal(
        er.ERROR_REASON_CALL_NOT_ADMITTED,
        "the call was not announced; record its intent first",
        capture_key=capture_key,
        call_id=call_id,
    )


def call_mismatch(capture_key: str, call_id: str, field: str) -> Refusal:
    """Refuse other content under a known call id (P5)."""
    return Refusal(
        er.ERROR_REASON_CALL_MISMATCH,
        f"the call was used before with other content ({field}); a repeat must be the same",
        capture_key=capture_key,
        call_id=call_id,
        field=field,
    )


def coordinates_mismatch(
    capture_key: str, call_id: str, field: str, *, admitted: str, stated: str
) -> Refusal:
    """Refuse coordinates that leave their admission (LED-13)."""
    return Refusal(
        er.ERROR_REASON_COORDINATES_MISMATCH,
        f"{field} is {stated}, but {admitted} was admitted; the call has a failure row",
        capture_key=capture_key,
        call_id=call_id,
        field=field,
    )


def pending_limit(limit: int) -> Refusal:
    """Refuse a call while too many of its attempt are unfinished."""
    return Refusal(
        er.ERROR_REASON_OVERLOADED,
        f"{limit} calls of this attempt are pending; repeat when some are done",
        retry_after_ms=_RETRY_AFTER_MS,
        limit="pending_calls",
        limit_value=limit,
    )


def log_corrupt(key: str, fact: str) -> Refusal:
    """Refuse an attempt whose events cannot be its log; it is never served."""
    return Refusal(
        er.ERROR_REASON_STORE_CORRUPT,
        f"the log of an attempt is damaged ({fact}); verify the store",
        store="ledger",
        key=key,
    )


def volatile_store(store: str) -> Refusal:
    """Refuse a store that can lose or evict rows (LED-4)."""
    return Refusal(
        er.ERROR_REASON_VOLATILE_STORE,
        "a ledger that can lose or evict rows is no record of completeness; use the lmdb store",
        store=store,
    )


def refused_call(reason: er.ErrorReason.ValueType, message: str) -> capture_admission_pb2.Verdict:
    """Make the verdict of a call that must not be generated."""
    refused = capture_admission_pb2.Refused(reason=reason, message=message)
    return capture_admission_pb2.Verdict(refused=refused)
