"""An attempt without what its calls say: which there are, how each has settled, what it takes.

Readers ask for that far more often than for the calls themselves, and keeping it costs a small part
of keeping the whole view (see `attempt`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from google.protobuf.unknown_fields import UnknownFieldSet

from callforest.capture.v1 import attempt_pb2, call_record_pb2
from callforest.ledger.v1 import ledger_event_pb2

OPEN: Final = attempt_pb2.ATTEMPT_STATE_OPEN
CLOSED: Final = attempt_pb2.ATTEMPT_STATE_CLOSED
SEALED: Final = attempt_pb2.ATTEMPT_STATE_SEALED
CHAIN: Final = attempt_pb2.CAPTURE_MODE_CHAIN
FOREST: Final = attempt_pb2.CAPTURE_MODE_FOREST
_PENDING: Final = "pending"
_RECORDED: Final = "recorded"
_FAILED: Final = "failed"
_WITHDRAWN: Final = "withdrawn"


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


class AttemptOutline:
    """The state of one attempt, folded from its log in order. An event costs the same every time.

    Args:
        opened: the first event of the log.

    Attributes:
        mode: how calls are found, CHAIN or FOREST.
        state: what the attempt takes.
        revision: events so far.
        record_count: calls that were committed or restored.
        failure_count: failure rows.
    """

    __slots__ = (
        "_pending",
        "_states",
        "failure_count",
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
        self.state: attempt_pb2.AttemptState.ValueType = OPEN
        self.revision = 1
        self.record_count = 0
        self.failure_count = 0
        self._states: dict[str, str] = {}
        self._pending: dict[str, None] = {}

    @classmethod
    def replay(cls, events: Iterable[ledger_event_pb2.LedgerEvent]) -> Self | None:
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
        cls, view: Self | None, events: Iterable[ledger_event_pb2.LedgerEvent]
    ) -> Self | None:
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
        which = event.WhichOneof("event")
        if self.state == SEALED:
            raise LogError(revision, "an event follows the seal")
        restored_count = self.opened.restored_count
        if which and (which == "restored") != (revision <= 1 + restored_count):
            raise LogError(revision, f"{which}, where {restored_count} calls are restored")
        if which == "intent":
            self._announce(revision, event.intent.call_id)
        elif which == "record":
            self._settle(revision, event.record.coords.call_id, which, _RECORDED, (_PENDING,))
            self.record_count += 1
        elif which == "restored":
            self._settle(revision, event.restored.coords.call_id, which, _RECORDED, (None,))
            self.record_count += 1
        elif which == "failure":
            self._fail(revision, event.failure.call_id)
        elif which == "withdrawal":
            self._settle(revision, event.withdrawal.call_id, which, _WITHDRAWN, (_PENDING,))
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
    def call_count(self) -> int:
        """How many calls were admitted or restored."""
        return len(self._states)

    @property
    def pending_count(self) -> int:
        """How many admitted calls have not settled: no record, no failure, no withdrawal."""
        return len(self._pending)

    @property
    def has_rows(self) -> bool:
        """Whether a call of the attempt was committed or failed (LED-2)."""
        return bool(self.record_count or self.failure_count)

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

    def _announce(self, revision: int, call_id: str) -> None:
        """Take a new call, or anew one that was withdrawn."""
        if self._states.get(call_id, _WITHDRAWN) != _WITHDRAWN:
            raise LogError(revision, f"a second intent of call {call_id}")
        self._states[call_id] = _PENDING
        self._pending[call_id] = None

    def _settle(
        self, revision: int, call_id: str, what: str, end: str, before: tuple[str | None, ...]
    ) -> None:
        """Let a call come to an end from one of some states; None is that it is unknown."""
        if self._states.get(call_id) not in before:
            raise LogError(revision, f"call {call_id} cannot have a {what} here")
        self._states[call_id] = end
        self._pending.pop(call_id, None)

    def _fail(self, revision: int, call_id: str) -> None:
        """Take a failure row; in forest mode one of a committed call stands beside its record."""
        if self.mode == CHAIN or self._states.get(call_id) != _RECORDED:
            self._settle(revision, call_id, "failure", _FAILED, (_PENDING, _FAILED))
        self.failure_count += 1


def record_of(event: ledger_event_pb2.LedgerEvent) -> call_record_pb2.CallRecord | None:
    """Give the record that an event commits or restores, or None."""
    if event.HasField("record"):
        return event.record
    return event.restored if event.HasField("restored") else None


def keeps_replay_items(record: call_record_pb2.CallRecord) -> bool:
    """Say whether a record keeps more of its request than a summary, as early ledgers did."""
    return record.HasField("replay") and len(UnknownFieldSet(record.replay)) > 0
