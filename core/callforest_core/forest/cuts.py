"""How a run of items is cut into whole answers.

A run may be cut in more ways than one. Ways that show the same calls, in another order only, are
one reading; where more readings are left, none is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

from callforest_core.custody.call import CallRecord
from callforest_core.forest.selection import SelectionFault, SelectionRefusedError

_CUTS_MOST: Final = 256
"""Most ways to cut one stretch that are compared; with more of them it counts as ambiguous."""

Calls: TypeAlias = frozenset[str]
Steps: TypeAlias = Mapping[int, Sequence[tuple[int, Calls]]]
"""By where an answer may begin: where it then ends, and the calls that it may be."""


def one_cut(
    steps: Steps, length: int, records: Mapping[str, CallRecord]
) -> list[tuple[int, Calls]] | None:
    """Give the one reading of a run: where each answer ends, and which calls it may be.

    Args:
        steps: the answers that may begin at each place that can be reached.
        length: items of the run.
        records: of the attempt in the order of their intents.

    Returns:
        None when the run cannot be cut.

    Raises:
        SelectionRefusedError: `answer_ambiguous`.
    """
    before, behind = _ways(steps, length)
    if not behind.get(0):
        return None
    bounds = [
        place
        for place in sorted({*steps, length})
        if before.get(place, 0) * behind.get(place, 0) == behind[0]
    ]
    cut: list[tuple[int, Calls]] = []
    for start, end in pairwise(bounds):
        cut += _one_reading(_cuts(steps, start, end, behind), records)
    return cut


def _ways(steps: Steps, length: int) -> tuple[dict[int, int], dict[int, int]]:
    """Count the ways from the run's begin to each place, and from there to its end."""
    before, behind = Counter({0: 1}), Counter({length: 1})
    for start in sorted(steps):
        for end, _ in steps[start]:
            before[end] += before[start]
    for start in sorted(steps, reverse=True):
        behind[start] = sum(behind[end] for end, _ in steps[start])
    return before, behind


def _cuts(
    steps: Steps, start: int, end: int, behind: Mapping[int, int]
) -> list[list[tuple[int, Calls]]]:
    """List the ways to cut a stretch, one more than _CUTS_MOST at most."""
    found: list[list[tuple[int, Calls]]] = []
    open_cuts: list[tuple[int, list[tuple[int, Calls]]]] = [(start, [])]
    while open_cuts and len(found) <= _CUTS_MOST:
        at, cut = open_cuts.pop()
        if at == end:
            found.append(cut)
            continue
        ahead = [(to, calls) for to, calls in steps[at] if to <= end and behind.get(to)]
        open_cuts += [(to, [*cut, (to, calls)]) for to, calls in reversed(ahead)]
    return found


def _one_reading(
    cuts: Sequence[list[tuple[int, Calls]]], records: Mapping[str, CallRecord]
) -> list[tuple[int, Calls]]:
    """Choose among the ways to cut a stretch: parents before children, then in intent order."""
    if len(cuts) == 1:
        return cuts[0]
    possible = [cut for cut in cuts if _is_possible(cut)]
    readings = {frozenset(Counter(calls for _, calls in cut).items()) for cut in possible}
    if len(readings) != 1 or len(cuts) > _CUTS_MOST:
        raise SelectionRefusedError(
            SelectionFault.ANSWER_AMBIGUOUS, "items can be cut into answers in several ways"
        )
    places = {call_id: place for place, call_id in enumerate(records)}
    return min(possible, key=lambda cut: (_disorder(cut, records), _announced(cut, places)))


def _is_possible(cut: Sequence[tuple[int, Calls]]) -> bool:
    """Say whether every answer of a cut can be another call."""
    shown = Counter(calls for _, calls in cut)
    return all(count <= len(calls) for calls, count in shown.items())


def _disorder(cut: Sequence[tuple[int, Calls]], records: Mapping[str, CallRecord]) -> int:
    """Count the answers that stand before the one that they continue."""
    shown = [next(iter(calls)) for _, calls in cut if len(calls) == 1]
    places = {call_id: place for place, call_id in enumerate(shown)}
    parents = ((place, records[call_id].parent_call_id) for call_id, place in places.items())
    return sum(places.get(parent or "", -1) > place for place, parent in parents)


def _announced(cut: Sequence[tuple[int, Calls]], places: Mapping[str, int]) -> list[int]:
    return [min(places[call_id] for call_id in calls) for _, calls in cut]
