"""Fingerprints, chain verdicts and terminals against what the peer package answered."""

import json
from pathlib import Path

import pytest

from callforest_core.lineage.canonical_json import CanonicalJsonError, canonical_arguments
from callforest_core.lineage.chain import ChainView, ContextWitness
from callforest_core.lineage.fingerprint import (
    FINGERPRINT_VERSION,
    ConversationScan,
    assistant_fingerprint,
    conversation_digest,
)
from callforest_core.lineage.terminal import resolve_terminal, select_terminal_call
from callforest_mesh.conformance.json_case import read_case
from callforest_mesh.conformance.peer_json import parse_record
from callforest_mesh.conformance.suites import suite_named

DATA = Path(__file__).parent / "data"
VECTORS = json.loads((DATA / "gym-0.7.0-vectors.json").read_text(encoding="utf-8"))


def case_lines(suite: str) -> list[str]:
    return (DATA / "cases" / f"{suite}.jsonl").read_text(encoding="utf-8").splitlines()


SUITE_CASES = [
    pytest.param(name, line, id=f"{name} {read_case(line)['id']}")
    for name in ("fingerprint", "lineage", "terminal")
    for line in case_lines(name)
]


@pytest.mark.requirement("ADM-1", "LED-1", "LED-2", "SEL-1")
@pytest.mark.parametrize(("name", "line"), SUITE_CASES)
def test_a_case_is_answered_as_the_peer_answered_it(name: str, line: str) -> None:
    suite = suite_named(name)
    case = read_case(line)
    answered = suite.answer(case)
    assert suite.agrees(case, answered), answered


def test_the_fingerprint_version_is_the_peers() -> None:
    assert VECTORS["fingerprint_version"] == FINGERPRINT_VERSION


@pytest.mark.parametrize("vector", VECTORS["fingerprints"], ids=lambda vector: vector["name"])
def test_fingerprint_vectors(vector: dict[str, object]) -> None:
    items = vector["items"]
    assert assistant_fingerprint(items).hex() == vector["assistant_fingerprint"]
    assert conversation_digest(items).hex() == vector["conversation_digest"]
    scan = ConversationScan(items)
    assert scan.assistant_fingerprint.hex() == vector["assistant_fingerprint"]
    assert scan.context_digest.hex() == vector["conversation_digest"]


@pytest.mark.parametrize("vector", VECTORS["canonical_arguments"], ids=lambda v: str(v["value"]))
def test_argument_vectors(vector: dict[str, object]) -> None:
    if vector.get("expect_error"):
        with pytest.raises(CanonicalJsonError):
            canonical_arguments(vector["value"])
    else:
        assert canonical_arguments(vector["value"]) == vector["expect"]


@pytest.mark.requirement("SEL-1")
@pytest.mark.parametrize("vector", VECTORS["select_terminal"], ids=lambda vector: vector["name"])
def test_selection_vectors(vector: dict[str, object]) -> None:
    selection = select_terminal_call([parse_record(record) for record in vector["records"]])
    assert vector["expect"] == {
        "terminal_model_call_id": selection.call_id,
        "reason": selection.reason,
    }


@pytest.mark.requirement("SEL-1")
@pytest.mark.parametrize("vector", VECTORS["resolve_terminal"], ids=lambda vector: vector["name"])
def test_attribution_vectors(vector: dict[str, object]) -> None:
    attribution = resolve_terminal(
        [parse_record(record) for record in vector["records"]],
        vector["response"],
        vector.get("declared_response_id"),
        vector.get("explicit_call_id"),
    )
    assert vector["expect"] == {
        "model_call_id": attribution.call_id,
        "method": attribution.method or "",
        "reason": attribution.reason,
    }


@pytest.mark.requirement("ADM-1", "LED-2")
def test_the_end_to_end_ledger_is_rebuilt_row_by_row() -> None:
    rollout = VECTORS["end_to_end"]
    records = {row["model_call_id"]: parse_record(row) for row in rollout["manifest"]["records"]}
    view = ChainView()
    for row in rollout["ledger_rows"]:
        digest = bytes.fromhex(row["context_digest"])
        witness = ContextWitness(bytes.fromhex(row["fingerprint"]), row["context_len"], digest)
        view.append_record(records[row["model_call_id"]], witness)
    for row in rollout["ledger_rows"]:
        assert view.staging_chain(row["model_call_id"]) == tuple(row["staging_chain"])
    manifest = view.manifest()
    assert [record.call_id for record in manifest.records] == list(records)
    terminal = select_terminal_call(manifest.records)
    assert terminal.call_id == rollout["select_terminal"]["terminal_model_call_id"]
    assert terminal.reason == rollout["select_terminal"]["reason"]
