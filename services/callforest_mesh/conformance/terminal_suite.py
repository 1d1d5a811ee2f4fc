"""The `terminal` suite: which call the witnesses name, and which one the parent links do."""

from __future__ import annotations

from callforest_core.lineage.terminal import resolve_terminal, select_terminal_call
from callforest_mesh.conformance.json_case import Case, Json, member
from callforest_mesh.conformance.peer_fields import elements, nullable, text
from callforest_mesh.conformance.peer_json import parse_record


def answer(case: Case) -> Json:
    """Write the attribution and the selection, each with its trail."""
    records = [parse_record(record) for record in elements(member(case, "records"))]
    attribution = resolve_terminal(
        records,
        case.get("response"),
        nullable(text)(case.get("declared_response_id")),
        nullable(text)(case.get("explicit_call_id")),
    )
    selection = select_terminal_call(records)
    return {
        "resolve": {
            "model_call_id": attribution.call_id,
            "method": "" if attribution.method is None else attribution.method.value,
            "reason": attribution.reason,
        },
        "select": {
            "terminal_model_call_id": selection.call_id,
            "reason": selection.reason.value,
        },
    }
