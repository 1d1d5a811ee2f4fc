"""Parse the JSON of capture-contract peers as strictly as they do (capture contract 1).

`parse_*` refuses what a peer's constructor refuses. `claimed_*` reads only types and shapes, for
records that were built without those checks and are to be judged by the verifier.
"""

from __future__ import annotations

from callforest_core.custody.call import CallIdentity, CallRecord, Receipt
from callforest_core.custody.digests import (
    CONTINUATION_MODE,
    FORMAT_VERSIONS,
    ROOT_MODE,
    DigestInputError,
    FormatVersions,
)
from callforest_core.custody.errors import ExtrasError
from callforest_core.custody.exact_call import ExactCall
from callforest_core.custody.extras import EMPTY_EXTRAS_DIGEST, encode_extras, extras_digest
from callforest_core.custody.row import LinearizedRow
from callforest_mesh.conformance.json_case import Json
from callforest_mesh.conformance.peer_fields import (
    PeerFields,
    PeerParseError,
    elements,
    flag,
    floats,
    identifier,
    length,
    lenient_float,
    mode,
    nullable,
    raw_digest,
    strict_float,
    terminal_selection,
    text,
    token_ids,
    version,
)


def parse_receipt(value: Json) -> Receipt:
    """Parse a receipt.

    Raises:
        PeerParseError: a peer would not construct it.
    """
    receipt = claimed_receipt(value)
    if receipt.versions != FORMAT_VERSIONS:
        raise PeerParseError("unsupported versions")
    for record in receipt.manifest:
        _check_record(record)
    call_ids = {record.call_id for record in receipt.manifest}
    terminal, selection = receipt.terminal_call_id, receipt.terminal_selection
    if len(call_ids) != len(receipt.manifest):
        raise PeerParseError("a call has two manifest rows")
    if terminal is not None and terminal not in call_ids:
        raise PeerParseError("the terminal is not in the manifest")
    if not receipt.capture_poisoned and (
        receipt.failure_reason is not None or terminal is None or selection is None
    ):
        raise PeerParseError("unpoisoned, yet failed or without an attributed terminal")
    if selection is None and (terminal is not None or receipt.failure_reason is None):
        raise PeerParseError("without attribution there is a failure and no terminal")
    return receipt


def claimed_receipt(value: Json) -> Receipt:
    """Read a receipt without checking what it says.

    Raises:
        PeerParseError: a field is unknown, missing, or not of its type.
    """
    fields = PeerFields(value)
    receipt = Receipt(
        capture_key=fields.take("rollout_id", identifier),
        reward=fields.take_or("reward", nullable(lenient_float), None),
        terminal_call_id=fields.take_or("terminal_model_call_id", nullable(identifier), None),
        manifest=fields.take_or("manifest", _claimed_records, ()),
        capture_poisoned=fields.take_or("capture_poisoned", flag, default=False),
        failure_reason=fields.take_or("failure_reason", nullable(text), None),
        terminal_selection=fields.take_or("terminal_selection", nullable(terminal_selection), None),
        terminal_attribution_reason=fields.take_or(
            "terminal_attribution_reason", nullable(text), None
        ),
        versions=_versions(fields),
    )
    fields.finish()
    return receipt


def parse_record(value: Json) -> CallRecord:
    """Parse a manifest row.

    Raises:
        PeerParseError: a peer would not construct it.
    """
    record = claimed_record(value)
    _check_record(record)
    return record


def claimed_record(value: Json) -> CallRecord:
    """Read a manifest row without checking what it says.

    Raises:
        PeerParseError: a field is unknown, missing, or not of its type.
    """
    fields = PeerFields(value)
    record = CallRecord(
        call_id=fields.take("model_call_id", identifier),
        parent_call_id=fields.take_or("parent_call_id", nullable(identifier), None),
        mode=fields.take_or("mode", mode, CONTINUATION_MODE),
        prev_len=fields.take("prev_len", length),
        delta_len=fields.take("delta_len", length),
        cum_len=fields.take("cum_len", length),
        weight_version=fields.take("weight_version", length),
        digest=fields.take("digest", raw_digest),
        extras_digest=fields.take("extras_digest", raw_digest),
        chain_hash=fields.take("chain_hash", raw_digest),
        cumulative_hash=fields.take("cumulative_hash", raw_digest),
        staging_key=fields.take("staging_key", identifier),
        response_id=fields.take("response_id", identifier),
        admitted_at=fields.take_or("admitted_at", nullable(strict_float), None),
        output_fingerprint=fields.take_or("output_fingerprint", nullable(raw_digest), None),
        continuation_fingerprint=fields.take_or(
            "continuation_fingerprint", nullable(raw_digest), None
        ),
        fingerprint_version=fields.take_or("fingerprint_version", length, 0),
        versions=_versions(fields),
    )
    fields.finish()
    return record


def parse_snapshot(value: Json) -> ExactCall:
    """Parse token columns without extras; the digest is recomputed.

    Raises:
        PeerParseError: a peer would not construct it.
    """
    snapshot = claimed_snapshot(value)
    _check_snapshot(snapshot)
    return snapshot


def claimed_snapshot(value: Json) -> ExactCall:
    """Read token columns without checking what they say.

    Raises:
        PeerParseError: a field is unknown, missing, or not of its type.
    """
    fields = PeerFields(value)
    snapshot = _snapshot(fields)
    fields.finish()
    return snapshot


def parse_staged_record(value: Json) -> tuple[ExactCall, bytes]:
    """Parse a whole staged record; return its token columns and its encoded extras.

    Raises:
        PeerParseError: a peer would not construct it.
    """
    fields = PeerFields(value)
    snapshot = _snapshot(fields)
    extras = fields.take_or("extras", _extras, encode_extras(None))
    fields.finish()
    _check_snapshot(snapshot)
    if extras_digest(extras) != snapshot.extras_digest:
        raise PeerParseError("extras_digest is not that of the extras")
    return snapshot, extras


def row_json(row: LinearizedRow) -> dict[str, Json]:
    """Write a row as a peer's linearized row (capture contract 6.5)."""
    links = [(link, link.record.call_id) for link in row.links]
    return {
        "rollout_id": row.capture_key,
        "token_ids": row.token_ids.tolist(),
        "token_mask": row.token_mask.tolist(),
        "logprobs": row.logprobs.tolist(),
        "model_call_ids": [call_id for _, call_id in links],
        "prompt_len": row.prompt_len,
        "weight_versions": list(row.weight_versions),
        "weight_version_spans": [
            {
                "model_call_id": call_id,
                "start": link.start,
                "end": link.end,
                "weight_version": link.record.weight_version,
            }
            for link, call_id in links
        ],
        "link_spans": [[call_id, link.carry_len, link.generation_len] for link, call_id in links],
        "extras_commitments": [
            {
                "model_call_id": call_id,
                "extras_digest_version": link.record.versions.extras_digest,
                "extras_digest": link.record.extras_digest.hex(),
            }
            for link, call_id in links
        ],
    }


def _claimed_records(value: Json) -> tuple[CallRecord, ...]:
    return tuple(map(claimed_record, elements(value)))


def _snapshot(fields: PeerFields) -> ExactCall:
    return ExactCall(
        identity=CallIdentity(
            fields.take("rollout_id", identifier),
            fields.take("model_call_id", identifier),
            fields.take_or("parent_call_id", nullable(identifier), None),
        ),
        mode=fields.take("mode", mode),
        prev_len=fields.take("prev_len", length),
        delta_len=fields.take("delta_len", length),
        cum_len=fields.take("cum_len", length),
        weight_version=fields.take("weight_version", length),
        token_ids=fields.take("token_ids_delta", token_ids),
        token_mask=fields.take("token_mask_delta", floats),
        logprobs=fields.take("generation_log_probs_delta", floats),
        digest=fields.take("digest", raw_digest),
        extras_digest=fields.take_or("extras_digest", raw_digest, EMPTY_EXTRAS_DIGEST),
        chain_hash=fields.take("chain_hash", raw_digest),
        cumulative_hash=fields.take("cumulative_hash", raw_digest),
        versions=_versions(fields),
    )


def _versions(fields: PeerFields) -> FormatVersions:
    supported = FORMAT_VERSIONS
    return FormatVersions(
        fields.take_or("schema_version", version, supported.schema),
        fields.take_or("digest_version", version, supported.digest),
        fields.take_or("extras_digest_version", version, supported.extras_digest),
    )


def _extras(value: Json) -> bytes:
    if value is not None and not isinstance(value, dict):
        raise PeerParseError("extras are an object or null")
    try:
        return encode_extras(value)
    except ExtrasError as error:
        raise PeerParseError(str(error)) from error


def _check_record(record: CallRecord) -> None:
    is_root = record.parent_call_id is None
    if record.versions != FORMAT_VERSIONS:
        raise PeerParseError("unsupported versions")
    if record.delta_len == 0 or record.cum_len != record.prev_len + record.delta_len:
        raise PeerParseError("lengths do not describe a contiguous delta")
    if (record.prev_len == 0) != is_root:
        raise PeerParseError("exactly a root has no prefix")
    if record.mode != (ROOT_MODE if is_root else CONTINUATION_MODE):
        raise PeerParseError("exactly a root has mode text")


def _check_snapshot(snapshot: ExactCall) -> None:
    try:
        digest = snapshot.recompute_digest()
    except DigestInputError as error:
        raise PeerParseError(str(error)) from error
    if digest != snapshot.digest:
        raise PeerParseError("the digest is not that of the contents")
