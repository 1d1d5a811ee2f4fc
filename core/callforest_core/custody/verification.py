"""Verify an attempt's staged calls against its receipt and join paths (capture contract 6).

The order of checks and the codes are the peer's, so that both sides refuse alike. Cost is linear in
calls and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, NoReturn

import numpy as np

from callforest_core.custody.call import CUSTODY_FIELDS, CallRecord, Receipt, StagedCall
from callforest_core.custody.columns import AnyCall, AttemptColumns, encode_attempt
from callforest_core.custody.digests import (
    FORMAT_VERSIONS,
    DigestInputError,
    Encoded,
    EncodedColumns,
    chain_hash_encoded,
    cumulative_hash_encoded,
    digest_opening,
)
from callforest_core.custody.exact_call import ExactCall
from callforest_core.custody.row import LinearizedRow, Link
from callforest_core.custody.sources import source_fault

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


class _Verified(NamedTuple):
    """An attempt whose calls are authentic and whose lineage is sound.

    Attributes:
        receipt: of the attempt.
        calls: one a manifest row, in manifest order.
        columns: of the calls.
        positions: where each call is in that order.

    """

    receipt: Receipt
    calls: Sequence[AnyCall]
    columns: AttemptColumns
    positions: dict[str, int]

    def record(self, call_id: str) -> CallRecord:
        """The ledger row of a call."""
        return self.receipt.manifest[self.positions[call_id]]


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
    verified = _verify_manifest(receipt, calls)
    return _linearize(verified, _path(verified, receipt.terminal_call_id))


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
    verified = _verify_manifest(receipt, calls)
    for record, encoded in zip(receipt.manifest, verified.columns.encoded, strict=True):
        parent_id = record.parent_call_id
        parent = None if parent_id is None else verified.record(parent_id).chain_hash
        _check_chain_hash(record, parent, encoded[0])
    # Each call extends its parent's recorded hash, so every path is checked: not once a path.
    paths = [_path(verified, endpoint) for endpoint in endpoints]
    return tuple(_join_path(verified, path) for path in paths)


def _verify_manifest(receipt: Receipt, calls: Sequence[AnyCall]) -> _Verified:
    """Check the receipt, bind every row to its call, check lineage."""
    _check_receipt(receipt)
    records = _index(receipt.manifest)
    if len(calls) != len(receipt.manifest):
        raise VerificationError(
            "row_count_mismatch", f"{len(calls)} calls for {len(receipt.manifest)} rows"
        )
    columns = encode_attempt(calls)
    openings = {receipt.capture_key: _opening(receipt.capture_key)}
    positions: dict[str, int] = {}
    for record, call, encoded in zip(receipt.manifest, calls, columns.encoded, strict=True):
        call_id = call.identity.call_id
        if call_id != record.call_id or call_id in positions:
            _refuse_order(records, positions, record, call_id)
        owner = record.owner_in(receipt.capture_key)
        _compare(receipt, record, call, owner)
        if owner not in openings:
            openings[owner] = _opening(owner)
        _authenticate(call, openings[owner], encoded, finite=columns.all_finite)
        positions[call_id] = len(positions)
    _check_lineage(records)
    _check_sources(receipt, records, calls)
    return _Verified(receipt, calls, columns, positions)


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


def _check_sources(
    receipt: Receipt, records: dict[str, CallRecord], calls: Sequence[AnyCall]
) -> None:
    fault = source_fault(receipt.capture_key, records, [call.identity for call in calls])
    if fault is not None:
        call_id, detail = fault
        raise VerificationError("wrong_source", detail, call_id)


def _opening(capture_key: str) -> bytes:
    try:
        return digest_opening(capture_key)
    except DigestInputError as error:
        raise VerificationError("invalid_snapshot", str(error)) from error


def _index(manifest: Sequence[CallRecord]) -> dict[str, CallRecord]:
    records = {record.call_id: record for record in manifest}
    keys = {record.staging_key for record in manifest}
    if not len(records) == len(keys) == len(manifest):
        _refuse_repetition(manifest)
    return records


def _refuse_repetition(manifest: Sequence[CallRecord]) -> NoReturn:
    """Name the first row that repeats an earlier one's call or key; there is one."""
    call_ids: set[str] = set()
    keys: set[str] = set()
    for record in manifest:
        if record.call_id in call_ids:
            raise VerificationError("duplicate_manifest_row", "two rows", record.call_id)
        if record.staging_key in keys:
            break
        call_ids.add(record.call_id)
        keys.add(record.staging_key)
    detail = f"staging key {record.staging_key!r} names two calls"
    raise VerificationError("duplicate_staging_key", detail, record.call_id)


def _refuse_order(
    records: dict[str, CallRecord], positions: dict[str, int], record: CallRecord, call_id: str
) -> NoReturn:
    if call_id in positions:
        raise VerificationError("duplicate_snapshot", "given twice", call_id)
    if call_id not in records:
        raise VerificationError("snapshot_identity_mismatch", "not in the manifest", call_id)
    raise VerificationError("snapshot_order_mismatch", f"stands for {record.call_id}", call_id)


def _compare(receipt: Receipt, record: CallRecord, call: AnyCall, owner: str) -> None:
    """Compare the call with its row field by field, in the peer's order.

    The owner is the attempt under which the call must be staged: the receipt's own but for a
    restored call.
    """
    if call.identity.capture_key != owner:
        detail = f"belongs to {call.identity.capture_key}, not {owner}"
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


def _authenticate(call: AnyCall, opening: bytes, encoded: EncodedColumns, *, finite: bool) -> None:
    """Compare the digest with the contents."""
    try:
        if isinstance(call, StagedCall):
            digest = call.digest_columns(opening, encoded)
        else:
            digest = call.recompute_digest()
    except DigestInputError as error:
        raise VerificationError("invalid_snapshot", str(error), call.identity.call_id) from error
    if not finite and not np.isfinite(call.logprobs).all():
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


def _path(verified: _Verified, endpoint: str | None) -> list[int]:
    """Return the positions of the calls from the root to the endpoint."""
    positions = verified.positions
    if endpoint is None or endpoint not in positions:
        detail = "the receipt names no terminal call" if endpoint is None else "not in the manifest"
        raise PathError("missing_terminal", detail, endpoint)
    manifest = verified.receipt.manifest
    path: list[int] = []
    cursor: str | None = endpoint
    while cursor is not None:
        position = positions[cursor]
        path.append(position)
        cursor = manifest[position].parent_call_id
    path.reverse()
    return path


def _check_chain_hash(record: CallRecord, parent: bytes | None, encoded: Encoded) -> bytes:
    """Check that a call extends its parent's chain hash; return its own."""
    chain_hash = chain_hash_encoded(parent, encoded)
    if chain_hash != record.chain_hash:
        detail = "does not extend its parent's deltas"
        raise PathError("chain_hash_mismatch", detail, record.call_id)
    return chain_hash


def _linearize(verified: _Verified, path: list[int]) -> LinearizedRow:
    """Check a path's chain hashes and the shape of its calls, call by call, and join it."""
    manifest, columns = verified.receipt.manifest, verified.columns.encoded
    links: list[Link] = []
    chain_hash: bytes | None = None
    for position in path:
        chain_hash = _check_chain_hash(manifest[position], chain_hash, columns[position][0])
        links.append(_link(verified, position, links))
    return _join_links(verified, path, links)


def _join_path(verified: _Verified, path: list[int]) -> LinearizedRow:
    """Check the shape of the calls of a path whose chain hashes were checked, and join it."""
    links: list[Link] = []
    for position in path:
        links.append(_link(verified, position, links))
    return _join_links(verified, path, links)


def _link(verified: _Verified, position: int, before: list[Link]) -> Link:
    """Check that a call's mask is carry, then generation, and place it behind others."""
    record, call = verified.receipt.manifest[position], verified.calls[position]
    carry_len = call.carry_len if isinstance(call, StagedCall) else _carry_len(call)
    if carry_len == record.delta_len:
        raise PathError("empty_generation", "has no sampled token", record.call_id)
    start = before[-1].end if before else 0
    return Link(record, start, carry_len, record.delta_len - carry_len)


def _join_links(verified: _Verified, path: list[int], links: list[Link]) -> LinearizedRow:
    """Check a path's cumulative hash, and join it."""
    terminal = links[-1].record
    if _covers_all(verified, path):
        pieces = [verified.columns.encoded_ids]
    else:
        pieces = [verified.columns.encoded[position][0] for position in path]
    if cumulative_hash_encoded(*pieces) != terminal.cumulative_hash:
        detail = "does not cover the path's tokens"
        raise PathError("cumulative_hash_mismatch", detail, terminal.call_id)
    return _join(verified, path, tuple(links))


def _covers_all(verified: _Verified, path: list[int]) -> bool:
    """Whether a path is the whole attempt in manifest order."""
    return path == list(range(len(verified.calls)))


def _carry_len(call: ExactCall) -> int:
    """Length of the leading zeros of a mask that must go on with ones."""
    generated = call.token_mask != 0.0
    carry_len = int(np.argmax(generated)) if generated.any() else len(generated)
    if not generated[carry_len:].all():
        detail = "the mask is not carry, then generation"
        raise PathError("invalid_mask_order", detail, call.identity.call_id)
    return carry_len


def _join(verified: _Verified, path: list[int], links: tuple[Link, ...]) -> LinearizedRow:
    """Cut the path out of the columns."""
    capture_key = verified.receipt.capture_key
    columns = verified.columns
    exact = [call for call in (verified.calls[n] for n in path) if isinstance(call, ExactCall)]
    if exact and len(exact) != len(path):
        raise TypeError("a path is canonical or exact as a whole")
    if exact:
        token_ids = np.concatenate([call.token_ids for call in exact])
        token_mask = np.concatenate([call.token_mask for call in exact])
        logprobs = np.concatenate([call.logprobs for call in exact])
        return LinearizedRow(capture_key, token_ids, token_mask, logprobs, links)
    if _covers_all(verified, path):
        return LinearizedRow(
            capture_key, columns.token_ids, columns.token_mask, columns.logprobs, links
        )
    spans = [slice(columns.bounds[n], columns.bounds[n + 1]) for n in path]
    token_ids = np.concatenate([verified.calls[n].token_ids for n in path])
    token_mask32 = np.concatenate([columns.token_mask[span] for span in spans])
    logprobs32 = np.concatenate([columns.logprobs[span] for span in spans])
    return LinearizedRow(capture_key, token_ids, token_mask32, logprobs32, links)
