"""Staged calls in the store: put if absent, read back checked, delete by exact key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from callforest.capture.v1 import staged_call_pb2
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.lmdb_store import LmdbStore, ReadTxn, WriteTxn
from callforest_mesh.chassis.record_frame import checksum
from callforest_mesh.chassis.transaction import corrupt
from callforest_mesh.staging import segments
from callforest_mesh.staging.core import (
    CallLink,
    StagedName,
    call_not_found,
    partition_dropped,
    plan_prefix,
    receipt_of,
)
from callforest_mesh.staging.entry import CallEntry, link_of, partition_key, tenant_key
from callforest_mesh.staging.segments import SegmentCollector, segment_key

CALLS: Final = "calls"
PARTITIONS: Final = "partitions"
DATABASES: Final = (CALLS, PARTITIONS, *segments.DATABASES)
_REMOVED_AT_ONCE: Final = 256
"""Calls that one commit removes: others must not wait for all, and a full disk has blocks kept for
so many."""
_READ_BYTES: Final = 1 << 20
_DROPPED: Final = b"dropped"


class StagedCalls:
    """The staged calls of all tenants.

    Args:
        opened: gives the store, which has DATABASES.
    """

    def __init__(self, opened: Callable[[], LmdbStore]) -> None:
        self._opened = opened

    def put(
        self,
        tenant: str,
        call: staged_call_pb2.StagedCall,
        staged: Callable[[int], None] = lambda _size: None,
    ) -> asyncio.Future[pb.StagedReceipt]:
        """Store a checked call unless one has its id; answer when that is durable.

        Args:
            tenant: owns the call.
            call: the call.
            staged: told the bytes of a call that was stored, once it is durable.

        Raises:
            Refusal: PARTITION_DROPPED, STORE_FULL, STORE_CORRUPT, OVERLOADED, DRAINING.
        """
        partition = partition_key(tenant, call.capture_key)
        key = partition + call.call_id.encode()
        link = link_of(call)
        payload = call.SerializeToString()
        seal = checksum(CALLS, key, payload)

        def put_if_absent(txn: WriteTxn) -> bytes | None:
            if txn.get(PARTITIONS, partition) is not None:
                raise partition_dropped(call.capture_key, call.call_id)
            entry = _entry(txn, key)
            if entry is not None:
                return self._payload(txn, key, entry)
            collector = txn.shared(SegmentCollector, len(payload))
            segment, offset = collector.add(txn, tenant_key(tenant), payload)
            entry = CallEntry(segment, offset, len(payload), seal, link)
            txn.put(CALLS, key, entry.to_bytes())
            failpoint("staging.after_put")
            return None

        def receipt(stored: bytes | None) -> pb.StagedReceipt:
            failpoint("staging.before_receipt")
            if stored is None:
                staged(len(payload))
                return receipt_of(call, None)
            return receipt_of(call, staged_call_pb2.StagedCall.FromString(stored))

        return self._opened().submit(put_if_absent, receipt)

    def prefix(self, tenant: str, query: pb.PrefixQuery) -> pb.Prefix:
        """Read the deltas that lead to a call, less what the caller holds.

        Raises:
            Refusal: CALL_NOT_FOUND, PREFIX_BROKEN, STORE_CORRUPT, MESSAGE_TOO_LARGE.
        """
        held = frozenset(query.held_call_ids)

        def read(txn: ReadTxn) -> pb.Prefix:
            def find(name: StagedName) -> CallLink | None:
                key = partition_key(tenant, name.capture_key) + name.call_id.encode()
                entry = _entry(txn, key)
                return None if entry is None else entry.link

            plan = plan_prefix(find, query, held)
            prefix = pb.Prefix(held_call_id=plan.held_call_id)
            for owner, call_id in plan.names:
                call = self._call(txn, partition_key(tenant, owner), owner, call_id)
                prefix.deltas.add(call_id=call_id, token_ids=call.canonical.token_ids)
            return prefix

        return self._opened().read(read)

    def require(self, tenant: str, capture_key: str, call_ids: Sequence[str]) -> None:
        """Refuse unless every call is staged.

        Raises:
            Refusal: CALL_NOT_FOUND names the first that is not.
        """
        partition = partition_key(tenant, capture_key)

        def read(txn: ReadTxn) -> None:
            for call_id in call_ids:
                if _entry(txn, partition + call_id.encode()) is None:
                    raise call_not_found(capture_key, call_id)

        self._opened().read(read)

    def some(
        self, tenant: str, capture_key: str, call_ids: Sequence[str]
    ) -> list[staged_call_pb2.StagedCall]:
        """Read the first of some calls: as many as make up a megabyte, at least one.

        Raises:
            Refusal: CALL_NOT_FOUND, STORE_CORRUPT.
        """
        partition = partition_key(tenant, capture_key)

        def read(txn: ReadTxn) -> list[staged_call_pb2.StagedCall]:
            calls: list[staged_call_pb2.StagedCall] = []
            size = 0
            for call_id in call_ids:
                calls.append(self._call(txn, partition, capture_key, call_id))
                size += calls[-1].ByteSize()
                if size >= _READ_BYTES:
                    break
            return calls

        return self._opened().read(read)

    async def delete(self, tenant: str, capture_key: str, call_ids: Sequence[str]) -> int:
        """Remove calls by their exact keys; give how many were there."""
        partition = partition_key(tenant, capture_key)
        removed = 0
        for names in (
            call_ids[i : i + _REMOVED_AT_ONCE] for i in range(0, len(call_ids), _REMOVED_AT_ONCE)
        ):
            keys = [partition + call_id.encode() for call_id in names]

            def remove(txn: WriteTxn, keys: Sequence[bytes] = keys) -> int:
                return _remove(txn, tenant_key(tenant), keys)

            removed += await self._opened().write(remove, records=len(keys), reserve=True)
        return removed

    async def drop(self, tenant: str, capture_key: str) -> int:
        """Remove all calls of an attempt and refuse later ones; give how many were there."""
        partition = partition_key(tenant, capture_key)

        def drop_some(txn: WriteTxn) -> int:
            # What removes comes first: on a full disk it is let in longer than what puts.
            keys = [key for key, _ in txn.scan(CALLS, partition, limit=_REMOVED_AT_ONCE)]
            removed = _remove(txn, tenant_key(tenant), keys)
            if txn.get(PARTITIONS, partition) is None:
                txn.put(PARTITIONS, partition, _DROPPED)
            return removed

        dropped = 0
        while True:
            count = await self._opened().write(drop_some, records=_REMOVED_AT_ONCE, reserve=True)
            dropped += count
            failpoint("staging.after_drop_part")
            if count < _REMOVED_AT_ONCE:
                return dropped
            await asyncio.sleep(0)

    def stat(self, tenant: str) -> pb.StatResponse:
        """Count what a tenant has staged."""
        calls, size = self._opened().read(lambda txn: segments.total_of(txn, tenant_key(tenant)))
        statistics = self._opened().statistics()
        return pb.StatResponse(
            call_count=calls,
            call_bytes=size,
            store_bytes=statistics.file_bytes,
            commit_count=statistics.commits,
            room_bytes=statistics.room_bytes,
        )

    def _call(
        self, txn: ReadTxn, partition: bytes, capture_key: str, call_id: str
    ) -> staged_call_pb2.StagedCall:
        key = partition + call_id.encode()
        entry = _entry(txn, key)
        if entry is None:
            raise call_not_found(capture_key, call_id)
        return staged_call_pb2.StagedCall.FromString(self._payload(txn, key, entry))

    def _payload(self, txn: ReadTxn, key: bytes, entry: CallEntry) -> bytes:
        """Give a call's stored bytes, checked."""
        where = (entry.segment, entry.offset, entry.size)
        found = None
        if isinstance(txn, WriteTxn) and (collector := txn.collected(SegmentCollector)):
            found = collector.read(*where)
        if found is None:
            found = txn.piece(segments.SEGMENTS, segment_key(entry.segment), *where[1:])
        if found is None or checksum(CALLS, key, found) != entry.checksum:
            raise corrupt("staging", f"{CALLS}/{key.hex()}")
        return found


def _entry(txn: ReadTxn, key: bytes) -> CallEntry | None:
    stored = txn.get(CALLS, key)
    return None if stored is None else CallEntry.from_bytes(stored)


def _remove(txn: WriteTxn, tenant: bytes, keys: Sequence[bytes]) -> int:
    """Remove calls with what the segments and totals count of them."""
    removed = 0
    for key in keys:
        entry = _entry(txn, key)
        if entry is not None:
            txn.shared(SegmentCollector).remove(entry.segment, tenant, entry.size)
            txn.delete(CALLS, key)
            removed += 1
    return removed
