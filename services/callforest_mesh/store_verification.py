"""`callforest verify --store`: is what the stores hold what was stored, and does it fit together?

Reads stopped stores, or a backup, and changes nothing. Every byte is read first in a process of its
own; then each store is held against itself, and all against each other.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from callforest.capture.v1 import attempt_pb2, commit_coords_pb2, staged_call_pb2
from callforest_client.codec import (
    ColumnError,
    call_record_from_proto,
    coords_of,
    known_coords,
    staged_call_from_proto,
)
from callforest_core.custody.call import Receipt
from callforest_core.custody.verification import VerificationError, verify_paths
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_environment import CONTENT_FILE
from callforest_mesh.chassis.store_fault import StoreFault
from callforest_mesh.chassis.store_hold import StoreHold
from callforest_mesh.chassis.store_walk import walk
from callforest_mesh.finalizer.inventory import FinalizerInventory
from callforest_mesh.ledger.inventory import LedgerInventory, LoggedAttempt
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.ledger.store import ATTEMPT_PREFIX_BYTES, TENANT_BYTES, attempt_prefix
from callforest_mesh.staging.entry import HASH_BYTES
from callforest_mesh.staging.inventory import StagedInventory
from callforest_mesh.store_set import StoreSet, find_stores

_DANGLING = "dangling: it has a record, and is not staged"
LINES_MAX = 200
"""Most faults that are told one by one."""


@dataclass(slots=True)
class Verification:
    """What was found.

    Attributes:
        faults: what is wrong, with the store's name.
        counts: of what was looked at.
    """

    faults: list[tuple[str, StoreFault]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Describe the findings; the last line is for programs."""
        lines = [f"fault  {store:<9} {one.key}  {one.text}" for store, one in self.faults]
        if len(lines) > LINES_MAX:
            lines[LINES_MAX:] = [f"... and {len(lines) - LINES_MAX} more faults"]
        lines += [f"{name:<24} {count}" for name, count in self.counts.items()]
        lines.append("intact" if not self.faults else f"{len(self.faults)} faults")
        counts = {"faults": len(self.faults), **self.counts}
        return [*lines, f"RESULT {json.dumps(counts)}"]


def verify_stores(path: Path) -> Verification:
    """Verify a state directory, a backup of one, or one store.

    What refers to a store that is not there is not looked for.

    Raises:
        NoStoreError: there is none.
        StoreInUseError: a service runs on one.
    """
    result = Verification()
    paths = find_stores(path)
    with ExitStack() as holds:
        for store in paths.values():
            holds.enter_context(StoreHold(store, alone=True))
        readable = {}
        for name, store in paths.items():
            faults = walk(store, alone=True)
            result.faults += [(name, fault) for fault in faults]
            if all(fault.key != CONTENT_FILE for fault in faults):
                readable[name] = store
        try:
            with StoreSet(readable, alone=True) as stores:
                result.counts["stores"] = len(readable)
                _StoreCheck(stores, result).run()
        except Refusal as refusal:
            fault = StoreFault(refusal.facts.get("key", CONTENT_FILE), refusal.message)
            result.faults.append((refusal.facts.get("store", path.name), fault))
    return result


class _StoreCheck:
    """Holds the stores against themselves and each other."""

    def __init__(self, stores: StoreSet, result: Verification) -> None:
        self._stores = stores
        self._result = result
        self._sealed: dict[bytes, tuple[int, int]] = {}
        self._known: set[bytes] = set()
        self._tenants: set[str] = set()

    def run(self) -> None:
        """Find every fault that a walk over the bytes does not show."""
        stores = self._stores
        staging, ledger, finalizer = stores.staging, stores.ledger, stores.finalizer
        if staging is not None:
            self._add("staging", staging.faults())
            self._result.counts["staged_calls"] = sum(one[1] for one in staging.partitions())
        if finalizer is not None:
            self._add("finalizer", finalizer.faults())
            self._result.counts.update(finalizer.cursors)
        if ledger is not None:
            self._check_attempts(ledger, staging, finalizer)
            if staging is not None:
                self._add("staging", self._unknown_partitions(staging))
            if finalizer is not None:
                self._add("finalizer", self._receipt_faults(finalizer))
                if staging is not None:
                    self._add("finalizer", self._reference_faults(finalizer, staging))

    def _add(self, store: str, faults: Iterator[StoreFault]) -> None:
        self._result.faults += [(store, fault) for fault in faults]

    def _check_attempts(
        self,
        ledger: LedgerInventory,
        staging: StagedInventory | None,
        finalizer: FinalizerInventory | None,
    ) -> None:
        counts = self._result.counts
        for prefix, attempt in ledger.attempts():
            counts["attempts"] += 1
            self._known.add(prefix)
            if isinstance(attempt, StoreFault):
                self._add("ledger", iter([attempt]))
                continue
            self._tenants.add(attempt.key.tenant)
            counts["records"] += len(attempt.records)
            self._known.update(_owners(attempt))
            if attempt.view.state == attempt_pb2.ATTEMPT_STATE_SEALED:
                self._sealed[prefix] = (attempt.view.opened.epoch, attempt.view.revision)
            if staging is not None:
                self._add("ledger", self._staged_faults(attempt, staging, finalizer))

    def _staged_faults(
        self,
        attempt: LoggedAttempt,
        staging: StagedInventory,
        finalizer: FinalizerInventory | None,
    ) -> Iterator[StoreFault]:
        """Hold an attempt's rows against what it staged."""
        tenant, capture_key = attempt.key.tenant, attempt.key.capture_key
        counts = self._result.counts
        staged = set(staging.call_ids(tenant, capture_key))
        own = {record.coords.call_id for record in attempt.own_records}
        for call_id in sorted(staged - own):
            if attempt.view.call(call_id) is None:
                yield _fault(attempt, call_id, "an orphan: it is staged, and was never announced")
            else:
                counts["staged_without_record"] += 1
        # Without the finalizer's store nobody can say what was consumed.
        consumed = finalizer is None or finalizer.is_consumed(
            tenant, attempt.view.opened.rollout_id
        )
        # Of what a later attempt did not restore nothing needs to be there.
        gone = consumed or attempt.superseded or staging.is_dropped(tenant, capture_key)
        calls: list[staged_call_pb2.StagedCall] = []
        for record in attempt.records:
            call_id, owner = record.coords.call_id, record.source_capture_key or capture_key
            is_staged = (
                call_id in staged if owner == capture_key else (staging.has(tenant, owner, call_id))
            )
            if not is_staged:
                counts["records_whose_call_is_gone"] += 1
                where = f" under {owner}" if record.source_capture_key else ""
                if not gone:
                    yield _fault(attempt, call_id, _DANGLING + where)
                continue
            call = staging.call(tenant, owner, call_id)
            if call is None:
                continue  # damaged, and named by Staging's own check
            calls.append(call)
            if known_coords(record.coords) != _coords_in(capture_key, call):
                yield _fault(attempt, call_id, "its record commits to another call")
        if calls and len(calls) == len(attempt.records):
            counts["attempts_verified_whole"] += 1
            yield from _chain_faults(attempt, calls)

    def _unknown_partitions(self, staging: StagedInventory) -> Iterator[StoreFault]:
        for partition, count, is_dropped in staging.partitions():
            if is_dropped:
                self._result.counts["calls_of_unfinished_teardowns"] += count
            elif _attempt_of(partition[:HASH_BYTES], partition[HASH_BYTES:]) not in self._known:
                text = f"orphans: {count} staged calls of an attempt that the ledger does not have"
                yield StoreFault(f"calls/{partition.hex()}", text)

    def _receipt_faults(self, finalizer: FinalizerInventory) -> Iterator[StoreFault]:
        for tenant, receipt, consumed in finalizer.receipts():
            self._result.counts["receipts"] += 1
            if not receipt.capture_key or consumed:
                continue  # the log of what was consumed may have been forgotten
            named = hashlib.sha256(receipt.capture_key.encode()).digest()
            sealed = self._sealed.get(_attempt_of(tenant, named))
            if sealed != (receipt.epoch, receipt.revision):
                text = "its receipt is of an attempt that the ledger does not have sealed like that"
                yield StoreFault(f"{receipt.rollout_id} ({receipt.capture_key})", text)

    def _reference_faults(
        self, finalizer: FinalizerInventory, staging: StagedInventory
    ) -> Iterator[StoreFault]:
        for tenant in sorted(self._tenants):
            for logged in finalizer.waiting_groups(tenant):
                for reference in logged.segments:
                    self._result.counts["references"] += 1
                    call = staging.call(tenant, reference.capture_key, reference.call_id)
                    if call is None or call.digest != reference.digest:
                        name = f"{reference.capture_key}/{reference.call_id}"
                        text = f"group {logged.group_id} waits to be trained on it; it is not there"
                        yield StoreFault(name, text)


def _owners(attempt: LoggedAttempt) -> set[bytes]:
    """Give what begins the keys of the attempts that made its restored calls.

    Their own logs may have been forgotten.
    """
    owners = {record.source_capture_key for record in attempt.records}
    return {attempt_prefix(AttemptKey(attempt.key.tenant, owner)) for owner in owners if owner}


def _coords_in(
    capture_key: str, call: staged_call_pb2.StagedCall
) -> commit_coords_pb2.CommitCoords:
    """Give the coordinates that a staged call has in an attempt, which may have restored it."""
    coords = coords_of(call)
    if call.capture_key != capture_key and coords.HasField("parent_call_id"):
        coords.parent_capture_key = coords.parent_capture_key or call.capture_key
    coords.capture_key = capture_key
    return coords


def _chain_faults(
    attempt: LoggedAttempt, staged: list[staged_call_pb2.StagedCall]
) -> Iterator[StoreFault]:
    """Check every digest, link and hash of an attempt whose calls are all there."""
    records = tuple(call_record_from_proto(record) for record in attempt.records)
    parents = {record.parent_call_id for record in records}
    endpoints = [record.call_id for record in records if record.call_id not in parents]
    try:
        calls = [staged_call_from_proto(call) for call in staged]
        verify_paths(Receipt(attempt.key.capture_key, records, None), calls, endpoints)
    except (VerificationError, ColumnError) as error:
        yield StoreFault(attempt.key.capture_key, str(error))


def _attempt_of(tenant_hash: bytes, key_hash: bytes) -> bytes:
    """Give what begins an attempt's keys in the ledger, of hashes that may be longer than there."""
    size = ATTEMPT_PREFIX_BYTES - TENANT_BYTES
    return tenant_hash[:TENANT_BYTES] + key_hash[:size]


def _fault(attempt: LoggedAttempt, call_id: str, text: str) -> StoreFault:
    return StoreFault(f"{attempt.key.capture_key}/{call_id}", text)
