"""What `callforest show` prints and draws."""

import xml.etree.ElementTree as ET

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest_mesh.attempt_report import report, tree
from callforest_mesh.call_graph import TooManyCallsError, draw
from tests.unit.mesh.attempts import manifest, receipt, record

FOREST = (
    record("a"),
    record("b", "a"),
    record("x"),
    record("c", "a"),
    record("d", "b"),
    record("e", "d"),
)


def test_a_forest_is_drawn_in_commit_order() -> None:
    drawn = [f"{line.branch}{line.record.coords.call_id}" for line in tree(FOREST)]
    assert drawn == ["a", "|- b", "|  `- d", "|  `- e", "`- c", "x"]


def test_a_long_chain_does_not_run_off_the_screen() -> None:
    chain = [record("c0"), *(record(f"c{i}", f"c{i - 1}") for i in range(1, 5000))]
    lines = tree(chain)
    assert [line.record.coords.call_id for line in lines] == [f"c{i}" for i in range(5000)]
    assert max(len(line.branch) for line in lines) < 10


def test_a_call_whose_parent_is_not_there_is_shown() -> None:
    assert [line.record.coords.call_id for line in tree([record("b", "gone")])] == ["b"]


def test_a_report_counts_and_names() -> None:
    lines = report(manifest(*FOREST), receipt("a", "b", total_token_count=16))
    assert lines[0] == "attempt r1  sealed  epoch 4  revision 9"
    assert lines[1] == "  6 calls committed, 0 failed, 0 pending"
    assert "a  0+3+5=8 tokens  weights 2  stop  trains" in lines[2]
    assert "|- b  8+3+5=16 tokens  weights 2  stop  trains" in lines[3]
    assert not any("c  8" in line and "trains" in line for line in lines)
    assert "receipt  group g slot 0  reward 0.5" in lines


@pytest.mark.requirement("LED-2")
def test_a_report_shows_what_was_withdrawn_apart_from_what_failed() -> None:
    made = manifest(record("a"))
    withdrawn = attempt_pb2.CallWithdrawal(call_id="w", reason="REQUEST_REFUSED", detail="too long")
    entry = attempt_pb2.ManifestEntry(withdrawal=withdrawn)
    made = type(made)(made.attempt, (*made.entries, entry))
    lines = report(made, None)
    assert lines[1] == "  1 calls committed, 0 failed, 1 withdrawn, 0 pending"
    assert "  withdrawn w  REQUEST_REFUSED: too long" in lines


def test_a_report_says_why_nothing_trains() -> None:
    made = manifest(record("a"))
    failure = attempt_pb2.CallFailure(
        call_id="z", reason="worker_capture_failed", worker_reason="stage_timeout", detail="late"
    )
    made = type(made)(made.attempt, (*made.entries, attempt_pb2.ManifestEntry(failure=failure)))
    made.attempt.pending_call_ids.append("p")
    masked = receipt(
        "a",
        masked=True,
        mask_reason="capture_poisoned",
        mask_detail="z",
        mask_cause="worker_capture_failed/stage_timeout",
        terminal_trail="content: none",
    )
    lines = report(made, masked)
    assert "  failed z  worker_capture_failed (stage_timeout): late" in lines
    assert "  pending p" in lines
    assert "  masked: capture_poisoned (z)" in lines
    assert "  first failure: worker_capture_failed/stage_timeout" in lines
    assert "  no call attributed: content: none" in lines
    assert not any("trains" in line for line in lines)
    saved = receipt("a", salvaged_from="pending_call", mask_detail="p")
    assert "  trains, salvaged from pending_call (p)" in report(made, saved)
    refused = receipt("a", masked=True, mask_reason="selection_refused", mask_cause="answer_split")
    assert "  fault: answer_split" in report(made, refused)


def test_a_receipt_of_another_attempt_is_not_shown() -> None:
    other = receipt("a")
    other.capture_key = "r1-a1"
    assert not any("receipt" in line for line in report(manifest(record("a")), other))
    assert "not finalized" in draw(manifest(record("a")), other)


def test_a_graph_has_a_box_a_call_and_an_edge_a_parent() -> None:
    drawn = ET.fromstring(draw(manifest(*FOREST), receipt("a", "b")))
    classes = [one.get("class") for one in drawn.iter()]
    assert classes.count("call") == 6
    assert classes.count("loss") == 2
    assert classes.count("rejected") == 4
    assert classes.count("note") == 1, "what the marks mean"
    edges = [one for one in drawn.iter() if one.get("stroke") == "slategray"]
    assert len(edges) == 4
    places = [
        (one.get("x"), one.get("y"))
        for one in drawn.iter()
        if one.tag.endswith("rect") and one.get("stroke") == "black"
    ]
    assert len(places) == len(set(places)) == 6 + 2, "no box or row segment hides another"


def test_calls_without_tokens_are_named_and_marks_follow_the_receipt() -> None:
    made = manifest(*FOREST)
    failure = attempt_pb2.CallFailure(call_id="z<", reason="worker_capture_failed")
    entries = (*made.entries, attempt_pb2.ManifestEntry(failure=failure))
    made.attempt.pending_call_ids.append("p")
    drawn = ET.fromstring(draw(type(made)(made.attempt, entries), None))
    classes = [one.get("class") for one in drawn.iter()]
    assert classes.count("idle") == 6
    assert "rejected" not in classes
    notes = [one.text for one in drawn.iter() if one.get("class") == "note"]
    assert notes[:2] == ["failed z<: worker_capture_failed", "pending p"]


def test_names_are_escaped() -> None:
    made = manifest(record("<script>"))
    made.attempt.capture_key = "a&b"
    finalized = receipt("<script>")
    finalized.capture_key = made.attempt.capture_key
    for known in (None, finalized):
        assert "<script>" not in draw(made, known)
        ET.fromstring(draw(made, known))


def test_an_empty_attempt_can_be_drawn() -> None:
    ET.fromstring(draw(manifest(), None))


def test_too_many_calls_are_refused() -> None:
    with pytest.raises(TooManyCallsError):
        draw(manifest(*(record(f"c{i}") for i in range(2001))), None)
