"""The log of each attempt, in one LMDB environment.

A key of `events` is 8 bytes of the tenant's hash, 16 of the capture key's, and the revision as a
big-endian u64; its value is a serialized LedgerEvent. `rollouts` says how many attempts a rollout
has, which one a request opened (both could be rebuilt from the logs), and which were forgotten.
Every function here runs inside a transaction that is not its own.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

from callforest.ledger.v1 import ledger_event_pb2
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.chassis.lmdb_store import LmdbStore, ReadTxn, WriteTxn
from callforest_mesh.ledger import refusals
from callforest_mesh.ledger.outline import AttemptKey

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")

DATABASES: Final = ("events", "rollouts")
_EVENTS, _ROLLOUTS = DATABASES
_REVISION: Final = struct.Struct(">Q")
_NUMBER: Final = struct.Struct(">I")
_LATEST: Final = b"n"
_REQUEST: Final = b"r"
_FORGOTTEN: Final = b"f"
TENANT_BYTES: Final = 8
"""How much of a tenant's hash begins every key."""
_NAME_BYTES: Final = 16
ATTEMPT_PREFIX_BYTES: Final = TENANT_BYTES + _NAME_BYTES
"""Length of what begins the keys of an attempt's events."""


class LogReader(Protocol):
    """Reads the logs as of one moment."""

    def revision(self, attempt: AttemptKey) -> int:
        """Give the number of events in an attempt's log; 0 when it was never opened."""
        ...

    def read(
        self, attempt: AttemptKey, *, after: int = 0, limit: int | None = None
    ) -> Iterator[tuple[int, ledger_event_pb2.LedgerEvent]]:
        """Give the events behind a revision, each with its own.

        Raises:
            Refusal: STORE_CORRUPT at the first event that is damaged or missing.
        """
        ...

    def latest_attempt(self, tenant: str, rollout_id: str) -> int | None:
        """Give the number of a rollout's latest attempt, None when it has none."""
        ...

    def attempt_opened_by(self, tenant: str, rollout_id: str, request_id: str) -> int | None:
        """Give the number of the attempt that a request opened, or None."""
        ...

    def was_forgotten(self, tenant: str, rollout_id: str, attempt_number: int) -> bool:
        """Say whether the log of an attempt was removed."""
        ...


class LogWriter(LogReader, Protocol):
    """Reads and appends inside one transaction."""

    def append(
        self,
        attempt: AttemptKey,
        expected_revision: int,
        events: Sequence[ledger_event_pb2.LedgerEvent],
    ) -> None:
        """Append events to a log that has `expected_revision` events.

        Raises:
            Refusal: STORE_FULL.
            RevisionConflictError: the log has another number of events.
        """
        ...

    def forget(self, opened: ledger_event_pb2.AttemptOpened) -> int:
        """Remove an attempt's log, and keep that there was one; give how many events it had."""
        ...


class LedgerStore(Protocol):
    """Where the logs are kept."""

    def submit(
        self, fn: Callable[[LogWriter], T], answer_of: Callable[[T], AnswerT], *, reserve: bool
    ) -> asyncio.Future[AnswerT]:
        """Run a function in a transaction; give the answer made of its value once it is durable.

        A function that raises has appended nothing. It may run more than once. Cancelling the
        future undoes nothing.

        Args:
            fn: reads and appends.
            answer_of: makes the answer, on the event loop; runs even if nobody waits any more.
            reserve: whether it may go beyond the quota, because it ends work that has begun.
        """
        ...

    def read(self, fn: Callable[[LogReader], T]) -> T:
        """Run a function over what is durable now."""
        ...


class RevisionConflictError(RuntimeError):
    """A log does not have the expected number of events."""


class LmdbLedgerStore:
    """Keeps the logs in an LmdbStore.

    Args:
        connect: opens the environment, with DATABASES.
    """

    def __init__(self, connect: Callable[[], LmdbStore]) -> None:
        self._connect = connect
        self._opened: LmdbStore | None = None

    def open(self) -> None:
        """Open the environment."""
        if self._opened is None:
            self._opened = self._connect()

    async def close(self) -> None:
        """Commit what waits and close the environment. Idempotent."""
        if self._opened is not None:
            await self._opened.close()

    def submit(
        self, fn: Callable[[LogWriter], T], answer_of: Callable[[T], AnswerT], *, reserve: bool
    ) -> asyncio.Future[AnswerT]:
        """Run a function in a transaction; give the answer made of its value once durable."""
        return self._store.submit(lambda txn: fn(_LmdbWriter(txn)), answer_of, reserve=reserve)

    def read(self, fn: Callable[[LogReader], T]) -> T:
        """Run a function over what is durable now."""
        return self._store.read(lambda txn: fn(_LmdbReader(txn)))

    @property
    def _store(self) -> LmdbStore:
        if self._opened is None:
            raise RuntimeError("the ledger's store is not open")
        return self._opened


class _LmdbReader:
    def __init__(self, txn: ReadTxn) -> None:
        self._snapshot = txn
        self._revisions: dict[AttemptKey, int] = {}

    def revision(self, attempt: AttemptKey) -> int:
        known = self._revisions.get(attempt)
        if known is None:
            # A damaged key is found where the log is folded: its number follows no other.
            found = self._snapshot.last_key(_EVENTS, attempt_prefix(attempt))
            known = self._revisions[attempt] = 0 if found is None else revision_of(found)
        return known

    def read(
        self, attempt: AttemptKey, *, after: int = 0, limit: int | None = None
    ) -> Iterator[tuple[int, ledger_event_pb2.LedgerEvent]]:
        prefix = attempt_prefix(attempt)
        start = prefix + _REVISION.pack(after + 1)
        expected = after
        for key, value in self._snapshot.scan(_EVENTS, prefix, start, limit):
            expected += 1
            if revision_of(key) != expected:
                raise refusals.log_corrupt(f"{_EVENTS}/{key.hex()}", f"no event {expected}")
            yield expected, ledger_event_pb2.LedgerEvent.FromString(value)

    def latest_attempt(self, tenant: str, rollout_id: str) -> int | None:
        return latest_attempt(self._snapshot, tenant, rollout_id)

    def attempt_opened_by(self, tenant: str, rollout_id: str, request_id: str) -> int | None:
        return _number(self._snapshot, _request_key(tenant, rollout_id, request_id))

    def was_forgotten(self, tenant: str, rollout_id: str, attempt_number: int) -> bool:
        return was_forgotten(self._snapshot, tenant, rollout_id, attempt_number)


class _LmdbWriter(_LmdbReader):
    def __init__(self, txn: WriteTxn) -> None:
        super().__init__(txn)
        self._txn = txn

    def append(
        self,
        attempt: AttemptKey,
        expected_revision: int,
        events: Sequence[ledger_event_pb2.LedgerEvent],
    ) -> None:
        found = self.revision(attempt)
        if found != expected_revision:
            raise RevisionConflictError(f"{found} events, not {expected_revision}")
        prefix = attempt_prefix(attempt)
        for revision, event in enumerate(events, expected_revision + 1):
            key = prefix + _REVISION.pack(revision)
            self._txn.put(_EVENTS, key, event.SerializeToString())
            self._revisions[attempt] = revision
            if event.WhichOneof("event") == "attempt_opened":
                self._index(event.attempt_opened)
        failpoint("ledger.after_append")

    def forget(self, opened: ledger_event_pb2.AttemptOpened) -> int:
        attempt = AttemptKey(opened.tenant, opened.capture_key)
        self._revisions.pop(attempt, None)
        prefix = attempt_prefix(attempt)
        keys = [key for key, _ in self._txn.scan(_EVENTS, prefix)]
        for key in keys:
            self._txn.delete(_EVENTS, key)
        number = _NUMBER.pack(opened.attempt_number)
        mark = _rollout_prefix(opened.tenant, opened.rollout_id) + _FORGOTTEN + number
        self._txn.put(_ROLLOUTS, mark, number)
        return len(keys)

    def _index(self, opened: ledger_event_pb2.AttemptOpened) -> None:
        number = _NUMBER.pack(opened.attempt_number)
        prefix = _rollout_prefix(opened.tenant, opened.rollout_id)
        self._txn.put(_ROLLOUTS, prefix + _LATEST, number)
        request = _request_key(opened.tenant, opened.rollout_id, opened.request_id)
        self._txn.put(_ROLLOUTS, request, number)


@functools.lru_cache(maxsize=4096)
def _hash(text: str, size: int) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:size]


@functools.lru_cache(maxsize=4096)
def attempt_prefix(attempt: AttemptKey) -> bytes:
    """Give what begins the keys of an attempt's events."""
    return _hash(attempt.tenant, TENANT_BYTES) + _hash(attempt.capture_key, _NAME_BYTES)


def latest_attempt(snapshot: ReadTxn, tenant: str, rollout_id: str) -> int | None:
    """Give the number of a rollout's latest attempt, None when it has none."""
    return _number(snapshot, _rollout_prefix(tenant, rollout_id) + _LATEST)


def was_forgotten(snapshot: ReadTxn, tenant: str, rollout_id: str, attempt_number: int) -> bool:
    """Say whether the log of an attempt was removed."""
    number = _NUMBER.pack(attempt_number)
    mark = _rollout_prefix(tenant, rollout_id) + _FORGOTTEN + number
    return snapshot.get(_ROLLOUTS, mark) is not None


def _number(snapshot: ReadTxn, key: bytes) -> int | None:
    found = snapshot.get(_ROLLOUTS, key)
    if found is None:
        return None
    number: int = _NUMBER.unpack(found)[0]
    return number


def _rollout_prefix(tenant: str, rollout_id: str) -> bytes:
    return _hash(tenant, TENANT_BYTES) + _hash(rollout_id, _NAME_BYTES)


def _request_key(tenant: str, rollout_id: str, request_id: str) -> bytes:
    return _rollout_prefix(tenant, rollout_id) + _REQUEST + _hash(request_id, _NAME_BYTES)


def revision_of(key: bytes) -> int:
    """Give the revision that ends an event's key."""
    revision: int = _REVISION.unpack(key[-_REVISION.size :])[0]
    return revision
