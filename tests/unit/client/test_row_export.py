"""Export files whose checksums are right and whose rows do not fit each other (SEC-3)."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

import pytest

from callforest.capture.v1 import row_certificate_pb2
from callforest_client import row_export
from callforest_client.certificates import CertificateError, certify
from callforest_core.forest.receipts import receipt_digest
from tests.unit.client.test_certificates import group, verified

Certificate = row_certificate_pb2.RowCertificate


def length_of(item: bytes) -> bytes:
    """A base 128 varint of one or two bytes."""
    high, low = divmod(len(item), 128)
    return bytes([low + 128, high]) if high else bytes([low])


def file_of(*payloads: bytes) -> bytes:
    """An export file of payloads shorter than 16 KiB, with their checksums."""
    items = [
        row_certificate_pb2.ExportedItem(
            payload=payload, sha256=hashlib.sha256(payload).digest()
        ).SerializeToString()
        for payload in payloads
    ]
    return b"".join(length_of(one) + one for one in items)


def forged(change: Callable[[list[Certificate]], None]) -> CertificateError:
    """Why a file with right checksums is refused after a change of its certificates."""
    certificates = list(certify(group()))
    change(certificates)
    header = row_certificate_pb2.ExportHeader(
        format="callforest-rows-v1", group_id="g", row_ids=[one.row_id for one in certificates]
    )
    payloads = [header, *certificates]
    with pytest.raises(CertificateError) as caught:
        verified(file_of(*(one.SerializeToString() for one in payloads)))
    return caught.value


def _two_receipts(certificates: list[Certificate]) -> None:
    certificates[1].receipt.reward += 1
    certificates[1].receipt.digest = receipt_digest(certificates[1].receipt)


def _other_layout(certificates: list[Certificate]) -> None:
    del certificates[5].segments[:]
    certificates[5].segments.extend(certificates[4].segments)
    for segment in certificates[5].segments:
        segment.owns_loss = False


def _padding_gap(certificates: list[Certificate]) -> None:
    certificates[7].row_id = "g_pad3"


def _twice(certificates: list[Certificate]) -> None:
    certificates.insert(1, certificates[0])


def _segments_swapped(certificates: list[Certificate]) -> None:
    certificates[0], certificates[1] = certificates[1], certificates[0]


@pytest.mark.requirement("SEC-3", "FOR-5")
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (_two_receipts, "receipt"),
        (_other_layout, "layout"),
        (_padding_gap, "row_id"),
        (_twice, "segments_missing"),
        (_segments_swapped, "segments_missing"),
    ],
    ids=lambda each: getattr(each, "__name__", "").strip("_"),
)
def test_rows_that_do_not_fit_each_other_are_refused(
    change: Callable[[list[Certificate]], None], fault: str
) -> None:
    assert forged(change).fault == fault


@pytest.mark.requirement("SEC-3")
def test_another_format_and_rows_beyond_the_header_are_refused() -> None:
    (first, *_) = certify(group())
    other = row_certificate_pb2.ExportHeader(format="rows-v9", group_id="g", row_ids=["g_g0_s0"])
    ours = row_certificate_pb2.ExportHeader(format="callforest-rows-v1", group_id="g")
    for header, fault in ((other, "format"), (ours, "row_order")):
        with pytest.raises(CertificateError) as caught:
            verified(file_of(header.SerializeToString(), first.SerializeToString()))
        assert caught.value.fault == fault


@pytest.mark.requirement("SEC-3")
def test_a_row_that_no_item_holds_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = max(one.ByteSize() for one in certify(group()))
    monkeypatch.setattr(row_export, "_ENVELOPE_BYTES", 0)
    monkeypatch.setattr(row_export, "ITEM_BYTES_MAX", largest // 2)
    file = io.BytesIO()
    with pytest.raises(CertificateError, match="row_too_large") as caught:
        row_export.write_export(group(), file)
    assert caught.value.row_id in [row.row_id for row in group().rows]
    assert file.getvalue() == b""


def test_a_length_beyond_the_file_is_refused_without_the_memory_for_it() -> None:
    with pytest.raises(CertificateError, match="malformed"):
        verified(b"\xff\xff\xff\xff\x07" + b"x" * 64)
    with pytest.raises(CertificateError, match="length"):
        verified(b"\xff\xff\xff\xff\x08")
