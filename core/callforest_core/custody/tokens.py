"""Token columns as numpy arrays, and their big-endian encodings that the digests cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.errors import NonFiniteLogprobError, TokenOutOfRangeError

TokenIds: TypeAlias = NDArray[np.uint32]
"""One id a token, shape [tokens]: the canonical column of our wire."""
WideTokenIds: TypeAlias = NDArray[np.uint64]
"""One id a token, shape [tokens]: the range of the capture contract, [0, 2^64)."""
AnyTokenIds: TypeAlias = TokenIds | WideTokenIds
Logprobs: TypeAlias = NDArray[np.float32]
"""One natural-log probability a generated token, shape [generated tokens]."""
ID_TYPE: Final = np.dtype(">u8")
FLOAT_TYPE: Final = np.dtype(">f4")
_NARROW: Final = np.dtype(np.uint32)
_SINGLE: Final = np.dtype(np.float32)
_LIMIT: Final = 2**32


def as_token_ids(values: Sequence[int] | NDArray[np.integer]) -> TokenIds:
    """Return ids as a contiguous uint32 array, sharing memory when they already are one.

    Raises:
        TokenOutOfRangeError: not one-dimensional, not integers, or outside [0, 2^32).

    """
    array = np.asarray(values)
    if array.ndim != 1:
        raise TokenOutOfRangeError(f"ids have shape {array.shape}")
    if array.dtype == _NARROW:
        return cast("TokenIds", array) if array.flags.c_contiguous else array.astype(np.uint32)
    if array.size == 0:
        return np.empty(0, dtype=np.uint32)
    if array.dtype.kind not in "iu":
        raise TokenOutOfRangeError(f"ids have type {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= _LIMIT:
        raise TokenOutOfRangeError(f"ids span [{low}, {high}]")
    return array.astype(np.uint32)


def as_logprobs(values: Sequence[float] | NDArray[np.floating]) -> Logprobs:
    """Return logprobs as a float32 array of their own (IEEE round to nearest even).

    Raises:
        NonFiniteLogprobError: a value is NaN, infinite, or overflows float32 (BUGCASES B10).

    """
    if isinstance(values, np.ndarray) and values.dtype == _SINGLE:
        array = values.astype(_SINGLE)
    else:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=np.float32)
    position = first_false(np.isfinite(array))
    if position >= 0:
        raise NonFiniteLogprobError(position)
    return array


def first_false(flags: NDArray[np.bool_]) -> int:
    """Return the position of the first False, or -1; a byte search beats a numpy reduction."""
    return flags.tobytes().find(0)


def encode_ids(token_ids: AnyTokenIds) -> memoryview:
    """Encode ids as big-endian u64: the bytes of `TOK` after its count (contract 2.2)."""
    return as_bytes(token_ids.astype(ID_TYPE))


def encode_floats(values: NDArray[np.floating]) -> memoryview:
    """Encode floats as big-endian float32: the bytes of a column after its count."""
    return as_bytes(values.astype(FLOAT_TYPE))


def as_bytes(column: NDArray[np.generic]) -> memoryview:
    """View a contiguous array as its bytes."""
    return column.view(np.uint8).data
