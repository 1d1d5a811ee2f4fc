"""Rows verify from their certificates alone, and nothing that was changed does (SEC-3)."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from callforest.capture.v1 import group_batch_pb2, row_certificate_pb2
from callforest_client.certificates import CertificateError, certify, verify_certificate
from callforest_client.row_export import VerifiedExport, verify_export, write_export
from callforest_core.custody.extras import encode_extras
from callforest_core.forest.receipts import receipt_digest
from tests.unit.finalizer.forests import Grown, batch_of
from tests.unit.finalizer.rollouts import finalized, message, two_turns

Certificate = row_certificate_pb2.RowCertificate


@cache
def group() -> group_batch_pb2.GroupBatch:
    """A fork and a root beside it, a masked rollout, a chain; padded to eight rows."""
    forked, masked, linear = (Grown(f"r{slot}", slot) for slot in range(3))
    forked.chain("a", "b")
    forked.call("c", "a", gen=1)
    forked.call("rejected", "a")
    forked.call("d")
    masked.chain("a")
    linear.chain("x", "y", "z")
    return batch_of(
        [
            (forked, forked.finalized(["a", "b", "c", "d"], scored="b")),
            (masked, masked.finalized(["a"], mask="environment_masked")),
            (linear, linear.finalized(["x", "y", "z"])),
        ],
        row_multiple=4,
    )


def exported(batch: group_batch_pb2.GroupBatch) -> bytes:
    file = io.BytesIO()
    assert write_export(batch, file) == len(batch.rows)
    return file.getvalue()


def verified(raw: bytes) -> VerifiedExport:
    return verify_export(io.BytesIO(raw))


@pytest.mark.requirement("SEC-3", "FOR-3")
def test_every_row_of_a_group_verifies_from_its_own_certificate() -> None:
    batch = group()
    rows = [verify_certificate(certificate) for certificate in certify(batch)]
    assert [(row.row_id, row.trains, row.owned_lengths) for row in rows] == [
        ("g_g0_s0", True, (3, 3)),
        ("g_g0_s1", True, (1,)),
        ("g_g0_s2", True, (3,)),
        ("g_g1_s0", False, ()),
        ("g_g2_s0", True, (3, 3, 3)),
        ("g_pad0", False, ()),
        ("g_pad1", False, ()),
        ("g_pad2", False, ()),
    ]
    proven = verified(exported(batch))
    assert (proven.group_id, proven.rollout_count, proven.rows) == ("g", 3, tuple(rows))


@pytest.mark.requirement("SEC-3")
def test_a_chain_group_verifies_too() -> None:
    calls = two_turns().staged()
    rollout = finalized(0)
    receipt = rollout.receipt
    receipt.capture_key = calls[0].identity.capture_key
    del receipt.calls[:]
    for call in calls:
        receipt.calls.add(call_id=call.identity.call_id, digest=call.digest, selected=True)
    receipt.terminal_call_id = "c2"
    receipt.generated_token_count, receipt.total_token_count = 5, 9
    receipt.digest = receipt_digest(receipt)
    batch = group_batch_pb2.GroupBatch(group_id="g", receipts=[receipt])
    batch.segments.extend(message(call) for call in calls)
    row = batch.rows.add(row_id="g_g0_s0", slot=0, kind=group_batch_pb2.ROW_KIND_TRAINING)
    for place in range(2):
        row.spans.add(segment_index=place, owns_loss=True)
    (proven,) = verified(exported(batch)).rows
    assert proven.owned_lengths == (2, 3)
    del row.spans[1]
    (alone,) = certify(batch)
    with pytest.raises(CertificateError) as caught:
        verify_certificate(alone)
    assert caught.value.fault == "path"


def test_a_dropped_group_has_no_rows_to_export() -> None:
    dropped = group_batch_pb2.GroupBatch(group_id="g", drop_reason="no_valid_layout")
    with pytest.raises(CertificateError, match="no_valid_layout"):
        write_export(dropped, io.BytesIO())


@pytest.mark.requirement("SEC-3")
@pytest.mark.bugcase("B20")
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_flipped_byte_is_refused(data: st.DataObject) -> None:
    raw = bytearray(exported(group()))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CertificateError):
        verified(bytes(raw))


@pytest.mark.requirement("SEC-3")
@pytest.mark.bugcase("B20")
def test_every_byte_of_a_row_counts() -> None:
    """Exhaustive over one row of a small file: each byte flipped once."""
    alone = Grown("r0", 0)
    alone.chain("a")
    raw = exported(batch_of([(alone, alone.finalized(["a"]))]))
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1 << (place % 8)
        with pytest.raises(CertificateError):
            verified(bytes(changed))


def proven(certificate: Certificate) -> Certificate:
    """Leave out what no digest covers: what is for people, how a generation began and ended."""
    left = Certificate()
    left.CopyFrom(certificate)
    left.DiscardUnknownFields()
    for call in left.receipt.calls:
        call.ClearField("reason")
    for segment in left.segments:
        segment.call.ClearField("completion")
        segment.call.ClearField("decision")
    return left


def training_rows() -> list[Certificate]:
    return [one for one in certify(group()) if one.kind == group_batch_pb2.ROW_KIND_TRAINING]


def assert_proven_or_refused(raw: bytes, whole: Certificate) -> None:
    try:
        changed = Certificate.FromString(raw)
        verify_certificate(changed)
    except (CertificateError, DecodeError):
        return
    assert proven(changed) == proven(whole)


@pytest.mark.requirement("SEC-3")
@settings(max_examples=600, deadline=None)
@given(st.data())
def test_no_flipped_byte_of_a_certificate_alone_changes_what_it_proves(data: st.DataObject) -> None:
    """Without the file's checksum: refused, or nothing of a training row is different."""
    whole = data.draw(st.sampled_from(training_rows()))
    raw = bytearray(whole.SerializeToString(deterministic=True))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    assert_proven_or_refused(bytes(raw), whole)


@pytest.mark.requirement("SEC-3")
@pytest.mark.bugcase("B20")
def test_what_is_lost_added_or_moved_is_refused() -> None:
    raw = exported(group())
    for broken in (b"", raw[:-1], raw[: len(raw) // 2], raw + b"\0", raw + raw, raw[1:]):
        with pytest.raises(CertificateError):
            verified(broken)
    batch = group_batch_pb2.GroupBatch()
    batch.CopyFrom(group())
    del batch.rows[-1]
    verified(exported(batch))  # two of padding are as good as three
    for lost in (0, 1, 3):
        batch.CopyFrom(group())
        del batch.rows[lost]
        with pytest.raises(CertificateError) as caught:
            verified(exported(batch))
        assert caught.value.fault in {"segments_missing", "slots_missing"}
    batch.CopyFrom(group())
    first, second = (batch.segments[place].canonical for place in (0, 1))
    assert len(first.token_ids) == len(second.token_ids)
    first.token_ids, second.token_ids = second.token_ids, first.token_ids
    with pytest.raises(CertificateError):
        verified(exported(batch))


Change = Callable[[Certificate], None]


def _token(certificate: Certificate) -> None:
    columns = certificate.segments[0].call.canonical
    ids = np.frombuffer(columns.token_ids, "<u4").copy()
    ids[-1] ^= 1
    columns.token_ids = ids.tobytes()


def _logprob(certificate: Certificate) -> None:
    columns = certificate.segments[0].call.canonical
    columns.logprobs = (np.frombuffer(columns.logprobs, "<f4") - 1).tobytes()


def _parent(certificate: Certificate) -> None:
    certificate.segments[1].call.parent_call_id = "z"


def _extras(certificate: Certificate) -> None:
    certificate.segments[0].call.extras = encode_extras({"sampling": {"temperature": 0.5}})


def _carry(certificate: Certificate) -> None:
    columns = certificate.segments[0].call.canonical
    columns.carry_token_count += 1
    columns.logprobs = columns.logprobs[4:]


def _weights(certificate: Certificate) -> None:
    certificate.segments[0].call.weight_version += 1


def _chain_hash(certificate: Certificate) -> None:
    certificate.segments[1].call.chain_hash = bytes(32)


def _cumulative_hash(certificate: Certificate) -> None:
    certificate.segments[1].call.cumulative_hash = bytes(32)


def _digest(certificate: Certificate) -> None:
    certificate.segments[0].call.digest = bytes(32)


def _reward(certificate: Certificate) -> None:
    certificate.receipt.reward += 1


def _reward_sealed_again(certificate: Certificate) -> None:
    """A receipt that was rewritten with its digest no longer is of these calls' rollout."""
    certificate.receipt.capture_key = "r7"
    certificate.receipt.digest = receipt_digest(certificate.receipt)


def _unmasked(certificate: Certificate) -> None:
    certificate.receipt.masked = True


def _selection(certificate: Certificate) -> None:
    certificate.receipt.selected_call_ids.reverse()


def _selection_sealed_again(certificate: Certificate) -> None:
    del certificate.receipt.selected_call_ids[1:]
    certificate.receipt.digest = receipt_digest(certificate.receipt)


def _parents_sealed_again(certificate: Certificate) -> None:
    certificate.receipt.calls[1].parent_call_id = "c"
    certificate.receipt.digest = receipt_digest(certificate.receipt)


def _ownership(certificate: Certificate) -> None:
    certificate.segments[0].owns_loss = not certificate.segments[0].owns_loss


def _other_row(certificate: Certificate) -> None:
    certificate.row_id = "g_g0_s1"


def _row_beyond(certificate: Certificate) -> None:
    certificate.row_id = "g_g0_s9"


def _odd_name(certificate: Certificate) -> None:
    certificate.row_id = "g_g0_s00"


def _other_group(certificate: Certificate) -> None:
    certificate.group_id = "h"


def _no_receipt(certificate: Certificate) -> None:
    certificate.ClearField("receipt")


def _padding(certificate: Certificate) -> None:
    certificate.kind = group_batch_pb2.ROW_KIND_PADDING


def _placeholder(certificate: Certificate) -> None:
    certificate.kind = group_batch_pb2.ROW_KIND_PLACEHOLDER


def _no_kind(certificate: Certificate) -> None:
    certificate.kind = group_batch_pb2.ROW_KIND_UNSPECIFIED


def _no_calls(certificate: Certificate) -> None:
    del certificate.segments[:]


def _without_its_end(certificate: Certificate) -> None:
    del certificate.segments[1]


def _response(certificate: Certificate) -> None:
    certificate.segments[0].call.served_response = b"{}"


def _cut(certificate: Certificate) -> None:
    certificate.segments[0].call.completion.finish_reason = "length"


def _columns(certificate: Certificate) -> None:
    certificate.segments[0].call.canonical.carry_token_count += 1


CHANGES: dict[Change, str] = {
    _token: "corrupt_digest",
    _logprob: "corrupt_digest",
    _parent: "corrupt_digest",
    _extras: "wrong_extras_digest",
    _carry: "corrupt_digest",
    _weights: "corrupt_digest",
    _chain_hash: "corrupt_digest",
    _cumulative_hash: "corrupt_digest",
    _digest: "corrupt_digest",
    _reward: "receipt_digest",
    _reward_sealed_again: "wrong_rollout",
    _unmasked: "receipt_digest",
    _selection: "receipt_digest",
    _selection_sealed_again: "selection",
    _parents_sealed_again: "path",
    _ownership: "ownership",
    _other_row: "path",
    _row_beyond: "row_id",
    _odd_name: "row_id",
    _other_group: "row_id",
    _no_receipt: "row_id",
    _padding: "padding",
    _placeholder: "placeholder",
    _no_kind: "kind",
    _no_calls: "empty_row",
    _without_its_end: "path",
    _response: "served_response",
    _cut: "truncated",
    _columns: "invalid_snapshot",
}


@pytest.mark.requirement("SEC-3")
@pytest.mark.bugcase("B20")
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__.strip("_"))
def test_what_a_certificate_says_is_held_against_itself(change: Change) -> None:
    """Without any checksum: the digests and the receipt alone refuse what was changed."""
    certificate = next(certify(group()))
    verify_certificate(certificate)
    change(certificate)
    with pytest.raises(CertificateError) as caught:
        verify_certificate(certificate)
    assert caught.value.fault == CHANGES[change]


@pytest.mark.requirement("SEC-3")
def test_a_second_row_may_not_take_the_ancestor_s_loss() -> None:
    second = list(certify(group()))[1]
    assert [segment.owns_loss for segment in second.segments] == [False, True]
    second.segments[0].owns_loss = True
    with pytest.raises(CertificateError) as caught:
        verify_certificate(second)
    assert caught.value.fault == "ownership"


@pytest.mark.requirement("SEC-3")
def test_counts_of_a_chain_receipt_are_held_against_its_rows() -> None:
    batch = group_batch_pb2.GroupBatch()
    batch.CopyFrom(group())
    batch.receipts[2].generated_token_count += 1
    batch.receipts[2].digest = receipt_digest(batch.receipts[2])
    with pytest.raises(CertificateError) as caught:
        verified(exported(batch))
    assert caught.value.fault == "counts"
