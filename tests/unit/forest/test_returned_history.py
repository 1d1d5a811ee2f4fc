"""Which calls a returned history selects, and every way in which it can be wrong (SEL-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from callforest_core.custody.call import CallRecord
from callforest_core.forest.history import read_history
from callforest_core.forest.returned import Returned, returned_calls
from callforest_core.forest.selection import SelectionFault, SelectionRefusedError
from tests.unit.forest.captured import Item, asked, record, said, seen, thought, tool

A_SAYS = [thought("first"), tool(1), tool(2)]
B_SAYS = [thought("then"), said("look again"), tool(3)]
C_SAYS = [said("done")]
A = record("a", A_SAYS)
B = record("b", B_SAYS, A)
REJECTED = record("x", [said("nonsense")], A)
C = record("c", C_SAYS, B)
RECORDS = [A, REJECTED, B, C]
TRANSCRIPT = [*A_SAYS, seen(1), seen(2), *B_SAYS, seen(3), *C_SAYS]
REFERENCES = {"turns": [{"model_calls": ["a"]}, {"model_calls": [{"model_call_id": "b"}, "c"]}]}


def chat(*items: Item, **own: object) -> Item:
    return {"choices": [{"message": one} for one in items], **own}


def select(result: object, records: list[CallRecord] | None = None) -> Returned:
    return returned_calls(records or RECORDS, read_history(result))


@pytest.mark.requirement("SEL-2")
@pytest.mark.parametrize(
    "result",
    [
        {"response": {"id": "resp_of_the_exporter", "output": TRANSCRIPT}},
        {"output": TRANSCRIPT},
        {"responses": [{"output": A_SAYS}, {"output": B_SAYS}, {"output": C_SAYS}]},
        {
            "responses": [
                {"output": A_SAYS},
                {"output": B_SAYS},
                {"id": "chatcmpl-c", "output": C_SAYS},
            ]
        },
        {"transitions": [{"response": {"output": one}} for one in (A_SAYS, B_SAYS, C_SAYS)]},
        {
            "transitions": [
                {"responses": [{"output": A_SAYS}, {"output": B_SAYS}]},
                {"response": {"output": C_SAYS}},
            ]
        },
        {"transitions": [{"response": {"output": TRANSCRIPT[:end]}} for end in (3, 8, 10)]},
        {"transitions": [{"output": one} for one in (A_SAYS, B_SAYS, C_SAYS)]},
        {"transitions": [TRANSCRIPT[:3], TRANSCRIPT[:8], TRANSCRIPT]},
        {"response": {"output": [TRANSCRIPT[:3], TRANSCRIPT[:8], TRANSCRIPT]}},
        {"ng_trajectory": REFERENCES},
        {"ng_trajectory": REFERENCES, "response": {"output": TRANSCRIPT}},
        {
            "ng_trajectory": REFERENCES,
            "responses": [{"output": A_SAYS}, {"output": B_SAYS}, {"output": C_SAYS}],
            "response": {"output": C_SAYS},
        },
        {
            # The second shows the first once more, behind something that it did not show.
            "ng_trajectory": REFERENCES,
            "transitions": [A_SAYS, [asked(), *TRANSCRIPT]],
        },
        {"responses": [{"output": TRANSCRIPT}], "transitions": [TRANSCRIPT]},
    ],
    ids=[
        "response",
        "output",
        "responses",
        "native response id",
        "transitions",
        "mixed transitions",
        "snapshots",
        "outputs of transitions",
        "bare snapshots",
        "snapshots as output",
        "references",
        "references and output",
        "references and responses",
        "references and snapshots that repeat",
        "two accounts",
    ],
)
def test_every_shape_selects_what_it_shows_in_its_order(result: object) -> None:
    assert select(result).call_ids == ("a", "b", "c")


@pytest.mark.requirement("SEL-2")
def test_a_chat_history_selects_too() -> None:
    answers = [{"role": "assistant", "content": text} for text in ("one", "two")]
    records = [record("a", [answers[0]]), record("b", [answers[1]])]
    result = {
        "responses": [
            chat(one, id=f"chatcmpl-{two.call_id}")
            for one, two in zip(answers, records, strict=True)
        ]
    }
    assert select(result, records).call_ids == ("a", "b")
    assert select({"response": chat(answers[1])}, records) == Returned(("b",), "b")


@pytest.mark.requirement("SEL-2")
def test_the_order_is_the_history_s_not_the_capture_s() -> None:
    records = [record("late", [said("z")]), record("early", [said("y")])]
    assert select({"output": [said("y"), asked(), said("z")]}, records).call_ids == (
        "early",
        "late",
    )


@pytest.mark.requirement("SEL-2")
def test_answers_that_follow_each_other_at_once_are_told_apart() -> None:
    """After a rewrite the history has no observation between two answers."""
    assert select({"output": [*A_SAYS, *B_SAYS, *C_SAYS]}).call_ids == ("a", "b", "c")


@pytest.mark.requirement("SEL-2")
def test_synthetic_ids_are_no_witnesses() -> None:
    synthetic = [{**one, "id": "msg_0f3e"} for one in C_SAYS]
    result = {"responses": [{"id": "resp_77", "output": synthetic}]}
    assert select(result).call_ids == ("c",)


TWINS = [
    record("a", [said("hm")], intent=1),
    record("t1", [said("ok")], A, intent=2),
    record("t2", [said("ok")], A, intent=3),
]


@pytest.mark.requirement("SEL-2")
@pytest.mark.parametrize(
    "result",
    [
        {"output": [said("ok", "t2")]},
        {"responses": [{"id": "chatcmpl-t2", "output": [said("ok")]}]},
        {
            "ng_trajectory": {"turns": [{"model_calls": [{"response_id": "chatcmpl-t2"}]}]},
            "output": [said("ok")],
        },
    ],
    ids=["item id", "response id", "reference"],
)
def test_native_ids_choose_among_equals(result: object) -> None:
    assert select(result, TWINS).call_ids == ("t2",)


@pytest.mark.requirement("SEL-2")
def test_equal_answers_of_one_line_that_are_all_shown_stand_in_its_order() -> None:
    first = record("z", [said("ok")])
    middle = record("m", [said("more")], first)
    last = record("a", [said("ok")], middle)
    records = [last, middle, first]
    transcript = [said("ok"), asked(), said("more"), asked(), said("ok")]
    assert select({"output": transcript}, records).call_ids == ("z", "m", "a")
    snapshots = {"transitions": [transcript[:1], transcript[:3], transcript]}
    assert select(snapshots, records).call_ids == ("z", "m", "a")
    assert _refused({"output": transcript[:3]}, records).fault == "answer_ambiguous"


@pytest.mark.requirement("SEL-2")
def test_a_snapshot_with_an_id_of_its_own_is_another_answer_that_says_the_same() -> None:
    """Equal answers of a line or of siblings: none is taken for a repetition of the one before."""
    root = record("a", [said("up")])
    words = {"a": "up", "b": "up", "c": "left"}
    as_chat = {one: chat({"role": "assistant", "content": word}) for one, word in words.items()}
    as_items: dict[str, Item] = {one: {"output": [said(word)]} for one, word in words.items()}
    for parent in (root, None):
        again = record("b", [said("up")], parent)
        records = [root, again, record("c", [said("left")], again)]
        for made in (as_chat, as_items):
            told = [{"response": {**made[one], "id": f"chatcmpl-{one}"}} for one in words]
            assert select({"transitions": told}, records).call_ids == ("a", "b", "c")
            twice = [told[0], told[0], told[1], told[1], told[1]]
            assert select({"transitions": twice}, records).call_ids == ("a", "b")
    snapshot = {"output": [said("up"), asked(), said("left")], "id": "chatcmpl-d"}
    line = [root, record("d", [said("left")], root)]
    named_first = {**snapshot, "id": "chatcmpl-a"}
    for shown in (named_first, snapshot):
        result = {"transitions": [{"response": snapshot}, {"response": shown}]}
        assert select(result, line).call_ids == ("a", "d")
    other = {**snapshot, "id": "chatcmpl-x"}
    result = {"transitions": [{"response": snapshot}, {"response": other}]}
    assert _refused(result, [*line, record("x", [said("down")])]).fault == "answer_not_captured"


def _refused(result: object, records: list[CallRecord] | None = None) -> SelectionRefusedError:
    with pytest.raises(SelectionRefusedError) as caught:
        select(result, records)
    return caught.value


TRIPLETS = [*TWINS, record("t3", [said("ok")], A, intent=4)]
OTHER_RULES = [
    A,
    replace(B, output=None if B.output is None else replace(B.output, normalization_version=4)),
]


@pytest.mark.requirement("SEL-2")
def test_references_alone_need_no_summaries() -> None:
    named = {"ng_trajectory": {"turns": [{"model_calls": ["a", "b"]}]}}
    assert select(named, OTHER_RULES).call_ids == ("a", "b")
    shown = _refused({**named, "output": [*A_SAYS, *B_SAYS]}, OTHER_RULES)
    assert shown.fault == "normalization_unsupported"


CUTS = [record("ab", [said("a"), said("b")]), record("a", [said("a")]), record("b", [said("b")])]


@pytest.mark.requirement("SEL-2")
@pytest.mark.parametrize(
    ("result", "records", "fault", "call_ids"),
    [
        (None, RECORDS, "history_missing", ()),
        ({}, RECORDS, "history_missing", ()),
        ({"reward": 1.0}, RECORDS, "history_missing", ()),
        ({"response": None}, RECORDS, "history_missing", ()),
        ({"response": {"output": []}}, RECORDS, "history_missing", ()),
        ({"responses": [], "ng_trajectory": {"turns": []}}, RECORDS, "history_missing", ()),
        ({"output": [asked(), seen(1)]}, RECORDS, "history_missing", ()),
        ([], RECORDS, "history_unreadable", ()),
        ({"response": 7}, RECORDS, "history_unreadable", ()),
        ({"responses": {"a": 1}}, RECORDS, "history_unreadable", ()),
        ({"responses": ["done"]}, RECORDS, "history_unreadable", ()),
        ({"transitions": [3]}, RECORDS, "history_unreadable", ()),
        ({"output": ["done"]}, RECORDS, "history_unreadable", ()),
        ({"output": [{"type": "computer_call"}]}, RECORDS, "history_unreadable", ()),
        ({"output": [{"role": "assistant", "content": 5}]}, RECORDS, "history_unreadable", ()),
        ({"ng_trajectory": []}, RECORDS, "history_unreadable", ()),
        ({"ng_trajectory": {"turns": [{"model_calls": [{}]}]}}, RECORDS, "history_unreadable", ()),
        ({"ng_trajectory": {"turns": [{"model_calls": [5]}]}}, RECORDS, "history_unreadable", ()),
        ({"output": [said("never said")]}, RECORDS, "answer_not_captured", ()),
        ({"output": [said("done", "b")]}, RECORDS, "answer_not_captured", ("c",)),
        (
            {"responses": [{"id": "chatcmpl-b", "output": C_SAYS}]},
            RECORDS,
            "answer_not_captured",
            ("b",),
        ),
        (
            {"output": [A_SAYS[0], A_SAYS[1], seen(1), A_SAYS[2], seen(2)]},
            RECORDS,
            "answer_split",
            ("a",),
        ),
        (
            {"responses": [{"output": B_SAYS[:2]}, {"output": B_SAYS[2:]}]},
            RECORDS,
            "answer_split",
            ("b",),
        ),
        (
            {"output": [thought("first", "a"), tool(1, "a"), seen(1)]},
            RECORDS,
            "answer_split",
            ("a",),
        ),
        ({"output": [A_SAYS[0], A_SAYS[2], A_SAYS[1]]}, RECORDS, "answer_reordered", ("a",)),
        ({"output": [*B_SAYS, seen(3), *A_SAYS]}, RECORDS, "answer_reordered", ("b",)),
        ({"output": [*C_SAYS, asked(), *C_SAYS]}, RECORDS, "answer_duplicated", ("c",)),
        ({"output": [said("ok")] * 3}, TWINS, "answer_duplicated", ("t1", "t2")),
        ({"output": [said("ok")]}, TWINS, "answer_ambiguous", ("t1", "t2")),
        ({"output": [said("ok")] * 2}, TRIPLETS, "answer_ambiguous", ("t1", "t2", "t3")),
        ({"output": [said("a"), said("b")]}, CUTS, "answer_ambiguous", ()),
        ({"output": A_SAYS}, OTHER_RULES, "normalization_unsupported", ("b",)),
        (
            {"ng_trajectory": {"turns": [{"model_calls": ["nobody"]}]}},
            RECORDS,
            "reference_unknown",
            (),
        ),
        (
            {
                "ng_trajectory": {
                    "turns": [{"model_calls": [{"call_id": "a", "response_id": "chatcmpl-b"}]}]
                }
            },
            RECORDS,
            "reference_unknown",
            (),
        ),
        (
            {"ng_trajectory": {"turns": [{"model_calls": ["a", "chatcmpl-a"]}]}},
            RECORDS,
            "reference_duplicated",
            ("a",),
        ),
        (
            {"ng_trajectory": REFERENCES, "output": [*A_SAYS, *B_SAYS]},
            RECORDS,
            "history_contradicts_references",
            (),
        ),
        (
            {"ng_trajectory": REFERENCES, "output": [*A_SAYS, *C_SAYS, *B_SAYS]},
            RECORDS,
            "history_contradicts_references",
            (),
        ),
        (
            {"ng_trajectory": REFERENCES, "output": [*TRANSCRIPT, asked(), said("nonsense")]},
            RECORDS,
            "history_contradicts_references",
            (),
        ),
        (
            {"responses": [{"output": C_SAYS}], "transitions": [TRANSCRIPT]},
            RECORDS,
            "history_contradicts_references",
            (),
        ),
        (
            {"responses": [{"output": C_SAYS}], "response": {"output": A_SAYS}},
            RECORDS,
            "history_contradicts_references",
            (),
        ),
    ],
)
def test_evidence_that_cannot_be_taken_says_why(
    result: object, records: list[CallRecord], fault: str, call_ids: tuple[str, ...]
) -> None:
    error = _refused(result, records)
    assert error.fault == fault
    assert tuple(sorted(error.call_ids)) == call_ids


@pytest.mark.requirement("SEL-2")
def test_a_record_without_a_summary_is_never_matched_by_content() -> None:
    records = [record("a", None)]
    assert _refused({"output": [said("ok", "a")]}, records).fault == "answer_not_captured"
    assert select({"ng_trajectory": {"turns": [{"model_calls": ["a"]}]}}, records).call_ids == (
        "a",
    )


@pytest.mark.requirement("SEL-2")
def test_every_fault_of_evidence_is_provoked_here() -> None:
    marks = test_evidence_that_cannot_be_taken_says_why.pytestmark
    provoked = {case[2] for mark in marks if mark.name == "parametrize" for case in mark.args[1]}
    of_history = {
        fault
        for fault in SelectionFault
        if fault.startswith(("history_", "answer_", "reference_", "normalization_"))
    }
    assert provoked == of_history


@pytest.mark.requirement("SEL-2")
@pytest.mark.parametrize("change", [list.reverse, lambda items: items.insert(1, tool(9)), list.pop])
def test_an_answer_counts_only_whole_and_as_it_was(change: Callable[[list[Item]], object]) -> None:
    changed = list(B_SAYS)
    change(changed)
    assert _refused({"output": changed}).fault in ("answer_not_captured", "answer_reordered")


@pytest.mark.requirement("SEL-2")
def test_a_long_conversation_of_equal_answers_is_read_in_time() -> None:
    records: list[CallRecord] = []
    for number in range(2000):
        parent = records[-1] if records else None
        records.append(record(f"c{number}", [said("ok")], parent))
    shown = [item for _ in records for item in (said("ok"), asked())]
    assert select({"output": shown}, records).call_ids == tuple(one.call_id for one in records)
