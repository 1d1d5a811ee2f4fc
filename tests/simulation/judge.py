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

from callforest.capture.v1 import attempt_pb2, staged_call_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_core.custody.attempts import AttemptName
from callforest_core.lineage.items import Dialect
from callforest_mesh.chassis.record_frame import CHECKSUM_BYTES
from callforest_mesh.chassis.token_capture import ALL_CAPTURED
from callforest_mesh.gateway.asked import digest_body
from callforest_mesh.staging.entry import CallEntry, partition_key
from callforest_mesh.staging.segments import SEGMENTS, segment_key
from callforest_mesh.worker.engine import EngineRequest, EngineResult
from tests.simulation.disk import Change, Disk
from tests.simulation.model import Messages, ModelAttempt, ModelCall, Sampled

TENANT = "default"
_PREFIX = 24
"""Bytes of a ledger key that name its attempt."""


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
            if which == "restored":
                self._restored(attempt, event.restored)
            elif which == "intent":
                self._intent(attempt, event.intent)
            elif which == "record":
                self._record(attempt, event.record)
            elif which == "failure":
                self._failure(attempt, event.failure)
            elif which == "withdrawal":
                self._withdrawal(attempt, event.withdrawal)
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
        attempt.forest = opened.mode == attempt_pb2.CAPTURE_MODE_FOREST
        self.demand(opened.attempt_number == number, "attempts are counted", opened.capture_key)
        self.demand(
            before is None or before.state == "sealed",
            "opening an attempt seals the one before",
            opened.capture_key,
        )
        if opened.restored_from:
            named = before is not None and opened.restored_from == before.capture_key
            self.demand(named, "only the latest attempt is restored", opened.capture_key)
            sound = before is not None and not before.lost
            self.demand(sound, "LED-7 nothing is restored from what failed", opened.capture_key)
        self._attempt_keys[prefix] = opened.capture_key
        self.attempts[opened.capture_key] = self.latest[opened.rollout_id] = attempt

    def _restored(self, attempt: ModelAttempt, record) -> None:
        """A restored call is the latest attempt's, staged where its first owner staged it."""
        coords, owner = record.coords, record.source_capture_key
        where = (attempt.capture_key, coords.call_id)
        before = self.attempts[AttemptName(attempt.rollout_id, attempt.number - 1).capture_key]
        made = before.calls.get(coords.call_id)
        if made is None or not made.record:
            self.wrong("what is restored was committed", *where)
            return
        self.demand(owner == before.owner_of(coords.call_id), "ADM-9 the first owner", *where)
        staged = self.staged.get((owner, coords.call_id))
        there = staged is not None and staged.digest == coords.digest
        self.demand(there, "ADM-9 it is staged under its owner", *where, owner)
        self.demand(not made.parent or made.parent in attempt.order, "parents come first", *where)
        said = before.told_at[coords.call_id]
        attempt.calls[coords.call_id] = ModelCall(
            made.verdict, made.messages, record=True, parent=made.parent, owner=owner
        )
        attempt.announced = [one for one in before.announced if one in attempt.calls]
        attempt.commit(coords.call_id, said)

    def _intent(self, attempt: ModelAttempt, intent: ledger_event_pb2.IntentRecorded) -> None:
        where = (attempt.capture_key, intent.call_id)
        self.demand(attempt.state == "open", "only open attempts admit calls", *where)
        known = attempt.calls.get(intent.call_id)
        self.demand(known is None or known.withdrawn, "P5 one intent a call", *where)
        messages = self.bodies.get(intent.body_digest)
        if messages is None:
            self.wrong("an intent is of a request", *where)
            return
        told, wanted = intent.verdict.WhichOneof("verdict"), self._verdict(attempt, messages)
        if told == "continuation":
            told = intent.verdict.continuation.parent_call_id
            owner = attempt.owner_of(told)
            named = intent.verdict.continuation.parent_capture_key or attempt.capture_key
            self.demand(named == owner, "ADM-9 a parent's owner", *where, named, owner)
            parent = self.paths.get((owner, told), b"")
            length = intent.verdict.continuation.prev_token_count * 4
            self.demand(len(parent) == length, "a parent's length is its path's", *where)
        self.demand(told == wanted, "P3 every parent is right", *where, told, "not", wanted)
        attempt.announce(intent.call_id)
        attempt.calls[intent.call_id] = ModelCall(intent.verdict, messages)

    def _verdict(self, attempt: ModelAttempt, messages: Messages) -> str:
        """Say what a request continues: "root", "uncaptured", "refused" or a call."""
        ends = [place + 1 for place, one in enumerate(messages) if one["role"] == "assistant"]
        if not ends:
            return "root"
        found = attempt.conversations.get(attempt.said(messages[: ends[-1]]), [])
        if attempt.forest:
            return {0: "root", 1: "".join(found)}.get(len(found), "refused")
        if not attempt.failed and not attempt.order:
            return "root"
        if len(found) != 1:
            return "uncaptured"
        same = attempt.calls[found[0]].messages == messages[: ends[-1] - 1]
        return found[0] if same else "uncaptured"

    def _record(self, attempt: ModelAttempt, record) -> None:
        coords = record.coords
        where = (attempt.capture_key, coords.call_id)
        call = attempt.calls.get(coords.call_id)
        if call is None:
            self.wrong("a record is of an admitted call", *where)
            return
        fresh = not (call.record or call.failures or call.withdrawn)
        self.demand(fresh, "one row a call", *where)
        staged = self.staged.get(where)
        if staged is None or staged.digest != coords.digest:
            self.wrong("P2 tokens are durable before their record", *where)
            return
        verdict, told = call.verdict.continuation.parent_call_id, coords.parent_call_id
        self.demand(told == verdict, "LED-13 the admitted parent", *where)
        call.record, call.parent = True, told
        answer = {"role": "assistant", "content": answer_of(staged.served_response)}
        attempt.commit(coords.call_id, attempt.said([*call.messages, answer]))

    def _failure(self, attempt: ModelAttempt, failure) -> None:
        where = (attempt.capture_key, failure.call_id, failure.reason)
        call = attempt.calls.get(failure.call_id)
        if call is None:
            self.wrong("a failure is of an admitted call", *where)
            return
        fits = not call.withdrawn and (attempt.forest or not call.record)
        self.demand(fits, "a committed or withdrawn call does not fail", *where)
        self.demand(failure.reason not in call.failures, "a failure is written once", *where)
        call.failures.add(failure.reason)

    def _withdrawal(self, attempt: ModelAttempt, withdrawal) -> None:
        where = (attempt.capture_key, withdrawal.call_id)
        pending = withdrawal.call_id in attempt.pending
        self.demand(pending, "only what is pending is withdrawn", *where)
        self.demand(where not in self.staged, "what was generated is not withdrawn", *where)
        attempt.calls[withdrawal.call_id].withdrawn = True

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
            owner = call.parent_capture_key or call.capture_key
            inherited = self.paths.get((owner, call.parent_call_id), b"")
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
        for call in receipt.calls:
            owner = call.source_capture_key or receipt.capture_key
            mine = owner == attempt.owner_of(call.call_id)
            self.demand(mine, "ADM-9 a receipt names the owners", *where, call.call_id, owner)
        if receipt.selection_policy == ALL_CAPTURED:
            self._selected_in_order(attempt, list(receipt.selected_call_ids))
        wanted = self._mask(attempt, set(receipt.selected_call_ids))
        told = receipt.mask_reason
        if told == "terminal_not_attributed" and not rollout.declared_response_id:
            told = ""  # nobody said which call was scored
        self.demand(told == wanted, "LED-7 masked if and only if incomplete", *where, wanted)

    def _selected_in_order(self, attempt: ModelAttempt, selected: list[str]) -> None:
        """Calls are selected as they were announced, not as they finished, whatever clocks say."""
        announced = [call_id for call_id in attempt.announced if call_id in selected]
        told = (attempt.capture_key, selected, "not", announced)
        self.demand(selected == announced, "SEL-3 intent order", *told)

    def _mask(self, attempt: ModelAttempt, selected: set[str]) -> str:
        """Say why a rollout must not train, "" if it must."""
        if attempt.pending:
            return "pending_call"
        if attempt.failed:
            return "capture_poisoned"
        if not attempt.order:
            return "attempt_not_captured"
        calls = [attempt.calls[call_id] for call_id in selected]
        if any(call.failures for call in calls):
            return "capture_poisoned"
        if any(call.parent and call.parent not in selected for call in calls):
            return "selection_not_closed"
        return ""

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
