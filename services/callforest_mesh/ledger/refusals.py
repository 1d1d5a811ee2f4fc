"""What the ledger refuses, each with its facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from callforest.capture.v1 import attempt_pb2, call_record_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.validation import malformed

DETAIL_MAX: Final = 1024
"""Most characters of a refusal's message in a verdict, and of a failure's detail."""
_RETRY_AFTER_MS: Final = 1000
_FAULTS: Final = {
    "no_boundary": "its history holds no answer that can be continued",
    "not_this_call": "that call does not end where the request's history does",
    "render_options": "that call was rendered with other options",
    "not_observations": "observations alone do not follow that call's answer",
}


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


def restored_call(capture_key: str, call_id: str) -> Refusal:
    """Refuse whatever writes to a call that an earlier attempt made (ADM-9)."""
    return Refusal(
        er.ERROR_REASON_CALL_MISMATCH,
        "the call was restored from an earlier attempt (source_capture_key); it takes no writes",
        capture_key=capture_key,
        call_id=call_id,
        field="source_capture_key",
    )


def record_malformed(field: str, fault: str) -> Refusal:
    """Refuse a record that no release of this ledger can keep."""
    name = call_record_pb2.CallRecord.DESCRIPTOR.full_name
    return malformed(name, f"{field}: {fault}", [(f"record.{field}", fault)])


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


def log_unknown(key: str, fact: str) -> Refusal:
    """Refuse an attempt whose events are another release's; nothing is migrated (LED-10)."""
    return Refusal(
        er.ERROR_REASON_STORE_CORRUPT,
        f"the log of an attempt was written by another release ({fact}); this one reads capture"
        " schema 3 with replay summaries, and migrates nothing. Use the release that wrote it, or"
        " an empty store",
        store="ledger",
        key=key,
    )


def call_not_found(capture_key: str, call_id: str) -> Refusal:
    """Refuse to show a call that was never announced."""
    return Refusal(
        er.ERROR_REASON_CALL_NOT_FOUND,
        "no such call was announced",
        capture_key=capture_key,
        call_id=call_id,
    )


def mode_mismatch(capture_key: str, *, opened: str, asked: str) -> Refusal:
    """Refuse a repeat that opens the same attempt in another mode."""
    return Refusal(
        er.ERROR_REASON_MODE_MISMATCH,
        f"the attempt was opened in {opened} mode; open another one for {asked} mode",
        capture_key=capture_key,
        expected=opened,
        actual=asked,
    )


def volatile_store(store: str) -> Refusal:
    """Refuse a store that can lose or evict rows (LED-4)."""
    return Refusal(
        er.ERROR_REASON_VOLATILE_STORE,
        "a ledger that can lose or evict rows is no record of completeness; use the lmdb store",
        store=store,
    )


def attempt_closed(capture_key: str, *, state: str, calls_max: int | None = None) -> Refusal:
    """Refuse a new call of an attempt that takes none, or no more than `calls_max`."""
    why = "takes no new calls" if calls_max is None else f"has had its {calls_max} calls"
    return Refusal(
        er.ERROR_REASON_ATTEMPT_CLOSED,
        f"the attempt {why}; open another attempt",
        capture_key=capture_key,
        state=state,
    )


def foreign_mode(capture_key: str, *, opened: str, asked: str) -> Refusal:
    """Refuse a call that is probed for another mode than its attempt's."""
    return Refusal(
        er.ERROR_REASON_MODE_MISMATCH,
        f"the attempt was opened in {opened} mode, and the call was probed for {asked} mode; open"
        " the attempt in the mode of the gateway",
        capture_key=capture_key,
        expected=opened,
        actual=asked,
    )


def configuration_changed(capture_key: str, *, bound: bytes, stated: bytes) -> Refusal:
    """Refuse a call of an engine that is not the attempt's (CAP-11)."""
    return Refusal(
        er.ERROR_REASON_CONFIGURATION_CHANGED,
        f"the engine's configuration is {stated.hex()}, but the attempt began with {bound.hex()};"
        " open another attempt",
        capture_key=capture_key,
        expected=bound.hex(),
        actual=stated.hex(),
    )


def configuration_missing(message_name: str) -> Refusal:
    """Refuse a call of forest mode that does not say which engine will serve it."""
    fault = "every call of forest mode must carry it"
    violations = [("configuration_digest", fault)]
    return malformed(message_name, f"configuration_digest: {fault}", violations)


def ambiguous_history(
    capture_key: str, call_id: str, candidates: Sequence[str], count: int
) -> Refusal:
    """Refuse a call whose history ends several calls (ADM-2)."""
    what = (
        "the history ends more than one call; echo the ids of the answer's items, or name the call"
        " in a delta request. Candidates"
    )
    return Refusal(
        er.ERROR_REASON_AMBIGUOUS_HISTORY,
        named(what, candidates, count),
        capture_key=capture_key,
        call_id=call_id,
        candidates=",".join(candidates),
    )


def claim_refused(capture_key: str, call_id: str, *, claimed_call_id: str, fault: str) -> Refusal:
    """Refuse a delta request that does not continue the call that it names."""
    return Refusal(
        er.ERROR_REASON_HISTORY_CLAIM_REFUSED,
        f"the request does not continue call {claimed_call_id}: {_FAULTS[fault]}; send the history"
        " whole",
        capture_key=capture_key,
        call_id=call_id,
        claimed_call_id=claimed_call_id,
        fault=fault,
    )


def ambiguous_retry(capture_key: str, candidates: Sequence[str], count: int) -> Refusal:
    """Refuse a marked repeat that may repeat several calls (CAP-13)."""
    what = (
        "the request is marked as a repeat, and more than one earlier call has its body; send an"
        " idempotency key with each request. Candidates"
    )
    return Refusal(
        er.ERROR_REASON_AMBIGUOUS_RETRY,
        named(what, candidates, count),
        capture_key=capture_key,
        candidates=",".join(candidates),
    )


def refused_call(refusal: Refusal) -> capture_admission_pb2.Verdict:
    """Make the verdict of a call that must not be generated."""
    refused = capture_admission_pb2.Refused(
        reason=refusal.reason, message=refusal.message[:DETAIL_MAX], metadata=refusal.facts
    )
    return capture_admission_pb2.Verdict(refused=refused)


def named(what: str, candidates: Sequence[str], count: int) -> str:
    """Say what is wrong, and name the candidates as far as there is room."""
    text = what
    for position, call_id in enumerate(candidates):
        piece = f"{':' if position == 0 else ','} {call_id}"
        rest = f" and {count - position} more"
        if len(text) + len(piece) + len(rest) > DETAIL_MAX:
            return text + rest
        text += piece
    return text if len(candidates) == count else f"{text} and {count - len(candidates)} more"
