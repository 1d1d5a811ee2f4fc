"""A sequential model of the mesh, held against what becomes durable, commit by commit.

It is written from docs/protocol.md and shares no decision with the services: it reads the durable
records, the bodies that harnesses sent and what the engine sampled, and says what must follow. It
knows conversations as texts, where the ledger knows fingerprints, and whole sequences of tokens,
where Staging knows deltas.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

from callforest.capture.v1 import capture_admission_pb2, staged_call_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_core.lineage.items import Dialect
from callforest_mesh.chassis.record_frame import CHECKSUM_BYTES
from callforest_mesh.gateway.asked import digest_body
from callforest_mesh.staging.entry import CallEntry, partition_key
from callforest_mesh.staging.segments import SEGMENTS, segment_key
from callforest_mesh.worker.engine import EngineRequest, EngineResult
from tests.simulation.disk import Change, Disk

Messages = list[dict[str, str]]
TENANT = "default"
_PREFIX = 24
"""Bytes of a ledger key that name its attempt."""


@dataclass(slots=True)
class ModelCall:
    """A call as the model knows it."""

    verdict: capture_admission_pb2.Verdict
    messages: Messages
    record: bool = False
    failures: set[str] = field(default_factory=set)


@dataclass(slots=True)
class ModelAttempt:
    """An attempt as the model knows it.

    Attributes:
        conversations: committed calls by all that models had said when they ended.
        order: committed calls, first to last.
    """

    rollout_id: str
    number: int
    capture_key: str
    revision: int = 1
    state: str = "open"
    calls: dict[str, ModelCall] = field(default_factory=dict)
    conversations: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    @property
    def pending(self) -> list[str]:
        return [one for one, call in self.calls.items() if not call.record and not call.failures]

    @property
    def failed(self) -> bool:
        return any(call.failures for call in self.calls.values())


@dataclass(slots=True)
class Sampled:
    """One generation of a call."""

    tokens: bytes
    response: bytes
    weight_version: int


@dataclass(slots=True)
class Judge:
    """The model, and what it found wrong.

    Attributes:
        violations: in words.
        counts: how much was judged.
    """

    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    attempts: dict[str, ModelAttempt] = field(default_factory=dict)
    latest: dict[str, ModelAttempt] = field(default_factory=dict)
    bodies: dict[bytes, Messages] = field(default_factory=dict)
    sampled: dict[str, list[Sampled]] = field(default_factory=dict)
    staged: dict[tuple[str, str], staged_call_pb2.StagedCall] = field(default_factory=dict)
    paths: dict[tuple[str, str], bytes] = field(default_factory=dict)
    groups: dict[int, row_log_pb2.LoggedGroup] = field(default_factory=dict)
    receipts: dict[str, row_log_pb2.FinalizedRollout] = field(default_factory=dict)
    state: row_log_pb2.RowLogState = field(default_factory=row_log_pb2.RowLogState)
    responses: dict[tuple[str, str], bytes] = field(default_factory=dict)
    restaged: set[str] = field(default_factory=set)
    _keys: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    _attempt_keys: dict[bytes, str] = field(default_factory=dict)
    _dropped: set[bytes] = field(default_factory=set)
    _cursors: dict[str, int] = field(default_factory=dict)

    def watch(self, disks: dict[str, Disk]) -> None:
        """Be shown every commit."""
        disks["ledger"].witness = self._ledger
        disks["staging"].witness = lambda changes: self._staging(changes, disks["staging"])
        disks["finalizer"].witness = self._row_log

    def asked(self, body: bytes, messages: Messages) -> None:
        """Note what a harness sends, before it does."""
        self.bodies[digest_body(body, Dialect.CHAT)] = list(messages)

    def generated(self, request: EngineRequest, result: EngineResult) -> None:
        """Note what the engine sampled."""
        tokens = result.prompt_ids.astype("<u4").tobytes()
        tokens += result.generated_ids.astype("<u4").tobytes()
        sampled = Sampled(tokens, result.response, result.weight_version)
        self.sampled.setdefault(request.call_id, []).append(sampled)

    def wrong(self, rule: str, *facts: object) -> None:
        """Write a violation down."""
        self.violations.append(f"{rule}: {' '.join(map(str, facts))}")

    def demand(self, holds: object, rule: str, *facts: object) -> None:
        """Write a violation down unless something holds."""
        if not holds:
            self.wrong(rule, *facts)

    def _ledger(self, changes: list[Change]) -> None:
        for database, key, value in changes:
            if database != "events":
                continue
            if value is None:
                self.wrong("the ledger is append-only", key.hex())
                continue
            event = ledger_event_pb2.LedgerEvent.FromString(value[CHECKSUM_BYTES:])
            which = event.WhichOneof("event") or ""
            self.counts[which] += 1
            if which == "attempt_opened":
                self._opened(key[:_PREFIX], event.attempt_opened)
                continue
            attempt = self.attempts[self._attempt_keys[key[:_PREFIX]]]
            attempt.revision += 1
            where = (attempt.capture_key, which)
            self.demand(attempt.state != "sealed", "P9 nothing follows a seal", *where)
            revision = int.from_bytes(key[_PREFIX:], "big")
            self.demand(revision == attempt.revision, "revisions follow each other", *where)
            if which == "intent":
                self._intent(attempt, event.intent)
            elif which == "record":
                self._record(attempt, event.record)
            elif which == "failure":
                self._failure(attempt, event.failure)
            elif which == "admissions_closed":
                attempt.state = "closed"
            elif which == "sealed":
                attempt.state = "sealed"
                told = (event.sealed.revision, list(event.sealed.pending_call_ids))
                self.demand(told == (revision, attempt.pending), "a seal fixes what is", *where)

    def _opened(self, prefix: bytes, opened: ledger_event_pb2.AttemptOpened) -> None:
        before = self.latest.get(opened.rollout_id)
        number = 0 if before is None else before.number + 1
        attempt = ModelAttempt(opened.rollout_id, opened.attempt_number, opened.capture_key)
        self.demand(opened.attempt_number == number, "attempts are counted", opened.capture_key)
        self.demand(
            before is None or before.state == "sealed",
            "opening an attempt seals the one before",
            opened.capture_key,
        )
        self._attempt_keys[prefix] = opened.capture_key
        self.attempts[opened.capture_key] = self.latest[opened.rollout_id] = attempt

    def _intent(self, attempt: ModelAttempt, intent: ledger_event_pb2.IntentRecorded) -> None:
        where = (attempt.capture_key, intent.call_id)
        self.demand(attempt.state == "open", "only open attempts admit calls", *where)
        self.demand(intent.call_id not in attempt.calls, "P5 one intent a call", *where)
        messages = self.bodies.get(intent.body_digest)
        if messages is None:
            self.wrong("an intent is of a request", *where)
            return
        told, wanted = intent.verdict.WhichOneof("verdict"), self._verdict(attempt, messages)
        if told == "continuation":
            told = intent.verdict.continuation.parent_call_id
            parent = self.paths.get((attempt.capture_key, told), b"")
            length = intent.verdict.continuation.prev_token_count * 4
            self.demand(len(parent) == length, "a parent's length is its path's", *where)
        self.demand(told == wanted, "P3 every parent is right", *where, told, "not", wanted)
        attempt.calls[intent.call_id] = ModelCall(intent.verdict, messages)

    def _verdict(self, attempt: ModelAttempt, messages: Messages) -> str:
        """Say what a request continues: "root", "uncaptured" or a call."""
        said = tuple(one["content"] for one in messages if one["role"] == "assistant")
        has_rows = attempt.failed or bool(attempt.order)
        if not said or not has_rows:
            return "root"
        found = attempt.conversations.get(said, [])
        if len(found) != 1:
            return "uncaptured"
        last = max(i for i, one in enumerate(messages) if one["role"] == "assistant")
        same = attempt.calls[found[0]].messages == messages[:last]
        return found[0] if same else "uncaptured"

    def _record(self, attempt: ModelAttempt, record) -> None:
        coords = record.coords
        where = (attempt.capture_key, coords.call_id)
        call = attempt.calls.get(coords.call_id)
        if call is None:
            self.wrong("a record is of an admitted call", *where)
            return
        self.demand(not call.record and not call.failures, "one row a call", *where)
        staged = self.staged.get(where)
        if staged is None or staged.digest != coords.digest:
            self.wrong("P2 tokens are durable before their record", *where)
            return
        verdict = call.verdict.continuation.parent_call_id
        self.demand(coords.parent_call_id == verdict, "LED-13 the admitted parent", *where)
        call.record = True
        attempt.order.append(coords.call_id)
        said = [one["content"] for one in call.messages if one["role"] == "assistant"]
        said.append(answer_of(staged.served_response))
        attempt.conversations.setdefault(tuple(said), []).append(coords.call_id)

    def _failure(self, attempt: ModelAttempt, failure) -> None:
        where = (attempt.capture_key, failure.call_id, failure.reason)
        call = attempt.calls.get(failure.call_id)
        if call is None:
            self.wrong("a failure is of an admitted call", *where)
            return
        self.demand(not call.record, "a committed call does not fail", *where)
        self.demand(failure.reason not in call.failures, "a failure is written once", *where)
        call.failures.add(failure.reason)

    def _staging(self, changes: list[Change], disk: Disk) -> None:
        for database, key, value in changes:
            if database == "calls" and value is None:
                self._unstaged(*self._keys[key])
            elif database == "calls" and value is not None:
                entry = CallEntry.from_bytes(value[CHECKSUM_BYTES:])
                segment = disk.tables[SEGMENTS].values[segment_key(entry.segment)]
                start = CHECKSUM_BYTES + entry.offset
                raw = segment[start : start + entry.size]
                self._staged(key, staged_call_pb2.StagedCall.FromString(raw))
            elif database == "partitions":
                self._dropped.add(key)

    def _staged(self, key: bytes, call: staged_call_pb2.StagedCall) -> None:
        where = (call.capture_key, call.call_id)
        self.counts["staged"] += 1
        partition = partition_key(TENANT, call.capture_key)
        self.demand(partition not in self._dropped, "LED-8 nothing after a teardown", *where)
        self.demand(where not in self.staged, "put if absent", *where)
        inherited = b""
        if call.HasField("parent_call_id"):
            inherited = self.paths.get((call.capture_key, call.parent_call_id), b"")
        self.demand(len(inherited) == 4 * call.prev_token_count, "a delta follows its path", *where)
        path = inherited + call.canonical.token_ids
        found = [one for one in self.sampled.get(call.call_id, []) if one.tokens == path]
        self.demand(found, "P7 exactly what the engine saw and sampled", *where)
        if found:
            versions = {one.weight_version for one in found}
            self.demand(call.weight_version in versions, "CAP-8 the admitted version", *where)
            bodies = {one.response for one in found}
            self.demand(call.served_response in bodies, "the response of these tokens", *where)
        if key in self._keys:
            self.restaged.add(call.call_id)
        self._keys[key] = where
        self.staged[where] = call
        self.responses[where] = call.served_response
        self.paths[where] = path

    def _unstaged(self, capture_key: str, call_id: str) -> None:
        """Tokens go only when the group of their rollout was consumed (FIN-3)."""
        self.counts["unstaged"] += 1
        del self.staged[capture_key, call_id]
        rollout_id = self.attempts[capture_key].rollout_id
        cursor = self._cursors.get(rollout_id)
        consumed = cursor is not None and cursor <= self.state.committed_cursor
        self.demand(consumed, "FIN-3 tokens stay until consumed", capture_key, call_id)

    def _row_log(self, changes: list[Change]) -> None:
        for database, key, value in changes:
            if value is None:
                self.wrong("the row log is append-only", database, key.hex())
                continue
            raw = value[CHECKSUM_BYTES:]
            if database == "rollouts":
                self._finalized(row_log_pb2.FinalizedRollout.FromString(raw))
            elif database == "log":
                self._logged(row_log_pb2.LoggedGroup.FromString(raw))
            elif database == "state":
                state = row_log_pb2.RowLogState.FromString(raw)
                self.demand(
                    state.cleaned_cursor <= state.committed_cursor <= state.head_cursor
                    and state.committed_cursor >= self.state.committed_cursor
                    and state.head_cursor >= self.state.head_cursor,
                    "cursors only move forward",
                    state,
                )
                self.state = state

    def _finalized(self, rollout: row_log_pb2.FinalizedRollout) -> None:
        receipt = rollout.receipt
        where = (receipt.rollout_id, receipt.mask_reason, receipt.mask_detail)
        self.counts["receipts"] += 1
        self.demand(receipt.rollout_id not in self.receipts, "one receipt a rollout", *where)
        self.receipts[receipt.rollout_id] = rollout
        attempt = self.attempts[receipt.capture_key]
        self.demand(attempt is self.latest[receipt.rollout_id], "of the last attempt", *where)
        self.demand(attempt.state == "sealed", "of a sealed attempt", *where)
        self.demand(receipt.revision == attempt.revision, "of its final revision", *where)
        calls = [call.call_id for call in receipt.calls]
        self.demand(calls == attempt.order, "of all its records, in order", *where)
        wanted = ""
        if attempt.pending:
            wanted = "pending_call"
        elif attempt.failed:
            wanted = "capture_poisoned"
        elif not attempt.order:
            wanted = "attempt_not_captured"
        told = receipt.mask_reason
        if told == "terminal_not_attributed" and not rollout.declared_response_id:
            told = ""  # nobody said which call was scored
        self.demand(told == wanted, "LED-7 masked if and only if incomplete", *where, wanted)

    def _logged(self, group: row_log_pb2.LoggedGroup) -> None:
        where = (group.group_id, group.cursor, group.drop_reason)
        known = self.groups.get(group.cursor)
        if known is not None:
            self.wrong("a published group stays as it is", *where)
            return
        self.counts["groups"] += 1
        self.demand(group.cursor == len(self.groups) + 1, "positions follow each other", *where)
        self.demand(
            group.drop_reason in ("", "no_valid_layout"), "no published group is lost", *where
        )
        names = [one.group_id for one in self.groups.values()]
        self.demand(group.group_id not in names, "a group has one position", *where)
        self.groups[group.cursor] = group
        for rollout_id in group.rollout_ids:
            self.demand(rollout_id in self.receipts, "a group is of finished rollouts", *where)
            self._cursors[rollout_id] = group.cursor


def answer_of(response: bytes) -> str:
    """Give what a Chat Completions response says."""
    answer: str = json.loads(response)["choices"][0]["message"]["content"]
    return answer
