"""Rows of restored calls verify from their certificates, and owners cannot be forged (ADM-9)."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from callforest.capture.v1 import group_batch_pb2, row_certificate_pb2
from callforest_client.certificates import CertificateError, certify, verify_certificate
from callforest_client.row_export import verify_export, write_export
from callforest_core.forest.receipts import receipt_digest
from callforest_mesh.trainer.core import AdvantageOptions
from callforest_mesh.trainer.rows import GroupDefectError, gather_step
from tests.unit.finalizer.forests import Grown, batch_of

pytestmark = pytest.mark.requirement("ADM-9", "SEC-3", "TRN-12")

FIRST, SECOND, THIRD = "r0", "r0-a1", "r0-a2"
Certificate = row_certificate_pb2.RowCertificate
Group = group_batch_pb2.GroupBatch


def group() -> Group:
    """A fork over three attempts, a masked rollout that borrows its layout, padding."""
    restored, masked = Grown(FIRST, 0), Grown("r1", 1)
    restored.chain("a", "b")
    restored.goes_on_in(SECOND)
    restored.call("c", "b")
    restored.goes_on_in(THIRD)
    restored.chain("d", "e", parent="c")
    restored.call("f", "b", gen=2)
    masked.chain("a")
    accepted = ["a", "b", "c", "d", "e", "f"]
    return batch_of(
        [
            (restored, restored.finalized(accepted, scored="e")),
            (masked, masked.finalized(["a"], mask="environment_masked")),
        ],
        row_multiple=4,
    )


def test_rows_of_several_owners_verify_and_train() -> None:
    batch = group()
    rows = [verify_certificate(one) for one in certify(batch)]
    first = ((FIRST, "a"), (FIRST, "b"), (SECOND, "c"), (THIRD, "d"), (THIRD, "e"))
    second = ((FIRST, "a"), (FIRST, "b"), (THIRD, "f"))
    assert [row.call_ids for row in rows] == [first, second, first, first]
    assert [row.owned_lengths for row in rows] == [(3, 3, 3, 3, 3), (2,), (), ()]
    file = io.BytesIO()
    write_export(batch, file)
    file.seek(0)
    assert verify_export(file).rollout_count == 2
    step = gather_step([batch], AdvantageOptions())
    assert [int(row.loss_mask.sum()) for row in step.rows] == [15, 2, 0, 0]


def _sealed(change: Callable[[Certificate], None]) -> Callable[[Certificate], None]:
    """Make a change of a receipt, and its digest anew, as a forger would."""

    def changed(certificate: Certificate) -> None:
        change(certificate)
        certificate.receipt.digest = receipt_digest(certificate.receipt)

    return changed


def _source(place: int, owner: str) -> Callable[[Certificate], None]:
    def change(certificate: Certificate) -> None:
        certificate.receipt.calls[place].source_capture_key = owner

    return change


def _parents_owner(place: int, owner: str) -> Callable[[Certificate], None]:
    def change(certificate: Certificate) -> None:
        certificate.segments[place].call.parent_capture_key = owner

    return change


def _attempt(owner: str) -> Callable[[Certificate], None]:
    def change(certificate: Certificate) -> None:
        certificate.receipt.capture_key = owner

    return change


CHANGES: dict[str, tuple[Callable[[Certificate], None], str]] = {
    "an owner": (_source(0, SECOND), "receipt_digest"),
    "an owner, sealed": (_sealed(_source(0, SECOND)), "wrong_rollout"),
    "no owner, sealed": (_sealed(_source(0, "")), "wrong_rollout"),
    "an owner that made nothing, sealed": (_sealed(_source(3, SECOND)), "wrong_rollout"),
    "an earlier attempt of the receipt, sealed": (_sealed(_attempt(SECOND)), "wrong_source"),
    "the parent's owner dropped": (_parents_owner(2, ""), "wrong_source"),
    "the parent's owner another": (_parents_owner(3, FIRST), "wrong_source"),
    "the parent's owner of another rollout": (_parents_owner(2, "r1"), "wrong_source"),
    "a root with a parent's owner": (_parents_owner(0, FIRST), "wrong_source"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_owner_can_be_forged(name: str) -> None:
    change, fault = CHANGES[name]
    certificate = next(certify(group()))
    verify_certificate(certificate)
    change(certificate)
    with pytest.raises(CertificateError) as caught:
        verify_certificate(certificate)
    assert caught.value.fault == fault


def test_an_owner_of_another_rollout_is_refused_though_it_made_the_call() -> None:
    """The calls are whole and say so; the receipt is of a rollout that they are not of."""
    certificate = next(certify(group()))
    certificate.receipt.capture_key = "r9-a2"
    certificate.receipt.calls[3].source_capture_key = THIRD
    certificate.receipt.calls[4].source_capture_key = THIRD
    certificate.receipt.digest = receipt_digest(certificate.receipt)
    with pytest.raises(CertificateError) as caught:
        verify_certificate(certificate)
    assert caught.value.fault == "wrong_source"


def _group_source(batch: Group) -> None:
    batch.receipts[0].calls[0].source_capture_key = SECOND


def _group_attempt(batch: Group) -> None:
    batch.receipts[0].capture_key = "r9-a2"
    for call in batch.receipts[0].calls:
        call.source_capture_key = call.source_capture_key or THIRD


def _group_parent(batch: Group) -> None:
    batch.segments[2].parent_capture_key = ""


def _group_root(batch: Group) -> None:
    batch.segments[0].parent_capture_key = FIRST


def _group_falls(batch: Group) -> None:
    """The child of a later attempt's call says that it is an earlier one's."""
    batch.segments[3].capture_key = FIRST
    batch.receipts[0].calls[3].source_capture_key = FIRST


@pytest.mark.parametrize(
    "damage", [_group_source, _group_attempt, _group_parent, _group_root, _group_falls]
)
def test_the_trainer_refuses_owners_that_do_not_fit(damage: Callable[[Group], None]) -> None:
    batch = group()
    gather_step([batch], AdvantageOptions())
    damage(batch)
    with pytest.raises(GroupDefectError):
        gather_step([batch], AdvantageOptions())
