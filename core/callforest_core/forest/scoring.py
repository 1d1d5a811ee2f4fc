"""Which call of a forest rollout is scored (SEL-3, SEL-6; docs/protocol.md, 7b).

A declared id, the scored response's own id and its content testify; all must name one call. The
order of capture is no witness, and neither is the shape of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from callforest_core.custody.call import CallRecord
from callforest_core.forest.answers import CapturedAnswers
from callforest_core.forest.history import Passage
from callforest_core.forest.selection import SelectionFault, SelectionRefusedError


@dataclass(frozen=True, slots=True)
class Witnesses:
    """What is said of the scored call.

    Attributes:
        declared_response_id: what the harness declares, or None.
        responses: the scored response, as each member that tells it was read.
        last_call_id: the call that the returned history ends the scored response with, or None.
    """

    declared_response_id: str | None = None
    responses: tuple[Passage, ...] = ()
    last_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class ScoredCall:
    """The scored call and who named it: `declared`, `response_id` or `content`, all of them."""

    call_id: str
    stage: str
    trail: str


def scored_call(
    records: Sequence[CallRecord],
    witnesses: Witnesses,
    among: Collection[str],
    lost: frozenset[str] = frozenset(),
) -> ScoredCall:
    """Give the call that every witness names.

    Args:
        records: of the attempt.
        witnesses: the witnesses.
        among: the selected calls; they decide between calls that said the same. Empty when the
            selection is not known yet.
        lost: calls that have no record; a response that carries an id of one is not another's.

    Raises:
        SelectionRefusedError: no witness names a call (`terminal_missing`), or they name several
            or contradict each other (`terminal_ambiguous`).
    """
    captured = CapturedAnswers(records, lost)
    heard = _heard(captured, witnesses)
    if not heard:
        detail = "no witness names the scored call"
        raise SelectionRefusedError(SelectionFault.TERMINAL_MISSING, detail)
    named = [who for _, who in heard]
    agreed = frozenset.intersection(*named)
    if not agreed:
        told = ", ".join(f"{witness}: {'/'.join(sorted(who))}" for witness, who in heard)
        raise SelectionRefusedError(
            SelectionFault.TERMINAL_AMBIGUOUS, told, frozenset.union(*named)
        )
    if len(agreed) > 1:
        agreed &= frozenset(among)
    if len(agreed) != 1:
        detail = "several calls said what the scored response says"
        raise SelectionRefusedError(
            SelectionFault.TERMINAL_AMBIGUOUS, detail, frozenset.union(*named)
        )
    (call_id,) = agreed
    first, *others = dict.fromkeys(witness for witness, _ in heard)
    trail = f"corroborated_by={'+'.join(others)}" if others else ""
    return ScoredCall(call_id, first, trail)


def _heard(captured: CapturedAnswers, witnesses: Witnesses) -> list[tuple[str, frozenset[str]]]:
    """Give the witnesses with the calls that each names; those that name none are left out."""
    named: list[tuple[str, frozenset[str]]] = []
    if witnesses.declared_response_id is not None:
        declared = captured.called(witnesses.declared_response_id)
        if not declared:
            detail = f"the declared id {witnesses.declared_response_id!r} names no captured call"
            raise SelectionRefusedError(SelectionFault.TERMINAL_MISSING, detail)
        named.append(("declared", declared))
    for response in witnesses.responses:
        _require_recorded(captured, response)
        if said := captured.called(response.response_id):
            named.append(("response_id", said))
    if witnesses.last_call_id is not None:
        return [*named, ("content", frozenset({witnesses.last_call_id}))]
    contents = [_content(captured, response) for response in witnesses.responses]
    return [*named, *(("content", said) for said in contents if said)]


def _require_recorded(captured: CapturedAnswers, response: Passage) -> None:
    ends = response.runs[-1][-1:] if response.runs else ()
    ids = [response.response_id, *(native_id for item in ends for native_id in item.native_ids)]
    if captured.lost_among(ids):
        raise SelectionRefusedError(
            SelectionFault.TERMINAL_MISSING, "the scored answer is that of a lost call"
        )


def _content(captured: CapturedAnswers, response: Passage) -> frozenset[str]:
    """Give the calls whose answers the response ends with."""
    if not response.runs:
        return frozenset()
    run = response.runs[-1]
    found: set[str] = set()
    for start in range(len(run)):
        for count, said in captured.prefixes(run[start:]):
            if start + count == len(run):
                found |= captured.candidates(said, run[start:])
    return frozenset(found)
