"""The `verify` suite: receipts with staged calls, and the row or the refusal they lead to."""

from __future__ import annotations

from callforest_core.custody.verification import VerificationError, verify_and_linearize
from callforest_mesh.conformance.json_case import Case, CaseError, Json, member
from callforest_mesh.conformance.peer_fields import PeerParseError
from callforest_mesh.conformance.peer_json import parse_receipt, parse_snapshot, row_json


def answer(case: Case) -> Json:
    """Parse, verify and linearize; name the outcome."""
    given, snapshots = member(case, "receipt"), member(case, "snapshots")
    if not isinstance(snapshots, list):
        raise CaseError("snapshots are a list")
    try:
        receipt = parse_receipt(given)
        calls = [parse_snapshot(snapshot) for snapshot in snapshots]
    except PeerParseError:
        return {"expect": "parse_reject"}
    try:
        row = verify_and_linearize(receipt, calls)
    except VerificationError as error:
        return {"expect": "error", "code": error.code}
    return {"expect": "row", "row": row_json(row)}
