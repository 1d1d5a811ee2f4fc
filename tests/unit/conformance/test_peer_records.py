"""Parsing of peers' records: as strict, and as lenient, as their own constructors."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from callforest_mesh.conformance.peer_fields import PeerParseError
from callforest_mesh.conformance.peer_json import (
    parse_receipt,
    parse_record,
    parse_snapshot,
    parse_staged_record,
)

VECTORS = Path(__file__).parents[2] / "golden" / "data" / "gym-0.7.0-vectors.json"
ROLLOUT = json.loads(VECTORS.read_text(encoding="utf-8"))["end_to_end"]


def changed(record: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with fields replaced, or left out where the change is Ellipsis."""
    merged = copy.deepcopy(record) | changes
    return {name: value for name, value in merged.items() if value is not ...}


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": ...},
        {"schema_version": 2.0, "extras_digest_version": True},
        {"admitted_at": 5},
        {"admitted_at": ..., "fingerprint_version": ...},
        {"weight_version": 2**64},
    ],
)
def test_records_that_peers_construct(changes: dict[str, Any]) -> None:
    parse_record(changed(ROLLOUT["manifest"]["records"][0], changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": "2"},
        {"schema_version": 3},
        {"schema_version": True},
        {"schema_version": None},
        {"extras_digest_version": 1.5},
        {"mode": ...},
        {"mode": "x"},
        {"mode": "token_in"},
        {"model_call_id": ""},
        {"model_call_id": 1},
        {"model_call_id": "\ud800"},
        {"response_id": ...},
        {"staging_key": ""},
        {"prev_len": 1},
        {"prev_len": -1},
        {"prev_len": False},
        {"delta_len": 5.0},
        {"delta_len": 0, "cum_len": 0},
        {"cum_len": 6},
        {"digest": "A" * 64},
        {"digest": "a" * 63},
        {"digest": "a" * 64 + "\n"},
        {"output_fingerprint": ""},
        {"admitted_at": "5"},
        {"admitted_at": True},
        {"admitted_at": 10**400},
        {"unknown": None},
    ],
)
def test_records_that_peers_refuse(changes: dict[str, Any]) -> None:
    with pytest.raises(PeerParseError):
        parse_record(changed(ROLLOUT["manifest"]["records"][0], changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"extras": {}},
        {"extras": []},
        {"extras": {"a": 2**63}},
        {"digest": "0" * 64},
        {"token_ids_delta": None},
        {"token_mask_delta": [True, 0.0, 0.0, 1.0, 1.0]},
        {"generation_log_probs_delta": "text"},
    ],
)
def test_staged_records_that_peers_refuse(changes: dict[str, Any]) -> None:
    parse_staged_record(ROLLOUT["staged_records"][0])
    with pytest.raises(PeerParseError):
        parse_staged_record(changed(ROLLOUT["staged_records"][0], changes))


@pytest.mark.parametrize("value", [-1, 2**64, 1.0, True, "1"])
def test_token_ids_are_exact_unsigned_integers(value: Any) -> None:
    record = changed(ROLLOUT["staged_records"][0], {"extras": ...})
    parse_snapshot(record)
    record["token_ids_delta"][0] = value
    with pytest.raises(PeerParseError):
        parse_snapshot(record)


@pytest.mark.parametrize(
    ("reward", "parsed"),
    [(1, 1.0), (True, 1.0), (" 1_0.5 ", 10.5), ("1e3", 1000.0), (".5", 0.5), (None, None)],
)
def test_a_reward_is_read_leniently(reward: Any, parsed: float | None) -> None:
    assert parse_receipt(changed(ROLLOUT["receipt"], {"reward": reward})).reward == parsed


@pytest.mark.parametrize("word", [True, 1, 1.0, "yes", "ON", "t"])
def test_a_flag_is_read_leniently(word: Any) -> None:
    assert parse_receipt(changed(ROLLOUT["receipt"], {"capture_poisoned": word})).capture_poisoned


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": "nan"},
        {"reward": "1__0"},
        {"reward": "0x1"},
        {"reward": "\u0661"},
        {"reward": []},
        {"capture_poisoned": 2},
        {"capture_poisoned": " true"},
        {"capture_poisoned": None},
        {"terminal_model_call_id": None},
        {"terminal_model_call_id": "gone"},
        {"terminal_selection": None},
        {"terminal_selection": "explicit"},
        {"failure_reason": "x"},
        {"capture_poisoned": True, "terminal_selection": None},
        {"capture_poisoned": True, "terminal_selection": None, "terminal_model_call_id": None},
        {"manifest": {}},
        {"manifest": ROLLOUT["receipt"]["manifest"] * 2},
        {"unknown": 1},
    ],
)
def test_receipts_that_peers_refuse(changes: dict[str, Any]) -> None:
    with pytest.raises(PeerParseError):
        parse_receipt(changed(ROLLOUT["receipt"], changes))


def test_a_poisoned_receipt_may_have_no_attribution() -> None:
    parsed = parse_receipt(
        changed(
            ROLLOUT["receipt"],
            {
                "capture_poisoned": True,
                "failure_reason": "x",
                "terminal_selection": None,
                "terminal_model_call_id": None,
            },
        )
    )
    assert parsed.terminal_call_id is None
