"""Every bit of a training row's certificate: what the row proves cannot be changed unnoticed."""

import pytest

from callforest_client.certificates import CertificateError, verify_certificate
from tests.unit.client.test_certificates import assert_proven_or_refused, training_rows


@pytest.mark.requirement("SEC-3")
def test_no_flipped_bit_of_a_training_row_changes_what_it_proves() -> None:
    """Every bit of one row, without the file's checksum."""
    whole = training_rows()[0]
    raw = bytearray(whole.SerializeToString(deterministic=True))
    for place in range(8 * len(raw)):
        raw[place // 8] ^= 1 << place % 8
        assert_proven_or_refused(bytes(raw), whole)
        raw[place // 8] ^= 1 << place % 8


@pytest.mark.requirement("SEC-3")
def test_a_call_without_its_completion_is_refused() -> None:
    """A changed tag makes another field of it, which nothing covers."""
    certificate = training_rows()[0]
    certificate.segments[-1].call.ClearField("completion")
    with pytest.raises(CertificateError) as caught:
        verify_certificate(certificate)
    assert caught.value.fault == "completion"
