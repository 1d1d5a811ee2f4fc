"""Calls of a made-up harness: what the gateway and the worker would send to the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
    commit_coords_pb2,
    completion_pb2,
)
from callforest.ledger.v1 import ledger_event_pb2, ledger_service_pb2
from callforest_core.lineage.fingerprint import FINGERPRINT_VERSION, ConversationScan
from callforest_mesh.ledger import commits, core
from callforest_mesh.ledger.attempt import AttemptView
from callforest_mesh.ledger.core import Decision
from callforest_mesh.ledger.outline import CHAIN

TENANT = "acme"
KEY = "r1"
REQUEST_ID = "3f2b8a52-0a3a-4b5e-9a58-0d9f8d2f7b11"
CAPTURE_FAILED = "worker_capture_failed"

T = TypeVar("T")
Items = Sequence[object]


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


FIRST: list[object] = [user("one")]
SECOND: list[object] = [*FIRST, said("A"), user("two")]
THIRD: list[object] = [*SECOND, said("B"), user("three")]


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def probe(items: Items, *, version: int = FINGERPRINT_VERSION) -> capture_admission_pb2.ChainProbe:
    scan = ConversationScan(items)
    return capture_admission_pb2.ChainProbe(
        assistant_fingerprint=scan.assistant_fingerprint,
        item_count=scan.item_count,
        context_digests=scan.context_digests,
        fingerprint_version=version,
    )


def intent(
    call_id: str, items: Items = FIRST, *, body: str = "body", key: str = KEY
) -> attempt_pb2.CallIntent:
    made = attempt_pb2.CallIntent(
        capture_key=key, call_id=call_id, body_digest=digest(body), chain=probe(items)
    )
    made.admit_time.FromSeconds(1_700_000_000)
    return made


def asking(
    items: Items, *, key: str = KEY, version: int = FINGERPRINT_VERSION
) -> ledger_service_pb2.FindPredecessorRequest:
    """Make the question whom a request would continue."""
    return ledger_service_pb2.FindPredecessorRequest(
        tenant=TENANT, capture_key=key, chain=probe(items, version=version)
    )


def record(
    call_id: str,
    items: Items = FIRST,
    answer: str = "A",
    *,
    parent: call_record_pb2.CallRecord | None = None,
    key: str = KEY,
    version: int = FINGERPRINT_VERSION,
) -> call_record_pb2.CallRecord:
    """Make the record of a call that answered `answer`; it adds 4 tokens."""
    scan = ConversationScan(items)
    coords = commit_coords_pb2.CommitCoords(
        capture_key=key,
        call_id=call_id,
        delta_token_count=4,
        weight_version=7,
        digest=digest(f"digest {call_id}"),
        extras_digest=digest("extras"),
        chain_hash=digest(f"chain {call_id}"),
        cumulative_hash=digest(f"tokens {call_id}"),
    )
    if parent is not None:
        coords.parent_call_id = parent.coords.call_id
        coords.prev_token_count = length(parent)
    made = call_record_pb2.CallRecord(
        coords=coords,
        response_id=f"chatcmpl-{call_id}",
        fingerprints=call_record_pb2.CallFingerprints(
            version=version,
            continuation=scan.continued([said(answer)]).fingerprint,
            context_item_count=scan.item_count,
            context_digest=scan.context_digest,
        ),
        completion=completion_pb2.Completion(
            status=completion_pb2.COMPLETION_STATUS_COMPLETED,
            finish_reason="stop",
            generation_token_count=2,
            weight_version_count=1,
        ),
    )
    made.admit_time.FromSeconds(1_700_000_000)
    return made


def numbered(
    committed: call_record_pb2.CallRecord, intent_number: int
) -> call_record_pb2.CallRecord:
    """Give a record as the ledger keeps it of the call that it announced in this place."""
    kept = call_record_pb2.CallRecord()
    kept.CopyFrom(committed)
    kept.intent_number = intent_number
    return kept


def length(committed: call_record_pb2.CallRecord) -> int:
    return committed.coords.prev_token_count + committed.coords.delta_token_count


def failure(
    call_id: str, reason: str = CAPTURE_FAILED, *, detail: str = "", key: str = KEY
) -> attempt_pb2.CallFailure:
    return attempt_pb2.CallFailure(capture_key=key, call_id=call_id, reason=reason, detail=detail)


def withdrawal(
    call_id: str, reason: str = "REQUEST_REFUSED", *, detail: str = "", key: str = KEY
) -> attempt_pb2.CallWithdrawal:
    return attempt_pb2.CallWithdrawal(
        capture_key=key, call_id=call_id, reason=reason, detail=detail
    )


def first_told(answer: capture_admission_pb2.Verdict) -> capture_admission_pb2.Verdict:
    """Give what a repeat was told without what only repeats are told."""
    assert answer.HasField("earlier")
    told = capture_admission_pb2.Verdict()
    told.CopyFrom(answer)
    told.ClearField("earlier")
    return told


class Attempt:
    """An attempt without a store: its log and the view that follows it."""

    def __init__(self, mode: attempt_pb2.CaptureMode.ValueType = CHAIN) -> None:
        opened = core.opened_event(TENANT, KEY, 0, REQUEST_ID, mode)
        self.log: list[ledger_event_pb2.LedgerEvent] = [opened]
        self.view = AttemptView(opened.attempt_opened)

    def apply(self, decision: Decision[T]) -> Decision[T]:
        for event in decision.events:
            self.log.append(event)
            self.view.apply(event)
        return decision

    def admit(
        self, call_id: str, items: Items = FIRST, *, body: str = "body"
    ) -> capture_admission_pb2.Verdict:
        return self.apply(core.record_intent(self.view, intent(call_id, items, body=body))).answer

    def commit(self, committed: call_record_pb2.CallRecord) -> None:
        self.apply(commits.commit_record(self.view, committed))

    def fail(self, failed: attempt_pb2.CallFailure) -> None:
        self.apply(commits.commit_failure(self.view, failed))

    def withdraw(self, withdrawn: attempt_pb2.CallWithdrawal) -> None:
        self.apply(commits.commit_withdrawal(self.view, withdrawn))

    def close(self) -> None:
        self.apply(core.close(self.view, KEY))

    def seal(self) -> None:
        self.apply(core.seal(self.view, KEY))

    def replayed(self) -> AttemptView:
        stored = [
            ledger_event_pb2.LedgerEvent.FromString(one.SerializeToString()) for one in self.log
        ]
        view = AttemptView.replay(stored)
        assert view is not None
        return view


def facts(view: AttemptView) -> tuple[object, ...]:
    """Give everything that a view can be asked, to compare two of them."""
    return (
        view.attempt(superseded=False).SerializeToString(deterministic=True),
        view.summary(),
        view.call_count,
        view.chain.manifest(),
        {call_id: view.call(call_id) for call_id in view._calls},
        {body: tuple(calls) for body, calls in view._unkeyed.items()},
        view.intent_count,
    )
