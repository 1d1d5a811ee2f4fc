"""No row depends on the order in which calls finished: whatever was said, whoever is chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from callforest.finalizer.v1 import row_log_pb2
from callforest_core.custody.call import CallRecord
from callforest_core.forest.reconstruction import Forest
from callforest_core.forest.selection import SelectionRefusedError
from callforest_core.lineage.source import output_summary
from callforest_mesh.finalizer import forest, groups
from callforest_mesh.finalizer.policies import Policy, resolve_policy
from tests.unit.finalizer.forests import FOREST, Grown
from tests.unit.finalizer.rollouts import evidence, request, sealed
from tests.unit.forest.captured import asked, said

RETURNED = resolve_policy("returned_history")
EVERYTHING = resolve_policy("all_captured")
CUSTOM = resolve_policy("tests.unit.finalizer.harness_policies:everything")
POLICIES = [RETURNED, EVERYTHING, CUSTOM]
TEXTS = ("ok", "hm")
ORDERS = 6


@dataclass(frozen=True)
class Played:
    """A rollout, and what its harness returned.

    Attributes:
        calls: with their tokens, in the order in which they were announced.
        records: theirs, by name.
        named: the calls whose answers carry their ids in the history.
        result: of the harness.
        scored: the scored call.
    """

    calls: Grown
    records: dict[str, CallRecord]
    named: frozenset[str]
    result: bytes
    scored: str

    def committed(self, random: Random) -> list[CallRecord]:
        """The manifest, had the calls finished in another order; a parent always does before."""
        waiting, order = list(self.records.values()), list[CallRecord]()
        while waiting:
            done = {one.call_id for one in order}
            ready = [one for one in waiting if one.parent_call_id in {None, *done}]
            order.append(random.choice(ready))
            waiting.remove(order[-1])
        return order


@st.composite
def played(draw: st.DrawFn) -> Played:
    """Few texts, so that lines and siblings say the same; names and clocks that tell nothing."""
    names = draw(st.permutations("abcdefgh"))[: draw(st.integers(2, 8))]
    calls, parents, texts = Grown("r0", 0), dict[str, str | None](), dict[str, str]()
    for name in names:
        parents[name] = draw(st.sampled_from([None, *parents]))
        texts[name] = draw(st.sampled_from(TEXTS))
        calls.call(name, parents[name])
    clock = draw(st.lists(st.none() | st.floats(0, 9), min_size=len(names), max_size=len(names)))
    records = {
        name: replace(
            CallRecord.of(calls.calls[name], f"chatcmpl-{name}", status="completed"),
            finish_reason="stop",
            output=output_summary([said(texts[name])]),
            admitted_at=when,
            intent_number=number,
        )
        for number, (name, when) in enumerate(zip(names, clock, strict=True), 1)
    }
    shown = draw(st.just(names) | st.lists(st.sampled_from(names), min_size=1, unique=True))
    history: list[str] = []
    for name in draw(st.permutations(shown)):
        line, cursor = list[str](), name
        while cursor is not None and cursor not in history:
            line.append(cursor)
            cursor = parents[cursor]
        history += reversed(line)
    named = frozenset(name for name in history if draw(st.integers(0, 3)) == 0)
    output = []
    for name in history:
        output.append(said(texts[name], name if name in named else ""))
        output += [asked()] if draw(st.booleans()) else []
    result = json.dumps({"response": {"output": output}}).encode()
    return Played(calls, records, named, result, history[-1])


def rows(
    one: Played, committed: Sequence[CallRecord], policy: Policy
) -> tuple[tuple[str, ...], list[tuple[str, list[tuple[str, bool]]]]]:
    """The selection, and each row by its id: its calls, and whether it owns them.

    Raises:
        SelectionRefusedError: the history does not tell equal answers apart.
    """
    records = tuple(committed)
    declared = {"declared_response_id": f"chatcmpl-{one.scored}"} if policy is EVERYTHING else {}
    asking = request(rollout_id="r0", capture_key="r0", slot=0, result=one.result, **declared)
    choice = forest.choose(asking, records, policy)
    calls = [one.calls.calls[record.call_id] for record in records]
    grown = forest.verify("r0", records, choice, calls)
    assert isinstance(grown, Forest), grown
    given = evidence(sealed(rollout_id="r0", capture_key="r0", mode=FOREST), records)
    mask = forest.mask_of_selection(given, choice.selection)
    finalized = row_log_pb2.FinalizedRollout(
        receipt=forest.make_receipt(asking, given, choice, grown, mask)
    )
    for row in grown.rows:
        finalized.paths.add(call_ids=row.line.call_ids)
    logged = groups.log_group("g", [finalized], row_multiple=2, abandon_reason="")
    named = [part.call_id for part in logged.segments]
    return choice.selection.call_ids, [
        (row.row_id, [(named[span.segment_index], span.owns_loss) for span in row.spans])
        for row in logged.rows
    ]


@pytest.mark.requirement("SEL-2", "SEL-3", "SEL-4", "FOR-2", "FOR-3")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@settings(max_examples=150, deadline=None)
@given(one=played(), random=st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_the_order_in_which_calls_finished(
    policy: Policy, one: Played, random: Random
) -> None:
    outcomes = []
    for _ in range(ORDERS):
        try:
            outcomes.append(rows(one, one.committed(random), policy))
        except SelectionRefusedError as error:
            outcomes.append((error.fault, sorted(error.call_ids)))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    event(f"{policy.name}: {'rows' if isinstance(outcomes[0][0], tuple) else outcomes[0][0]}")
    if policy is RETURNED:
        return
    assert outcomes[0][0] == tuple(one.records), "as they were announced"


@pytest.mark.requirement("SEL-2")
@settings(max_examples=150, deadline=None)
@given(one=played(), random=st.randoms(use_true_random=False))
def test_equal_answers_stand_as_their_calls_were_announced(one: Played, random: Random) -> None:
    """Those that no id tells apart; the others stand where their history shows them."""
    try:
        selected, _ = rows(one, one.committed(random), RETURNED)
    except SelectionRefusedError:
        return
    unnamed: dict[object, list[int | None]] = {}
    for call_id in selected:
        if call_id not in one.named:
            record = one.records[call_id]
            unnamed.setdefault(record.output, []).append(record.intent_number)
    assert all(numbers == sorted(numbers) for numbers in unnamed.values())
