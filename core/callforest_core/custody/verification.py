"""Verify an attempt's staged calls against its receipt and join paths (capture contract 6).

The order of checks and the codes are the peer's, so that both sides refuse alike. Cost is linear in
calls and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from callforest_core.custody.call import CallRecord, ExactCall, Receipt, StagedCall
from callforest_core.custody.digests import (
    FORMAT_VERSIONS,
    DigestInputError,
    chain_hash_encoded,
    cumulative_hash_encoded,
)
from callforest_core.custody.row import LinearizedRow, Link
from callforest_core.custody.tokens import EncodedIds, encode_ids

AnyCall: TypeAlias = StagedCall | ExactCall

_UNSUPPORTED: Final = ("unsupported_schema", "unsupported_digest", "unsupported_extras_digest")
_VERSION_FIELDS: Final = ("schema_version", "digest_version", "extras_digest_version")
_SHARED_FIELDS: Final = (
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
_COMPARED: Final = ("parent_call_id", *_SHARED_FIELDS)
_of_record: Final = attrgetter(*_COMPARED)
_of_call: Final = attrgetter("identity.parent_call_id", *_SHARED_FIELDS)


class VerificationError(ValueError):
    """A receipt or a staged call breaks custody; nothing of the attempt may train.

    Attributes:
        code: of capture contract 6.2.
        detail: the facts, for a person.
        call_id: the call at fault, or None when the receipt as a whole is.

    """

    def __init__(self, code: str, detail: str, call_id: str | None = None) -> None:
        super().__init__(f"{code}: {detail}" if call_id is None else f"{code}: {call_id}: {detail}")
        self.code = code
        self.detail = detail
        self.call_id = call_id


class PathError(VerificationError):
    """The calls are intact but do not form the path that was asked for."""


class _Bound(NamedTuple):
    """A ledger row with its authentic staged call and that call's encoded ids."""

    record: CallRecord
    call: AnyCall
    encoded: EncodedIds


def verify_and_linearize(receipt: Receipt, calls: Sequence[AnyCall]) -> LinearizedRow:
    """Verify a whole attempt and join the path to its terminal call.

    Calls off that path are checked for identity, digest and lineage, and then left out. The chain
    hash is checked on the path, the cumulative hash at the terminal.

    Args:
        receipt: of the attempt.
        calls: one a manifest row, in manifest order.

    Raises:
        VerificationError: with the code of the first check that fails.

    """
    bound = _verify_manifest(receipt, calls)
    path = _path(bound, receipt.terminal_call_id)
    return _linearize(receipt.capture_key, bound, path)


def verify_paths(
    receipt: Receipt, calls: Sequence[AnyCall], endpoints: Sequence[str]
) -> tuple[LinearizedRow, ...]:
    """Verify a whole attempt and join the path to each endpoint, in the order given.

    The chain hash of every call is checked, on a path or not, and the cumulative hash at each
    endpoint (FOR-4).

    Args:
        receipt: of the attempt.
        calls: one a manifest row, in manifest order.
        endpoints: call ids.

    Raises:
        VerificationError: with the code of the first check that fails.

    """
    bound = _verify_manifest(receipt, calls)
    for call_id in bound:
        _check_chain_hash(bound, call_id)
    paths = [_path(bound, endpoint) for endpoint in endpoints]
    return tuple(_linearize(receipt.capture_key, bound, path) for path in paths)


def _verify_manifest(receipt: Receipt, calls: Sequence[AnyCall]) -> dict[str, _Bound]:
    """Check the receipt, bind every row to its call, check lineage. Keys keep manifest order."""
    _check_receipt(receipt)
    records = _index(receipt.manifest)
    if len(calls) != len(receipt.manifest):
        raise VerificationError(
            "row_count_mismatch", f"{len(calls)} calls for {len(receipt.manifest)} rows"
        )
    all_finite = _all_finite(calls)
    bound: dict[str, _Bound] = {}
    for record, call in zip(receipt.manifest, calls, strict=True):
        call_id = call.identity.call_id
        if call_id != record.call_id or call_id in bound:
            _refuse_order(records, bound, record, call_id)
        _compare(receipt, record, call)
        bound[call_id] = _Bound(record, call, _authenticate(call, check_finite=not all_finite))
    _check_lineage(records)
    return bound


def _check_receipt(receipt: Receipt) -> None:
    for code, found, supported in zip(_UNSUPPORTED, receipt.versions, FORMAT_VERSIONS, strict=True):
        if found != supported:
            raise VerificationError(code, f"the receipt has version {found}")
    if receipt.failure_reason is not None:
        raise VerificationError("rollout_failed", receipt.failure_reason)
    if receipt.capture_poisoned:
        raise VerificationError("capture_poisoned", "a capture of this attempt failed")
    if not receipt.manifest:
        raise VerificationError("empty_manifest", "no call was committed")


def _index(manifest: Sequence[CallRecord]) -> dict[str, CallRecord]:
    records: dict[str, CallRecord] = {}
    keys: set[str] = set()
    for record in manifest:
        if record.call_id in records:
            raise VerificationError("duplicate_manifest_row", "two rows", record.call_id)
        if record.staging_key in keys:
            detail = f"staging key {record.staging_key!r} names two calls"
            raise VerificationError("duplicate_staging_key", detail, record.call_id)
        records[record.call_id] = record
        keys.add(record.staging_key)
    return records


def _refuse_order(
    records: dict[str, CallRecord], bound: dict[str, _Bound], record: CallRecord, call_id: str
) -> None:
    if call_id in bound:
        raise VerificationError("duplicate_snapshot", "given twice", call_id)
    if call_id not in records:
        raise VerificationError("snapshot_identity_mismatch", "not in the manifest", call_id)
    raise VerificationError("snapshot_order_mismatch", f"stands for {record.call_id}", call_id)


def _compare(receipt: Receipt, record: CallRecord, call: AnyCall) -> None:
    """Compare the call with its row field by field, in the peer's order."""
    if call.identity.capture_key != receipt.capture_key:
        detail = f"belongs to {call.identity.capture_key}"
        raise VerificationError("wrong_rollout", detail, record.call_id)
    found, expected = _of_call(call), _of_record(record)
    if found != expected:
        field = next(i for i in range(len(_COMPARED)) if found[i] != expected[i])
        detail = f"staged {_shown(found[field])}, manifest {_shown(expected[field])}"
        raise VerificationError(f"wrong_{_COMPARED[field]}", detail, record.call_id)
    if not call.versions == record.versions == receipt.versions:
        for i, name in enumerate(_VERSION_FIELDS):
            if not call.versions[i] == record.versions[i] == receipt.versions[i]:
                detail = f"staged {call.versions[i]}, manifest {record.versions[i]}"
                raise VerificationError(f"wrong_{name}", detail, record.call_id)


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _all_finite(calls: Sequence[AnyCall]) -> bool:
    """One pass over the logprobs of all canonical calls; exact calls are checked one by one."""
    columns = [call.logprobs for call in calls if isinstance(call, StagedCall)]
    return not columns or bool(np.isfinite(np.concatenate(columns)).all())


def _authenticate(call: AnyCall, *, check_finite: bool) -> EncodedIds:
    """Compare the digest with the contents; return the encoded ids for the hashes to come."""
    call_id = call.identity.call_id
    encoded = encode_ids(call.token_ids)
    try:
        if isinstance(call, StagedCall):
            if check_finite and not np.isfinite(call.logprobs).all():
                raise VerificationError("invalid_snapshot", "a logprob is not finite", call_id)
            digest = call.recompute_digest(encoded)
        else:
            digest = call.recompute_digest()
    except DigestInputError as error:
        raise VerificationError("invalid_snapshot", str(error), call_id) from error
    if digest != call.digest:
        raise VerificationError("corrupt_digest", "contents differ from the digest", call_id)
    return encoded


def _check_lineage(records: dict[str, CallRecord]) -> None:
    """Check that every parent is present, ends where its child starts, and leads to a root."""
    grounded: set[str] = set()
    for call_id, record in records.items():
        if record.parent_call_id is not None:
            parent = records.get(record.parent_call_id)
            if parent is None:
                raise PathError("missing_parent", f"no row {record.parent_call_id!r}", call_id)
            if parent.cum_len != record.prev_len:
                detail = f"starts at {record.prev_len}, its parent ends at {parent.cum_len}"
                raise PathError("parent_length_mismatch", detail, call_id)
        walked: set[str] = set()
        cursor: CallRecord | None = record
        while cursor is not None and cursor.call_id not in grounded:
            if cursor.call_id in walked:
                raise PathError("lineage_cycle", "is its own ancestor", cursor.call_id)
            walked.add(cursor.call_id)
            parent_id = cursor.parent_call_id
            cursor = None if parent_id is None else records.get(parent_id)
        grounded |= walked


def _path(bound: dict[str, _Bound], endpoint: str | None) -> list[str]:
    """Call ids from the root to the endpoint. Lineage has been checked."""
    if endpoint is None or endpoint not in bound:
        detail = "the receipt names no terminal call" if endpoint is None else "not in the manifest"
        raise PathError("missing_terminal", detail, endpoint)
    path: list[str] = []
    cursor: str | None = endpoint
    while cursor is not None:
        path.append(cursor)
        cursor = bound[cursor].record.parent_call_id
    path.reverse()
    return path


def _check_chain_hash(bound: dict[str, _Bound], call_id: str) -> None:
    """Check one call against its parent's recorded chain hash; over a path, that is the path's."""
    record, _, encoded = bound[call_id]
    parent_id = record.parent_call_id
    parent = None if parent_id is None else bound[parent_id].record.chain_hash
    if chain_hash_encoded(parent, encoded) != record.chain_hash:
        raise PathError("chain_hash_mismatch", "does not extend its parent's deltas", call_id)


def _linearize(capture_key: str, bound: dict[str, _Bound], path: list[str]) -> LinearizedRow:
    links: list[Link] = []
    start = 0
    for call_id in path:
        _check_chain_hash(bound, call_id)
        record, call, _ = bound[call_id]
        carry_len = call.carry_len if isinstance(call, StagedCall) else _carry_len(call)
        generation_len = record.delta_len - carry_len
        if generation_len == 0:
            raise PathError("empty_generation", "has no sampled token", call_id)
        links.append(Link(record, start, carry_len, generation_len))
        start += record.delta_len
    encoded = [bound[call_id].encoded for call_id in path]
    if cumulative_hash_encoded(encoded) != bound[path[-1]].record.cumulative_hash:
        raise PathError("cumulative_hash_mismatch", "does not cover the path's tokens", path[-1])
    return _join(capture_key, [bound[call_id].call for call_id in path], tuple(links), start)


def _carry_len(call: ExactCall) -> int:
    """Length of the leading zeros of a mask that must go on with ones."""
    generated = call.token_mask != 0.0
    carry_len = int(np.argmax(generated)) if generated.any() else len(generated)
    if not generated[carry_len:].all():
        detail = "the mask is not carry, then generation"
        raise PathError("invalid_mask_order", detail, call.identity.call_id)
    return carry_len


def _join(
    capture_key: str, calls: list[AnyCall], links: tuple[Link, ...], size: int
) -> LinearizedRow:
    exact = [call for call in calls if isinstance(call, ExactCall)]
    token_ids = np.concatenate([call.token_ids for call in calls])
    if len(exact) == len(calls):
        token_mask = np.concatenate([call.token_mask for call in exact])
        logprobs = np.concatenate([call.logprobs for call in exact])
        return LinearizedRow(capture_key, token_ids, token_mask, logprobs, links)
    if exact:
        raise TypeError("a path is canonical or exact as a whole")
    mask32 = np.zeros(size, dtype=np.float32)
    logprobs32 = np.zeros(size, dtype=np.float32)
    for call, link in zip(calls, links, strict=True):
        generation = slice(link.start + link.carry_len, link.end)
        mask32[generation] = 1.0
        logprobs32[generation] = call.logprobs
    return LinearizedRow(capture_key, token_ids, mask32, logprobs32, links)
