"""The row log: receipts, groups and positions, in one LMDB environment.

Keys begin with 8 bytes of the tenant's hash. `rollouts` holds receipts by rollout, `slots` says
which rollout sits where in a group, `groups` finds a group's position, `log` holds the positions,
`state` how far a tenant's log is. A group becomes visible by one transaction (FIN-3).
"""

from __future__ import annotations

import hashlib
import struct

from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import LmdbStore, ReadTxn, WriteTxn

DATABASES = ("rollouts", "slots", "groups", "log", "state")


class RowLog:
    """Reads and writes the row log.

    Args:
        store: the open environment, with DATABASES.
    """

    def __init__(self, store: LmdbStore) -> None:
        self._store = store

    def rollout(self, tenant: str, rollout_id: str) -> row_log_pb2.FinalizedRollout | None:
        """Read what was finalized of a rollout."""
        return self._store.read(lambda txn: _rollout(txn, tenant, rollout_id))

    async def keep_rollout(
        self, tenant: str, finalized: row_log_pb2.FinalizedRollout
    ) -> row_log_pb2.FinalizedRollout:
        """Store a receipt unless the rollout has one; give the stored one.

        Raises:
            Refusal: another rollout has the slot (GROUP_MISMATCH), or the group was published
                already (GROUP_MISMATCH).
        """
        receipt = finalized.receipt

        def keep(txn: WriteTxn) -> row_log_pb2.FinalizedRollout:
            stored = _rollout(txn, tenant, receipt.rollout_id)
            if stored is not None:
                return stored
            slot_key = _slot_key(tenant, receipt.group_id, receipt.slot)
            if txn.get("slots", slot_key) is not None:
                raise _mismatch(receipt.group_id, receipt.rollout_id, "slot")
            if txn.get("groups", _key(tenant, receipt.group_id)) is not None:
                raise _mismatch(receipt.group_id, receipt.rollout_id, "group_id")
            key = _key(tenant, receipt.rollout_id)
            txn.put("rollouts", key, finalized.SerializeToString())
            txn.put("slots", slot_key, receipt.rollout_id.encode())
            return finalized

        return await self._store.write(keep)

    def group(self, tenant: str, group_id: str) -> row_log_pb2.LoggedGroup | None:
        """Read a published group."""
        return self._store.read(lambda txn: _group(txn, tenant, group_id))

    def group_rollouts(self, tenant: str, group_id: str) -> dict[int, row_log_pb2.FinalizedRollout]:
        """Read what was finalized of a group, by slot."""

        def read(txn: ReadTxn) -> dict[int, row_log_pb2.FinalizedRollout]:
            found = {}
            for key, rollout_id in txn.scan("slots", _key(tenant, group_id)):
                rollout = _rollout(txn, tenant, rollout_id.decode())
                if rollout is not None:
                    found[struct.unpack(">I", key[-4:])[0]] = rollout
            return found

        return self._store.read(read)

    async def publish(
        self, tenant: str, logged: row_log_pb2.LoggedGroup
    ) -> row_log_pb2.LoggedGroup:
        """Give a group the next position, all at once; a published one keeps its own."""

        def append(txn: WriteTxn) -> row_log_pb2.LoggedGroup:
            published = _group(txn, tenant, logged.group_id)
            if published is not None:
                return published
            state = _state(txn, tenant)
            state.head_cursor += 1
            logged.cursor = state.head_cursor
            position = _position(tenant, logged.cursor)
            txn.put("log", position, logged.SerializeToString())
            txn.put("groups", _key(tenant, logged.group_id), position)
            txn.put("state", _tenant(tenant), state.SerializeToString())
            return logged

        return await self._store.write(append)

    async def replace(self, tenant: str, logged: row_log_pb2.LoggedGroup) -> None:
        """Overwrite a position with a dropped group."""
        position = _position(tenant, logged.cursor)
        raw = logged.SerializeToString()
        await self._store.write(lambda txn: txn.put("log", position, raw), reserve=True)

    def at(self, tenant: str, cursor: int) -> row_log_pb2.LoggedGroup | None:
        """Read the group at a position; None if there is none, or it was cleaned."""

        def read(txn: ReadTxn) -> row_log_pb2.LoggedGroup | None:
            raw = txn.get("log", _position(tenant, cursor))
            return None if raw is None else row_log_pb2.LoggedGroup.FromString(raw)

        return self._store.read(read)

    def state(self, tenant: str) -> row_log_pb2.RowLogState:
        """Read how far a tenant's log is."""
        return self._store.read(lambda txn: _state(txn, tenant))

    async def bind(self, tenant: str, consumer: str) -> row_log_pb2.RowLogState:
        """Bind a tenant's log to its one consumer; give the log's state.

        Raises:
            Refusal: CONSUMER_BOUND to another.
        """

        def bind(txn: WriteTxn) -> row_log_pb2.RowLogState:
            state = _state(txn, tenant)
            if state.consumer and state.consumer != consumer:
                raise Refusal(
                    er.ERROR_REASON_CONSUMER_BOUND,
                    f"the row log belongs to the consumer {state.consumer}",
                    consumer=consumer,
                    bound_consumer=state.consumer,
                )
            if not state.consumer:
                state.consumer = consumer
                txn.put("state", _tenant(tenant), state.SerializeToString())
            return state

        return await self._store.write(bind)

    async def commit(self, tenant: str, cursor: int) -> row_log_pb2.RowLogState:
        """Move the committed cursor; it never moves back."""

        def move(txn: WriteTxn) -> row_log_pb2.RowLogState:
            state = _state(txn, tenant)
            if cursor > state.committed_cursor:
                state.committed_cursor = cursor
                txn.put("state", _tenant(tenant), state.SerializeToString())
            return state

        return await self._store.write(move, reserve=True)

    async def cleaned(self, tenant: str, cursor: int) -> None:
        """Mark a position as cleaned; its references stay, so that a repeat answers the same."""

        def mark(txn: WriteTxn) -> None:
            state = _state(txn, tenant)
            state.cleaned_cursor = max(state.cleaned_cursor, cursor)
            txn.put("state", _tenant(tenant), state.SerializeToString())

        await self._store.write(mark, reserve=True)


def _rollout(txn: ReadTxn, tenant: str, rollout_id: str) -> row_log_pb2.FinalizedRollout | None:
    raw = txn.get("rollouts", _key(tenant, rollout_id))
    return None if raw is None else row_log_pb2.FinalizedRollout.FromString(raw)


def _group(txn: ReadTxn, tenant: str, group_id: str) -> row_log_pb2.LoggedGroup | None:
    position = txn.get("groups", _key(tenant, group_id))
    raw = None if position is None else txn.get("log", position)
    return None if raw is None else row_log_pb2.LoggedGroup.FromString(raw)


def _state(txn: ReadTxn, tenant: str) -> row_log_pb2.RowLogState:
    raw = txn.get("state", _tenant(tenant))
    return row_log_pb2.RowLogState.FromString(raw or b"")


def _tenant(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()[:8]


def _key(tenant: str, name: str) -> bytes:
    return _tenant(tenant) + hashlib.sha256(name.encode()).digest()[:16]


def _slot_key(tenant: str, group_id: str, slot: int) -> bytes:
    return _key(tenant, group_id) + struct.pack(">I", slot)


def _position(tenant: str, cursor: int) -> bytes:
    return _tenant(tenant) + struct.pack(">Q", cursor)


def _mismatch(group_id: str, rollout_id: str, field: str) -> Refusal:
    return Refusal(
        er.ERROR_REASON_GROUP_MISMATCH,
        f"group {group_id} was finalized with another {field}",
        group_id=group_id,
        rollout_id=rollout_id,
        field=field,
    )
