"""One captured call: its identity, its staged tokens, its ledger row, and an attempt's receipt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from callforest_core.custody.digests import (
    CONTINUATION_MODE,
    FORMAT_VERSIONS,
    ROOT_MODE,
    DigestInputError,
    Encoded,
    EncodedColumns,
    FormatVersions,
    call_digest,
    canonical_columns,
)
from callforest_core.custody.tokens import Logprobs, TokenIds
from callforest_core.lineage.source import OutputSummary

NO_FINGERPRINT_VERSION: Final = 0

Custody: TypeAlias = tuple[str | None, str, int, int, int, int, bytes, bytes, bytes, bytes]
"""Values of `CUSTODY_FIELDS`, which a staged call and its ledger row have in common."""

CUSTODY_FIELDS: Final = (
    "parent_call_id",
    "mode",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "digest",
    "extras_digest",
    "chain_hash",
    "cumulative_hash",
)


def staging_key(capture_key: str, call_id: str) -> str:
    """Name a staged call in the store: `capture_key/call_id` (capture contract 1.1)."""
    return f"{capture_key}/{call_id}"


@dataclass(frozen=True, slots=True)
class CallIdentity:
    """Who a call is.

    Attributes:
        capture_key: the attempt.
        call_id: the call, unique in its attempt.
        parent_call_id: the call that this one continues, or None for a root.
        parent_capture_key: the earlier attempt under which the parent is staged; "" for
            `capture_key`. No digest covers it.

    """

    capture_key: str
    call_id: str
    parent_call_id: str | None
    parent_capture_key: str = ""

    @property
    def parent_owner(self) -> str:
        """The attempt under which the parent is staged, if there is one."""
        return self.parent_capture_key or self.capture_key

    @property
    def staging_key(self) -> str:
        """Name of the staged call in the store."""
        return staging_key(self.capture_key, self.call_id)


@dataclass(frozen=True, slots=True, eq=False)
class StagedCall:
    """The tokens of one call in canonical form, durable before anyone is told of them.

    Attributes:
        identity: who the call is.
        prev_len: tokens inherited from the parent's path; 0 exactly for a root.
        carry_len: new prompt tokens (no loss), the first of `token_ids`.
        weight_version: of the policy when the call began.
        token_ids: the delta, carry then generation.
        logprobs: of the generated tokens only.
        extras: canonical encoding of the extras (`custody.extras`).
        digest: over everything of this call, raw 32 bytes, as are the next three.
        extras_digest: over `extras`.
        chain_hash: over the deltas from the root to here.
        cumulative_hash: over all tokens from the root to here, flat.
        versions: layout versions of the digests.
    """

    identity: CallIdentity
    prev_len: int
    carry_len: int
    weight_version: int
    token_ids: TokenIds
    logprobs: Logprobs
    extras: bytes
    digest: bytes
    extras_digest: bytes
    chain_hash: bytes
    cumulative_hash: bytes
    versions: FormatVersions = FORMAT_VERSIONS

    @property
    def delta_len(self) -> int:
        """Tokens that this call adds."""
        return len(self.token_ids)

    @property
    def cum_len(self) -> int:
        """Tokens from the root to the end of this call."""
        return self.prev_len + len(self.token_ids)

    @property
    def generation_len(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids) - self.carry_len

    @property
    def mode(self) -> str:
        """`text` for a root, `token_in` for a continuation."""
        return ROOT_MODE if self.identity.parent_call_id is None else CONTINUATION_MODE

    @property
    def staging_key(self) -> str:
        """Name of this call in the store."""
        return self.identity.staging_key

    @property
    def custody(self) -> Custody:
        """What the ledger row must repeat."""
        parent_call_id = self.identity.parent_call_id
        size = len(self.token_ids)
        return (
            parent_call_id,
            ROOT_MODE if parent_call_id is None else CONTINUATION_MODE,
            self.prev_len,
            size,
            self.prev_len + size,
            self.weight_version,
            self.digest,
            self.extras_digest,
            self.chain_hash,
            self.cumulative_hash,
        )

    def recompute_digest(self, opening: bytes, encoded: Encoded, logprobs: Encoded) -> bytes:
        """Digest the fields again, committed extras digest and hashes included.

        Args:
            opening: `digest_opening` of the attempt.
            encoded: this call's ids, encoded by the caller, who hashes them again.
            logprobs: this call's logprobs, encoded by the caller, who checks that they are finite.

        Raises:
            DigestInputError: the fields have no digest.
        """
        if len(encoded) != 8 * len(self.token_ids) or len(logprobs) != 4 * len(self.logprobs):
            raise DigestInputError("the encoded columns are not those of this call")
        carry_len = min(max(self.carry_len, 0), len(self.token_ids))
        return self.digest_columns(opening, canonical_columns(carry_len, encoded, logprobs))

    def digest_columns(self, opening: bytes, columns: EncodedColumns) -> bytes:
        """`recompute_digest` from this call's columns, encoded whole; it raises the same."""
        identity, carry_len, size = self.identity, self.carry_len, len(self.token_ids)
        if size == 0:
            raise DigestInputError("the delta is empty")
        if carry_len < 0 or carry_len + len(self.logprobs) != size:
            raise DigestInputError("carry and logprobs do not make up the delta")
        if (identity.parent_call_id is None) != (self.prev_len == 0):
            raise DigestInputError("exactly a root has no prefix")
        if self.versions != FORMAT_VERSIONS:
            raise DigestInputError(f"versions {tuple(self.versions)}")
        return call_digest(
            opening,
            identity.call_id,
            identity.parent_call_id,
            self.prev_len,
            self.weight_version,
            columns,
            (self.extras_digest, self.chain_hash, self.cumulative_hash),
        )


@dataclass(frozen=True, slots=True)
class CallRecord:
    """The token-free ledger row of a call.

    Attributes:
        call_id: the call.
        parent_call_id: the call that it continues, or None for a root.
        mode: `text` or `token_in`.
        prev_len: tokens inherited; with `delta_len` and `cum_len` as in the staged call.
        delta_len: tokens added.
        cum_len: tokens up to the end of the call.
        weight_version: of the policy when the call began.
        digest: of the staged call, raw 32 bytes, as are the next three.
        extras_digest: of its extras.
        chain_hash: of its deltas from the root.
        cumulative_hash: of its tokens from the root.
        staging_key: where the staged call is; opaque to verification.
        response_id: id of the served response.
        admitted_at: seconds since the epoch, or None when the peer stamped none.
        output_fingerprint: of the call's own output, raw 32 bytes, or None.
        continuation_fingerprint: of request and output, raw 32 bytes, or None.
        fingerprint_version: of the canonicalisation, 0 when none was recorded.
        finish_reason: why generation stopped, "" when unknown.
        status: completion status of the served response, "" when unknown.
        versions: layout versions of the digests.
        intent_number: place of the call among those that its attempt announced, from 1, as the
            ledger counted; None when it did not.
        output: identifies the answer in a returned history, of forest mode, or None.
        source_capture_key: the earlier attempt under which a restored call is staged and
            digested, its owner; "" when that is the attempt that the row is of.
        parent_capture_key: the parent's owner; "" when that is the attempt that the row is of.
    """

    call_id: str
    parent_call_id: str | None
    mode: str
    prev_len: int
    delta_len: int
    cum_len: int
    weight_version: int
    digest: bytes
    extras_digest: bytes
    chain_hash: bytes
    cumulative_hash: bytes
    staging_key: str
    response_id: str
    admitted_at: float | None = None
    output_fingerprint: bytes | None = None
    continuation_fingerprint: bytes | None = None
    fingerprint_version: int = NO_FINGERPRINT_VERSION
    finish_reason: str = ""
    status: str = ""
    versions: FormatVersions = FORMAT_VERSIONS
    intent_number: int | None = None
    output: OutputSummary | None = None
    source_capture_key: str = ""
    parent_capture_key: str = ""

    def owner_in(self, capture_key: str) -> str:
        """Give the attempt under which the call is staged; the row is one of `capture_key`."""
        return self.source_capture_key or capture_key

    @property
    def custody(self) -> Custody:
        """What the staged call must repeat."""
        return (
            self.parent_call_id,
            self.mode,
            self.prev_len,
            self.delta_len,
            self.cum_len,
            self.weight_version,
            self.digest,
            self.extras_digest,
            self.chain_hash,
            self.cumulative_hash,
        )

    @classmethod
    def of(
        cls,
        staged: StagedCall,
        response_id: str,
        *,
        admitted_at: float | None = None,
        output_fingerprint: bytes | None = None,
        continuation_fingerprint: bytes | None = None,
        fingerprint_version: int = NO_FINGERPRINT_VERSION,
        finish_reason: str = "",
        status: str = "",
    ) -> CallRecord:
        """Make the ledger row of a staged call that was served as `response_id`."""
        identity = staged.identity
        return cls(
            identity.call_id,
            identity.parent_call_id,
            staged.mode,
            staged.prev_len,
            staged.delta_len,
            staged.cum_len,
            staged.weight_version,
            staged.digest,
            staged.extras_digest,
            staged.chain_hash,
            staged.cumulative_hash,
            identity.staging_key,
            response_id,
            admitted_at,
            output_fingerprint,
            continuation_fingerprint,
            fingerprint_version,
            finish_reason,
            status,
            staged.versions,
            parent_capture_key=identity.parent_capture_key,
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an attempt recorded and which call is scored (capture contract 1.11).

    Attributes:
        capture_key: the attempt.
        manifest: one record a call, in commit order.
        terminal_call_id: the scored call, or None when nothing attributed one.
        reward: of the logical rollout, or None before scoring.
        capture_poisoned: some call's capture failed; nothing may train.
        failure_reason: why the rollout failed, or None.
        terminal_selection: `declared`, `response_id`, `content`, `heuristic` or None.
        terminal_attribution_reason: trail of the attribution, or None.
        versions: layout versions of the digests.
    """

    capture_key: str
    manifest: tuple[CallRecord, ...]
    terminal_call_id: str | None
    reward: float | None = None
    capture_poisoned: bool = False
    failure_reason: str | None = None
    terminal_selection: str | None = None
    terminal_attribution_reason: str | None = None
    versions: FormatVersions = FORMAT_VERSIONS
