"""Chain-mode records of version 2 come through the Gym adapters, whole, to a verified row."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from callforest_core.custody.call import StagedCall
from callforest_core.custody.digests import FORMAT_VERSIONS
from callforest_core.custody.exact_call import ExactCall
from callforest_core.custody.verification import VerificationError, verify_and_linearize
from callforest_mesh.conformance.json_case import same
from callforest_mesh.conformance.peer_fields import PeerParseError
from callforest_mesh.conformance.peer_json import (
    parse_receipt,
    parse_record,
    parse_staged_record,
    row_json,
)

pytestmark = pytest.mark.requirement("LED-10")

DATA = Path(__file__).parent / "data"
ROLLOUT: dict[str, Any] = json.loads((DATA / "gym-0.7.0-vectors.json").read_text("utf-8"))[
    "end_to_end"
]


def staged() -> list[tuple[ExactCall, bytes]]:
    return [parse_staged_record(record) for record in ROLLOUT["staged_records"]]


def canonical(call: ExactCall, extras: bytes) -> StagedCall:
    """Give a peer's call in the form that this mesh stages: 32-bit ids, carry then generation."""
    carry_len = int(np.count_nonzero(call.token_mask == 0.0))
    assert not call.token_mask[:carry_len].any()
    return StagedCall(
        call.identity,
        call.prev_len,
        carry_len,
        call.weight_version,
        call.token_ids.astype(np.uint32),
        call.logprobs[carry_len:].astype(np.float32),
        extras,
        call.digest,
        call.extras_digest,
        call.chain_hash,
        call.cumulative_hash,
        call.versions,
    )


def test_the_versions_are_those_of_the_peer() -> None:
    assert tuple(FORMAT_VERSIONS) == (2, 2, 1)
    assert ROLLOUT["receipt"].get("schema_version", 2) == 2


def test_exact_columns_become_the_peer_s_own_row() -> None:
    receipt = parse_receipt(ROLLOUT["receipt"])
    row = verify_and_linearize(receipt, [call for call, _ in staged()])
    assert same(row_json(row), ROLLOUT["linearized_row"])
    manifest = tuple(parse_record(record) for record in ROLLOUT["manifest"]["records"])
    assert [record.digest for record in manifest] == [one.digest for one in receipt.manifest]


def test_canonical_columns_become_the_same_row() -> None:
    receipt = parse_receipt(ROLLOUT["receipt"])
    calls = [canonical(call, extras) for call, extras in staged()]
    row = verify_and_linearize(receipt, calls)
    exact = verify_and_linearize(receipt, [call for call, _ in staged()])
    assert row.call_ids == exact.call_ids
    assert row.token_ids.tolist() == exact.token_ids.tolist()
    assert row.token_mask.tolist() == exact.token_mask.tolist()
    np.testing.assert_array_equal(row.logprobs, np.float32(exact.logprobs))


def test_ids_that_only_the_exact_form_carries_are_verified_too() -> None:
    (call, _), *rest = staged()
    wide = replace(call, token_ids=call.token_ids + np.uint64(2**40))
    receipt = parse_receipt(ROLLOUT["receipt"])
    with pytest.raises(VerificationError) as refused:
        verify_and_linearize(receipt, [wide, *(one for one, _ in rest)])
    assert refused.value.code == "corrupt_digest"
    honest = replace(wide, digest=wide.recompute_digest())
    first = replace(receipt.manifest[0], digest=honest.digest)
    told = replace(receipt, manifest=(first, *receipt.manifest[1:]))
    with pytest.raises(VerificationError) as refused:
        verify_and_linearize(told, [honest, *(one for one, _ in rest)])
    assert refused.value.code == "chain_hash_mismatch"


@pytest.mark.parametrize("name", ["schema_version", "digest_version", "extras_digest_version"])
def test_records_of_another_version_are_refused(name: str) -> None:
    for record in (ROLLOUT["receipt"], ROLLOUT["staged_records"][0]):
        parse = parse_receipt if record is ROLLOUT["receipt"] else parse_staged_record
        with pytest.raises(PeerParseError):
            parse({**record, name: 3})
