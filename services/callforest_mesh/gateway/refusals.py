"""How the edge says no: OpenAI-shaped errors over HTTP, and the same as a mesh refusal over gRPC.

Contract: docs/protocol.md, section "The HTTP edge".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final

from callforest.capture.v1 import capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import CallforestError, UnavailableError
from callforest_core.refusal import Refusal


class HttpRefusal(Exception):  # noqa: N818 - a refusal is an answer, not a programming error
    """A request that gets an error for an answer.

    Attributes:
        status: the HTTP status.
        code: the machine-readable code.
        message: what is wrong and what to do.
        parameter: the field at fault, if there is one.
        retry_after_s: when a repeat can succeed, in whole seconds.
        reason: why, as the mesh says it.
        facts: the identifiers and values that the reason's comment names.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        parameter: str | None = None,
        retry_after_s: int | None = None,
        reason: er.ErrorReason.ValueType = er.ERROR_REASON_REQUEST_REFUSED,
        **facts: object,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.parameter = parameter
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.facts = facts

    def body(self) -> bytes:
        """Give the error as OpenAI shapes it."""
        return json.dumps({"error": self.shown()}).encode("ascii")

    def shown(self) -> dict[str, str | None]:
        """Give what is shown of the error."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        return {
            "message": self.message,
            "type": kind,
            "param": self.parameter,
            "code": self.code,
        }

    def refusal(self) -> Refusal:
        """Give the error as the mesh's services say it."""
        facts = self.facts
        if self.reason == er.ERROR_REASON_REQUEST_REFUSED:
            facts = {"parameter": self.parameter}
        delay_ms = None if self.retry_after_s is None else self.retry_after_s * 1000
        return Refusal(self.reason, self.message, retry_after_ms=delay_ms, violations=(), **facts)


_WHOLE: Final = "Send the request again with its whole history, and with `history_is_whole`."
_IN_MODE: Final[Mapping[er.ErrorReason.ValueType, tuple[str, str]]] = {
    er.ERROR_REASON_AMBIGUOUS_HISTORY: (
        "ambiguous_history",
        "Echo the answer's items with their ids, or name the call in a delta request.",
    ),
    er.ERROR_REASON_AMBIGUOUS_RETRY: (
        "ambiguous_retry",
        "Send an `Idempotency-Key` of its own with each request.",
    ),
    er.ERROR_REASON_HISTORY_REQUIRED: ("history_required", _WHOLE),
    er.ERROR_REASON_HISTORY_CLAIM_REFUSED: ("history_claim_refused", _WHOLE),
    er.ERROR_REASON_MODE_MISMATCH: (
        "mode_mismatch",
        "Open an attempt in the capture mode of this gateway.",
    ),
    er.ERROR_REASON_CONFIGURATION_CHANGED: (
        "configuration_changed",
        "Model, template or processor are not the attempt's. Open another attempt.",
    ),
    er.ERROR_REASON_CANDIDATE_WITHOUT_PROOF: (
        "candidate_without_proof",
        "Admission, gateway and worker must be of paired releases: tell an operator.",
    ),
}
"""Refusals of a call that asks for what its attempt cannot give: code, and what to do. All are 422:
SDKs repeat a 409 on their own, and a repeat fails alike."""


def unsupported(parameter: str, message: str) -> HttpRefusal:
    """Make the refusal of what cannot be captured."""
    return HttpRefusal(400, "unsupported_value", message, parameter=parameter)


def malformed(message: str, parameter: str | None = None) -> HttpRefusal:
    """Make the refusal of a body that cannot be read."""
    return HttpRefusal(400, "invalid_request_error", message, parameter=parameter)


def no_attempt_named() -> HttpRefusal:
    """Make the refusal of a request that names no attempt."""
    return HttpRefusal(
        401,
        "invalid_api_key",
        "Name an attempt by its capture key: as bearer key, or in the base URL as "
        "/rollouts/<capture key>/v1.",
    )


def attempt_not_found(capture_key: str) -> HttpRefusal:
    """Make the refusal of an attempt that was never opened."""
    return HttpRefusal(
        404,
        "attempt_not_found",
        f"No attempt {capture_key} was opened.",
        reason=er.ERROR_REASON_ATTEMPT_NOT_FOUND,
        capture_key=capture_key,
    )


def call_mismatch(capture_key: str, call_id: str, field: str = "body_digest") -> HttpRefusal:
    """Make the refusal of another request under a known key; 422, since SDKs repeat a 409."""
    return HttpRefusal(
        422,
        "call_mismatch",
        "The idempotency key was used with another request. Send each request with its own.",
        reason=er.ERROR_REASON_CALL_MISMATCH,
        capture_key=capture_key,
        call_id=call_id,
        field=field,
    )


def consumed(capture_key: str) -> HttpRefusal:
    """Make the answer to the repeat of a call whose tokens were consumed."""
    return HttpRefusal(
        422,
        "attempt_closed",
        "The call was consumed; its response is no longer kept.",
        reason=er.ERROR_REASON_ATTEMPT_CLOSED,
        capture_key=capture_key,
        state="consumed",
    )


def too_large(limit_bytes: int) -> HttpRefusal:
    """Make the refusal of a body over the limit."""
    return HttpRefusal(413, "request_too_large", f"The body exceeds {limit_bytes} bytes.")


def unsupported_encoding(coding: str) -> HttpRefusal:
    """Make the refusal of a compressed body."""
    return HttpRefusal(
        415, "unsupported_encoding", f"Send the body as it is, without {coding[:32]!a}."
    )


def overloaded(limit: str, limit_value: int, *, retry_after_s: float = 1.0) -> HttpRefusal:
    """Make the refusal at a bound of the gateway."""
    return HttpRefusal(
        429,
        "overloaded",
        f"{limit} is at its limit of {limit_value}. Repeat.",
        retry_after_s=math.ceil(retry_after_s),
        reason=er.ERROR_REASON_OVERLOADED,
        limit=limit,
        limit_value=limit_value,
    )


def unavailable(message: str, *, retry_after_s: int = 1, peer: str = "") -> HttpRefusal:
    """Make the answer when a service behind the gateway is away; nothing was served."""
    return HttpRefusal(
        503,
        "unavailable",
        message,
        retry_after_s=retry_after_s,
        reason=er.ERROR_REASON_PEER_UNAVAILABLE,
        peer=peer,
    )


def faulty(incident_id: str) -> HttpRefusal:
    """Make the answer to a fault; a log explains the incident."""
    return HttpRefusal(
        500,
        "internal_error",
        f"A fault of the server; its log has incident {incident_id}.",
        reason=er.ERROR_REASON_INTERNAL,
        incident_id=incident_id,
    )


def refused_verdict(
    capture_key: str, call_id: str, refused: capture_admission_pb2.Refused
) -> HttpRefusal:
    """Make the answer to a call that must not be generated.

    A closed attempt gets 422: SDKs repeat 409 on their own.
    """
    if refused.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND:
        return attempt_not_found(capture_key)
    if refused.reason in _IN_MODE:
        facts = {"capture_key": capture_key, "call_id": call_id, **refused.metadata}
        return in_mode(refused.reason, refused.message, facts)
    if refused.reason in (er.ERROR_REASON_ATTEMPT_CLOSED, er.ERROR_REASON_ATTEMPT_SEALED):
        return HttpRefusal(
            422,
            "attempt_closed",
            refused.message,
            reason=er.ERROR_REASON_ATTEMPT_CLOSED,
            capture_key=capture_key,
        )
    return HttpRefusal(422, "call_refused", refused.message)


def in_mode(reason: er.ErrorReason.ValueType, found: str, facts: Mapping[str, str]) -> HttpRefusal:
    """Make the refusal of a call that asks for what its attempt cannot give.

    Args:
        reason: one of those that have a code of their own here.
        found: what was found; the answer says besides what to do.
        facts: what the reason's comment names.
    """
    code, advice = _IN_MODE[reason]
    finding = f"{found[:1].upper()}{found[1:].rstrip('.')}. " if found else ""
    said = f"{finding}{advice} Nothing was generated."
    refusal = HttpRefusal(422, code, said, reason=reason)
    refusal.facts = dict(facts)
    return refusal


def history_required(capture_key: str, call_id: str) -> HttpRefusal:
    """Make the answer to a delta request whose history is not here (any more)."""
    return in_mode(
        er.ERROR_REASON_HISTORY_REQUIRED,
        f"the history of call {call_id} is not kept here",
        {"capture_key": capture_key, "call_id": call_id},
    )


def history_claim_refused(capture_key: str, claimed_call_id: str, fault: str) -> HttpRefusal:
    """Make the answer to a delta request of whose claim it is plain that it cannot hold."""
    return in_mode(
        er.ERROR_REASON_HISTORY_CLAIM_REFUSED,
        f"the request does not continue call {claimed_call_id} ({fault})",
        {"capture_key": capture_key, "claimed_call_id": claimed_call_id, "fault": fault},
    )


def of_service(error: CallforestError) -> HttpRefusal:
    """Make the answer to what a service behind the gateway said."""
    retry_after_s = None
    if error.retry_after_ms is not None:
        retry_after_s = max(1, -(-error.retry_after_ms // 1000))
    if error.reason in _IN_MODE:
        return in_mode(error.reason, error.message, error.metadata)
    match error.reason:
        case er.ERROR_REASON_REQUEST_REFUSED:
            return malformed(error.message, error.metadata.get("parameter"))
        case er.ERROR_REASON_OVERLOADED:
            return HttpRefusal(
                429,
                "overloaded",
                error.message,
                retry_after_s=retry_after_s or 1,
                reason=error.reason,
                limit=error.metadata.get("limit"),
                limit_value=error.metadata.get("limit_value"),
            )
        case er.ERROR_REASON_ATTEMPT_NOT_FOUND:
            return attempt_not_found(error.metadata.get("capture_key", ""))
        case er.ERROR_REASON_CALL_MISMATCH:
            return call_mismatch(
                error.metadata.get("capture_key", ""),
                error.metadata.get("call_id", ""),
                error.metadata.get("field", ""),
            )
        case er.ERROR_REASON_STORE_FULL:
            found = f"{error.message[:1].upper()}{error.message[1:].rstrip('.')}."
            return HttpRefusal(
                503,
                "unavailable",
                f"{found} Nothing was served; repeat later.",
                retry_after_s=retry_after_s or 30,
                reason=error.reason,
                **error.metadata,
            )
        case er.ERROR_REASON_ENGINE_UNAVAILABLE:
            return HttpRefusal(
                503,
                "unavailable",
                "The engine is away; nothing was generated. Repeat.",
                retry_after_s=1,
                reason=error.reason,
                engine=error.metadata.get("engine"),
            )
    if isinstance(error, UnavailableError):
        return unavailable("A service behind the gateway is away. Repeat.")
    return faulty(error.metadata.get("incident_id", "unknown"))
