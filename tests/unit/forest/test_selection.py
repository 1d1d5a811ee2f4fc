"""Policies, scored calls, and what a selection must be."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from callforest_core.custody.call import CallRecord
from callforest_core.forest.history import read_response
from callforest_core.forest.scoring import ScoredCall, Witnesses, scored_call
from callforest_core.forest.selection import (
    CallReason,
    Selection,
    SelectionFault,
    SelectionRefusedError,
    all_captured,
    check_terminal,
    checked_choice,
    checked_policy_answer,
    in_intent_order,
    incomplete_call,
    open_call,
)
from tests.unit.forest.captured import record, said

A = record("a", [said("one")], admitted_at=1.0, intent=1)
B = record("b", [said("two")], A, admitted_at=2.0, intent=2)
C = record("c", [said("three")], A, admitted_at=3.0, intent=4)
RECORDS = [C, A, B]
KNOWN = {one.call_id: one for one in RECORDS}


@pytest.mark.requirement("SEL-3")
def test_all_captured_selects_abandoned_branches_too_in_intent_order() -> None:
    assert all_captured(RECORDS, "b") == ("a", "b", "c")
    assert all_captured([B, C, A], "b") == ("a", "b", "c")


@pytest.mark.requirement("SEL-3")
@pytest.mark.parametrize(
    ("status", "finish_reason", "kept"),
    [
        ("completed", "stop", True),
        ("incomplete", "length", True),
        ("incomplete", "content_filter", False),
        ("failed", "error", False),
        ("unheard_of", "stop", False),
    ],
)
def test_all_captured_leaves_out_unscored_leaves_that_did_not_complete(
    status: str, finish_reason: str, *, kept: bool
) -> None:
    ended = {"status": status, "finish_reason": finish_reason}
    leaf = replace(C, **ended)
    assert ("c" in all_captured([A, B, leaf], "b")) == kept
    assert "c" in all_captured([A, B, leaf], "c"), "the scored call stays, whatever became of it"
    assert "a" in all_captured([replace(A, **ended), B], "b"), "and so does one with children"


@pytest.mark.requirement("SEL-3", "SEL-8")
@pytest.mark.parametrize(
    "ended", [{"status": ""}, {"status": "incomplete", "finish_reason": ""}], ids=["none", "why"]
)
def test_a_record_that_does_not_say_how_it_ended_is_an_error(ended: dict[str, str]) -> None:
    unknown = replace(C, **ended)
    for refused in (
        lambda: all_captured([A, B, unknown], "b"),
        lambda: incomplete_call({**KNOWN, "c": unknown}, ["a", "c"]),
    ):
        with pytest.raises(SelectionRefusedError) as caught:
            refused()
        assert caught.value.fault == SelectionFault.COMPLETION_MISSING
        assert caught.value.call_ids == ("c",)
    assert incomplete_call({**KNOWN, "c": unknown}, ["a", "b"]) is None


@pytest.mark.requirement("SEL-8")
def test_a_selected_call_that_did_not_complete_is_named() -> None:
    assert incomplete_call(KNOWN, ["a", "b", "c"]) is None
    for status, why in (("failed", "x"), ("odd", "x"), ("incomplete", "content_filter")):
        broken = {**KNOWN, "b": replace(B, status=status, finish_reason=why)}
        assert incomplete_call(broken, ["a", "b"]) == "b"
        assert incomplete_call(broken, ["a", "c"]) is None
    cut = {**KNOWN, "b": replace(B, status="incomplete", finish_reason="length")}
    assert incomplete_call(cut, ["a", "b"]) is None


@pytest.mark.requirement("SEL-5")
def test_a_continuation_without_its_parent_is_named() -> None:
    assert open_call(KNOWN, ["c", "b", "a"]) is None
    assert open_call(KNOWN, ["b", "c"]) == "b"


@pytest.mark.requirement("SEL-6")
def test_the_scored_call_stands_anywhere_in_the_selection() -> None:
    check_terminal(["a", "b", "c"], "a")
    with pytest.raises(SelectionRefusedError) as caught:
        check_terminal(["a", "b"], "c")
    assert (caught.value.fault, caught.value.call_ids) == ("terminal_not_selected", ("c",))


@pytest.mark.parametrize(
    ("call_ids", "fault"),
    [
        ([], "policy_empty"),
        (["a", "b", "a"], "policy_duplicated"),
        (["a", "z"], "policy_unknown"),
    ],
)
def test_a_choice_is_of_this_attempt_s_calls(call_ids: list[str], fault: str) -> None:
    with pytest.raises(SelectionRefusedError) as caught:
        checked_choice(KNOWN, call_ids)
    assert caught.value.fault == fault


@pytest.mark.requirement("SEL-4")
def test_a_policy_s_answer_is_taken_in_its_order() -> None:
    assert checked_policy_answer(RECORDS, (C, A), "chatcmpl-a") == (("c", "a"), "a")


@pytest.mark.requirement("SEL-4")
@pytest.mark.parametrize(
    ("selected", "terminal", "fault"),
    [
        ([], "chatcmpl-a", "policy_empty"),
        ([A, A], "chatcmpl-a", "policy_duplicated"),
        ([record("z", None)], "chatcmpl-z", "policy_unknown"),
        (["a"], "chatcmpl-a", "policy_unknown"),
        ({"a": A}, "chatcmpl-a", "policy_unknown"),
        (None, "chatcmpl-a", "policy_unknown"),
        ([A, replace(B, digest=b"\1" * 32)], "chatcmpl-a", "policy_changed_record"),
        ([replace(A, parent_call_id="b")], "chatcmpl-a", "policy_changed_record"),
        ([A, B], None, "terminal_missing"),
        ([A, B], "", "terminal_missing"),
        ([A, B], "chatcmpl-c", "terminal_not_selected"),
        ([A, B], "b", "terminal_not_selected"),
        ([A, replace(B, response_id="chatcmpl-a")], "chatcmpl-a", "policy_changed_record"),
    ],
)
def test_a_policy_s_answer_that_cannot_be_taken_says_why(
    selected: object, terminal: object, fault: str
) -> None:
    with pytest.raises(SelectionRefusedError) as caught:
        checked_policy_answer(RECORDS, selected, terminal)
    assert caught.value.fault == fault


@pytest.mark.requirement("SEL-4")
def test_a_response_id_of_two_selected_calls_scores_neither() -> None:
    twin = replace(B, response_id="chatcmpl-a")
    with pytest.raises(SelectionRefusedError) as caught:
        checked_policy_answer([A, twin], [A, twin], "chatcmpl-a")
    assert caught.value.fault == "terminal_ambiguous"


def ordered(*records: CallRecord) -> list[str]:
    return [one.call_id for one in in_intent_order(records)]


@pytest.mark.requirement("SEL-3")
@pytest.mark.parametrize("clock", [(1.0, 2.0, 3.0, 4.0), (9.0, 8.0, 1.0, 5.0), (None,) * 4])
def test_the_clock_does_not_matter_where_the_ledger_numbered_the_intents(
    clock: tuple[float | None, ...],
) -> None:
    """D, a root, was announced before C, a sibling of B; whatever a gateway's clock showed."""
    other = record("d", [said("four")], intent=3)
    stamped = [
        replace(one, admitted_at=when) for one, when in zip((A, B, C, other), clock, strict=True)
    ]
    for committed in permutations(stamped):
        assert ordered(*committed) == ["a", "b", "d", "c"]
        assert all_captured(committed, "b") == ("a", "b", "d", "c")


def by_clock(*records: CallRecord) -> list[CallRecord]:
    """Records as an earlier release wrote them."""
    return [replace(one, intent_number=None) for one in records]


@pytest.mark.requirement("SEL-3")
def test_records_of_earlier_releases_stand_by_the_clock_and_no_call_before_its_parent() -> None:
    unstamped = replace(record("z", None), admitted_at=None)
    tied = replace(record("y", None), admitted_at=2.0)
    assert ordered(*by_clock(unstamped, tied, C, B, A)) == ["a", "b", "y", "c", "z"]
    hour = 3600.0
    root = replace(A, admitted_at=A.admitted_at + hour)
    assert ordered(*by_clock(C, B, root)) == ["a", "b", "c"]
    other = record("d", [said("four")], admitted_at=2.5)
    assert ordered(*by_clock(root, B, C, other)) == ["d", "a", "b", "c"]


@pytest.mark.requirement("SEL-3")
def test_an_attempt_that_two_releases_recorded_has_one_order() -> None:
    """Numbers and times do not compare, so one record without a number leaves all to the clock."""
    late = replace(A, intent_number=None, admitted_at=2.5)
    roots = [replace(one, parent_call_id=None) for one in (late, B, C)]
    for committed in permutations(roots):
        assert ordered(*committed) == ["b", "a", "c"]


def test_a_record_that_leads_back_to_itself_is_kept_for_the_verification() -> None:
    first, second = replace(B, parent_call_id="c"), replace(C, parent_call_id="b")
    assert ordered(second, A, first) == ["a", "b", "c"]


def test_a_selection_says_why_of_every_call() -> None:
    selection = Selection(("a",), "a", "all_captured", CallReason.LEAF_NOT_COMPLETED)
    assert selection.reasons_of("ab", masked=False) == ["selected", "leaf_not_completed"]
    assert selection.reasons_of("ab", masked=True) == ["masked", "leaf_not_completed"]


def witnesses(
    declared: str | None = None, response: object = None, last: str | None = None
) -> Witnesses:
    read = () if response is None else read_response(response)
    return Witnesses(declared, read, last)


@pytest.mark.requirement("SEL-3", "SEL-6")
@pytest.mark.parametrize(
    ("given", "call_id", "stage"),
    [
        (witnesses("chatcmpl-b"), "b", "declared"),
        (witnesses(response={"id": "chatcmpl-b"}), "b", "response_id"),
        (witnesses(response={"output": [said("two")]}), "b", "content"),
        (witnesses(response={"id": "resp_x", "output": [said("two")]}), "b", "content"),
        (witnesses(response={"output": [said("one"), said("two")]}), "b", "content"),
        (witnesses("chatcmpl-b", {"id": "chatcmpl-b", "output": [said("two")]}), "b", "declared"),
        (witnesses("chatcmpl-b", {"output": [said("what no call said")]}), "b", "declared"),
        (witnesses(last="c"), "c", "content"),
    ],
)
def test_every_witness_names_the_scored_call(given: Witnesses, call_id: str, stage: str) -> None:
    scored = scored_call(RECORDS, given, ())
    assert (scored.call_id, scored.stage) == (call_id, stage)


@pytest.mark.requirement("SEL-3")
def test_the_trail_names_who_agreed() -> None:
    given = witnesses("chatcmpl-b", {"id": "chatcmpl-b", "output": [said("two")]})
    expected = ScoredCall("b", "declared", "corroborated_by=response_id+content")
    assert scored_call(RECORDS, given, ()) == expected


@pytest.mark.requirement("SEL-3")
@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (witnesses(), "terminal_missing"),
        (witnesses("nobody"), "terminal_missing"),
        (witnesses("nobody", {"id": "chatcmpl-b"}), "terminal_missing"),
        (witnesses(response={"id": "resp_synthetic"}), "terminal_missing"),
        (witnesses(response={"output": [said("never said")]}), "terminal_missing"),
        (witnesses("chatcmpl-a", {"id": "chatcmpl-b"}), "terminal_ambiguous"),
        (witnesses(response={"id": "chatcmpl-a", "output": [said("two")]}), "terminal_ambiguous"),
        (witnesses("chatcmpl-a", last="c"), "terminal_ambiguous"),
        (
            witnesses(
                response={
                    "output": [said("two")],
                    "choices": [{"message": {"role": "assistant", "content": "three"}}],
                }
            ),
            "terminal_ambiguous",
        ),
    ],
)
def test_no_scored_call_is_guessed(given: Witnesses, fault: str) -> None:
    with pytest.raises(SelectionRefusedError) as caught:
        scored_call(RECORDS, given, ())
    assert caught.value.fault == fault


@pytest.mark.requirement("SEL-3")
def test_witnesses_that_contradict_each_other_are_quoted() -> None:
    with pytest.raises(SelectionRefusedError, match="declared: a, response_id: b"):
        scored_call(RECORDS, witnesses("chatcmpl-a", {"id": "chatcmpl-b"}), ())


@pytest.mark.requirement("SEL-3")
def test_of_calls_that_said_the_same_the_selected_one_is_scored() -> None:
    twins = [A, record("t1", [said("ok")], A), record("t2", [said("ok")], A)]
    given = witnesses(response={"output": [said("ok")]})
    assert scored_call(twins, given, ["a", "t2"]).call_id == "t2"
    for among in ([], ["a", "t1", "t2"], ["a"]):
        with pytest.raises(SelectionRefusedError) as caught:
            scored_call(twins, given, among)
        assert caught.value.fault == "terminal_ambiguous"
