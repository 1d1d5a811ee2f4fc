"""Complete a call: from the engine's prompt and generation to a staged call with all digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from callforest_core.custody.call import CallIdentity, StagedCall
from callforest_core.custody.digests import (
    DIGEST_SIZE,
    DigestInputError,
    canonical_call_digest,
    chain_hash_encoded,
    cumulative_hash_encoded,
    digest_opening,
)
from callforest_core.custody.errors import (
    CountMismatchError,
    EmptyDeltaError,
    IdentityError,
    PrefixMismatchError,
    WeightVersionError,
)
from callforest_core.custody.extras import EMPTY_EXTRAS, EMPTY_EXTRAS_DIGEST, extras_digest
from callforest_core.custody.path import EMPTY_PATH, TokenPath
from callforest_core.custody.tokens import (
    FLOAT_TYPE,
    TokenIds,
    as_logprobs,
    as_token_ids,
    first_false,
)


def complete_call(
    identity: CallIdentity,
    *,
    prefix: TokenIds | TokenPath | None,
    parent_chain_hash: bytes | None,
    prompt_ids: Sequence[int] | NDArray[np.integer],
    generated_ids: Sequence[int] | NDArray[np.integer],
    logprobs: Sequence[float] | NDArray[np.floating],
    weight_version: int,
    extras: bytes = EMPTY_EXTRAS,
    reported_generation_len: int | None = None,
) -> StagedCall:
    """`complete_path` for callers that do not keep the path."""
    return complete_path(
        identity,
        prefix=prefix,
        parent_chain_hash=parent_chain_hash,
        prompt_ids=prompt_ids,
        generated_ids=generated_ids,
        logprobs=logprobs,
        weight_version=weight_version,
        extras=extras,
        reported_generation_len=reported_generation_len,
    )[0]


def complete_path(
    identity: CallIdentity,
    *,
    prefix: TokenIds | TokenPath | None,
    parent_chain_hash: bytes | None,
    prompt_ids: Sequence[int] | NDArray[np.integer],
    generated_ids: Sequence[int] | NDArray[np.integer],
    logprobs: Sequence[float] | NDArray[np.floating],
    weight_version: int,
    extras: bytes = EMPTY_EXTRAS,
    reported_generation_len: int | None = None,
) -> tuple[StagedCall, TokenPath]:
    """Build the delta of a call and every digest (capture contract 2.7 and 2.9).

    Returns the call to stage and the path that its continuations begin with.

    An empty generation is allowed when the prompt adds tokens; the verifier refuses to train it.
    Cost is a comparison and a hash of the whole sequence; the rest grows with the delta only, when
    the prefix is the parent's path as it was completed here.

    Args:
        identity: who the call is.
        prefix: all tokens of the parent's path, None for a root.
        parent_chain_hash: the parent's chain hash, None for a root.
        prompt_ids: what the engine was given, whole.
        generated_ids: what it sampled.
        logprobs: of the sampled tokens.
        weight_version: of the policy when the call began.
        extras: canonical encoding of the extras.
        reported_generation_len: the engine's own count of sampled tokens, when it gave one.

    Raises:
        CaptureError: one subclass for each reason; nothing may be staged.

    """
    generated = as_token_ids(generated_ids)
    scores = as_logprobs(logprobs)
    if len(generated) != len(scores):
        raise CountMismatchError(len(generated), len(scores), "logprobs")
    if reported_generation_len not in (None, len(generated)):
        raise CountMismatchError(len(generated), reported_generation_len or 0, "the engine")
    prompt = as_token_ids(prompt_ids)
    parent = _inherited(identity, prefix, parent_chain_hash, prompt, len(generated))
    prev_len = len(parent)
    carry_len = len(prompt) - prev_len
    if carry_len + len(generated) == 0:
        raise EmptyDeltaError
    if not 0 <= weight_version < 2**64:
        raise WeightVersionError(weight_version)

    token_ids = np.concatenate((prompt[prev_len:], generated))
    path = parent.continued_by(token_ids)
    delta = path.encoded(prev_len)
    extras_commitment = EMPTY_EXTRAS_DIGEST if extras == EMPTY_EXTRAS else extras_digest(extras)
    chain = chain_hash_encoded(parent_chain_hash, delta)
    cumulative = cumulative_hash_encoded(path.encoded())
    try:
        digest = canonical_call_digest(
            digest_opening(identity.capture_key),
            identity.call_id,
            identity.parent_call_id,
            prev_len,
            carry_len,
            weight_version,
            delta,
            scores.astype(FLOAT_TYPE).tobytes(),
            (extras_commitment, chain, cumulative),
        )
    except DigestInputError as error:
        raise IdentityError(str(error)) from error
    commitments = (digest, extras_commitment, chain, cumulative)
    staged = StagedCall(
        identity, prev_len, carry_len, weight_version, token_ids, scores, extras, *commitments
    )
    return staged, path


def _inherited(
    identity: CallIdentity,
    prefix: TokenIds | TokenPath | None,
    parent_chain_hash: bytes | None,
    prompt: TokenIds,
    generation_len: int,
) -> TokenPath:
    """Check lineage and prefix; return the path that the call continues."""
    if identity.parent_call_id is None:
        if parent_chain_hash is not None or (prefix is not None and len(prefix)):
            raise IdentityError("a root has neither prefix nor parent chain hash")
        return EMPTY_PATH
    size = 0 if prefix is None else len(prefix)
    if prefix is None or not size:
        raise IdentityError("a continuation needs its prefix")
    if parent_chain_hash is None or len(parent_chain_hash) != DIGEST_SIZE:
        raise IdentityError("a continuation needs its parent's chain hash")
    if not isinstance(prefix, TokenPath):
        added = len(prompt) - size + generation_len
        prefix = TokenPath.of(prefix, spare=max(added, 0))
    if not prefix.begins(prompt):
        _refuse_prefix(prefix.token_ids, prompt)
    return prefix


def _refuse_prefix(prefix: TokenIds, prompt: TokenIds) -> NoReturn:
    size = len(prefix)
    position = first_false(prompt[:size] == prefix[: len(prompt)])
    raise PrefixMismatchError(position if position >= 0 else len(prompt), size, len(prompt))
