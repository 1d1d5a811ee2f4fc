"""Every digest of a call (capture contract 2.1 to 2.6): byte layouts, SHA-256, raw 32 bytes.

Functions that take `EncodedIds` are for callers that hash the same ids more than once: encode
once, hash slices. Digests are raw bytes here; hexadecimal is a matter of the peer's JSON.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.extras import EXTRAS_DIGEST_VERSION
from callforest_core.custody.tokens import (
    FLOAT_TYPE,
    AnyTokenIds,
    EncodedIds,
    Logprobs,
    encode_ids,
)

FloatColumn: TypeAlias = NDArray[np.float64]
"""One double a token, as the contract's records carry masks and logprobs."""

DIGEST_SIZE: Final = 32
ROOT_MODE: Final = "text"
"""Mode of a root: the prompt was rendered from text."""
CONTINUATION_MODE: Final = "token_in"
"""Mode of a continuation: the prompt begins with captured tokens."""

_CUMULATIVE_DOMAIN: Final = b"nemo-gym-staging-prefix-v2"
_CHAIN_ROOT: Final = b"nemo-gym-staging-chain-v1\x00"
_CHAIN_CHILD: Final = b"nemo-gym-staging-chain-v1\x01"
_CALL_DOMAIN: Final = b"nemo-gym-staging-call-v2"
_U64: Final = struct.Struct(">Q")
_PAIR: Final = struct.Struct(">QQ")
_LENGTHS: Final = struct.Struct(">QQQQ")
_ROOT_BYTES: Final = b"\x00" + _U64.pack(len(ROOT_MODE)) + ROOT_MODE.encode()
_CONTINUATION_BYTES: Final = _U64.pack(len(CONTINUATION_MODE)) + CONTINUATION_MODE.encode()
_ONE: Final = struct.pack(">f", 1.0)


class FormatVersions(NamedTuple):
    """The version bytes that open the pre-image of a call digest."""

    schema: int
    digest: int
    extras_digest: int


FORMAT_VERSIONS: Final = FormatVersions(2, 2, EXTRAS_DIGEST_VERSION)
_CALL_OPENING: Final = _CALL_DOMAIN + bytes(FORMAT_VERSIONS)


class DigestInputError(ValueError):
    """The fields of a call have no digest (pre-conditions of capture contract 2.6)."""


class CallHeader(NamedTuple):
    """What a call digest covers besides columns and hashes, as claimed; lengths in tokens."""

    versions: FormatVersions
    capture_key: str
    call_id: str
    parent_call_id: str | None
    mode: str
    prev_len: int
    delta_len: int
    cum_len: int
    weight_version: int


def chain_hash(parent: bytes | None, token_ids: AnyTokenIds) -> bytes:
    """Hash a delta onto its parent's chain hash; `parent` is None for a root (contract 2.4)."""
    return chain_hash_encoded(parent, encode_ids(token_ids))


def chain_hash_encoded(parent: bytes | None, encoded: EncodedIds) -> bytes:
    """`chain_hash` of ids that are already encoded."""
    count = _U64.pack(len(encoded))
    opening = _CHAIN_ROOT + count if parent is None else _CHAIN_CHILD + parent + count
    state = hashlib.sha256(opening)
    state.update(encoded.data)
    return state.digest()


def cumulative_hash(token_ids: AnyTokenIds) -> bytes:
    """Hash all tokens of a call from token 0: prompt and generation (contract 2.3)."""
    return cumulative_hash_encoded([encode_ids(token_ids)])


def cumulative_hash_encoded(deltas: list[EncodedIds]) -> bytes:
    """`cumulative_hash` of a sequence given as encoded pieces, in order."""
    state = hashlib.sha256(_CUMULATIVE_DOMAIN + _U64.pack(sum(map(len, deltas))))
    for delta in deltas:
        state.update(delta.data)
    return state.digest()


def canonical_call_digest(
    capture_key: str,
    call_id: str,
    parent_call_id: str | None,
    prev_len: int,
    carry_len: int,
    weight_version: int,
    encoded: EncodedIds,
    logprobs: Logprobs,
    digests: bytes,
) -> bytes:
    """Digest a call in canonical form: zeros for the carry, ones for the generation.

    Args:
        capture_key: the attempt, in the contract's rollout slot.
        call_id: the call.
        parent_call_id: its parent, or None for a root.
        prev_len: inherited tokens.
        carry_len: new prompt tokens, at most the delta's length.
        weight_version: of the policy, in [0, 2^64).
        encoded: the delta's ids, carry then generation.
        logprobs: of the generated tokens, exactly `len(encoded) - carry_len`, finite.
        digests: what `commitments` makes of extras digest, chain hash and cumulative hash.

    Raises:
        DigestInputError: an identity is not valid Unicode, or a length exceeds 64 bits.

    """
    size = len(encoded)
    carry = bytes(4 * carry_len)
    column = _PAIR.pack(8 + 4 * size, size)
    return hashlib.sha256(
        b"".join(
            (
                _identity_bytes(capture_key, call_id, parent_call_id),
                _lengths_bytes(prev_len, size, prev_len + size, weight_version),
                _PAIR.pack(8 + 8 * size, size),
                encoded.data,
                column,
                carry,
                _ONE * (size - carry_len),
                column,
                carry,
                logprobs.astype(FLOAT_TYPE).data,
                digests,
            )
        )
    ).digest()


def commitments(extras_digest: bytes, chain: bytes, cumulative: bytes) -> bytes:
    """Join the end of a call digest's pre-image; both presence bytes are frozen at 1."""
    return b"".join((extras_digest, b"\x01", chain, b"\x01", cumulative))


def exact_call_digest(
    header: CallHeader,
    token_ids: AnyTokenIds,
    token_mask: FloatColumn,
    logprobs: FloatColumn,
    digests: bytes,
) -> bytes:
    """Digest a call in the contract's full form: any mask order, all logprobs, signed zeros.

    Args:
        header: the claimed fields.
        token_ids: the delta, shape [tokens].
        token_mask: 0.0 or 1.0 a token, signs of zeros significant.
        logprobs: one a token, 0.0 where the mask is; rounded to float32 here.
        digests: what `commitments` makes of extras digest, chain hash and cumulative hash.

    Raises:
        DigestInputError: a pre-condition of capture contract 2.6 does not hold.

    """
    _check_header(header)
    _check_columns(header.delta_len, token_ids, token_mask, logprobs)
    size = header.delta_len
    column = _PAIR.pack(8 + 4 * size, size)
    return hashlib.sha256(
        b"".join(
            (
                _identity_bytes(header.capture_key, header.call_id, header.parent_call_id),
                _lengths_bytes(header.prev_len, size, header.cum_len, header.weight_version),
                _PAIR.pack(8 + 8 * size, size),
                encode_ids(token_ids).data,
                column,
                token_mask.astype(FLOAT_TYPE).data,
                column,
                _float32(logprobs).data,
                digests,
            )
        )
    ).digest()


def _identity_bytes(capture_key: str, call_id: str, parent_call_id: str | None) -> bytes:
    """Versions, identities and mode: the opening of the pre-image."""
    try:
        key, call = capture_key.encode(), call_id.encode()
        opening = (_CALL_OPENING, _U64.pack(len(key)), key, _U64.pack(len(call)), call)
        if parent_call_id is None:
            return b"".join((*opening, _ROOT_BYTES))
        parent = parent_call_id.encode()
    except UnicodeEncodeError as error:
        raise DigestInputError(f"identity is not valid Unicode: {error.reason}") from error
    return b"".join((*opening, b"\x01", _U64.pack(len(parent)), parent, _CONTINUATION_BYTES))


def _lengths_bytes(prev_len: int, delta_len: int, cum_len: int, weight_version: int) -> bytes:
    try:
        return _LENGTHS.pack(prev_len, delta_len, cum_len, weight_version)
    except struct.error as error:
        raise DigestInputError(f"a length or version is not unsigned 64-bit: {error}") from error


def _check_header(header: CallHeader) -> None:
    if header.versions != FORMAT_VERSIONS:
        raise DigestInputError(f"versions {tuple(header.versions)}")
    if not header.capture_key or not header.call_id or header.parent_call_id == "":
        raise DigestInputError("an identity is empty")
    is_root = header.parent_call_id is None
    if (
        header.mode != (ROOT_MODE if is_root else CONTINUATION_MODE)
        or (header.prev_len == 0) != is_root
    ):
        raise DigestInputError("a root has mode text and no prefix, a child token_in and a prefix")
    if header.delta_len < 1:
        raise DigestInputError("the delta is empty")
    if header.cum_len != header.prev_len + header.delta_len:
        raise DigestInputError("cum_len is not prev_len + delta_len")


def _check_columns(
    size: int, token_ids: AnyTokenIds, token_mask: FloatColumn, logprobs: FloatColumn
) -> None:
    if not size == len(token_ids) == len(token_mask) == len(logprobs):
        raise DigestInputError("column lengths differ from delta_len")
    is_carry = token_mask == 0.0
    if not (is_carry | (token_mask == 1.0)).all():
        raise DigestInputError("masks are 0.0 or 1.0")
    if (is_carry & (logprobs != 0.0)).any():
        raise DigestInputError("a token without loss has a logprob other than 0.0")


def _float32(values: FloatColumn) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(FLOAT_TYPE)
    if not np.isfinite(rounded).all():
        raise DigestInputError("a logprob is not finite in float32")
    return rounded
