"""What `callforest explain` says of a call, and the rows that `callforest show` draws."""

import xml.etree.ElementTree as ET

import pytest

from callforest.capture.v1 import attempt_pb2, call_record_pb2, capture_admission_pb2
from callforest.ledger.v1 import ledger_service_pb2 as pb
from callforest_mesh.call_graph import draw
from callforest_mesh.explanation import explain
from callforest_mesh.training_rows import row_lines, rows_of
from tests.unit.mesh.attempts import manifest, receipt, record

pytestmark = pytest.mark.requirement("OPS-4")

WHY = "no call of the attempt ends with the request's last answer"
ROOT = capture_admission_pb2.Verdict(
    root=capture_admission_pb2.Root(
        reason=capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED,
        nearest_call_id="c1",
        shared_atom_count=4,
    )
)


def test_a_root_says_where_it_left_the_history() -> None:
    made = record("c2")
    made.difference.kind = call_record_pb2.DIFFERENCE_CLASS_REWRITTEN_HISTORY
    made.difference.against_call_id = "c1"
    made.difference.atom_index = 4
    lines = explain("r1/c2", pb.GetCallResponse(verdict=ROOT, record=made), None)
    assert lines == [
        "call r1/c2",
        f"  admitted: root, for {WHY}; 4 atoms are those of c1",
        "  differs: rewritten_history at atom 4 against c1",
        "  recorded: 0 inherited, 3 carried, 5 generated, weights 2, stop",
        "  selection: the rollout is not finalized",
    ]


@pytest.mark.parametrize("reason", list(capture_admission_pb2.RootReason.values()))
def test_every_root_reason_has_words(reason: capture_admission_pb2.RootReason.ValueType) -> None:
    verdict = capture_admission_pb2.Verdict(root=capture_admission_pb2.Root(reason=reason))
    (_, admitted, *_) = explain("r1/c", pb.GetCallResponse(verdict=verdict), None)
    assert "newer release" not in admitted


def test_a_continuation_says_in_which_sense_and_what_the_worker_did() -> None:
    verdict = capture_admission_pb2.Verdict(
        continuation=capture_admission_pb2.Continuation(
            parent_call_id="c1",
            prev_token_count=8,
            match=capture_admission_pb2.HISTORY_MATCH_TOOL_CONTENT_EQUIVALENT,
        )
    )
    made = record("c2")
    made.decision.input = capture_admission_pb2.CAPTURE_INPUT_ROOT
    made.decision.reason = "turn_differs"
    made.decision.notes.append("template_truncated_reasoning")
    lines = explain("r1/c2", pb.GetCallResponse(verdict=verdict, record=made), receipt("c2"))
    assert "continuation of c1: the history is equal but for how missing text is spelt" in lines[1]
    assert lines[2] == (
        "  engine input: the rendering as it is, a fresh root: turn_differs; "
        "template_truncated_reasoning"
    )
    assert lines[-1] == "  selection: in"


def test_what_has_no_record_says_why() -> None:
    failed = pb.GetCallResponse(verdict=ROOT)
    failed.failures.add(
        reason="worker_capture_failed", worker_reason="stage_timeout", detail="late"
    )
    assert "  failed: worker_capture_failed/stage_timeout late" in explain("r1/c", failed, None)
    why = "  selection: out, its capture failed: no tokens of it can be verified"
    assert explain("r1/c", failed, receipt("a"))[-1] == why
    pending = explain("r1/c", pb.GetCallResponse(verdict=ROOT), receipt("a"))
    assert pending[-1] == "  selection: out, it was pending when the attempt was sealed"
    withdrawn = pb.GetCallResponse(
        verdict=ROOT,
        withdrawal=attempt_pb2.CallWithdrawal(reason="REQUEST_REFUSED", detail="too long"),
    )
    assert "  withdrawn: REQUEST_REFUSED too long" in explain("r1/c", withdrawn, None)
    pending = explain("r1/c", pb.GetCallResponse(verdict=ROOT), None)
    assert "  pending: neither a record nor a failure is durable" in pending


def test_a_call_outside_the_selection_says_why() -> None:
    made = receipt("a")
    made.calls.add(call_id="b", reason="not_returned")
    lines = explain("r1/b", pb.GetCallResponse(verdict=ROOT, record=record("b")), made)
    assert lines[-1] == "  selection: out, not_returned"


SHARED = (record("a"), record("b", "a"), record("c", "a"), record("x"))


def test_rows_show_who_owns_which_loss() -> None:
    chosen = receipt("a", "b", "c", selected_call_ids=["a", "b", "c"])
    rows = rows_of(manifest(*SHARED), chosen)
    assert row_lines(rows) == ["row 0  a > b", "row 1  [a] c"]
    root = ET.fromstring(draw(manifest(*SHARED), chosen))
    marks = [one.get("class") for one in root.iter() if one.get("class") in ("owned", "context")]
    assert marks == ["owned", "owned", "context", "owned"]


def test_a_chain_receipt_has_one_row_and_a_masked_one_none() -> None:
    made = manifest(record("a"), record("b", "a"))
    assert row_lines(rows_of(made, receipt("a", "b"))) == ["row 0  a > b"]
    assert rows_of(made, receipt("a", masked=True, mask_reason="pending_call")) == ()
    assert rows_of(made, None) == ()


def test_a_long_row_fits_the_screen() -> None:
    calls = [record("c0"), *(record(f"c{i}", f"c{i - 1}") for i in range(1, 400))]
    (line,) = row_lines(rows_of(manifest(*calls), receipt(*(f"c{i}" for i in range(400)))))
    assert len(line) < 160
    assert "more" in line
