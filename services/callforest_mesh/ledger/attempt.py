"""One attempt with its calls, as its log tells it: a view folded from the events in order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from callforest.capture.v1 import attempt_pb2, call_record_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_client.codec import parent_of
from callforest_client.source_codec import source_summary_from_proto
from callforest_core.custody.attempts import is_earlier_attempt
from callforest_core.custody.call import staging_key
from callforest_core.lineage.chain import ChainView, ContextWitness
from callforest_core.lineage.fingerprint import NO_FINGERPRINT
from callforest_core.lineage.forest_view import ForestView
from callforest_mesh.ledger.admitted_call import AdmittedCall
from callforest_mesh.ledger.outline import FOREST, AttemptOutline, LogError

NO_RESULT: Final = "request_finished_without_staged_coordinates"
"""The reason of a failure row that says that an admitted request ended without an answer."""
_NO_CONTEXT: Final = ContextWitness(NO_FINGERPRINT, 0, b"")


class CommittedCall(NamedTuple):
    """What is kept ready of a committed call; its record is kept as it was stored.

    Attributes:
        call_id: the call.
        parent_call_id: the call that it continues, or None for a root.
        cum_len: tokens up to its end.
        chain_hash: of its deltas from the root, raw 32 bytes.
        staging_key: where the staged call is.
        fingerprint_version: of the canonicalisation, 0 when none was recorded.
    """

    call_id: str
    parent_call_id: str | None
    cum_len: int
    chain_hash: bytes
    staging_key: str
    fingerprint_version: int


class AttemptView(AttemptOutline):
    """The state of one attempt with its calls. An event costs the same however many came before.

    Args:
        opened: the first event of the log.

    Attributes:
        forest: the committed calls by their histories; None in chain mode.
        configuration_digest: the engine's, that the first intent with one bound, or to which the
            restored attempt was bound; else b"".
        are_numbered: whether every record has its intent number, as earlier releases' have not.
        intent_count: calls announced or restored; a withdrawn one may be announced again.
    """

    __slots__ = (
        "_calls",
        "_chain",
        "_unkeyed",
        "are_numbered",
        "configuration_digest",
        "forest",
        "intent_count",
    )

    def __init__(self, opened: ledger_event_pb2.AttemptOpened) -> None:
        super().__init__(opened)
        self.forest = ForestView() if self.mode == FOREST else None
        self.configuration_digest = opened.configuration_digest
        self.intent_count = 0
        self.are_numbered = True
        self._chain: ChainView[CommittedCall] = ChainView()
        self._calls: dict[str, AdmittedCall] = {}
        # What a repeat without a key may repeat: by body, in the order of their intents.
        self._unkeyed: dict[bytes, dict[str, None]] = {}

    def apply(self, event: ledger_event_pb2.LedgerEvent) -> None:
        """Add the next event of the log.

        Raises:
            LogError: it cannot follow; the view must be thrown away.
        """
        super().apply(event)
        which = event.WhichOneof("event")
        if which == "intent":
            self._apply_intent(event.intent)
        elif which == "record":
            self._append_record(event.record)
        elif which == "restored":
            self._apply_restored(event.restored)
        elif which == "failure":
            self._apply_failure(event.failure)
        elif which == "withdrawal":
            self._apply_withdrawal(event.withdrawal)

    @property
    def chain(self) -> ChainView[CommittedCall]:
        """The rows and whom a request would continue."""
        return self._chain

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

    def _apply_restored(self, record: call_record_pb2.CallRecord) -> None:
        """Take a committed call of an earlier attempt over."""
        coords, owner = record.coords, record.source_capture_key
        if coords.capture_key != self.opened.capture_key:
            raise LogError(self.revision, f"call {coords.call_id} cannot be restored here")
        if not is_earlier_attempt(owner, coords.capture_key):
            raise LogError(self.revision, f"call {coords.call_id} is restored from {owner!r}")
        if coords.HasField("parent_call_id") and (
            coords.parent_call_id not in self._calls
            or coords.parent_capture_key != self.source_of(coords.parent_call_id)
        ):
            raise LogError(self.revision, f"call {coords.call_id} comes without what it continues")
        self._calls[coords.call_id] = AdmittedCall(b"", b"", source_capture_key=owner)
        self.intent_count += 1
        self._append_record(record)

    def _apply_intent(self, intent: ledger_event_pb2.IntentRecorded) -> None:
        self.intent_count += 1
        self._calls[intent.call_id] = AdmittedCall(
            intent.body_digest,
            intent.verdict.SerializeToString(),
            intent.is_keyed,
            intent.admit_time.SerializeToString(),
            intent_number=self.intent_count,
        )
        if not intent.is_keyed:
            self._unkeyed.setdefault(intent.body_digest, {})[intent.call_id] = None
        if intent.configuration_digest and not self.configuration_digest:
            self.configuration_digest = intent.configuration_digest

    def _append_record(self, record: call_record_pb2.CallRecord) -> None:
        """Let a committed call be found and continued."""
        committed = _committed(record)
        self._chain.append_record(committed, _witness(record))
        if self.forest is not None:
            _append_history(self.forest, record)
        self._calls[committed.call_id].record = record.SerializeToString()
        self.are_numbered = self.are_numbered and record.intent_number > 0

    def _apply_failure(self, failure: attempt_pb2.CallFailure) -> None:
        call = self._calls[failure.call_id]
        self._chain.append_failure(failure.call_id, failure.reason)
        call.failures = (*call.failures, failure.SerializeToString())
        call.failure_reasons = (*call.failure_reasons, failure.reason)
        if call.record is None:
            self._forget_unkeyed(failure.call_id, call)

    def _apply_withdrawal(self, withdrawal: attempt_pb2.CallWithdrawal) -> None:
        """Settle a call that never was: it is no row, and nothing continues it."""
        call = self._calls[withdrawal.call_id]
        call.withdrawal = withdrawal.SerializeToString()
        self._forget_unkeyed(withdrawal.call_id, call)

    def _forget_unkeyed(self, call_id: str, call: AdmittedCall) -> None:
        alike = self._unkeyed.get(call.body_digest, {})
        alike.pop(call_id, None)
        if not alike:
            self._unkeyed.pop(call.body_digest, None)


def _committed(record: call_record_pb2.CallRecord) -> CommittedCall:
    coords = record.coords
    capture_key, call_id = record.source_capture_key or coords.capture_key, coords.call_id
    return CommittedCall(
        call_id,
        parent_of(coords),
        coords.prev_token_count + coords.delta_token_count,
        coords.chain_hash,
        staging_key(capture_key, call_id),
        record.fingerprints.version,
    )


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
