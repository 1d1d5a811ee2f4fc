"""Whatever happens in whatever order: no silent root, rising revisions, one truth in the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callforest.capture.v1 import call_record_pb2, capture_admission_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.ledger import commits, core
from callforest_mesh.ledger.outline import OPEN, SEALED
from tests.unit.ledger.calls import (
    KEY,
    Attempt,
    facts,
    failure,
    first_told,
    intent,
    record,
    said,
    user,
)

# Conversations of up to three turns over a tiny language, so that twins, forks, edits and lost
# contexts all happen often.
TURN = st.sampled_from("xy")
CONVERSATIONS = st.lists(st.tuples(TURN, TURN), max_size=2).flatmap(
    lambda turns: TURN.map(lambda last: (tuple(turns), last))
)
STEPS = st.one_of(
    st.tuples(st.just("intent"), CONVERSATIONS),
    st.tuples(st.just("commit"), st.integers(0, 30), TURN),
    st.tuples(st.just("astray"), st.integers(0, 30)),
    st.tuples(st.just("fail"), st.integers(0, 30)),
    st.tuples(st.just("repeat"), st.integers(0, 30)),
    st.tuples(st.just("close")),
    st.tuples(st.just("seal")),
)
Conversation = tuple[tuple[tuple[str, str], ...], str]


def items_of(conversation: Conversation) -> list[object]:
    turns, last = conversation
    items: list[object] = []
    for asked, answered in turns:
        items += [user(asked), said(answered)]
    return [*items, user(last)]


@dataclass
class World:
    """An attempt beside a model of it that compares texts where the ledger compares digests."""

    attempt: Attempt = field(default_factory=Attempt)
    calls: list[tuple[str, Conversation, capture_admission_pb2.Verdict]] = field(
        default_factory=list
    )
    records: dict[str, tuple[call_record_pb2.CallRecord, Conversation, str]] = field(
        default_factory=dict
    )
    failed: set[str] = field(default_factory=set)

    def expected(self, conversation: Conversation) -> str:
        """Say by content alone what the verdict must be: root, uncaptured, or the parent."""
        turns, _ = conversation
        spoken = tuple(answer for _, answer in turns)
        if not spoken or not (self.records or self.failed):
            return "root"
        twins = [
            (call_id, known)
            for call_id, (_, known, answer) in self.records.items()
            if (*(text for _, text in known[0]), answer) == spoken
        ]
        if len(twins) != 1:
            return "uncaptured"
        [(call_id, known)] = twins
        context = items_of(known)
        same = items_of(conversation)[: len(context)] == context
        return call_id if same else "uncaptured"

    def announce(self, conversation: Conversation) -> None:
        call_id = f"c{len(self.calls)}"
        expected = self.expected(conversation)
        is_open = self.attempt.view.state == OPEN
        verdict = self.attempt.admit(call_id, items_of(conversation))
        if not is_open:
            assert verdict.HasField("refused")
            return
        which = verdict.WhichOneof("verdict")
        named = verdict.continuation.parent_call_id if which == "continuation" else which
        assert named == expected
        self.calls.append((call_id, conversation, verdict))
        if which == "uncaptured":
            self.failed.add(call_id)

    def commit(self, number: int, answer: str, *, astray: bool = False) -> None:
        call_id, conversation, verdict = self.calls[number % len(self.calls)]
        made = self._record(call_id, conversation, verdict, answer)
        if astray:
            made.coords.parent_call_id = "elsewhere"
            made.coords.prev_token_count = 3
        known = call_id in self.records
        repeats = known and self.records[call_id][0] == made
        takes = self.attempt.view.state != SEALED and not known and call_id not in self.failed
        try:
            decision = self.attempt.apply(commits.commit_record(self.attempt.view, made))
        except Refusal:
            assert not takes
            assert not repeats
            return
        if decision.refusal is not None:
            assert astray
            assert takes
            self.failed.add(call_id)
        elif known:
            assert repeats
        else:
            assert takes
            assert not astray
            self.records[call_id] = (made, conversation, answer)

    def _record(
        self,
        call_id: str,
        conversation: Conversation,
        verdict: capture_admission_pb2.Verdict,
        answer: str,
    ) -> call_record_pb2.CallRecord:
        parent = None
        if verdict.HasField("continuation"):
            parent = self.records[verdict.continuation.parent_call_id][0]
        return record(call_id, items_of(conversation), answer, parent=parent)

    def fail(self, number: int) -> None:
        call_id, _, _ = self.calls[number % len(self.calls)]
        try:
            decision = commits.commit_failure(self.attempt.view, failure(call_id))
        except Refusal:
            assert self.attempt.view.state == SEALED
            return
        self.attempt.apply(decision)
        if call_id in self.records:
            assert decision.answer.kept_record
        else:
            self.failed.add(call_id)

    def repeat(self, number: int) -> None:
        call_id, conversation, verdict = self.calls[number % len(self.calls)]
        again = core.record_intent(self.attempt.view, intent(call_id, items_of(conversation)))
        assert first_told(again.answer) == verdict
        assert not again.events

    def step(self, step: tuple[object, ...]) -> None:
        kind = step[0]
        if kind == "intent":
            self.announce(cast("Conversation", step[1]))
        elif kind == "close":
            self.attempt.close()
        elif kind == "seal":
            self.attempt.seal()
        elif self.calls:
            number = cast("int", step[1])
            if kind == "commit":
                self.commit(number, cast("str", step[2]))
            elif kind == "astray":
                self.commit(number, "x", astray=True)
            elif kind == "fail":
                self.fail(number)
            else:
                self.repeat(number)


@pytest.mark.requirement("ADM-1", "LED-1")
@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_any_order_of_requests(steps: list[tuple[object, ...]]) -> None:
    """P3: the verdict is the model's; P9: nothing changes behind the seal."""
    world = World()
    sealed: tuple[object, ...] | None = None
    for step in steps:
        before = world.attempt.view.revision
        world.step(step)
        view = world.attempt.view
        assert view.revision >= before
        assert view.revision == len(world.attempt.log)
        pending = [
            call_id
            for call_id, _, _ in world.calls
            if call_id not in world.records and call_id not in world.failed
        ]
        assert view.pending_call_ids() == pending
        assert view.record_count == len(world.records)
        if view.state == SEALED:
            sealed = sealed or facts(view)
            assert facts(view) == sealed
    assert facts(world.attempt.replayed()) == facts(world.attempt.view)
    assert world.attempt.view.attempt(superseded=False).capture_key == KEY
