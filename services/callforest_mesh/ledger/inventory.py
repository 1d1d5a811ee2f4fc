"""What a snapshot of the Ledger's store holds: every attempt, folded from its log."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from callforest.capture.v1 import call_record_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_client.codec import seconds_of
from callforest_core.custody.attempts import AttemptName
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.store_fault import StoreFault
from callforest_mesh.chassis.store_snapshot import StoreSnapshot
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.outline import AttemptKey, LogError
from callforest_mesh.ledger.store import (
    ATTEMPT_PREFIX_BYTES,
    DATABASES,
    attempt_prefix,
    latest_attempt,
    revision_of,
)

_EVENTS = DATABASES[0]


@dataclass(frozen=True, slots=True)
class LoggedAttempt:
    """An attempt as its log tells it.

    Attributes:
        key: names it.
        view: its state.
        records: its committed calls, in order, restored ones first.
        last_admit_s: when its last call was admitted, by the gateway's clock, in seconds since the
            epoch, restored ones included; 0.0 without a call.
        last_own_s: the same of the calls that it announced itself; None without one.
        superseded: whether a later attempt of the rollout was opened.
    """

    key: AttemptKey
    view: AttemptView
    records: Sequence[call_record_pb2.CallRecord]
    last_admit_s: float
    last_own_s: float | None
    superseded: bool

    def age_s(self, now_s: float) -> float | None:
        """How long ago the attempt announced its last call; None when it announced none."""
        return None if self.last_own_s is None else now_s - self.last_own_s

    @property
    def own_records(self) -> list[call_record_pb2.CallRecord]:
        """The calls that the attempt made itself."""
        return [record for record in self.records if not record.source_capture_key]


class LedgerInventory:
    """Reads the attempts of a snapshot.

    Args:
        snapshot: of the Ledger's store.
    """

    def __init__(self, snapshot: StoreSnapshot) -> None:
        self._snapshot = snapshot

    def attempts(self) -> Iterator[tuple[bytes, LoggedAttempt | StoreFault]]:
        """Give what begins each attempt's keys, and the attempt or what is wrong with its log."""
        stored = self._snapshot.records(_EVENTS)
        for prefix, pairs in itertools.groupby(
            stored, key=lambda one: one[0][:ATTEMPT_PREFIX_BYTES]
        ):
            yield prefix, self._attempt(prefix, list(pairs))

    def latest(self, tenant: str, rollout_id: str) -> LoggedAttempt | None:
        """Give a rollout's latest attempt; None when its log cannot be read, or is not there."""
        try:
            number = latest_attempt(self._snapshot.view, tenant, rollout_id)
        except Refusal:
            return None
        if number is None:
            return None
        prefix = attempt_prefix(AttemptKey(tenant, AttemptName(rollout_id, number).capture_key))
        found = self._attempt(prefix, list(self._snapshot.records(_EVENTS, prefix)))
        return found if isinstance(found, LoggedAttempt) else None

    def _attempt(
        self, prefix: bytes, pairs: list[tuple[bytes, bytes | None]]
    ) -> LoggedAttempt | StoreFault:
        name = f"{_EVENTS}/{prefix.hex()}"
        events: list[ledger_event_pb2.LedgerEvent] = []
        for number, (key, value) in enumerate(pairs, 1):
            if value is None:
                return StoreFault(name, f"event {number} is damaged; the attempt cannot be read")
            if revision_of(key) != number:
                return StoreFault(name, f"no event {number}")
            try:
                events.append(ledger_event_pb2.LedgerEvent.FromString(value))
            except DecodeError:
                return StoreFault(name, f"event {number} is no event")
        try:
            view = AttemptView.replay(events)
        except LogError as error:
            return StoreFault(name, str(error))
        if view is None:
            return StoreFault(name, "it has no events")
        opened = view.opened
        attempt = AttemptKey(opened.tenant, opened.capture_key)
        if attempt_prefix(attempt) != prefix:
            return StoreFault(name, "it is stored under another attempt's key")
        try:
            latest = latest_attempt(self._snapshot.view, opened.tenant, opened.rollout_id)
        except Refusal:
            return StoreFault(name, "the index of its rollout is damaged")
        if latest is None or latest < opened.attempt_number:
            return StoreFault(name, f"{opened.capture_key} is not in its rollout's index")
        return LoggedAttempt(
            attempt,
            view,
            list(view.records()),
            max((_admitted(event) for event in events), default=0.0),
            max((_admitted(one) for one in events if one.HasField("intent")), default=None),
            superseded=latest != opened.attempt_number,
        )


def _admitted(event: ledger_event_pb2.LedgerEvent) -> float:
    which = event.WhichOneof("event")
    if which == "intent":
        return seconds_of(event.intent.admit_time)
    return seconds_of(event.restored.admit_time) if which == "restored" else 0.0
