"""Row certificates: each row of a group with what proves it, checked without any service (SEC-3).

A certificate holds the staged calls of its row and its owner's receipt. Their digests cover tokens,
log-probabilities, sampling, lineage, reward, selection and masks; the receipt alone says which row
owns which loss. Contract: docs/protocol.md, section "Certificates".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from callforest.capture.v1 import group_batch_pb2, receipt_pb2, row_certificate_pb2
from callforest_client.codec import ColumnError, staged_call_from_proto
from callforest_core.custody.attempts import is_earlier_attempt
from callforest_core.custody.call import CallRecord, Receipt, StagedCall
from callforest_core.custody.extras import extras_digest
from callforest_core.custody.verification import VerificationError, verify_paths
from callforest_core.forest.paths import (
    SelectedPath,
    SelectionError,
    check_selection,
    selected_paths,
)
from callforest_core.forest.receipts import is_forest, receipt_digest

_TRAINING: Final = group_batch_pb2.ROW_KIND_TRAINING
_PLACEHOLDER: Final = group_batch_pb2.ROW_KIND_PLACEHOLDER
_PADDING: Final = group_batch_pb2.ROW_KIND_PADDING
_ROW_ID: Final = re.compile(r"(?P<group>.+)_(?:g(?P<slot>\d+)_s(?P<segment>\d+)|pad(?P<pad>\d+))")


class CertificateError(ValueError):
    """A row is not what its certificate says.

    Attributes:
        fault: what is wrong, one word; a verification code where custody is.
        row_id: the row, or "" when it is not known.
    """

    def __init__(self, fault: str, detail: str, row_id: str = "") -> None:
        super().__init__(f"{row_id or 'a row'}: {fault}: {detail}")
        self.fault = fault
        self.row_id = row_id


@dataclass(frozen=True, slots=True)
class CertifiedRow:
    """What a valid certificate proves.

    Attributes:
        row_id: the row.
        slot: the owner's slot; None for padding.
        segment: the row's place among its owner's; 0 for padding.
        segment_count: rows of its owner.
        call_ids: from the root to the endpoint, with the attempt.
        token_count: the whole row.
        owned_lengths: of the generations that have loss here.
        trains: whether it has any loss.
    """

    row_id: str
    slot: int | None
    segment: int
    segment_count: int
    call_ids: tuple[tuple[str, str], ...]
    token_count: int
    owned_lengths: tuple[int, ...]
    trains: bool


def certify(
    batch: group_batch_pb2.GroupBatch,
) -> Iterator[row_certificate_pb2.RowCertificate]:
    """Give the certificate of every row of a delivered group, in its order."""
    for row in batch.rows:
        certificate = row_certificate_pb2.RowCertificate(
            group_id=batch.group_id, row_id=row.row_id, kind=row.kind
        )
        for span in row.spans:
            call = batch.segments[span.segment_index]
            certificate.segments.add(call=call, owns_loss=span.owns_loss)
        if row.HasField("slot"):
            certificate.receipt.CopyFrom(batch.receipts[row.slot])
        yield certificate


def verify_certificate(certificate: row_certificate_pb2.RowCertificate) -> CertifiedRow:
    """Verify a row from its certificate alone.

    Every call digest, extras digest and chain hash along the path, the cumulative hash at its end,
    the receipt's digest, and who owns the loss.

    Raises:
        CertificateError: with the first fault.
    """
    row_id = certificate.row_id
    calls = _verified_calls(certificate)
    named = _ROW_ID.fullmatch(row_id)
    if named is None or named["group"] != certificate.group_id:
        raise CertificateError("row_id", "names no row of its group", row_id)
    if certificate.kind == _PADDING:
        canonical = named["pad"] and f"{certificate.group_id}_pad{int(named['pad'])}" == row_id
        if not canonical or certificate.HasField("receipt"):
            raise CertificateError("padding", "padding has no owner", row_id)
        return _without_loss(certificate, calls, None)
    slot, segment = _place(named, certificate)
    receipt = certificate.receipt
    _check_receipt(certificate, slot)
    if certificate.kind == _PLACEHOLDER:
        if not receipt.masked or segment != 0:
            raise CertificateError("placeholder", "its owner is not masked", row_id)
        return _without_loss(certificate, calls, slot)
    if certificate.kind != _TRAINING:
        raise CertificateError("kind", f"{certificate.kind} is not known", row_id)
    paths = _paths_of(receipt, row_id)
    if receipt.masked or segment >= len(paths):
        raise CertificateError("row_id", "its owner has no such row", row_id)
    _check_path(certificate, calls, paths[segment])
    return CertifiedRow(
        row_id=row_id,
        slot=slot,
        segment=segment,
        segment_count=len(paths),
        call_ids=_names(calls),
        token_count=calls[-1].cum_len,
        owned_lengths=tuple(call.generation_len for call in calls[paths[segment].first_owned :]),
        trains=True,
    )


def _verified_calls(certificate: row_certificate_pb2.RowCertificate) -> list[StagedCall]:
    """Verify the path itself, whoever owns it."""
    row_id = certificate.row_id
    try:
        calls = [staged_call_from_proto(segment.call) for segment in certificate.segments]
    except ColumnError as error:
        raise CertificateError("invalid_snapshot", str(error), row_id) from error
    if not calls:
        raise CertificateError("empty_row", "it has no calls", row_id)
    for call, segment in zip(calls, certificate.segments, strict=True):
        if extras_digest(call.extras) != call.extras_digest:
            raise CertificateError("wrong_extras_digest", call.identity.call_id, row_id)
        if not segment.call.HasField("completion"):
            raise CertificateError("completion", call.identity.call_id, row_id)
        if segment.call.served_response:
            raise CertificateError("served_response", call.identity.call_id, row_id)
    # Owners never fall from root to endpoint, so the endpoint's is the last attempt of the row.
    last = calls[-1].identity
    records = tuple(_record_in(last.capture_key, call) for call in calls)
    try:
        (line,) = verify_paths(
            Receipt(last.capture_key, records, last.call_id), calls, [last.call_id]
        )
    except VerificationError as error:
        raise CertificateError(error.code, str(error), row_id) from error
    if len(line.links) != len(calls):
        raise CertificateError("not_one_path", "calls stand beside the path", row_id)
    return calls


def _record_in(capture_key: str, call: StagedCall) -> CallRecord:
    """Make the row that a call has in an attempt, which it may be restored in."""
    identity = call.identity
    record = CallRecord.of(call, "")
    if identity.capture_key == capture_key:
        return record
    parent_owner = "" if identity.parent_call_id is None else identity.parent_owner
    return replace(record, source_capture_key=identity.capture_key, parent_capture_key=parent_owner)


def _place(
    named: re.Match[str], certificate: row_certificate_pb2.RowCertificate
) -> tuple[int, int]:
    """Give slot and segment of a row that has an owner."""
    row_id = certificate.row_id
    if named["slot"] is None or not certificate.HasField("receipt"):
        raise CertificateError("row_id", "it has no owner", row_id)
    slot, segment = int(named["slot"]), int(named["segment"])
    if row_id != f"{certificate.group_id}_g{slot}_s{segment}":
        raise CertificateError("row_id", "its numbers are not canonical", row_id)
    return slot, segment


def _check_receipt(certificate: row_certificate_pb2.RowCertificate, slot: int) -> None:
    receipt = certificate.receipt
    if receipt_digest(receipt) != receipt.digest:
        raise CertificateError("receipt_digest", "the receipt was changed", certificate.row_id)
    if (receipt.group_id, receipt.slot) != (certificate.group_id, slot):
        raise CertificateError("receipt", "it is another rollout's", certificate.row_id)


def _paths_of(receipt: receipt_pb2.Receipt, row_id: str) -> tuple[SelectedPath, ...]:
    """Give the rows that a receipt makes, and what of each has loss there."""
    chosen = [call.call_id for call in receipt.calls if call.selected]
    if not is_forest(receipt):
        if not chosen or receipt.terminal_call_id != chosen[-1]:
            raise CertificateError("terminal_not_selected", "", row_id)
        return (SelectedPath(tuple(chosen), 0),)
    selection = list(receipt.selected_call_ids)
    if sorted(selection) != sorted(chosen):
        raise CertificateError("selection", "the receipt's calls say another one", row_id)
    parents = {
        call.call_id: call.parent_call_id if call.HasField("parent_call_id") else None
        for call in receipt.calls
    }
    try:
        check_selection(parents, selection, receipt.terminal_call_id)
    except SelectionError as error:
        raise CertificateError(error.reason, str(error), row_id) from error
    return selected_paths(parents, selection)


def _check_path(
    certificate: row_certificate_pb2.RowCertificate,
    calls: Sequence[StagedCall],
    path: SelectedPath,
) -> None:
    """Hold a training row's calls and ownership against what its receipt makes of it."""
    row_id, receipt = certificate.row_id, certificate.receipt
    listed = {call.call_id: call for call in receipt.calls}
    for call in calls:
        identity = call.identity
        entry = listed.get(identity.call_id, receipt_pb2.ReceiptCall())
        if identity.capture_key != (entry.source_capture_key or receipt.capture_key):
            raise CertificateError("wrong_rollout", identity.call_id, row_id)
        if entry.source_capture_key and not is_earlier_attempt(
            entry.source_capture_key, receipt.capture_key
        ):
            raise CertificateError("wrong_source", identity.call_id, row_id)
        if entry.digest != call.digest:
            raise CertificateError("wrong_digest", identity.call_id, row_id)
    if tuple(call.identity.call_id for call in calls) != path.call_ids:
        raise CertificateError("path", "its receipt makes another row", row_id)
    owned = [segment.owns_loss for segment in certificate.segments]
    if owned != [place >= path.first_owned for place in range(len(calls))]:
        raise CertificateError("ownership", "its receipt gives the loss to another row", row_id)
    cut = any(segment.call.completion.finish_reason == "length" for segment in certificate.segments)
    if cut and not receipt.truncated:
        raise CertificateError("truncated", "a generation was cut, the receipt says not", row_id)


def _without_loss(
    certificate: row_certificate_pb2.RowCertificate,
    calls: Sequence[StagedCall],
    slot: int | None,
) -> CertifiedRow:
    if any(segment.owns_loss for segment in certificate.segments):
        raise CertificateError("ownership", "a row without training has loss", certificate.row_id)
    return CertifiedRow(
        certificate.row_id, slot, 0, 1, _names(calls), calls[-1].cum_len, (), trains=False
    )


def _names(calls: Sequence[StagedCall]) -> tuple[tuple[str, str], ...]:
    return tuple((call.identity.capture_key, call.identity.call_id) for call in calls)
