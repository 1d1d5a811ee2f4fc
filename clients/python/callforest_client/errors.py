"""Errors as they cross the wire, and back.

    CallforestError            a service refused or failed; has reason, code, metadata
    |- UnavailableError        repeat with back-off (UNAVAILABLE, DEADLINE_EXCEEDED)
    `- RefusedError            a repeat fails alike, unless retry_after_ms is set

Contract: docs/protocol.md, section "Errors".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal

DOMAIN = "callforest"
_PREFIX = "ERROR_REASON_"

_CODE = grpc.StatusCode
STATUS_CODES: Mapping[er.ErrorReason.ValueType, grpc.StatusCode] = {
    er.ERROR_REASON_INVALID_MESSAGE: _CODE.INVALID_ARGUMENT,
    er.ERROR_REASON_INTERNAL: _CODE.INTERNAL,
    er.ERROR_REASON_DRAINING: _CODE.UNAVAILABLE,
    er.ERROR_REASON_OVERLOADED: _CODE.RESOURCE_EXHAUSTED,
    er.ERROR_REASON_ITEM_DEADLINE: _CODE.DEADLINE_EXCEEDED,
    er.ERROR_REASON_FRAME_BROKEN: _CODE.INVALID_ARGUMENT,
    er.ERROR_REASON_MESSAGE_TOO_LARGE: _CODE.RESOURCE_EXHAUSTED,
    er.ERROR_REASON_PEER_UNAVAILABLE: _CODE.UNAVAILABLE,
    er.ERROR_REASON_VOLATILE_STORE: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_STORE_CORRUPT: _CODE.DATA_LOSS,
    er.ERROR_REASON_STORE_FULL: _CODE.RESOURCE_EXHAUSTED,
    er.ERROR_REASON_ATTEMPT_NOT_FOUND: _CODE.NOT_FOUND,
    er.ERROR_REASON_ATTEMPT_CLOSED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_ATTEMPT_SEALED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_ATTEMPT_NOT_SEALED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_STALE_MANIFEST: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_CALL_NOT_FOUND: _CODE.NOT_FOUND,
    er.ERROR_REASON_CALL_NOT_ADMITTED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_CALL_MISMATCH: _CODE.ALREADY_EXISTS,
    er.ERROR_REASON_COORDINATES_MISMATCH: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_AMBIGUOUS_HISTORY: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_MODE_MISMATCH: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_HISTORY_CLAIM_REFUSED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_CONFIGURATION_CHANGED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_AMBIGUOUS_RETRY: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_RESTORE_REFUSED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_DIGEST_MISMATCH: _CODE.INVALID_ARGUMENT,
    er.ERROR_REASON_PARTITION_DROPPED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_PREFIX_BROKEN: _CODE.DATA_LOSS,
    er.ERROR_REASON_REQUEST_REFUSED: _CODE.INVALID_ARGUMENT,
    er.ERROR_REASON_ENGINE_UNAVAILABLE: _CODE.UNAVAILABLE,
    er.ERROR_REASON_WEIGHT_VERSION_STALE: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_HISTORY_REQUIRED: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_CANDIDATE_WITHOUT_PROOF: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_GROUP_MISMATCH: _CODE.ALREADY_EXISTS,
    er.ERROR_REASON_GROUP_INCOMPLETE: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_RECEIPT_NOT_FOUND: _CODE.NOT_FOUND,
    er.ERROR_REASON_CURSOR_INVALID: _CODE.OUT_OF_RANGE,
    er.ERROR_REASON_CONSUMER_BOUND: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_SUBSCRIPTION_SUPERSEDED: _CODE.ABORTED,
    er.ERROR_REASON_SELECTION_REFUSED: _CODE.INVALID_ARGUMENT,
    er.ERROR_REASON_GROUP_NEEDS_PARTS: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_TRAINER_CONFIGURATION: _CODE.FAILED_PRECONDITION,
    er.ERROR_REASON_LEARNER_FAILED: _CODE.ABORTED,
    er.ERROR_REASON_CHECKPOINT_REFUSED: _CODE.FAILED_PRECONDITION,
}
"""The status of each reason, as the reason's comment states it."""

_MESSAGE_BYTES = 768
_FACT_BYTES = 256
_VIOLATIONS = 8
_VIOLATION_BYTES = 128
_GRPC_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_BY_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class CallforestError(Exception):
    """A service refused or failed.

    Attributes:
        code: the gRPC status code.
        reason: a value of ErrorReason; unspecified when the peer sent none.
        metadata: the facts that the reason's comment names.
        retry_after_ms: when a repeat can succeed, if the service said so.
        of_repeat: what became of the item is not known: it was sent before, on a stream that
            broke, and what is refused is the repeat; or its answer could not be read.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: er.ErrorReason.ValueType = er.ERROR_REASON_UNSPECIFIED,
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after_ms = retry_after_ms
        self.of_repeat = False

    def __str__(self) -> str:
        facts = " ".join(f"{key}={value}" for key, value in self.metadata.items())
        return f"{self.code.name} {reason_name(self.reason)}: {self.message} {facts}".rstrip()


class UnavailableError(CallforestError):
    """The service did not answer, or is not there. Repeat with the same ids."""


class RefusedError(CallforestError):
    """The service refused. A repeat fails alike, unless `retry_after_ms` is set."""


def reason_name(reason: er.ErrorReason.ValueType) -> str:
    """Give the reason as ErrorInfo writes it, without the enum's prefix."""
    return er.ErrorReason.Name(reason).removeprefix(_PREFIX)


def status_of(refusal: Refusal) -> status_pb2.Status:
    """Turn a refusal into its status: code, message, ErrorInfo, and RetryInfo if it has a delay."""
    status = _status(
        STATUS_CODES[refusal.reason], refusal.message, reason_name(refusal.reason), refusal.facts
    )
    if refusal.violations:
        bad = error_details_pb2.BadRequest()
        for field, description in refusal.violations[:_VIOLATIONS]:
            bad.field_violations.add(
                field=_cut(field, _VIOLATION_BYTES), description=_cut(description, _VIOLATION_BYTES)
            )
        status.details.append(_packed(bad))
    _add_delay(status, refusal.retry_after_ms)
    return status


def status_of_error(error: CallforestError) -> status_pb2.Status:
    """Turn an error that has a reason back into the status it came as, without field violations."""
    status = _status(error.code, error.message, reason_name(error.reason), error.metadata)
    _add_delay(status, error.retry_after_ms)
    return status


def error_of(status: status_pb2.Status, *, of_repeat: bool = False) -> CallforestError:
    """Turn a status into the exception that a client raises."""
    reason = er.ERROR_REASON_UNSPECIFIED
    metadata: dict[str, str] = {}
    retry_after_ms: int | None = None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            name = _PREFIX + info.reason
            if name in er.ErrorReason.keys():  # noqa: SIM118 - not a mapping
                reason = er.ErrorReason.Value(name)
            metadata = dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    code = _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    error = _typed(code, status.message, reason, metadata, retry_after_ms)
    error.of_repeat = of_repeat
    return error


def error_of_rpc(error: grpc.aio.AioRpcError) -> CallforestError:
    """Turn what a stub raised into the exception that a client raises.

    CANCELLED comes as an error only when the caller did not cancel: a server that shuts down resets
    the calls that reach it too late. Such a call may be repeated.
    """
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))  # it has what from_call reads
    except ValueError:  # gRPC put a code of its own over the service's
        status = None
    if status is not None:
        return error_of(status)
    if error.code() is grpc.StatusCode.CANCELLED:
        message = "the service ended the call; it may be shutting down"
        return UnavailableError(grpc.StatusCode.UNAVAILABLE, message)
    return _typed(error.code(), error.details() or "", er.ERROR_REASON_UNSPECIFIED, {}, None)


def error_of_stream(error: grpc.aio.AioRpcError) -> CallforestError:
    """Turn what ended a stream into the exception that a client raises.

    Our services give a reason with every INTERNAL. Without one it is gRPC's own, for instance for a
    write into a stream that the server has just ended, whatever its status was.
    """
    failure = error_of_rpc(error)
    if failure.reason == er.ERROR_REASON_UNSPECIFIED and failure.code in _GRPC_FAULTS:
        message = f"the stream broke: {failure.code.name}"
        return UnavailableError(grpc.StatusCode.UNAVAILABLE, message)
    return failure


def _typed(
    code: grpc.StatusCode,
    message: str,
    reason: er.ErrorReason.ValueType,
    metadata: Mapping[str, str],
    retry_after_ms: int | None,
) -> CallforestError:
    transient = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    kind = UnavailableError if transient else RefusedError
    return kind(code, message, reason=reason, metadata=metadata, retry_after_ms=retry_after_ms)


def _status(
    code: grpc.StatusCode, message: str, reason: str, facts: Mapping[str, str]
) -> status_pb2.Status:
    """Make a status that travels whole.

    It goes in trailers, of which a peer with default limits takes 8 KiB: a larger one would reach
    its caller as another error. So texts are cut; they repeat what the caller sent.
    """
    number: int = code.value[0]
    told = {key: _cut(value, _FACT_BYTES) for key, value in facts.items()}
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=told)
    cut = _cut(message, _MESSAGE_BYTES)
    return status_pb2.Status(code=number, message=cut, details=[_packed(info)])


def _add_delay(status: status_pb2.Status, retry_after_ms: int | None) -> None:
    if retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_after_ms)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))


def _cut(text: str, limit_bytes: int) -> str:
    """Cut a text to so many bytes of UTF-8; half a surrogate pair, which has none, becomes "?"."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode()
    return encoded[: limit_bytes - 3].decode("utf-8", "ignore") + "..."


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
