"""What happens to the file of a stopped store, done on purpose."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from callforest_mesh.chassis.record_frame import CHECKSUM_BYTES, seal
from callforest_mesh.staging.entry import CallEntry
from callforest_mesh.staging.segments import segment_key

MAP_BYTES = 512 << 20


@contextmanager
def opened(store: Path, database: str) -> Iterator[tuple[lmdb.Transaction, object]]:
    """Give a transaction over one database of a store, as any program could have it."""
    with lmdb.open(str(store), max_dbs=16, map_size=MAP_BYTES) as env:
        handle = env.open_db(database.encode(), create=False)
        with env.begin(write=True) as txn:
            yield txn, handle


def keys(store: Path, database: str) -> list[bytes]:
    with opened(store, database) as (txn, handle):
        return [bytes(key) for key, _ in txn.cursor(handle)]


def stored(store: Path, database: str, key: bytes) -> bytes:
    with opened(store, database) as (txn, handle):
        found = txn.get(key, db=handle)
        assert found is not None
        return bytes(found)


def put(store: Path, database: str, key: bytes, raw: bytes) -> None:
    """Put bytes as they are, without a checksum."""
    with opened(store, database) as (txn, handle):
        txn.put(key, raw, db=handle)


def put_sealed(store: Path, database: str, key: bytes, payload: bytes) -> None:
    """Put a payload with the checksum that it must have."""
    put(store, database, key, seal(database, key, payload))


def delete(store: Path, database: str, key: bytes) -> None:
    with opened(store, database) as (txn, handle):
        assert txn.delete(key, db=handle)


def entry_of(store: Path, key: bytes) -> CallEntry:
    """Say where Staging's store has a call."""
    return CallEntry.from_bytes(stored(store, "calls", key)[CHECKSUM_BYTES:])


def payload_of(store: Path, entry: CallEntry) -> bytes:
    segment = stored(store, "segments", segment_key(entry.segment))
    start = CHECKSUM_BYTES + entry.offset
    return segment[start : start + entry.size]


def overwrite(store: Path, entry: CallEntry, payload: bytes) -> None:
    """Put other bytes in a call's place, in a segment that has its checksum all the same."""
    key = segment_key(entry.segment)
    segment = bytearray(stored(store, "segments", key)[CHECKSUM_BYTES:])
    segment[entry.offset : entry.offset + entry.size] = payload
    put_sealed(store, "segments", key, bytes(segment))


def swap_payloads(store: Path, key: bytes, other: bytes) -> None:
    """Exchange the bytes of two calls that have equally many."""
    one, two = entry_of(store, key), entry_of(store, other)
    assert one.size == two.size
    payloads = payload_of(store, one), payload_of(store, two)
    overwrite(store, one, payloads[1])
    overwrite(store, two, payloads[0])


def flip_in_file(store: Path, needle: bytes, *, at: int = 0) -> None:
    """Flip one bit wherever some bytes stand in the file, its free pages too, as a disk would."""
    file = store / "data.mdb"
    content = bytearray(file.read_bytes())
    place = content.find(needle)
    assert place >= 0
    while place >= 0:
        content[place + at] ^= 4
        place = content.find(needle, place + 1)
    file.write_bytes(content)
