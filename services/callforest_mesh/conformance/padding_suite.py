"""The `padding` suite: rows of rollouts, and the padding rows that their groups need."""

from __future__ import annotations

from callforest_core.forest.padding import padding_count, row_multiple
from callforest_mesh.conformance.json_case import Case, CaseError, Json, member


def answer(case: Case) -> Json:
    """Give the row multiple and the padding of each group."""
    groups = member(case, "groups")
    if not isinstance(groups, list):
        raise CaseError("groups are a list")
    multiple = row_multiple(
        _size(case, "dp"),
        train_microbatch=_size(case, "train_mb"),
        logprob_microbatch=_size(case, "logprob_mb"),
        packing=member(case, "packing") is True,
    )
    padding: list[Json] = [padding_count(_row_count(group), multiple) for group in groups]
    return {"row_multiple": multiple, "padding": padding}


def _row_count(group: Json) -> int:
    if not isinstance(group, list):
        raise CaseError("a group lists the rows of its rollouts")
    return sum(rows for rows in group if isinstance(rows, int))


def _size(case: Case, name: str) -> int:
    value = member(case, name)
    if not isinstance(value, int):
        raise CaseError(f"{name} is a size")
    return value
