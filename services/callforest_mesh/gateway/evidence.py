"""What both capture modes know alike: a served response, and evidence of a request's history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from callforest.capture.v1 import attempt_pb2, call_record_pb2, capture_admission_pb2
from callforest_core.lineage.items import Item


@dataclass(frozen=True, slots=True, eq=False)
class ServedResponse:
    """A response as it will leave.

    Attributes:
        body: its bytes: the plain response, or its events.
        response_id: the id that the harness gets; "" when there is none.
        items: the response's items; None when they cannot be read.
        message: the assistant's message of the engine's completion, from which it was made; empty
            when there is not one.
    """

    body: bytes
    response_id: str
    items: list[Item] | None
    message: Item


@dataclass(frozen=True, slots=True)
class Claim:
    """What a harness says of the history that its request continues; checked, never trusted.

    Attributes:
        call_id: the call.
        history_is_whole: whether the request brings its whole history all the same; the claim then
            only breaks a tie. Otherwise its turns are only those that follow the call's answer.
    """

    call_id: str
    history_is_whole: bool


class Evidence(Protocol):
    """By what a request finds the call that it continues, in one capture mode."""

    def announce(self, intent: attempt_pb2.CallIntent) -> None:
        """Put the probe into an announcement."""
        ...

    def describe(self, record: call_record_pb2.CallRecord, served: ServedResponse) -> None:
        """Put into a record by what a later request finds the call."""
        ...

    def explain(
        self, verdict: capture_admission_pb2.Verdict
    ) -> call_record_pb2.HistoryDifference | None:
        """Say where the request left the history before it; None when that is not asked."""
        ...

    def keep(self, call_id: str, served: ServedResponse) -> None:
        """Keep what later requests may build upon, once the call has its record."""
        ...
