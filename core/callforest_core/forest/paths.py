"""Paths of a selected forest: which rows there are and who owns which loss. Pure structure.

Roots stand by their position in the selection, and so do the children of a call; paths go depth
first in that order, one to each endpoint of the *selected* graph (FOR-1). A selected call whose
children were all discarded is an endpoint. The first path that contains a call owns its loss
(FOR-3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class SelectionError(ValueError):
    """A selection cannot be reconstructed.

    Attributes:
        reason: `empty_selection`, `duplicate_selection`, `unknown_selection`,
            `terminal_not_selected`, or `selection_not_closed`, which masks its rollout alone
            (SEL-5); the others are errors of whoever selected.
        call_ids: the calls at fault.
    """

    def __init__(self, reason: str, call_ids: Sequence[str] = ()) -> None:
        super().__init__(f"{reason}: {', '.join(call_ids[:8])}" if call_ids else reason)
        self.reason = reason
        self.call_ids = tuple(call_ids)


@dataclass(frozen=True, slots=True)
class SelectedPath:
    """One row's calls.

    Attributes:
        call_ids: from the root to the endpoint.
        first_owned: calls from this index on are owned by this row; those before it belong to an
            earlier one. Ownership is always a tail: a path leaves its predecessor once.
    """

    call_ids: tuple[str, ...]
    first_owned: int


def check_selection(
    parents: Mapping[str, str | None], selection: Sequence[str], scored_terminal: str
) -> None:
    """Refuse a selection that is not closed, not unique, or without its scored call.

    Args:
        parents: the parent of every recorded call.
        selection: the calls that train, in priority order.
        scored_terminal: the call that the reward is of; anywhere in the selection (SEL-6).

    Raises:
        SelectionError: with the first reason that applies.
    """
    chosen = set(selection)
    if not selection:
        raise SelectionError("empty_selection")
    if len(chosen) != len(selection):
        counts = Counter(selection)
        raise SelectionError("duplicate_selection", [one for one in counts if counts[one] > 1])
    if unknown := [call_id for call_id in selection if call_id not in parents]:
        raise SelectionError("unknown_selection", unknown)
    if scored_terminal not in chosen:
        raise SelectionError("terminal_not_selected", [scored_terminal])
    open_ended = [one for one in selection if (parents[one] or one) not in chosen]
    if open_ended:
        raise SelectionError("selection_not_closed", open_ended)


def selected_paths(
    parents: Mapping[str, str | None], selection: Sequence[str]
) -> tuple[SelectedPath, ...]:
    """Give the paths of a checked selection, in row order.

    Linear in the selection and in the lengths of the paths.
    """
    children: dict[str | None, list[str]] = {}
    for call_id in selection:
        children.setdefault(parents[call_id], []).append(call_id)
    paths: list[SelectedPath] = []
    trail: list[str] = []
    owned = 0
    stack = [(call_id, 0) for call_id in reversed(children.get(None, []))]
    while stack:
        call_id, depth = stack.pop()
        # What lies behind the branching point was owned by an earlier path.
        owned = min(owned, depth)
        del trail[depth:]
        trail.append(call_id)
        if below := children.get(call_id):
            stack.extend((child, depth + 1) for child in reversed(below))
        else:
            paths.append(SelectedPath(tuple(trail), owned))
            owned = len(trail)
    return tuple(paths)
