"""The row log: receipts, groups and positions, in one LMDB environment.

Keys begin with 8 bytes of the tenant's hash. `rollouts` holds receipts by rollout, `slots` says
which rollout sits where in a group, `groups` finds a group's position, `log` holds the positions,
`state` how far a tenant's log is. A group becomes visible by one transaction (FIN-3).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.errors import draining
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.lmdb_store import LmdbStore, ReadTxn, WriteTxn

DATABASES = ("rollouts", "slots", "groups", "log", "state")


class RowLog:
    """Reads and writes the row log.

    Args:
        open_store: opens the environment, with DATABASES.
    """

    def __init__(self, open_store: Callable[[], LmdbStore]) -> None:
        self._open_store = open_store
        self._opened: LmdbStore | None = None

    def open(self) -> None:
        """Open the store; blocks for a moment."""
        self._opened = self._open_store()

    async def close(self) -> None:
        """Commit what waits and close the store. Idempotent."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _store(self) -> LmdbStore:
        if self._opened is None:
            raise draining("finalizer")
        return self._opened

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
            if txn.get("groups", tenant_key(tenant, receipt.group_id)) is not None:
                raise _mismatch(receipt.group_id, receipt.rollout_id, "group_id")
            key = tenant_key(tenant, receipt.rollout_id)
            txn.put("rollouts", key, finalized.SerializeToString())
            failpoint("finalizer.after_receipt_put")
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
            for key, rollout_id in txn.scan("slots", tenant_key(tenant, group_id)):
                rollout = _rollout(txn, tenant, rollout_id.decode())
                if rollout is not None:
                    found[struct.unpack(">I", key[-4:])[0]] = rollout
            return found

        return self._store.read(read)

    def rollouts(
        self, tenant: str, logged: row_log_pb2.LoggedGroup
    ) -> list[row_log_pb2.FinalizedRollout]:
        """Read what was finalized of the rollouts of a published group, in slot order."""

        def read(txn: ReadTxn) -> list[row_log_pb2.FinalizedRollout]:
            found = [_rollout(txn, tenant, rollout_id) for rollout_id in logged.rollout_ids]
            return [rollout for rollout in found if rollout is not None]

        return self._store.read(read)

    async def publish(
        self, tenant: str, logged: row_log_pb2.LoggedGroup
    ) -> row_log_pb2.LoggedGroup | None:
        """Give a group the next position, all at once; a published one keeps its own.

        Returns:
            What stands in the log; None when a rollout joined the group since it was laid out.
        """

        def append(txn: WriteTxn) -> row_log_pb2.LoggedGroup | None:
            published = _group(txn, tenant, logged.group_id)
            if published is not None:
                return published
            members = [name for _, name in txn.scan("slots", tenant_key(tenant, logged.group_id))]
            if members != [name.encode() for name in logged.rollout_ids]:
                return None
            state = _state(txn, tenant)
            state.head_cursor += 1
            logged.cursor = state.head_cursor
            position = _position(tenant, logged.cursor)
            txn.put("log", position, logged.SerializeToString())
            failpoint("finalizer.after_group_put")
            txn.put("groups", tenant_key(tenant, logged.group_id), position)
            txn.put("state", tenant_prefix(tenant), state.SerializeToString())
            return logged

        return await self._store.write(append)

    async def replace(self, tenant: str, logged: row_log_pb2.LoggedGroup) -> bool:
        """Overwrite a position with a dropped group, unless it was consumed already."""
        position = _position(tenant, logged.cursor)
        raw = logged.SerializeToString()

        def overwrite(txn: WriteTxn) -> bool:
            if logged.cursor <= _state(txn, tenant).committed_cursor:
                return False
            txn.put("log", position, raw)
            return True

        return await self._store.write(overwrite, reserve=True)

    def at(self, tenant: str, cursor: int) -> row_log_pb2.LoggedGroup | None:
        """Read the group at a position; None if there is none."""

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
                txn.put("state", tenant_prefix(tenant), state.SerializeToString())
            return state

        return await self._store.write(bind)

    async def commit(
        self, tenant: str, cursor: int, *, allowed: Callable[[], bool]
    ) -> row_log_pb2.RowLogState | None:
        """Move the committed cursor; it never moves back.

        Args:
            tenant: owns the log.
            cursor: the last consumed position.
            allowed: asked within the transaction, on the writer's thread.

        Returns:
            The log's state; None when it was no longer allowed.
        """

        def move(txn: WriteTxn) -> row_log_pb2.RowLogState | None:
            if not allowed():
                return None
            state = _state(txn, tenant)
            if cursor > state.committed_cursor:
                state.committed_cursor = cursor
                txn.put("state", tenant_prefix(tenant), state.SerializeToString())
            return state

        return await self._store.write(move, reserve=True)

    async def cleaned(self, tenant: str, cursor: int) -> None:
        """Mark a position as cleaned; its references stay, so that a repeat answers the same."""

        def mark(txn: WriteTxn) -> None:
            state = _state(txn, tenant)
            state.cleaned_cursor = max(state.cleaned_cursor, cursor)
            txn.put("state", tenant_prefix(tenant), state.SerializeToString())

        await self._store.write(mark, reserve=True)


def _rollout(txn: ReadTxn, tenant: str, rollout_id: str) -> row_log_pb2.FinalizedRollout | None:
    raw = txn.get("rollouts", tenant_key(tenant, rollout_id))
    return None if raw is None else row_log_pb2.FinalizedRollout.FromString(raw)


def _group(txn: ReadTxn, tenant: str, group_id: str) -> row_log_pb2.LoggedGroup | None:
    position = txn.get("groups", tenant_key(tenant, group_id))
    raw = None if position is None else txn.get("log", position)
    return None if raw is None else row_log_pb2.LoggedGroup.FromString(raw)


def _state(txn: ReadTxn, tenant: str) -> row_log_pb2.RowLogState:
    raw = txn.get("state", tenant_prefix(tenant))
    return row_log_pb2.RowLogState.FromString(raw or b"")


def tenant_prefix(tenant: str) -> bytes:
    """Give what begins every key of a tenant."""
    return hashlib.sha256(tenant.encode()).digest()[:8]


def tenant_key(tenant: str, name: str) -> bytes:
    """Give the key of a rollout or a group of a tenant."""
    return tenant_prefix(tenant) + hashlib.sha256(name.encode()).digest()[:16]


def _slot_key(tenant: str, group_id: str, slot: int) -> bytes:
    return tenant_key(tenant, group_id) + struct.pack(">I", slot)


def _position(tenant: str, cursor: int) -> bytes:
    return tenant_prefix(tenant) + struct.pack(">Q", cursor)


def _mismatch(group_id: str, rollout_id: str, field: str) -> Refusal:
    return Refusal(
        er.ERROR_REASON_GROUP_MISMATCH,
        f"group {group_id} was finalized with another {field}",
        group_id=group_id,
        rollout_id=rollout_id,
        field=field,
    )
