"""What a snapshot of Staging's store holds, by attempt, and what of it contradicts itself."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Final

from google.protobuf.message import DecodeError

from callforest.capture.v1 import staged_call_pb2
from callforest_client.codec import ColumnError
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.record_frame import checksum
from callforest_mesh.chassis.store_fault import StoreFault
from callforest_mesh.chassis.store_snapshot import StoreSnapshot
from callforest_mesh.staging.core import check_call
from callforest_mesh.staging.entry import HASH_BYTES, CallEntry, link_of, partition_key
from callforest_mesh.staging.segments import LIVES, SEGMENTS, TOTALS, segment_key, total_of
from callforest_mesh.staging.store import CALLS, PARTITIONS

PARTITION_BYTES: Final = 2 * HASH_BYTES
"""Length of what begins the keys of an attempt's calls."""


class StagedInventory:
    """Reads staged calls of a snapshot.

    Args:
        snapshot: of Staging's store.
    """

    def __init__(self, snapshot: StoreSnapshot) -> None:
        self._snapshot = snapshot

    def faults(self) -> Iterator[StoreFault]:
        """Check every call against its checksum, its key and its digests, and all counts.

        Index entries whose own frame is damaged are left out: a walk over the store names them.
        """
        lives: Counter[bytes] = Counter()
        totals: dict[bytes, tuple[int, int]] = {}
        for key, stored in self._snapshot.records(CALLS):
            if stored is None:
                continue
            entry = CallEntry.from_bytes(stored)
            lives[segment_key(entry.segment)] += 1
            calls, size = totals.get(key[:HASH_BYTES], (0, 0))
            totals[key[:HASH_BYTES]] = (calls + 1, size + entry.size)
            fault = self._fault_of(key, entry)
            if fault:
                yield StoreFault(f"{CALLS}/{key.hex()}", f"call {_call_id(key)}: {fault}")
        yield from self._count_faults(lives, totals)

    def call_ids(self, tenant: str, capture_key: str) -> list[str]:
        """Give the staged calls of an attempt."""
        found = self._snapshot.records(CALLS, partition_key(tenant, capture_key))
        return [_call_id(key) for key, _ in found]

    def size(self, tenant: str, capture_key: str) -> tuple[int, int]:
        """Give how many calls an attempt has staged, and their bytes; damaged entries count 0."""
        found = list(self._snapshot.records(CALLS, partition_key(tenant, capture_key)))
        return len(found), sum(CallEntry.from_bytes(one).size for _, one in found if one)

    def has(self, tenant: str, capture_key: str, call_id: str) -> bool:
        """Say whether a call is staged, damaged or not."""
        key = partition_key(tenant, capture_key) + call_id.encode()
        found = next(self._snapshot.stored(CALLS, key), None)
        return found is not None and found[0] == key

    def call(
        self, tenant: str, capture_key: str, call_id: str
    ) -> staged_call_pb2.StagedCall | None:
        """Give a staged call; None when it is not there or damaged."""
        key = partition_key(tenant, capture_key) + call_id.encode()
        stored = self._snapshot.value(CALLS, key)
        payload = None if stored is None else self._payload(key, CallEntry.from_bytes(stored))
        return None if payload is None else staged_call_pb2.StagedCall.FromString(payload)

    def is_dropped(self, tenant: str, capture_key: str) -> bool:
        """Say whether an attempt was torn down."""
        return self._has_tombstone(partition_key(tenant, capture_key))

    def partitions(self) -> Iterator[tuple[bytes, int, bool]]:
        """Give the keys of the attempts that have staged calls, how many, and whether torn down."""
        keys = (key for key, _ in self._snapshot.stored(CALLS))
        for partition, calls in itertools.groupby(keys, lambda key: key[:PARTITION_BYTES]):
            yield partition, sum(1 for _ in calls), self._has_tombstone(partition)

    def _has_tombstone(self, partition: bytes) -> bool:
        # A damaged one still says that there was a teardown.
        found = next(self._snapshot.stored(PARTITIONS, partition), None)
        return found is not None and found[0] == partition

    def _payload(self, key: bytes, entry: CallEntry) -> bytes | None:
        where = (entry.offset, entry.size)
        found = self._snapshot.view.piece(SEGMENTS, segment_key(entry.segment), *where)
        return found if found and checksum(CALLS, key, found) == entry.checksum else None

    def _fault_of(self, key: bytes, entry: CallEntry) -> str:
        payload = self._payload(key, entry)
        if payload is None:
            return "its bytes do not have their checksum"
        try:
            call = staged_call_pb2.StagedCall.FromString(payload)
            check_call(call)
        except (DecodeError, ColumnError) as error:
            return f"it is no call: {error}"
        except Refusal as refusal:
            return refusal.message
        named = partition_key("", call.capture_key)[HASH_BYTES:] + call.call_id.encode()
        if key[HASH_BYTES:] != named:
            return "it is stored under another call's key"
        if entry.link != link_of(call):
            return "its index entry has another place in the chain"
        return ""

    def _count_faults(
        self, lives: Counter[bytes], totals: dict[bytes, tuple[int, int]]
    ) -> Iterator[StoreFault]:
        counted = {
            key: int.from_bytes(stored, "big")
            for key, stored in self._snapshot.records(LIVES)
            if stored is not None
        }
        segments = {key for key, _ in self._snapshot.stored(SEGMENTS)}
        for key in sorted(segments | set(lives) | set(counted)):
            if counted.get(key, 0) != lives[key] or (key in segments) != (lives[key] > 0):
                text = f"{lives[key]} calls are in it, its count says {counted.get(key, 0)}"
                yield StoreFault(f"{SEGMENTS}/{key.hex()}", text)
        for tenant, _ in self._snapshot.stored(TOTALS):
            said, found = total_of(self._snapshot.view, tenant), totals.pop(tenant, (0, 0))
            if said != found:
                yield StoreFault(f"{TOTALS}/{tenant.hex()}", f"it says {said}, not {found}")
        for tenant in totals:
            yield StoreFault(f"{TOTALS}/{tenant.hex()}", "the tenant's calls are not counted")


def _call_id(key: bytes) -> str:
    return key[PARTITION_BYTES:].decode(errors="replace")
