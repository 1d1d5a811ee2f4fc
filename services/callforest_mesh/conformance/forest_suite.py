"""The `forest` suite: honest staged calls and a selection, and the rows that they make."""

from __future__ import annotations

from callforest_core.custody.call import Receipt
from callforest_core.forest.paths import SelectionError
from callforest_core.forest.reconstruction import Forest, ForestRow, reconstruct
from callforest_mesh.conformance.json_case import Case, CaseError, Json, member
from callforest_mesh.conformance.peer_json import claimed_record, claimed_snapshot

_RECORD_ONLY = ("response_id", "staging_key")
_COLUMNS = ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta", "rollout_id")
_MASKS = "selection_not_closed"


def answer(case: Case) -> Json:
    """Reconstruct the selected forest, or name why it has no rows."""
    given, selection = member(case, "calls"), member(case, "selection")
    scored = member(case, "scored_terminal")
    if not isinstance(given, list) or not isinstance(selection, list):
        raise CaseError("calls and selection are lists")
    calls = [one for one in given if isinstance(one, dict)]
    receipt = Receipt(
        capture_key=str(member(case, "rollout_id")),
        manifest=tuple(claimed_record(_without(call, _COLUMNS)) for call in calls),
        terminal_call_id=str(scored),
        terminal_selection="declared",
    )
    snapshots = [claimed_snapshot(_without(call, _RECORD_ONLY)) for call in calls]
    try:
        forest = reconstruct(receipt, snapshots, [str(one) for one in selection])
    except SelectionError as error:
        return {"masked" if error.reason == _MASKS else "error": error.reason}
    return _forest_json(forest)


def _without(call: dict[str, Json], names: tuple[str, ...]) -> dict[str, Json]:
    return {name: value for name, value in call.items() if name not in names}


def _forest_json(forest: Forest) -> Json:
    metrics = forest.metrics
    return {
        "rows": [_row_json(row) for row in forest.rows],
        "metrics": {
            "gen_tokens_per_sample": metrics.gen_tokens_per_sample,
            "max_gen_tokens_per_turn": metrics.max_gen_tokens_per_turn,
            "total_tokens_per_sample": metrics.total_tokens_per_sample,
        },
    }


def _row_json(row: ForestRow) -> Json:
    line = row.line
    return {
        "model_call_ids": list(line.call_ids),
        "token_ids": [int(one) for one in line.token_ids],
        "loss_mask": [int(one) for one in row.loss_mask],
        "logprobs": [float(one) for one in line.logprobs],
        "spans": [
            {
                "model_call_id": link.record.call_id,
                "start": link.start,
                "gen_start": link.start + link.carry_len,
                "end": link.end,
                "owned": index >= row.first_owned,
            }
            for index, link in enumerate(line.links)
        ],
        "weight_versions": list(line.weight_versions),
    }
