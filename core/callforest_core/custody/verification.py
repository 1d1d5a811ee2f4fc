"""Verify an attempt's staged calls against its receipt and join paths (capture contract 6).

The order of checks and the codes are the peer's, so that both sides refuse alike. Cost is linear in
calls and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias, cast

import numpy as np

from callforest_core.custody.call import CUSTODY_FIELDS, CallRecord, ExactCall, Receipt, StagedCall
from callforest_core.custody.digests import (
    FORMAT_VERSIONS,
    DigestInputError,
    chain_hash_encoded,
    cumulative_hash_encoded,
    digest_opening,
)
from callforest_core.custody.row import LinearizedRow, Link
from callforest_core.custody.tokens import AnyTokenIds, encode_floats, encode_ids

AnyCall: TypeAlias = StagedCall | ExactCall

_UNSUPPORTED: Final = ("unsupported_schema", "unsupported_digest", "unsupported_extras_digest")
_VERSION_FIELDS: Final = ("schema_version", "digest_version", "extras_digest_version")


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
    encoded: memoryview


class _Columns(NamedTuple):
    """The columns of all calls, encoded in one pass, cut into one piece a call.

    Exact calls encode their own logprobs; their pieces are empty here.
    """

    token_ids: list[memoryview]
    logprobs: list[memoryview]
    all_finite: bool


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
    return _linearize(receipt.capture_key, _path(bound, receipt.terminal_call_id))


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
    for link in bound.values():
        parent_id = link.record.parent_call_id
        _check_chain_hash(link, None if parent_id is None else bound[parent_id].record.chain_hash)
    paths = [_path(bound, endpoint) for endpoint in endpoints]
    return tuple(_linearize(receipt.capture_key, path) for path in paths)


def _verify_manifest(receipt: Receipt, calls: Sequence[AnyCall]) -> dict[str, _Bound]:
    """Check the receipt, bind every row to its call, check lineage. Keys keep manifest order."""
    _check_receipt(receipt)
    records = _index(receipt.manifest)
    if len(calls) != len(receipt.manifest):
        raise VerificationError(
            "row_count_mismatch", f"{len(calls)} calls for {len(receipt.manifest)} rows"
        )
    columns = _encode(calls)
    opening = _opening(receipt)
    bound: dict[str, _Bound] = {}
    for position, (record, call) in enumerate(zip(receipt.manifest, calls, strict=True)):
        call_id = call.identity.call_id
        if call_id != record.call_id or call_id in bound:
            _refuse_order(records, bound, record, call_id)
        _compare(receipt, record, call)
        _authenticate(call, opening, columns, position)
        bound[call_id] = _Bound(record, call, columns.token_ids[position])
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


def _opening(receipt: Receipt) -> bytes:
    try:
        return digest_opening(receipt.capture_key)
    except DigestInputError as error:
        raise VerificationError("invalid_snapshot", str(error)) from error


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
    if call.custody != record.custody:
        for name, found, expected in zip(CUSTODY_FIELDS, call.custody, record.custody, strict=True):
            if found != expected:
                detail = f"staged {_shown(found)}, manifest {_shown(expected)}"
                raise VerificationError(f"wrong_{name}", detail, record.call_id)
    if not call.versions == record.versions == receipt.versions:
        for name, found, expected, supported in zip(
            _VERSION_FIELDS, call.versions, record.versions, receipt.versions, strict=True
        ):
            if not found == expected == supported:
                detail = f"staged {found}, manifest {expected}, receipt {supported}"
                raise VerificationError(f"wrong_{name}", detail, record.call_id)


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _encode(calls: Sequence[AnyCall]) -> _Columns:
    no_logprobs = np.empty(0, dtype=np.float32)
    scores = [call.logprobs if isinstance(call, StagedCall) else no_logprobs for call in calls]
    ids = [call.token_ids for call in calls]
    flat_ids = cast("AnyTokenIds", np.concatenate(ids))
    flat_scores = np.concatenate(scores)
    return _Columns(
        _pieces(encode_ids(flat_ids), [8 * len(column) for column in ids]),
        _pieces(encode_floats(flat_scores), [4 * len(column) for column in scores]),
        bool(np.isfinite(flat_scores).all()),
    )


def _pieces(whole: memoryview, sizes: list[int]) -> list[memoryview]:
    """Cut bytes into consecutive pieces."""
    ends = accumulate(sizes)
    return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _authenticate(call: AnyCall, opening: bytes, columns: _Columns, position: int) -> None:
    """Compare the digest with the contents."""
    try:
        if isinstance(call, StagedCall):
            encoded, logprobs = columns.token_ids[position], columns.logprobs[position]
            digest = call.recompute_digest(opening, encoded, logprobs)
        else:
            digest = call.recompute_digest()
    except DigestInputError as error:
        raise VerificationError("invalid_snapshot", str(error), call.identity.call_id) from error
    if not columns.all_finite and not np.isfinite(call.logprobs).all():
        detail = "a logprob is not finite"
        raise VerificationError("invalid_snapshot", detail, call.identity.call_id)
    if digest != call.digest:
        detail = "contents differ from the digest"
        raise VerificationError("corrupt_digest", detail, call.identity.call_id)


def _check_lineage(records: dict[str, CallRecord]) -> None:
    """Check that every parent is present, ends where its child starts, and leads to a root."""
    grounded: set[str] = set()
    for call_id, record in records.items():
        parent_id = record.parent_call_id
        if parent_id is not None:
            parent = records.get(parent_id)
            if parent is None:
                raise PathError("missing_parent", f"no row {parent_id!r}", call_id)
            if parent.cum_len != record.prev_len:
                detail = f"starts at {record.prev_len}, its parent ends at {parent.cum_len}"
                raise PathError("parent_length_mismatch", detail, call_id)
        if parent_id is None or parent_id in grounded:
            grounded.add(call_id)
        elif call_id not in grounded:
            grounded |= _ancestry(records, grounded, call_id)


def _ancestry(records: dict[str, CallRecord], grounded: set[str], call_id: str) -> set[str]:
    """Return a call and its ancestors up to a grounded or missing one."""
    walked: set[str] = set()
    cursor: str | None = call_id
    while cursor is not None and cursor in records and cursor not in grounded:
        if cursor in walked:
            raise PathError("lineage_cycle", "is its own ancestor", cursor)
        walked.add(cursor)
        cursor = records[cursor].parent_call_id
    return walked


def _path(bound: dict[str, _Bound], endpoint: str | None) -> list[_Bound]:
    """Return the calls from the root to the endpoint. Lineage has been checked."""
    if endpoint is None or endpoint not in bound:
        detail = "the receipt names no terminal call" if endpoint is None else "not in the manifest"
        raise PathError("missing_terminal", detail, endpoint)
    path: list[_Bound] = []
    cursor: str | None = endpoint
    while cursor is not None:
        link = bound[cursor]
        path.append(link)
        cursor = link.record.parent_call_id
    path.reverse()
    return path


def _check_chain_hash(link: _Bound, parent: bytes | None) -> bytes:
    """Check that a call extends its parent's chain hash; return its own."""
    chain_hash = chain_hash_encoded(parent, link.encoded)
    if chain_hash != link.record.chain_hash:
        detail = "does not extend its parent's deltas"
        raise PathError("chain_hash_mismatch", detail, link.record.call_id)
    return chain_hash


def _linearize(capture_key: str, path: list[_Bound]) -> LinearizedRow:
    links: list[Link] = []
    start = 0
    chain_hash: bytes | None = None
    for bound in path:
        record, call, encoded = bound
        chain_hash = _check_chain_hash(bound, chain_hash)
        carry_len = call.carry_len if isinstance(call, StagedCall) else _carry_len(call)
        size = len(encoded) // 8
        if carry_len == size:
            raise PathError("empty_generation", "has no sampled token", record.call_id)
        links.append(Link(record, start, carry_len, size - carry_len))
        start += size
    terminal = path[-1].record
    if cumulative_hash_encoded([bound.encoded for bound in path]) != terminal.cumulative_hash:
        detail = "does not cover the path's tokens"
        raise PathError("cumulative_hash_mismatch", detail, terminal.call_id)
    return _join(capture_key, [bound.call for bound in path], tuple(links), start)


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
