"""The one exception that a core raises to refuse: a reason, a message, the facts involved."""

from __future__ import annotations

from collections.abc import Sequence

from callforest.error.v1.error_reason_pb2 import ErrorReason


class Refusal(Exception):  # noqa: N818 - a refusal is an answer, not a programming error
    """A request that is refused, with everything its caller needs to know.

    The chassis turns it into a status; the core knows nothing of statuses. The facts' keys are
    those that the reason's comment in `callforest/error/v1/error_reason.proto` names; an unknown
    fact is left out, never empty.

    Attributes:
        reason: why, a value of ErrorReason.
        message: what is wrong and what to do, for a person. Holds nothing secret.
        facts: the identifiers and values involved, for a program.
        retry_after_ms: when a repeat can succeed, if that is known.
        violations: (field path, what is wrong) of a malformed message.
    """

    def __init__(
        self,
        reason: ErrorReason.ValueType,
        message: str,
        *,
        retry_after_ms: int | None = None,
        violations: Sequence[tuple[str, str]] = (),
        **facts: object,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.facts = {key: str(value) for key, value in facts.items() if value not in (None, "")}
        self.retry_after_ms = retry_after_ms
        self.violations = tuple(violations)
