"""What a snapshot of the Finalizer's store holds: receipts, groups, cursors, and their faults."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from callforest.capture.v1 import receipt_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.forest.receipts import receipt_digest
from callforest_mesh.chassis.store_fault import StoreFault
from callforest_mesh.chassis.store_snapshot import StoreSnapshot
from callforest_mesh.finalizer.store import tenant_key, tenant_prefix

_TENANT_BYTES: Final = 8
_CURSOR: Final = struct.Struct(">Q")
_SLOT: Final = struct.Struct(">I")
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(slots=True)
class _Log:
    """A tenant's row log."""

    state: row_log_pb2.RowLogState = field(default_factory=row_log_pb2.RowLogState)
    groups: dict[int, row_log_pb2.LoggedGroup] = field(default_factory=dict)


class FinalizerInventory:
    """Reads receipts and groups of a snapshot; the references of all groups are kept in memory.

    Args:
        snapshot: of the Finalizer's store.
    """

    def __init__(self, snapshot: StoreSnapshot) -> None:
        self._snapshot = snapshot
        self._faults: list[StoreFault] = []
        self._logs: dict[bytes, _Log] = {}
        for key, state in self._read("state", row_log_pb2.RowLogState):
            self._logs.setdefault(key, _Log()).state = state
        for key, logged in self._read("log", row_log_pb2.LoggedGroup):
            log = self._logs.setdefault(key[:_TENANT_BYTES], _Log())
            log.groups[_CURSOR.unpack(key[_TENANT_BYTES:])[0]] = logged
        self._cursors = {
            key: _CURSOR.unpack(position[_TENANT_BYTES:])[0]
            for key, position in snapshot.records("groups")
            if position is not None
        }

    def faults(self) -> Iterator[StoreFault]:
        """Check cursors, positions, indexes and the digest of every receipt."""
        yield from self._faults
        for tenant, log in self._logs.items():
            yield from _log_faults(tenant, log)
            for cursor, logged in log.groups.items():
                key = _sibling(tenant, logged.group_id)
                if self._cursors.get(key) != cursor:
                    yield StoreFault(f"groups/{key.hex()}", f"group {logged.group_id} is not there")
        for key, finalized in self._read("rollouts", row_log_pb2.FinalizedRollout):
            yield from self._rollout_faults(key, finalized)

    def receipt(self, tenant: str, rollout_id: str) -> receipt_pb2.Receipt | None:
        """Give the receipt of a rollout, or None."""
        stored = self._snapshot.value("rollouts", tenant_key(tenant, rollout_id))
        return None if stored is None else row_log_pb2.FinalizedRollout.FromString(stored).receipt

    def receipts(self) -> Iterator[tuple[bytes, receipt_pb2.Receipt, bool]]:
        """Give every receipt, with what begins its tenant's keys and whether it was consumed."""
        for key, finalized in self._read("rollouts", row_log_pb2.FinalizedRollout):
            tenant, receipt = key[:_TENANT_BYTES], finalized.receipt
            cursor = self._cursors.get(_sibling(tenant, receipt.group_id))
            state = self._logs.get(tenant, _Log()).state
            yield tenant, receipt, cursor is not None and cursor <= state.committed_cursor

    def is_consumed(self, tenant: str, rollout_id: str) -> bool:
        """Say whether the group of a finalized rollout is at or below the committed cursor."""
        cursor = self._cursor(tenant, rollout_id)
        return cursor is not None and cursor <= self._state(tenant).committed_cursor

    def is_cleaned(self, tenant: str, rollout_id: str) -> bool:
        """Say whether the finalizer has removed what the consumed group of a rollout had staged."""
        cursor = self._cursor(tenant, rollout_id)
        return cursor is not None and cursor <= self._state(tenant).cleaned_cursor

    def waiting_groups(self, tenant: str) -> Iterator[row_log_pb2.LoggedGroup]:
        """Give the groups of a tenant that are not consumed."""
        log = self._logs.get(tenant_prefix(tenant), _Log())
        for cursor, logged in log.groups.items():
            if cursor > log.state.committed_cursor:
                yield logged

    @property
    def cursors(self) -> Mapping[str, int]:
        """Positions of all tenants together: published, and of them consumed."""
        states = [log.state for log in self._logs.values()]
        return {
            "groups": sum(state.head_cursor for state in states),
            "groups_consumed": sum(state.committed_cursor for state in states),
        }

    def _cursor(self, tenant: str, rollout_id: str) -> int | None:
        receipt = self.receipt(tenant, rollout_id)
        if receipt is None:
            return None
        return self._cursors.get(tenant_key(tenant, receipt.group_id))

    def _state(self, tenant: str) -> row_log_pb2.RowLogState:
        return self._logs.get(tenant_prefix(tenant), _Log()).state

    def _rollout_faults(
        self, key: bytes, finalized: row_log_pb2.FinalizedRollout
    ) -> Iterator[StoreFault]:
        receipt = finalized.receipt
        name = f"rollouts/{key.hex()}"
        if receipt_digest(receipt) != receipt.digest:
            yield StoreFault(name, f"the receipt of {receipt.rollout_id} does not have its digest")
        if key != _sibling(key[:_TENANT_BYTES], receipt.rollout_id):
            yield StoreFault(name, f"{receipt.rollout_id} is stored under another rollout's key")
        group = _sibling(key[:_TENANT_BYTES], receipt.group_id)
        slot = self._snapshot.value("slots", group + _SLOT.pack(receipt.slot))
        if slot != receipt.rollout_id.encode():
            yield StoreFault(name, f"slot {receipt.slot} of {receipt.group_id} is another's")

    def _read(self, database: str, kind: type[MessageT]) -> Iterator[tuple[bytes, MessageT]]:
        for key, stored in self._snapshot.records(database):
            if stored is None:
                continue  # a walk over the store names it
            message = kind()
            try:
                message.ParseFromString(stored)
            except DecodeError:
                self._faults.append(StoreFault(f"{database}/{key.hex()}", "is no record"))
                continue
            yield key, message


def _log_faults(tenant: bytes, log: _Log) -> Iterator[StoreFault]:
    state, name = log.state, f"state/{tenant.hex()}"
    if not state.cleaned_cursor <= state.committed_cursor <= state.head_cursor:
        found = f"{state.cleaned_cursor}, {state.committed_cursor}, {state.head_cursor}"
        yield StoreFault(name, f"cleaned, committed and head cursor are out of order: {found}")
    if sorted(log.groups) != list(range(1, state.head_cursor + 1)):
        yield StoreFault(name, f"{len(log.groups)} positions, not 1 to {state.head_cursor}")
    for cursor, logged in log.groups.items():
        key = f"log/{(tenant + _CURSOR.pack(cursor)).hex()}"
        if logged.cursor != cursor:
            yield StoreFault(key, f"position {cursor} says that it is {logged.cursor}")
        used = {span.segment_index for row in logged.rows for span in row.spans}
        if used and max(used) >= len(logged.segments):
            yield StoreFault(key, f"group {logged.group_id} refers to calls that it does not name")


def _sibling(tenant: bytes, name: str) -> bytes:
    """Give the key of a rollout or a group of a tenant of whom only the hash is known."""
    return tenant + tenant_key("", name)[_TENANT_BYTES:]
