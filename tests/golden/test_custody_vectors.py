"""Digests, records and verification against the peer's golden vectors and recorded answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from callforest_core.custody.digests import (
    CallHeader,
    DigestInputError,
    FormatVersions,
    chain_hash,
    cumulative_hash,
    exact_call_digest,
)
from callforest_core.custody.extras import decode_extras, encode_extras, extras_digest
from callforest_core.custody.routes import classify_route_span
from callforest_core.custody.verification import (
    PathError,
    VerificationError,
    verify_and_linearize,
    verify_paths,
)
from callforest_mesh.conformance.json_case import same
from callforest_mesh.conformance.peer_fields import PeerParseError
from callforest_mesh.conformance.peer_json import (
    claimed_receipt,
    claimed_snapshot,
    parse_receipt,
    parse_record,
    parse_staged_record,
    row_json,
)

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "gym-0.7.0-golden.json").read_text(encoding="utf-8"))
VECTORS = json.loads((DATA / "gym-0.7.0-vectors.json").read_text(encoding="utf-8"))


def named(section: str) -> Any:
    return pytest.mark.parametrize("vector", VECTORS[section], ids=lambda vector: vector["name"])


def wide(values: list[int]) -> np.ndarray:
    return np.array(values, np.uint64)


def digest_of(fields: dict[str, Any]) -> str:
    header = CallHeader(
        FormatVersions(
            fields["schema_version"], fields["digest_version"], fields["extras_digest_version"]
        ),
        fields["rollout_id"],
        fields["model_call_id"],
        fields["parent_call_id"],
        *(fields[name] for name in ("mode", "prev_len", "delta_len", "cum_len", "weight_version")),
    )
    return exact_call_digest(
        header,
        wide(fields["token_ids_delta"]),
        np.array(fields["token_mask_delta"], np.float64),
        np.array(fields["generation_log_probs_delta"], np.float64),
        (
            bytes.fromhex(fields["extras_digest"]),
            bytes.fromhex(fields["chain_hash"]),
            bytes.fromhex(fields["cumulative_hash"]),
        ),
    ).hex()


def test_the_peer_s_own_golden_vectors() -> None:
    assert extras_digest(encode_extras(GOLDEN["extras"])).hex() == GOLDEN["extras_digest"]
    assert digest_of(GOLDEN["staged_call"]) == GOLDEN["staged_call_digest"]


@pytest.mark.parametrize("vector", VECTORS["tokens"])
def test_cumulative_hashes(vector: dict[str, Any]) -> None:
    assert cumulative_hash(wide(vector["token_ids"])).hex() == vector["cumulative_hash"]


@pytest.mark.parametrize("vector", VECTORS["chain_hash"])
def test_chain_hashes(vector: dict[str, Any]) -> None:
    parent = None if vector["parent"] is None else bytes.fromhex(vector["parent"])
    assert chain_hash(parent, wide(vector["delta"])).hex() == vector["expect"]


@pytest.mark.parametrize("vector", VECTORS["extras"])
def test_extras(vector: dict[str, Any]) -> None:
    encoded = encode_extras(vector["extras"])
    assert "01" + encoded.hex() == vector["payload_hex"]
    assert extras_digest(encoded).hex() == vector["expect"]
    assert same(decode_extras(encoded), vector["extras"])


@named("staging")
def test_call_digests(vector: dict[str, Any]) -> None:
    assert digest_of(vector["fields"]) == vector["expect"]


@named("staging_reject")
def test_calls_without_a_digest(vector: dict[str, Any]) -> None:
    with pytest.raises((PeerParseError, DigestInputError)):
        claimed_snapshot(vector["fields"] | {"digest": "0" * 64}).recompute_digest()


@pytest.mark.parametrize("vector", VECTORS["route_span"])
def test_route_spans(vector: dict[str, Any]) -> None:
    span = classify_route_span(
        vector["carry_len"], vector["generation_len"], vector["staged_route_len"]
    )
    assert span == vector["expect"]


@pytest.mark.requirement("FOR-4")
def test_one_rollout_end_to_end() -> None:
    rollout = VECTORS["end_to_end"]
    staged = [parse_staged_record(record) for record in rollout["staged_records"]]
    for call, extras in staged:
        assert extras_digest(extras) == call.extras_digest
    for record in rollout["manifest"]["records"]:
        parse_record(record)
    receipt = parse_receipt(rollout["receipt"])
    calls = [call for call, _ in staged]
    row = verify_and_linearize(receipt, calls)
    assert same(row_json(row), rollout["linearized_row"])
    assert receipt.terminal_call_id is not None
    (only,) = verify_paths(receipt, calls, [receipt.terminal_call_id])
    assert row_json(only) == row_json(row)


@pytest.mark.requirement("FOR-4")
@named("verify_cases")
def test_verification(vector: dict[str, Any]) -> None:
    receipt = claimed_receipt(vector["receipt"])
    calls = [claimed_snapshot(snapshot) for snapshot in vector["snapshots"]]
    if vector["expect"] == "row":
        row = verify_and_linearize(receipt, calls)
        assert list(row.call_ids) == vector["model_call_ids"]
        return
    with pytest.raises(VerificationError) as refused:
        verify_and_linearize(receipt, calls)
    assert refused.value.code == vector["code"]
    assert isinstance(refused.value, PathError) == vector["rebuild_error"]
