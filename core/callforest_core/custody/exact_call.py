"""One captured call in the contract's full form, as peers make it."""

from __future__ import annotations

from dataclasses import dataclass

from callforest_core.custody.call import CallIdentity, Custody
from callforest_core.custody.digests import (
    FORMAT_VERSIONS,
    CallHeader,
    FloatColumn,
    FormatVersions,
    exact_call_digest,
)
from callforest_core.custody.tokens import WideTokenIds


@dataclass(frozen=True, slots=True, eq=False)
class ExactCall:
    """The tokens of one call in the contract's full form, for records that peers made.

    Everything is as claimed: lengths and mode may contradict the columns, and verification says so.
    Legal records that the canonical form cannot carry live here: ids from 2^32 on, signed zeros,
    any order of mask values. The trainer path refuses them.

    Attributes:
        identity: who the call is.
        mode: `text` or `token_in`.
        prev_len: tokens inherited from the parent's path.
        delta_len: tokens that this call adds.
        cum_len: tokens from the root to the end of this call.
        weight_version: of the policy when the call began.
        token_ids: the delta.
        token_mask: 1.0 for a generated token, 0.0 for a carried one.
        logprobs: one a token.
        digest: raw 32 bytes, as are the next three; meanings as in `StagedCall`.
        extras_digest: over extras that are held elsewhere.
        chain_hash: over the deltas from the root to here.
        cumulative_hash: over all tokens from the root to here, flat.
        versions: layout versions of the digests.

    """

    identity: CallIdentity
    mode: str
    prev_len: int
    delta_len: int
    cum_len: int
    weight_version: int
    token_ids: WideTokenIds
    token_mask: FloatColumn
    logprobs: FloatColumn
    digest: bytes
    extras_digest: bytes
    chain_hash: bytes
    cumulative_hash: bytes
    versions: FormatVersions = FORMAT_VERSIONS

    @property
    def custody(self) -> Custody:
        """What the ledger row must repeat."""
        return (
            self.identity.parent_call_id,
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

    @property
    def header(self) -> CallHeader:
        """The claimed fields that a digest covers."""
        return CallHeader(
            self.versions,
            self.identity.capture_key,
            self.identity.call_id,
            self.identity.parent_call_id,
            self.mode,
            self.prev_len,
            self.delta_len,
            self.cum_len,
            self.weight_version,
        )

    def recompute_digest(self) -> bytes:
        """Digest the fields again, committed extras digest and hashes included.

        Raises:
            DigestInputError: the fields have no digest.

        """
        digests = (self.extras_digest, self.chain_hash, self.cumulative_hash)
        return exact_call_digest(
            self.header, self.token_ids, self.token_mask, self.logprobs, digests
        )
