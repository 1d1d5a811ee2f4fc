"""One attempt as its log tells it: a view that is folded from the events in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from google.protobuf.unknown_fields import UnknownFieldSet

from callforest.capture.v1 import attempt_pb2, call_record_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_client.codec import call_record_from_proto
from callforest_client.source_codec import source_summary_from_proto
from callforest_core.custody.attempts import is_earlier_attempt
from callforest_core.lineage.chain import ChainView, ContextWitness
from callforest_core.lineage.fingerprint import NO_FINGERPRINT
from callforest_core.lineage.forest_view import ForestView
from callforest_mesh.ledger.admitted_call import AdmittedCall

OPEN: Final = attempt_pb2.ATTEMPT_STATE_OPEN
CLOSED: Final = attempt_pb2.ATTEMPT_STATE_CLOSED
SEALED: Final = attempt_pb2.ATTEMPT_STATE_SEALED
CHAIN: Final = attempt_pb2.CAPTURE_MODE_CHAIN
FOREST: Final = attempt_pb2.CAPTURE_MODE_FOREST
NO_RESULT: Final = "request_finished_without_staged_coordinates"
"""The reason of a failure row that says that an admitted request ended without an answer."""
_NO_CONTEXT: Final = ContextWitness(NO_FINGERPRINT, 0, b"")


class LogError(ValueError):
    """Events that cannot be the log of an attempt; `revision` is that of the first at fault."""

    def __init__(self, revision: int, fact: str) -> None:
        super().__init__(f"event {revision}: {fact}")
        self.revision = revision
        self.fact = fact


class UnknownLogError(LogError):
    """Events of a kind, or contents, that this release does not know."""


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
        pending_count: admitted calls that have not settled.
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


class AttemptView:
    """The state of one attempt. Applying an event costs the same however many came before.

    Args:
        opened: the first event of the log.

    Attributes:
        mode: how calls are found, CHAIN or FOREST.
        forest: the committed calls by their histories; None in chain mode.
        configuration_digest: the engine's, that the first intent with one bound, or to which the
            restored attempt was bound; else b"".
        are_numbered: whether every record has its intent number, as earlier releases' have not.
        intent_count: calls announced or restored; a withdrawn one may be announced again.
    """

    __slots__ = (
        "_calls",
        "_chain",
        "_pending",
        "_unkeyed",
        "are_numbered",
        "configuration_digest",
        "failure_count",
        "forest",
        "intent_count",
        "mode",
        "opened",
        "record_count",
        "revision",
        "state",
    )

    def __init__(self, opened: ledger_event_pb2.AttemptOpened) -> None:
        if opened.mode not in {attempt_pb2.CAPTURE_MODE_UNSPECIFIED, CHAIN, FOREST}:
            raise UnknownLogError(1, f"capture mode {opened.mode}")
        self.opened = opened
        self.mode = FOREST if opened.mode == FOREST else CHAIN
        self.forest = ForestView() if self.mode == FOREST else None
        self.configuration_digest = opened.configuration_digest
        self.state: attempt_pb2.AttemptState.ValueType = OPEN
        self.revision = 1
        self.record_count = 0
        self.failure_count = 0
        self.intent_count = 0
        self.are_numbered = True
        self._chain = ChainView()
        self._calls: dict[str, AdmittedCall] = {}
        self._pending: dict[str, None] = {}
        # What a repeat without a key may repeat: by body, in the order of their intents.
        self._unkeyed: dict[bytes, dict[str, None]] = {}

    @classmethod
    def replay(cls, events: Iterable[ledger_event_pb2.LedgerEvent]) -> AttemptView | None:
        """Fold a whole log; None when it is empty.

        Raises:
            LogError: the events are no attempt's log.
        """
        view = cls.continued(None, events)
        if view is not None:
            view.require_whole()
        return view

    @classmethod
    def continued(
        cls, view: AttemptView | None, events: Iterable[ledger_event_pb2.LedgerEvent]
    ) -> AttemptView | None:
        """Fold the next events of a log into the view of those before; None while there are none.

        Raises:
            LogError: they cannot follow; the view must be thrown away.
        """
        for event in events:
            record = record_of(event)
            # Read past what it keeps beyond a summary, it would look like one of ours.
            if record is not None and keeps_replay_items(record):
                revision = 0 if view is None else view.revision + 1
                raise UnknownLogError(revision, "a record that keeps replay items")
            if view is not None:
                view.apply(event)
            elif event.HasField("attempt_opened"):
                view = cls(event.attempt_opened)
            else:
                raise LogError(1, "the log does not begin with its attempt")
        return view

    def require_whole(self) -> None:
        """Refuse to be the view of a whole log that lacks restored calls.

        Raises:
            LogError: it lacks some.
        """
        if self.revision < 1 + self.opened.restored_count:
            raise LogError(self.revision + 1, "restored calls are missing")

    def apply(self, event: ledger_event_pb2.LedgerEvent) -> None:
        """Add the next event of the log.

        Raises:
            LogError: it cannot follow; the view must be thrown away.
        """
        revision = self.revision + 1
        if self.state == SEALED:
            raise LogError(revision, "an event follows the seal")
        which = event.WhichOneof("event")
        restored_count = self.opened.restored_count
        if which and (which == "restored") != (revision <= 1 + restored_count):
            raise LogError(revision, f"{which}, where {restored_count} calls are restored")
        if which == "restored":
            self._apply_restored(revision, event.restored)
        elif which == "intent":
            self._apply_intent(revision, event.intent)
        elif which == "record":
            self._apply_record(revision, event.record)
        elif which == "failure":
            self._apply_failure(revision, event.failure)
        elif which == "withdrawal":
            self._apply_withdrawal(revision, event.withdrawal)
        elif which == "admissions_closed":
            self.state = CLOSED
        elif which == "sealed":
            self.state = SEALED
            if event.sealed.revision != revision:
                raise LogError(revision, f"the seal names revision {event.sealed.revision}")
        elif which is None:
            raise UnknownLogError(revision, "an event of an unknown kind")
        else:
            raise LogError(revision, f"misplaced event {which}")
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
        """How many admitted calls have not settled: no record, no failure, no withdrawal."""
        return len(self._pending)

    def call(self, call_id: str) -> AdmittedCall | None:
        """Give an admitted call, or None."""
        return self._calls.get(call_id)

    def parents(self) -> dict[str, str | None]:
        """Give the committed calls, each with the call that it continues, which comes first."""
        return {row.call_id: row.parent_call_id for row in self._chain.manifest().records}

    def records(
        self, call_ids: Iterable[str] | None = None
    ) -> Iterator[call_record_pb2.CallRecord]:
        """Give the records of committed calls, in the order given; of all, restored ones first."""
        for call_id in self.parents() if call_ids is None else call_ids:
            record = self._calls[call_id].read_record()
            if record is not None:
                yield record

    def lost_call_ids(self) -> list[str]:
        """Give the calls whose answers may have been served though their capture failed."""
        return [
            call_id
            for call_id, call in self._calls.items()
            if any(reason != NO_RESULT for reason in call.failure_reasons)
        ]

    def source_of(self, call_id: str) -> str:
        """Give the earlier attempt under which a restored call is staged; "" for any other."""
        call = self._calls.get(call_id)
        return "" if call is None else call.source_capture_key

    def unkeyed_call_ids(self, body_digest: bytes) -> Collection[str]:
        """Give the calls without a key that have this body, neither failed nor withdrawn."""
        return self._unkeyed.get(body_digest, ())

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
            mode=self.mode,
            restored_from=self.opened.restored_from,
            restored_count=self.opened.restored_count,
        )

    def _apply_restored(self, revision: int, record: call_record_pb2.CallRecord) -> None:
        """Take a committed call of an earlier attempt over."""
        coords, owner = record.coords, record.source_capture_key
        if coords.call_id in self._calls or coords.capture_key != self.opened.capture_key:
            raise LogError(revision, f"call {coords.call_id} cannot be restored here")
        if not is_earlier_attempt(owner, coords.capture_key):
            raise LogError(revision, f"call {coords.call_id} is restored from {owner!r}")
        if coords.HasField("parent_call_id") and (
            coords.parent_call_id not in self._calls
            or coords.parent_capture_key != self.source_of(coords.parent_call_id)
        ):
            raise LogError(revision, f"call {coords.call_id} comes without what it continues")
        self._calls[coords.call_id] = AdmittedCall(b"", b"", source_capture_key=owner)
        self.intent_count += 1
        self._append_record(record)

    def _apply_intent(self, revision: int, intent: ledger_event_pb2.IntentRecorded) -> None:
        known = self._calls.get(intent.call_id)
        if known is not None and known.withdrawal is None:
            raise LogError(revision, f"a second intent of call {intent.call_id}")
        self.intent_count += 1
        self._calls[intent.call_id] = AdmittedCall(
            intent.body_digest,
            intent.verdict.SerializeToString(),
            intent.is_keyed,
            intent.admit_time.SerializeToString(),
            intent_number=self.intent_count,
        )
        self._pending[intent.call_id] = None
        if not intent.is_keyed:
            self._unkeyed.setdefault(intent.body_digest, {})[intent.call_id] = None
        if intent.configuration_digest and not self.configuration_digest:
            self.configuration_digest = intent.configuration_digest

    def _apply_record(self, revision: int, record: call_record_pb2.CallRecord) -> None:
        call_id = record.coords.call_id
        call = self._calls.get(call_id)
        if call is None or call.record or call.failure_reasons or call.withdrawal:
            raise LogError(revision, f"call {call_id} cannot have a record here")
        self._append_record(record)

    def _append_record(self, record: call_record_pb2.CallRecord) -> None:
        """Let a committed call be found and continued."""
        call_id = record.coords.call_id
        self._chain.append_record(call_record_from_proto(record), _witness(record))
        if self.forest is not None:
            _append_history(self.forest, record)
        self._calls[call_id].record = record.SerializeToString()
        self._pending.pop(call_id, None)
        self.record_count += 1
        self.are_numbered = self.are_numbered and record.intent_number > 0

    def _apply_failure(self, revision: int, failure: attempt_pb2.CallFailure) -> None:
        call = self._calls.get(failure.call_id)
        is_kept = call is not None and call.record is not None
        if call is None or call.withdrawal or (is_kept and self.forest is None):
            raise LogError(revision, f"call {failure.call_id} cannot have a failure here")
        self._chain.append_failure(failure.call_id, failure.reason)
        call.failures = (*call.failures, failure.SerializeToString())
        call.failure_reasons = (*call.failure_reasons, failure.reason)
        self._pending.pop(failure.call_id, None)
        self.failure_count += 1
        if not is_kept:
            self._forget_unkeyed(failure.call_id, call)

    def _apply_withdrawal(self, revision: int, withdrawal: attempt_pb2.CallWithdrawal) -> None:
        """Settle a call that never was: it is no row, and nothing continues it."""
        call = self._calls.get(withdrawal.call_id)
        if call is None or withdrawal.call_id not in self._pending:
            raise LogError(revision, f"call {withdrawal.call_id} cannot be withdrawn here")
        call.withdrawal = withdrawal.SerializeToString()
        del self._pending[withdrawal.call_id]
        self._forget_unkeyed(withdrawal.call_id, call)

    def _forget_unkeyed(self, call_id: str, call: AdmittedCall) -> None:
        alike = self._unkeyed.get(call.body_digest, {})
        alike.pop(call_id, None)
        if not alike:
            self._unkeyed.pop(call.body_digest, None)


def _witness(record: call_record_pb2.CallRecord) -> ContextWitness:
    """Give the witness by which a request finds the call; without fingerprints, an empty one."""
    if not record.HasField("fingerprints"):
        return _NO_CONTEXT
    prints = record.fingerprints
    return ContextWitness(prints.continuation, prints.context_item_count, prints.context_digest)


def _append_history(forest: ForestView, record: call_record_pb2.CallRecord) -> None:
    """Let a record be found by its history; one without a summary is never continued."""
    summary = source_summary_from_proto(record.replay)
    if summary is not None:
        coords = record.coords
        forest.append(
            coords.call_id,
            cum_len=coords.prev_token_count + coords.delta_token_count,
            chain_hash=coords.chain_hash,
            summary=summary,
            response_id=record.response_id,
        )


def record_of(event: ledger_event_pb2.LedgerEvent) -> call_record_pb2.CallRecord | None:
    """Give the record that an event commits or restores, or None."""
    if event.HasField("record"):
        return event.record
    return event.restored if event.HasField("restored") else None


def keeps_replay_items(record: call_record_pb2.CallRecord) -> bool:
    """Say whether a record keeps more of its request than a summary, as early ledgers did."""
    return record.HasField("replay") and len(UnknownFieldSet(record.replay)) > 0
