"""Terminal attribution: witnesses agree or attribute nothing; the heuristic comes last."""

from collections.abc import Callable

import pytest

from callforest_core.custody.call import CallRecord
from callforest_core.lineage.fingerprint import assistant_fingerprint
from callforest_core.lineage.terminal import (
    SelectionReason,
    Terminal,
    TerminalStage,
    Witness,
    attribute_terminal,
    resolve_terminal,
    select_terminal_call,
)

MakeRecord = Callable[..., CallRecord]

USER: dict[str, object] = {"role": "user", "content": "hi"}


def said(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def speaking(make_record: MakeRecord, call_id: str, text: str, **changes: object) -> CallRecord:
    own = assistant_fingerprint([said(text)])
    prints = {"output_fingerprint": own, "continuation_fingerprint": own}
    return make_record(call_id, **{**prints, **changes})


@pytest.fixture
def two(make_record: MakeRecord) -> list[CallRecord]:
    """Two roots, `a` that said A and, admitted later, `b` that said B."""
    return [
        speaking(make_record, "a", "A"),
        speaking(make_record, "b", "B", admitted_at=200.0),
    ]


def scored(response_id: object = None, *items: object) -> dict[str, object]:
    return {"id": response_id, "output": list(items)}


@pytest.mark.requirement("SEL-1")
@pytest.mark.parametrize(
    ("response", "declared", "expected"),
    [
        (None, "resp-b", Terminal("b", TerminalStage.DECLARED, "no_response_object")),
        (
            scored("resp-b"),
            None,
            Terminal("b", TerminalStage.RESPONSE_ID, "response_has_no_output"),
        ),
        (scored(None, said("B")), None, Terminal("b", TerminalStage.CONTENT, "response_has_no_id")),
        (
            scored("resp-b", said("B")),
            "resp-b",
            Terminal("b", TerminalStage.DECLARED, "corroborated_by=response_id+content"),
        ),
    ],
    ids=["declared", "response id", "content", "all agree"],
)
def test_agreeing_witnesses_attribute_and_the_first_names_the_stage(
    two: list[CallRecord], response: object, declared: str | None, expected: Terminal
) -> None:
    assert attribute_terminal(two, response, declared) == expected


@pytest.mark.requirement("SEL-1")
@pytest.mark.parametrize(
    ("response", "declared", "stage", "trail"),
    [
        (
            scored("resp-a", said("B")),
            None,
            TerminalStage.CONTENT,
            "witness_disagreement[response_id=a;content=b]",
        ),
        (
            scored("resp-b", said("B")),
            "resp-a",
            TerminalStage.DECLARED,
            "witness_disagreement[declared=a;response_id=b;content=b]",
        ),
    ],
)
def test_disagreeing_witnesses_attribute_nothing_and_never_reach_the_heuristic(
    two: list[CallRecord],
    response: object,
    declared: str | None,
    stage: TerminalStage,
    trail: str,
) -> None:
    assert select_terminal_call(two).call_id == "a"  # the heuristic would have named one
    assert attribute_terminal(two, response, declared) == Terminal(None, stage, trail)


@pytest.mark.requirement("SEL-1")
def test_a_declared_id_that_matches_nothing_masks_and_never_falls_back(
    two: list[CallRecord],
) -> None:
    verdict = attribute_terminal(two, scored("resp-b", said("B")), "resp-lost")
    assert verdict == Terminal(None, TerminalStage.DECLARED, "declared_terminal_not_captured")


@pytest.mark.requirement("SEL-1")
def test_without_any_witness_the_heuristic_decides_or_masks_with_its_reason(
    make_record: MakeRecord,
) -> None:
    root = make_record("a")
    chain = [root, make_record("b", root)]
    verdict = attribute_terminal(chain, None, None)
    assert verdict == Terminal("b", TerminalStage.HEURISTIC, "no_response_object,selected")
    forked = [*chain, make_record("c", root)]
    verdict = attribute_terminal(forked, None, "")
    trail = "no_response_object,ambiguous_terminal"
    assert verdict == Terminal(None, TerminalStage.HEURISTIC, trail)
    verdict = attribute_terminal([], None, None)
    assert verdict == Terminal(None, TerminalStage.HEURISTIC, "no_response_object,no_records")


def test_an_explicit_call_is_a_witness_like_any_other(two: list[CallRecord]) -> None:
    named = resolve_terminal(two, scored("resp-b"), None, "b")
    assert (named.call_id, named.method) == ("b", Witness.EXPLICIT)
    lost = resolve_terminal(two, scored("resp-b"), None, "lost")
    assert (lost.call_id, lost.method) == ("b", Witness.RESPONSE_ID)
    assert lost.reason.startswith("explicit_terminal_not_captured,")
    contradicted = resolve_terminal(two, scored("resp-b"), None, "a")
    assert contradicted.call_id is None
    assert contradicted.witnesses == (Witness.EXPLICIT, Witness.RESPONSE_ID)


def test_a_merged_transcript_is_recognised_by_its_last_answer(two: list[CallRecord]) -> None:
    merged = scored(None, said("?"), USER, said("B"))
    assert resolve_terminal(two, merged, None, None).call_id == "b"
    pending = scored(None, said("?"), said("B"), USER)
    assert resolve_terminal(two, pending, None, None).call_id is None


@pytest.mark.parametrize(
    ("response", "note"),
    [
        ("text", "no_response_object"),
        (scored(5), "response_id_no_match"),
        ({"id": "", "output": "text"}, "response_has_no_output"),
        (scored(None, {"role": "assistant", "content": 5}), "response_output_unfingerprintable"),
        (
            scored(None, {"role": "assistant", "tool_calls": "x"}),
            "response_output_unfingerprintable",
        ),
        (scored(None, USER, "stray"), "no_model_authored_output"),
        (scored(None, said("never")), "no_content_match"),
    ],
)
def test_malformed_evidence_abstains_and_leaves_a_note(
    two: list[CallRecord], response: object, note: str
) -> None:
    attribution = resolve_terminal(two, response, None, None)
    assert attribution.call_id is None
    assert attribution.witnesses == ()
    assert note in attribution.reason.split(",")


def test_retries_with_one_token_sequence_are_interchangeable(make_record: MakeRecord) -> None:
    sequence = {"cumulative_hash": bytes(32), "chain_hash": bytes(32), "response_id": "resp"}
    same = [speaking(make_record, call_id, "A", **sequence) for call_id in ("z", "y")]
    assert resolve_terminal(same, None, "resp", None).call_id == "y"
    assert resolve_terminal(same, scored(None, said("A")), None, None).call_id == "y"
    differing = [
        same[0],
        speaking(make_record, "y", "A", **{**sequence, "chain_hash": bytes([1]) * 32}),
    ]
    assert resolve_terminal(differing, None, "resp", None).reason == "declared_ambiguous"
    assert (
        "content_ambiguous" in resolve_terminal(differing, scored("", said("A")), None, None).reason
    )
    assert "response_id_ambiguous" in resolve_terminal(differing, scored("resp"), None, None).reason


def test_fingerprints_of_another_version_are_no_witness(make_record: MakeRecord) -> None:
    old = speaking(make_record, "a", "A", fingerprint_version=1)
    assert resolve_terminal([old], scored(None, said("A")), None, None).call_id is None


@pytest.mark.requirement("SEL-1")
def test_the_heuristic_descends_extended_siblings(make_record: MakeRecord) -> None:
    retry = make_record("retry", admitted_at=1.0)
    root = make_record("root", admitted_at=2.0)
    abandoned = make_record("abandoned", root)
    kept = make_record("kept", root)
    last = make_record("last", kept)
    selection = select_terminal_call([retry, root, abandoned, kept, last])
    assert (selection.call_id, selection.reason) == ("last", SelectionReason.SELECTED)


@pytest.mark.parametrize(
    ("times", "expected"),
    [((3.0, 2.0), "b"), ((2.0, 2.0), "a"), ((None, 9.0), "b"), ((None, None), "a")],
)
def test_the_earliest_admitted_root_wins(
    make_record: MakeRecord, times: tuple[float | None, float | None], expected: str
) -> None:
    records = [make_record("a", admitted_at=times[0]), make_record("b", admitted_at=times[1])]
    assert select_terminal_call(records).call_id == expected


def test_a_graph_that_cannot_be_walked_selects_nothing(make_record: MakeRecord) -> None:
    root = make_record("a")
    child = make_record("b", root)
    cases = {
        SelectionReason.NO_RECORDS: [],
        SelectionReason.DUPLICATE_CALL_ID: [root, root],
        SelectionReason.ORPHANED_ROW: [child],
        SelectionReason.NO_ROOT: [make_record("a", child), child],
        SelectionReason.AMBIGUOUS_TERMINAL: [root, child, make_record("c", root)],
    }
    for reason, records in cases.items():
        selection = select_terminal_call(records)
        assert (selection.call_id, selection.reason) == (None, reason)
