"""One attempt as its log tells it: a view that is folded from the events in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from callforest.capture.v1 import attempt_pb2, call_record_pb2, capture_admission_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_client.codec import call_record_from_proto
from callforest_core.lineage.chain import ChainView, ContextWitness
from callforest_core.lineage.fingerprint import NO_FINGERPRINT

OPEN: Final = attempt_pb2.ATTEMPT_STATE_OPEN
CLOSED: Final = attempt_pb2.ATTEMPT_STATE_CLOSED
SEALED: Final = attempt_pb2.ATTEMPT_STATE_SEALED
_NO_CONTEXT: Final = ContextWitness(NO_FINGERPRINT, 0, b"")


class LogError(ValueError):
    """Events that cannot be the log of an attempt; `revision` is that of the first at fault."""

    def __init__(self, revision: int, fact: str) -> None:
        super().__init__(f"event {revision}: {fact}")
        self.revision = revision
        self.fact = fact


class AttemptKey(NamedTuple):
    """Names an attempt: its tenant and its capture key."""

    tenant: str
    capture_key: str


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """An attempt at one revision, without its calls.

    Attributes:
        state: what the attempt takes.
        revision: events in its log.
        pending_count: admitted calls with neither a record nor a failure.
    """

    state: attempt_pb2.AttemptState.ValueType
    revision: int
    pending_count: int

    @property
    def is_settled(self) -> bool:
        """Whether no admitted call is pending."""
        return self.pending_count == 0

    @property
    def is_final(self) -> bool:
        """Whether nothing is left to wait for: settled, or sealed with what is missing."""
        return self.is_settled or self.state == SEALED


@dataclass(slots=True)
class AdmittedCall:
    """What the log says of one call.

    Attributes:
        body_digest: of the request body, from the intent.
        verdict: the serialized Verdict.
        record: the serialized CallRecord, or None.
        failure_reasons: of its failure rows, in order.
    """

    body_digest: bytes
    verdict: bytes
    record: bytes | None = None
    failure_reasons: tuple[str, ...] = ()

    def read_verdict(self) -> capture_admission_pb2.Verdict:
        """Give the verdict as it was first given."""
        return capture_admission_pb2.Verdict.FromString(self.verdict)

    def read_record(self) -> call_record_pb2.CallRecord | None:
        """Give the committed record, or None."""
        return None if self.record is None else call_record_pb2.CallRecord.FromString(self.record)


class AttemptView:
    """The state of one attempt. Applying an event costs the same however many came before.

    Args:
        opened: the first event of the log.
    """

    __slots__ = (
        "_calls",
        "_chain",
        "_pending",
        "failure_count",
        "opened",
        "record_count",
        "revision",
        "state",
    )

    def __init__(self, opened: ledger_event_pb2.AttemptOpened) -> None:
        self.opened = opened
        self.state: attempt_pb2.AttemptState.ValueType = OPEN
        self.revision = 1
        self.record_count = 0
        self.failure_count = 0
        self._chain = ChainView()
        self._calls: dict[str, AdmittedCall] = {}
        self._pending: dict[str, None] = {}

    @classmethod
    def replay(cls, events: Iterable[ledger_event_pb2.LedgerEvent]) -> AttemptView | None:
        """Fold a whole log; None when it is empty.

        Raises:
            LogError: the events are no attempt's log.
        """
        view: AttemptView | None = None
        for event in events:
            if view is not None:
                view.apply(event)
            elif event.WhichOneof("event") == "attempt_opened":
                view = cls(event.attempt_opened)
            else:
                raise LogError(1, "the log does not begin with its attempt")
        return view

    def apply(self, event: ledger_event_pb2.LedgerEvent) -> None:
        """Add the next event of the log.

        Raises:
            LogError: it cannot follow; the view must be thrown away.
        """
        revision = self.revision + 1
        if self.state == SEALED:
            raise LogError(revision, "an event follows the seal")
        which = event.WhichOneof("event")
        if which == "intent":
            self._apply_intent(revision, event.intent)
        elif which == "record":
            self._apply_record(revision, event.record)
        elif which == "failure":
            self._apply_failure(revision, event.failure)
        elif which == "admissions_closed":
            self.state = CLOSED
        elif which == "sealed":
            self.state = SEALED
            if event.sealed.revision != revision:
                raise LogError(revision, f"the seal names revision {event.sealed.revision}")
        else:
            raise LogError(revision, f"unknown or misplaced event {which}")
        self.revision = revision

    @property
    def chain(self) -> ChainView:
        """The rows and whom a request would continue."""
        return self._chain

    @property
    def call_count(self) -> int:
        """How many calls were admitted."""
        return len(self._calls)

    @property
    def pending_count(self) -> int:
        """How many admitted calls have neither a record nor a failure."""
        return len(self._pending)

    def call(self, call_id: str) -> AdmittedCall | None:
        """Give an admitted call, or None."""
        return self._calls.get(call_id)

    def pending_call_ids(self) -> list[str]:
        """Give the pending calls in the order of their intents."""
        return list(self._pending)

    def summary(self) -> AttemptSummary:
        """Give the attempt as of now, unchanging."""
        return AttemptSummary(self.state, self.revision, len(self._pending))

    def attempt(self, *, superseded: bool) -> attempt_pb2.Attempt:
        """Give the attempt as its readers see it. Costs as much as there are pending calls.

        Args:
            superseded: whether a later attempt of the rollout was opened; its own log cannot say.
        """
        return attempt_pb2.Attempt(
            rollout_id=self.opened.rollout_id,
            attempt_number=self.opened.attempt_number,
            capture_key=self.opened.capture_key,
            state=self.state,
            epoch=self.opened.epoch,
            revision=self.revision,
            pending_call_ids=self._pending,
            record_count=self.record_count,
            failure_count=self.failure_count,
            superseded=superseded,
        )

    def _apply_intent(self, revision: int, intent: ledger_event_pb2.IntentRecorded) -> None:
        if intent.call_id in self._calls:
            raise LogError(revision, f"a second intent of call {intent.call_id}")
        verdict = intent.verdict.SerializeToString()
        self._calls[intent.call_id] = AdmittedCall(intent.body_digest, verdict)
        self._pending[intent.call_id] = None

    def _apply_record(self, revision: int, record: call_record_pb2.CallRecord) -> None:
        call_id = record.coords.call_id
        call = self._calls.get(call_id)
        if call is None or call.record is not None or call.failure_reasons:
            raise LogError(revision, f"call {call_id} cannot have a record here")
        self._chain.append_record(call_record_from_proto(record), _witness(record))
        call.record = record.SerializeToString()
        self._pending.pop(call_id, None)
        self.record_count += 1

    def _apply_failure(self, revision: int, failure: attempt_pb2.CallFailure) -> None:
        call = self._calls.get(failure.call_id)
        if call is None or call.record is not None:
            raise LogError(revision, f"call {failure.call_id} cannot have a failure here")
        self._chain.append_failure(failure.call_id, failure.reason)
        call.failure_reasons = (*call.failure_reasons, failure.reason)
        self._pending.pop(failure.call_id, None)
        self.failure_count += 1


def _witness(record: call_record_pb2.CallRecord) -> ContextWitness:
    """Give the witness by which a request finds the call; without fingerprints, an empty one."""
    if not record.HasField("fingerprints"):
        return _NO_CONTEXT
    prints = record.fingerprints
    return ContextWitness(prints.continuation, prints.context_item_count, prints.context_digest)
