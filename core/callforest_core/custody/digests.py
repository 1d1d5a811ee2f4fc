"""Every digest of a call (capture contract 2.1 to 2.6): byte layouts, SHA-256, raw 32 bytes.

Functions that take encoded ids (`tokens.encode_ids`) are for callers that hash the same ids more
than once: encode once, hash slices. Digests are raw bytes here; hexadecimal is a matter of the
peer's JSON.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.extras import EXTRAS_DIGEST_VERSION
from callforest_core.custody.tokens import (
    AnyTokenIds,
    encode_floats,
    encode_ids,
)

Encoded: TypeAlias = bytes | memoryview
"""Big-endian bytes of a column."""
EncodedColumns: TypeAlias = tuple[Encoded, Encoded, Encoded, Encoded]
"""A delta's ids (8 bytes a token), what mask and logprobs both begin with (zeros of the carry, or
nothing), and the rest of its mask and of its finite logprobs (4 bytes a token)."""
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
_COUNT: Final = struct.Struct(">QQ")
_LENGTHS: Final = struct.Struct(">QQQQQQ")
_ROOT_BYTES: Final = b"\x00" + _U64.pack(len(ROOT_MODE)) + ROOT_MODE.encode()
_CHILD: Final = _U64.pack(len(CONTINUATION_MODE)) + CONTINUATION_MODE.encode()
_PRESENT: Final = b"\x01"
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


def chain_hash_encoded(parent: bytes | None, encoded: Encoded) -> bytes:
    """`chain_hash` of ids that are already encoded."""
    count = _U64.pack(len(encoded) // 8)
    if parent is None:
        return sha256(b"".join((_CHAIN_ROOT, count, encoded))).digest()
    return sha256(b"".join((_CHAIN_CHILD, parent, count, encoded))).digest()


def cumulative_hash(token_ids: AnyTokenIds) -> bytes:
    """Hash all tokens of a call from token 0: prompt and generation (contract 2.3)."""
    return cumulative_hash_encoded(encode_ids(token_ids))


def cumulative_hash_encoded(*encoded: Encoded) -> bytes:
    """`cumulative_hash` of a sequence given as encoded pieces, in order."""
    state = sha256(_CUMULATIVE_DOMAIN + _U64.pack(sum(map(len, encoded)) // 8))
    for piece in encoded:
        state.update(piece)
    return state.digest()


@lru_cache(maxsize=1024)
def digest_opening(capture_key: str) -> bytes:
    """Encode what opens the pre-image of every call digest of an attempt.

    Raises:
        DigestInputError: the key is empty or not valid Unicode.

    """
    return _CALL_OPENING + _identifier(capture_key)


def canonical_columns(carry_len: int, encoded: Encoded, logprobs: Encoded) -> EncodedColumns:
    """Complete encoded ids and logprobs: zeros for the carry, ones for the generation."""
    return encoded, bytes(4 * carry_len), _ONE * (len(encoded) // 8 - carry_len), logprobs


def canonical_call_digest(
    opening: bytes,
    call_id: str,
    parent_call_id: str | None,
    prev_len: int,
    carry_len: int,
    weight_version: int,
    encoded: Encoded,
    logprobs: Encoded,
    digests: tuple[bytes, bytes, bytes],
) -> bytes:
    """Digest a call in canonical form: zeros for the carry, ones for the generation.

    Args:
        opening: `digest_opening` of the attempt.
        call_id: the call.
        parent_call_id: its parent, or None for a root.
        prev_len: inherited tokens; 0 exactly for a root.
        carry_len: new prompt tokens, at most the delta's length.
        weight_version: of the policy, in [0, 2^64).
        encoded: the delta's ids, carry then generation, encoded; not empty.
        logprobs: of the generated tokens, finite, encoded; as many as the delta has after the
            carry.
        digests: extras digest, chain hash and cumulative hash, raw.

    Raises:
        DigestInputError: an identity is empty or not valid Unicode, or a length exceeds 64 bits.

    """
    columns = canonical_columns(carry_len, encoded, logprobs)
    return call_digest(opening, call_id, parent_call_id, prev_len, weight_version, columns, digests)


def call_digest(
    opening: bytes,
    call_id: str,
    parent_call_id: str | None,
    prev_len: int,
    weight_version: int,
    columns: EncodedColumns,
    digests: tuple[bytes, bytes, bytes],
) -> bytes:
    """Digest a call whose columns are encoded (capture contract 2.6).

    Args:
        opening: `digest_opening` of the attempt.
        call_id: the call.
        parent_call_id: its parent, or None for a root.
        prev_len: inherited tokens; 0 exactly for a root.
        weight_version: of the policy, in [0, 2^64).
        columns: of the delta, at least one token, equally many in each.
        digests: extras digest, chain hash and cumulative hash, raw.

    Raises:
        DigestInputError: an identity is empty or not valid Unicode, or a length exceeds 64 bits.

    """
    token_ids, carry, token_mask, logprobs = columns
    size = len(token_ids) // 8
    count = _COUNT.pack(8 + 4 * size, size)
    try:
        lengths = _LENGTHS.pack(prev_len, size, prev_len + size, weight_version, 8 + 8 * size, size)
    except struct.error as error:
        raise DigestInputError(f"a length or version is not unsigned 64-bit: {error}") from error
    parts = (
        opening,
        _identifier(call_id),
        _ROOT_BYTES if parent_call_id is None else _PRESENT + _identifier(parent_call_id) + _CHILD,
        lengths,
        token_ids,
        count,
        carry,
        token_mask,
        count,
        carry,
        logprobs,
        _PRESENT.join(digests),
    )
    return sha256(b"".join(parts)).digest()


def exact_call_digest(
    header: CallHeader,
    token_ids: AnyTokenIds,
    token_mask: FloatColumn,
    logprobs: FloatColumn,
    digests: tuple[bytes, bytes, bytes],
) -> bytes:
    """Digest a call in the contract's full form: any mask order, all logprobs, signed zeros.

    Args:
        header: the claimed fields.
        token_ids: the delta, shape [tokens].
        token_mask: 0.0 or 1.0 a token, signs of zeros significant.
        logprobs: one a token, 0.0 where the mask is; rounded to float32 here.
        digests: extras digest, chain hash and cumulative hash, raw.

    Raises:
        DigestInputError: a pre-condition of capture contract 2.6 does not hold.

    """
    _check_header(header)
    _check_columns(header.delta_len, token_ids, token_mask, logprobs)
    return call_digest(
        digest_opening(header.capture_key),
        header.call_id,
        header.parent_call_id,
        header.prev_len,
        header.weight_version,
        (encode_ids(token_ids), b"", encode_floats(token_mask), _finite_floats(logprobs)),
        digests,
    )


def _identifier(name: str) -> bytes:
    if not name:
        raise DigestInputError("an identity is empty")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise DigestInputError(f"identity is not valid Unicode: {error.reason}") from error
    return _U64.pack(len(encoded)) + encoded


def _check_header(header: CallHeader) -> None:
    if header.versions != FORMAT_VERSIONS:
        raise DigestInputError(f"versions {tuple(header.versions)}")
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


def _finite_floats(values: FloatColumn) -> memoryview:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise DigestInputError("a logprob is not finite in float32")
    return encode_floats(rounded)
