"""Export files: the rows of a group with their certificates, and their check without any service.

A file is length-delimited ExportedItem messages: first the header, then every row of the group in
its order. The length is a base 128 varint, as protobuf writes it. Contract: docs/protocol.md,
section "Certificates".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from google.protobuf.message import DecodeError

from callforest.capture.v1 import group_batch_pb2, receipt_pb2, row_certificate_pb2
from callforest_client.certificates import (
    CertificateError,
    CertifiedRow,
    certify,
    verify_certificate,
)

FORMAT: Final = "callforest-rows-v1"
ITEM_BYTES_MAX: Final = (2 << 30) - 1
"""Largest item: a message of protobuf has no more."""
_ENVELOPE_BYTES: Final = 1 << 20
"""Room for what stands around a row's calls and receipt: names, the checksum."""
_READ_BYTES: Final = 1 << 20
_VARINT_BYTES: Final = 5
_CONTINUES: Final = 0x80


@dataclass(frozen=True, slots=True)
class VerifiedExport:
    """What a valid file proves.

    Attributes:
        group_id: the group.
        rollout_count: its logical rollouts.
        rows: in file order.
    """

    group_id: str
    rollout_count: int
    rows: tuple[CertifiedRow, ...]


def write_export(batch: group_batch_pb2.GroupBatch, file: BinaryIO) -> int:
    """Write every row of a delivered group with its certificate; give the number of rows.

    Raises:
        CertificateError: the group has no rows: it was dropped; or one of them has no room in an
            item.
    """
    if not batch.rows:
        raise CertificateError("no_rows", f"group {batch.group_id}: {batch.drop_reason}")
    _check_sizes(batch)
    header = row_certificate_pb2.ExportHeader(
        format=FORMAT, group_id=batch.group_id, row_ids=[row.row_id for row in batch.rows]
    )
    file.write(_item(header.SerializeToString(deterministic=True)))
    certificates = (one.SerializeToString(deterministic=True) for one in certify(batch))
    file.writelines(map(_item, certificates))
    return len(batch.rows)


def verify_export(file: BinaryIO) -> VerifiedExport:
    """Verify a file: every row from its certificate, and that all of the group are there.

    Raises:
        CertificateError: a byte was changed, lost, added or moved.
    """
    items = _items(file)
    header = _header(next(items, b""))
    checked = _Group(header.group_id)
    for position, payload in enumerate(items):
        try:
            certificate = row_certificate_pb2.RowCertificate.FromString(payload)
        except DecodeError as error:
            raise CertificateError("malformed", f"row {position}: {error}") from error
        if position >= len(header.row_ids) or certificate.row_id != header.row_ids[position]:
            raise CertificateError("row_order", f"row {position} is not the header's")
        checked.take(certificate)
    if len(checked.rows) != len(header.row_ids):
        raise CertificateError("rows_missing", f"{len(checked.rows)} of {len(header.row_ids)}")
    return checked.closed()


class _Group:
    """Holds the rows of one group against each other."""

    def __init__(self, group_id: str) -> None:
        self.rows: list[CertifiedRow] = []
        self._group_id = group_id
        self._owners: dict[int, receipt_pb2.Receipt] = {}
        self._paddings = 0

    def take(self, certificate: row_certificate_pb2.RowCertificate) -> None:
        """Verify one more row."""
        if certificate.group_id != self._group_id:
            raise CertificateError("group", "a row of another group", certificate.row_id)
        row = verify_certificate(certificate)
        if row.slot is None:
            expected = f"{self._group_id}_pad{self._paddings}"
            self._paddings += 1
            if row.row_id != expected:
                raise CertificateError("row_id", f"stands where {expected} does", row.row_id)
        elif self._owners.setdefault(row.slot, certificate.receipt) != certificate.receipt:
            raise CertificateError("receipt", "its owner has two receipts", row.row_id)
        self.rows.append(row)

    def closed(self) -> VerifiedExport:
        """Check that every owner is complete and what its receipt counts, and what was borrowed."""
        if set(self._owners) != set(range(len(self._owners))):
            raise CertificateError("slots_missing", f"there are {sorted(self._owners)}")
        for slot, receipt in self._owners.items():
            self._check_owner(receipt, [row for row in self.rows if row.slot == slot])
        lender = next((row for row in self.rows if row.trains), None)
        for row in self.rows:
            if not row.trains and (lender is None or row.call_ids != lender.call_ids):
                raise CertificateError("layout", "it borrows no valid row's", row.row_id)
        return VerifiedExport(self._group_id, len(self._owners), tuple(self.rows))

    def _check_owner(self, receipt: receipt_pb2.Receipt, rows: list[CertifiedRow]) -> None:
        segments = [row.segment for row in rows]
        if segments != list(range(rows[0].segment_count)):
            raise CertificateError("segments_missing", f"there are {segments}", rows[0].row_id)
        if receipt.masked:
            return
        owned = [length for row in rows for length in row.owned_lengths]
        found = (sum(owned), max(owned), max(row.token_count for row in rows))
        stated = (
            receipt.generated_token_count,
            receipt.longest_generation_token_count or max(owned),
            receipt.total_token_count,
        )
        if found != stated:
            raise CertificateError("counts", f"receipt {stated}, rows {found}", rows[0].row_id)


def _check_sizes(batch: group_batch_pb2.GroupBatch) -> None:
    """Refuse a row that no item holds, before anything is written."""
    calls = [call.ByteSize() for call in batch.segments]
    receipts = [receipt.ByteSize() for receipt in batch.receipts]
    for row in batch.rows:
        size = sum(calls[span.segment_index] for span in row.spans)
        size += receipts[row.slot] if row.HasField("slot") else 0
        if size + _ENVELOPE_BYTES + 16 * len(row.spans) > ITEM_BYTES_MAX:
            raise CertificateError("row_too_large", f"{size} bytes in one item", row.row_id)


def _header(payload: bytes) -> row_certificate_pb2.ExportHeader:
    try:
        header = row_certificate_pb2.ExportHeader.FromString(payload)
    except DecodeError as error:
        raise CertificateError("malformed", f"the header: {error}") from error
    if header.format != FORMAT:
        raise CertificateError("format", f"{header.format!r} is not {FORMAT!r}")
    return header


def _item(payload: bytes) -> bytes:
    item = row_certificate_pb2.ExportedItem(
        payload=payload, sha256=hashlib.sha256(payload).digest()
    ).SerializeToString(deterministic=True)
    return _varint(len(item)) + item


def _items(file: BinaryIO) -> Iterator[bytes]:
    """Give the payloads of a file, each as its checksum says."""
    number = 0
    while (length := _length(file)) is not None:
        raw = _read(file, length)
        try:
            item = row_certificate_pb2.ExportedItem.FromString(raw)
        except DecodeError as error:
            raise CertificateError("malformed", f"item {number}: {error}") from error
        # Written anew it must be the same bytes: nothing unknown rides along.
        if len(raw) != length or item.SerializeToString(deterministic=True) != raw:
            raise CertificateError("malformed", f"item {number} is not as it was written")
        if hashlib.sha256(item.payload).digest() != item.sha256:
            raise CertificateError("checksum", f"item {number} was changed")
        yield item.payload
        number += 1


def _read(file: BinaryIO, length: int) -> bytes:
    """Read an item piece by piece: a false length takes no more memory than the file has."""
    content = bytearray()
    while piece := file.read(min(length - len(content), _READ_BYTES)):
        content += piece
    return bytes(content)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= _CONTINUES:
        encoded.append(value % _CONTINUES + _CONTINUES)
        value //= _CONTINUES
    return bytes([*encoded, value])


def _length(file: BinaryIO) -> int | None:
    """Read the length of the next item; None at the end of the file."""
    read = bytearray()
    while len(read) < _VARINT_BYTES:
        byte = file.read(1)
        if not byte and not read:
            return None
        if not byte:
            break
        read += byte
        if byte[0] < _CONTINUES:
            value = sum((one % _CONTINUES) << (7 * place) for place, one in enumerate(read))
            if value <= ITEM_BYTES_MAX and _varint(value) == bytes(read):
                return value
            break
    raise CertificateError("malformed", "the length of an item cannot be read")
