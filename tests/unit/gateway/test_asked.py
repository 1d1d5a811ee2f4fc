"""What a harness asks, and by what its repeats are known."""

import hashlib

import pytest

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway.asked import Identity, call_id_of, digest_body, identify
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.refusals import HttpRefusal


@pytest.mark.requirement("CAP-13")
def test_a_call_is_named_by_its_attempt_and_key_alone() -> None:
    named = b"callforest-call-id-v1" + bytes(7) + b"\1k" + bytes(7) + b"\3key"
    expected = "k" + hashlib.sha256(named).hexdigest()[:40]
    assert call_id_of("k", "key") == expected == identify("k", ["key"], "1").call_id
    assert len({call_id_of(*pair) for pair in (("k", "a"), ("ka", ""), ("j", "a"))}) == 3
    assert not identify("k", ["key"], "1").is_marked
    assert identify("k", ["!" * 255]).call_id
    for keys in ([""], ["a b"], ["\x7f"], ["é"], ["a" * 256], ["a", "a"]):
        with pytest.raises(HttpRefusal) as caught:
            identify("k", keys)
        assert (caught.value.status, caught.value.parameter) == (400, "Idempotency-Key")


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize(
    ("count", "marked"), [("1", True), ("02", True), ("0", False), ("", False), ("-1", False)]
)
def test_what_its_client_counts_marks_a_repeat(count: str, marked: bool) -> None:
    assert identify("k", [], count) == Identity(is_marked=marked)


@pytest.mark.requirement("CAP-13")
def test_the_body_digest_is_of_api_claim_and_body() -> None:
    digests = {
        digest_body(body, dialect, claim)
        for body in (b"{}", b"{ }")
        for dialect in Dialect
        for claim in (
            None,
            Claim("a", history_is_whole=False),
            Claim("a", history_is_whole=True),
            Claim("b", history_is_whole=True),
        )
    }
    assert len(digests) == 16
