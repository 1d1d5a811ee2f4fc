"""The `digest` suite: every digest of a call, and records that have none."""

from __future__ import annotations

import numpy as np

from callforest_core.custody.digests import (
    FORMAT_VERSIONS,
    CallHeader,
    DigestInputError,
    chain_hash,
    cumulative_hash,
    exact_call_digest,
)
from callforest_core.custody.errors import ExtrasError
from callforest_core.custody.extras import encode_extras, extras_digest
from callforest_mesh.conformance.json_case import Case, CaseError, Json, member
from callforest_mesh.conformance.peer_fields import (
    PeerFields,
    PeerParseError,
    floats,
    identifier,
    length,
    mode,
    nullable,
    raw_digest,
    token_ids,
)
from callforest_mesh.conformance.peer_json import parse_staged_record


def answer(case: Case) -> Json:
    """Digest a call, or say why a staged record is refused."""
    given = _with_floats(member(case, "input"))
    try:
        if member(case, "kind") == "call":
            return _digests(given)
        snapshot, _ = parse_staged_record(given)
    except (PeerParseError, DigestInputError, ExtrasError) as error:
        return {"reject": str(error)}
    return {"digest": snapshot.digest.hex()}


def _digests(given: Json) -> dict[str, Json]:
    fields = PeerFields(given)
    delta = fields.take("token_ids_delta", token_ids)
    prefix = fields.take("prefix_token_ids", token_ids)
    extras = fields.take_or("extras", _encoded_extras, encode_extras(None))
    chain = chain_hash(fields.take_or("parent_chain_hash", nullable(raw_digest), None), delta)
    cumulative = cumulative_hash(np.concatenate((prefix, delta)))
    header = CallHeader(
        FORMAT_VERSIONS,
        fields.take("rollout_id", identifier),
        fields.take("model_call_id", identifier),
        fields.take_or("parent_call_id", nullable(identifier), None),
        fields.take("mode", mode),
        fields.take("prev_len", length),
        fields.take("delta_len", length),
        fields.take("cum_len", length),
        fields.take("weight_version", length),
    )
    token_mask = fields.take("token_mask_delta", floats)
    logprobs = fields.take("generation_log_probs_delta", floats)
    fields.finish()
    extras_commitment = extras_digest(extras)
    digests = (extras_commitment, chain, cumulative)
    return {
        "extras_digest": extras_commitment.hex(),
        "chain_hash": chain.hex(),
        "cumulative_hash": cumulative.hex(),
        "digest": exact_call_digest(header, delta, token_mask, logprobs, digests).hex(),
    }


def _encoded_extras(value: Json) -> bytes:
    if value is not None and not isinstance(value, dict):
        raise PeerParseError("extras are an object or null")
    return encode_extras(value)


def _with_floats(value: Json) -> Json:
    """Put the floats that JSON has no words for in place of their stand-ins."""
    if isinstance(value, list):
        return [_with_floats(element) for element in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$f64"}:
        name = value["$f64"]
        if not isinstance(name, str):
            raise CaseError("$f64 names a float")
        return float(name)
    return {key: _with_floats(element) for key, element in value.items()}
