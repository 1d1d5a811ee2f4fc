"""The columns of all calls of an attempt, laid one behind the other and encoded in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from operator import gt, sub
from typing import Final, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.call import StagedCall
from callforest_core.custody.digests import Encoded, EncodedColumns
from callforest_core.custody.exact_call import ExactCall
from callforest_core.custody.tokens import AnyTokenIds, encode_floats, encode_ids

AnyCall: TypeAlias = StagedCall | ExactCall

_CARRY_THEN_GENERATION: Final = np.array([0, 1], dtype=np.float32)
_NO_LOGPROBS: Final = np.empty(0, dtype=np.float32)


class AttemptColumns(NamedTuple):
    """The columns of all calls, one call behind the other, encoded in one pass.

    Exact calls bring a mask and logprobs of their own; here they have placeholders.

    Attributes:
        bounds: where each call starts, in tokens, and then where the last ends.
        encoded_ids: the ids of all calls, big-endian.
        token_ids: shape [tokens].
        token_mask: shape [tokens], 1.0 for the tokens that have a logprob.
        logprobs: shape [tokens].
        encoded: the three columns, big-endian, cut into the calls'.
        all_finite: whether every logprob is.

    """

    bounds: list[int]
    encoded_ids: Encoded
    token_ids: AnyTokenIds
    token_mask: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    encoded: list[EncodedColumns]
    all_finite: bool


def encode_attempt(calls: Sequence[AnyCall]) -> AttemptColumns:
    """Lay out the columns of calls, at least one, as claimed.

    Logprobs beyond the tokens of their call are left out; such a call has no digest.
    """
    ids = [call.token_ids for call in calls]
    scores = [_NO_LOGPROBS if isinstance(call, ExactCall) else call.logprobs for call in calls]
    sizes = list(map(len, ids))
    if any(map(gt, map(len, scores), sizes)):
        scores = [own[:size] for own, size in zip(scores, sizes, strict=True)]
    generated = list(map(len, scores))
    carried = list(map(sub, sizes, generated))
    bounds = [0, *accumulate(sizes)]
    runs = list(chain.from_iterable(zip(carried, generated, strict=True)))
    token_ids = cast("AnyTokenIds", np.concatenate(ids))
    token_mask = np.repeat(np.tile(_CARRY_THEN_GENERATION, len(calls)), runs)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    for end, size, own in zip(bounds[1:], generated, scores, strict=True):
        logprobs[end - size : end] = own
    encoded_ids = encode_ids(token_ids)
    encoded = _cut(encoded_ids, encode_floats(token_mask), encode_floats(logprobs), bounds)
    all_finite = bool(np.isfinite(logprobs).all())
    return AttemptColumns(bounds, encoded_ids, token_ids, token_mask, logprobs, encoded, all_finite)


def _cut(
    token_ids: memoryview, token_mask: memoryview, logprobs: memoryview, bounds: list[int]
) -> list[EncodedColumns]:
    return [
        (
            token_ids[8 * start : 8 * end],
            b"",
            token_mask[4 * start : 4 * end],
            logprobs[4 * start : 4 * end],
        )
        for start, end in pairwise(bounds)
    ]
