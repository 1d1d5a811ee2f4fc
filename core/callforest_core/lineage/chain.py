"""Chain mode: the ledger rows of one attempt, and which call a request continues.

A pure state machine over the attempt's events in log order. It holds no items and no tokens, and
what it stores a call does not grow with the calls before it: a staging chain is walked along
parent links, not kept (seed 2 "The ledger"; contract 3.6 to 3.8, 4.4, 4.5).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from callforest_core.lineage.fingerprint import (
    DIGEST_SIZE,
    FINGERPRINT_VERSION,
    NO_FINGERPRINT,
    UnreadableItemError,
)


class UnresolvedReason(StrEnum):
    """Why a request with model text has no parent."""

    NO_MATCH = "no_match"
    AMBIGUOUS = "ambiguous"
    CONTEXT_CHANGED = "context_changed"
    PARENT_NOT_CHAINED = "parent_not_chained"


class ProbeError(ValueError):
    """A probe's digests do not fit together; `fact` says which."""

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact


class RowConflictError(ValueError):
    """The call id already has a row with another payload."""

    def __init__(self, call_id: str, existing: str) -> None:
        super().__init__(f"call {call_id} already has {existing}")
        self.call_id = call_id
        self.existing = existing


@dataclass(frozen=True, slots=True)
class ChainProbe:
    """What admission asks about a request: digests, never items.

    `assistant_fingerprint` is 32 bytes, or b"" when the request holds no model text.
    `context_digests` concatenates the 32-byte conversation digests of the prefixes of length 0,
    1, ... up to `item_count`; it is shorter when an item cannot be read.
    """

    assistant_fingerprint: bytes
    context_digests: bytes
    item_count: int

    def __post_init__(self) -> None:
        if len(self.assistant_fingerprint) not in {0, DIGEST_SIZE}:
            raise ProbeError("the assistant fingerprint has neither 0 nor 32 bytes")
        prefixes, rest = divmod(len(self.context_digests), DIGEST_SIZE)
        if rest or not 1 <= prefixes <= self.item_count + 1:
            raise ProbeError("the context digests do not fit the number of items")

    def context_digest(self, length: int) -> bytes | None:
        """Return the digest of the first `length` items, None when the request is shorter.

        Raises UnreadableItemError when one of those items cannot be read.
        """
        if length > self.item_count:
            return None
        start = DIGEST_SIZE * length
        if start >= len(self.context_digests):
            raise UnreadableItemError(f"the first {length} items cannot all be read")
        return self.context_digests[start : start + DIGEST_SIZE]


@dataclass(frozen=True, slots=True)
class ContextWitness:
    """What a committed row keeps of its conversation.

    `fingerprint` covers request and response items (b"" without model text), `context_digest`
    the `context_len` request items.
    """

    fingerprint: bytes
    context_len: int
    context_digest: bytes


@dataclass(frozen=True, slots=True)
class Root:
    """The call starts a chain; `seeded` when it brings model text that was never captured here."""

    seeded: bool


@dataclass(frozen=True, slots=True)
class Match:
    """The call continues `parent_call_id`, whose `prev_len` tokens it inherits."""

    parent_call_id: str
    prev_len: int
    chain_hash: bytes


@dataclass(frozen=True, slots=True)
class Unresolved:
    """No admission: the call is served uncaptured and poisons the rollout.

    `candidates` names the rows whose fingerprint fits, in commit order.
    """

    reason: UnresolvedReason
    candidates: tuple[str, ...]


Verdict = Root | Match | Unresolved


class ChainRecord(Protocol):
    """What decides of a committed call whether and how a request continues it."""

    @property
    def call_id(self) -> str:
        """The call."""
        ...

    @property
    def parent_call_id(self) -> str | None:
        """The call that it continues, or None for a root."""
        ...

    @property
    def cum_len(self) -> int:
        """Tokens up to its end."""
        ...

    @property
    def chain_hash(self) -> bytes:
        """Of its deltas from the root."""
        ...

    @property
    def staging_key(self) -> str:
        """Where the staged call is."""
        ...

    @property
    def fingerprint_version(self) -> int:
        """Of the canonicalisation, 0 when none was recorded."""
        ...


RecordT = TypeVar("RecordT", bound=ChainRecord)


@dataclass(frozen=True, slots=True)
class ChainRow(Generic[RecordT]):
    """One committed call: its custody columns, its witness and how its staging chain is known.

    `stated_chain` is None when the chain is the parent's with the call's own key behind it.
    Without a chain (`chained` false) nothing can continue the call.
    """

    record: RecordT
    witness: ContextWitness
    stated_chain: tuple[str, ...] | None
    chained: bool


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A poison row: the call's capture did not commit."""

    call_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ChainManifest(Generic[RecordT]):
    """All rows of an attempt: one record a call, failures as recorded, each in log order."""

    records: tuple[RecordT, ...]
    failures: tuple[CallFailure, ...]


class ChainView(Generic[RecordT]):
    """The rows of one attempt, added in log order. Announced calls that have none are not here."""

    __slots__ = ("_failures", "_poisoned_first", "_rows", "_rows_by_fingerprint")

    def __init__(self) -> None:
        self._rows: dict[str, ChainRow[RecordT]] = {}
        self._failures: dict[CallFailure, None] = {}
        self._poisoned_first: set[str] = set()
        self._rows_by_fingerprint: dict[bytes, list[str]] = {}

    def append_record(
        self,
        record: RecordT,
        witness: ContextWitness,
        staging_chain: Iterable[str] | None = None,
    ) -> bool:
        """Add a committed call; False when the very same row is already there.

        `staging_chain` lists staging keys from the root to this call. None means the parent's
        chain and this call's key; a peer's row may state another, or an empty one, and then
        nothing can continue the call.

        Raises RowConflictError when the call has a row with another payload or a failure row.
        """
        call_id = record.call_id
        stated = None if staging_chain is None else tuple(staging_chain)
        existing = self._rows.get(call_id)
        if existing is not None:
            if not self._is_same(existing, record, witness, stated):
                raise RowConflictError(call_id, "a row with another payload")
            return False
        if call_id in self._poisoned_first:
            raise RowConflictError(call_id, "a failure row")
        inherited = self._inherits(record)
        if stated and inherited and stated == self._inherited_chain(record):
            stated = None
        chained = inherited if stated is None else bool(stated)
        self._rows[call_id] = ChainRow(record, witness, stated, chained)
        if witness.fingerprint and record.fingerprint_version == FINGERPRINT_VERSION:
            self._rows_by_fingerprint.setdefault(witness.fingerprint, []).append(call_id)
        return True

    def append_failure(self, call_id: str, reason: str) -> bool:
        """Add a poison row; False when this call has one with the same reason.

        A failure may follow a record of the same call; the other order is refused.
        """
        failure = CallFailure(call_id, reason)
        if failure in self._failures:
            return False
        self._failures[failure] = None
        if call_id not in self._rows:
            self._poisoned_first.add(call_id)
        return True

    def has_rows(self) -> bool:
        """Say whether a call was committed or failed here."""
        return bool(self._rows or self._failures)

    def row(self, call_id: str) -> ChainRow[RecordT] | None:
        """Return the committed row of a call."""
        return self._rows.get(call_id)

    def manifest(self) -> ChainManifest[RecordT]:
        """Return every row, one record a call, in the order of the log."""
        records = tuple(row.record for row in self._rows.values())
        return ChainManifest(records, tuple(self._failures))

    def staging_chain(self, call_id: str) -> tuple[str, ...]:
        """Return the staging keys from the root to this call, () when they are not known."""
        row = self._rows.get(call_id)
        if row is None or not row.chained:
            return ()
        keys: list[str] = []
        while row.stated_chain is None:
            keys.append(row.record.staging_key)
            if row.record.parent_call_id is None:
                return tuple(reversed(keys))
            row = self._rows[row.record.parent_call_id]
        return row.stated_chain + tuple(reversed(keys))

    def resolve(self, probe: ChainProbe) -> Verdict:
        """Return the verdict on a request; nothing changes (contract 3.7, 3.8).

        Raises UnreadableItemError when the verdict hangs on an item that cannot be read.
        """
        if probe.assistant_fingerprint == NO_FINGERPRINT:
            return Root(seeded=False)
        if not self.has_rows():
            return Root(seeded=True)
        candidates = tuple(self._rows_by_fingerprint.get(probe.assistant_fingerprint, ()))
        if len(candidates) != 1:
            reason = UnresolvedReason.AMBIGUOUS if candidates else UnresolvedReason.NO_MATCH
            return Unresolved(reason, candidates)
        row = self._rows[candidates[0]]
        if probe.context_digest(row.witness.context_len) != row.witness.context_digest:
            return Unresolved(UnresolvedReason.CONTEXT_CHANGED, candidates)
        if not row.chained:
            return Unresolved(UnresolvedReason.PARENT_NOT_CHAINED, candidates)
        record = row.record
        return Match(record.call_id, record.cum_len, record.chain_hash)

    def _inherits(self, record: RecordT) -> bool:
        """Say whether the record has a chain through its parent; a root has its own."""
        if record.parent_call_id is None:
            return True
        parent = self._rows.get(record.parent_call_id)
        return parent is not None and parent.chained

    def _inherited_chain(self, record: RecordT) -> tuple[str, ...]:
        if record.parent_call_id is None:
            return (record.staging_key,)
        return (*self.staging_chain(record.parent_call_id), record.staging_key)

    def _is_same(
        self,
        row: ChainRow[RecordT],
        record: RecordT,
        witness: ContextWitness,
        stated: tuple[str, ...] | None,
    ) -> bool:
        if row.record != record or row.witness != witness:
            return False
        if stated is None:
            return row.stated_chain is None
        return self.staging_chain(record.call_id) == stated
