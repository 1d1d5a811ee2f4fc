"""What the finalizer decides of a rollout of forest mode: choices, masks, receipts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from callforest.capture.v1 import attempt_pb2, receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.custody.call import CallRecord
from callforest_core.custody.extras import encode_extras
from callforest_core.forest.receipts import receipt_digest
from callforest_core.forest.reconstruction import Forest
from callforest_core.forest.selection import SelectionRefusedError
from callforest_core.lineage.source import output_summary
from callforest_mesh.chassis.instruments import Metrics
from callforest_mesh.finalizer import core, forest, spans
from callforest_mesh.finalizer.policies import Policy, resolve_policy
from tests.unit.custody.chains import KEY, Attempt, Turn, branching
from tests.unit.finalizer.rollouts import evidence, failure, records_of, request, sealed

RETURNED = resolve_policy("returned_history")
EVERYTHING = resolve_policy("all_captured")
CUSTOM = resolve_policy("tests.unit.finalizer.harness_policies:last_root")
EXCUSED = "request_finished_without_staged_coordinates"
FOREST = attempt_pb2.CAPTURE_MODE_FOREST


def said(call_id: str) -> dict[str, object]:
    return {"type": "message", "role": "assistant", "content": f"I am {call_id}"}


def known(attempt: Attempt | None = None, **changes: object) -> tuple[CallRecord, ...]:
    """Records of `branching`, each having said its name, announced in the order of capture."""
    return tuple(
        replace(
            record,
            output=output_summary([said(record.call_id)]),
            admitted_at=float(number),
            **changes,
        )
        for number, record in enumerate(records_of(attempt or branching(), finish_reason="stop"))
    )


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def result_of(*names: str, **fields: object) -> bytes:
    return as_json({"response": {"output": [said(name) for name in names]}, **fields})


def choose(policy: Policy = RETURNED, records: tuple[CallRecord, ...] = (), **asked: object):
    return forest.choose(request(**asked), records or known(), policy)


def refused(policy: Policy = RETURNED, **asked: object) -> SelectionRefusedError:
    with pytest.raises(SelectionRefusedError) as caught:
        choose(policy, **asked)
    return caught.value


@pytest.mark.requirement("SEL-2", "SEL-6")
def test_the_returned_history_selects_and_its_last_answer_is_scored() -> None:
    choice = choose(result=result_of("r", "c1", "c3"))
    assert choice.selection.call_ids == ("r", "c1", "c3")
    assert (choice.scored.call_id, choice.scored.stage) == ("c3", "content")
    declared = choose(result=result_of("c1", "c3"), declared_response_id="resp-c3")
    assert (declared.scored.call_id, declared.scored.stage) == ("c3", "declared")
    earlier = choose(
        result=as_json({"responses": [{"output": [said("c1")]}, {"output": [said("c3")]}]}),
        scored_response=as_json({"id": "resp-c1"}),
    )
    assert earlier.scored.call_id == "c1", "the scored call need not be last"


@pytest.mark.requirement("SEL-2", "SEL-6")
def test_a_scored_response_that_is_the_result_s_own_is_read_in_its_history() -> None:
    """Two calls of one line said the same; the history tells which of them came last."""
    ok = {"role": "assistant", "content": "ok"}
    records = tuple(
        replace(one, output=output_summary([ok])) for one in known() if one.call_id in ("c1", "c3")
    )
    response = {"output": [ok, {"role": "user", "content": "go on"}, ok]}
    result = as_json({"response": response})
    choice = choose(records=records, result=result, scored_response=as_json(response))
    assert (choice.selection.call_ids, choice.scored.call_id) == (("c1", "c3"), "c3")
    other = as_json({"output": [ok]})
    with pytest.raises(SelectionRefusedError) as caught:
        choose(records=records, result=result, scored_response=other)
    assert caught.value.fault == "terminal_ambiguous"


@pytest.mark.requirement("SEL-2", "SEL-6")
@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({}, "history_missing"),
        ({"result": b"{"}, "history_unreadable"),
        ({"result": b"[" * 100_000}, "history_unreadable"),
        ({"result": b"null"}, "history_missing"),
        ({"result": result_of("nobody")}, "answer_not_captured"),
        ({"result": as_json({"responses": [{"output": [said("c1")]}]})}, "terminal_missing"),
        ({"result": result_of("c1"), "declared_response_id": "nobody"}, "terminal_missing"),
        ({"result": result_of("c1"), "declared_response_id": "resp-c3"}, "terminal_ambiguous"),
        (
            {"result": result_of("c1"), "scored_response": as_json({"id": "resp-c3"})},
            "terminal_not_selected",
        ),
    ],
)
def test_evidence_that_cannot_be_taken_is_refused(asked: dict[str, object], fault: str) -> None:
    assert refused(**asked).fault == fault


@pytest.mark.requirement("SEL-3")
def test_all_captured_takes_every_branch() -> None:
    choice = choose(EVERYTHING, declared_response_id="resp-c4")
    assert choice.selection.call_ids == ("c1", "c2", "c3", "r", "c4")
    assert choose(EVERYTHING, result=result_of("c4")).scored.call_id == "c4"
    assert refused(EVERYTHING).fault == "terminal_missing"
    assert refused(EVERYTHING, result=b"{").fault == "terminal_missing"


@pytest.mark.requirement("SEL-4")
def test_a_custom_policy_chooses_and_is_held_to_the_same() -> None:
    choice = choose(CUSTOM, result=b'{"keep": ["r", "c1"]}')
    assert (choice.selection.call_ids, choice.scored.call_id) == (("r", "c1"), "c1")
    assert choice.selection.policy == CUSTOM.name
    assert refused(CUSTOM, result=b'{"keep": ["c1", "c1"]}').fault == "policy_duplicated"
    assert refused(CUSTOM).fault == "policy_failed", "the result that it needs was not given"
    wrong = refused(CUSTOM, result=b'{"keep": ["c1"]}', declared_response_id="resp-r")
    assert wrong.fault == "terminal_ambiguous"


@pytest.mark.requirement("SEL-6", "SEL-7")
@pytest.mark.parametrize(
    ("call_ids", "terminal", "fault"),
    [
        (["c1", "c3"], "c1", None),
        (["c1", "z"], "c1", "policy_unknown"),
        (["c1", "c1"], "c1", "policy_duplicated"),
        ([], "c1", "policy_empty"),
        (["c1"], "c3", "terminal_not_selected"),
        (["c1"], "", "terminal_not_selected"),
    ],
)
def test_an_explicit_selection_stands_before_any_policy(
    call_ids: list[str], terminal: str, fault: str | None
) -> None:
    asked = {"selection": {"call_ids": call_ids, "terminal_call_id": terminal}}
    if fault is not None:
        assert refused(CUSTOM, **asked).fault == fault
        return
    choice = choose(CUSTOM, **asked)
    assert choice.selection.call_ids == tuple(call_ids)
    assert (choice.selection.policy, choice.scored.stage) == ("explicit", "explicit")


@pytest.mark.requirement("LED-9")
@pytest.mark.parametrize(
    ("failed", "reason", "selected", "mask"),
    [
        ("c2", EXCUSED, ("c1", "c3"), None),
        ("c2", EXCUSED, ("c1", "c2"), "capture_poisoned"),
        ("c9", EXCUSED, ("c1", "c3"), "capture_poisoned"),
        ("c2", "worker_capture_failed", ("c1", "c3"), "capture_poisoned"),
        ("c9", "unresolved_parent", ("c1", "c3"), "capture_poisoned"),
    ],
)
def test_a_failure_masks_but_for_a_recorded_call_outside_the_selection(
    failed: str, reason: str, selected: tuple[str, ...], mask: str | None
) -> None:
    row = attempt_pb2.CallFailure(capture_key=KEY, call_id=failed, reason=reason)
    given = evidence(sealed(mode=FOREST), known(), [row])
    found = forest.mask_before_selection(given)
    if found is None:
        choice = choose(selection={"call_ids": selected, "terminal_call_id": "c1"})
        found = forest.mask_of_selection(given, choice.selection)
    assert (None if found is None else found.reason) == mask


@pytest.mark.requirement("LED-9")
def test_nothing_is_excused_while_a_call_is_pending() -> None:
    row = attempt_pb2.CallFailure(capture_key=KEY, call_id="c2", reason=EXCUSED)
    pending = sealed(mode=FOREST, pending_call_ids=["c8"])
    found = forest.mask_before_selection(evidence(pending, known(), [row]))
    assert found == core.Mask("pending_call", "c8")


@pytest.mark.requirement("LED-7")
def test_what_the_ledger_alone_shows_masks_without_any_evidence_of_acceptance() -> None:
    assert forest.mask_before_selection(evidence()).reason == "attempt_not_captured"
    assert forest.mask_before_selection(evidence(sealed())).reason == "attempt_not_captured"
    first = evidence(sealed(), failures=[failure(detail="gone")])
    assert forest.mask_before_selection(first).reason == "capture_poisoned"


@pytest.mark.requirement("SEL-5", "SEL-8")
@pytest.mark.parametrize(
    ("selected", "changes", "mask"),
    [
        (("c1", "c3"), {}, None),
        (("c3", "r"), {}, "selection_not_closed"),
        (("c1", "c3"), {"status": "failed"}, "selected_call_incomplete"),
        (("c1", "c3"), {"status": "odd"}, "selected_call_incomplete"),
        (
            ("c1", "c3"),
            {"status": "incomplete", "finish_reason": "content_filter"},
            "selected_call_incomplete",
        ),
        (("c1", "c3"), {"status": "incomplete", "finish_reason": "length"}, None),
    ],
)
def test_an_unfit_selection_masks_its_rollout_alone(
    selected: tuple[str, ...], changes: dict[str, str], mask: str | None
) -> None:
    records = tuple(
        replace(one, **changes) if one.call_id == selected[0] else one for one in known()
    )
    choice = choose(selection={"call_ids": selected, "terminal_call_id": selected[0]})
    found = forest.mask_of_selection(evidence(sealed(), records), choice.selection)
    assert (None if found is None else found.reason) == mask


@pytest.mark.requirement("SEL-8")
def test_a_selected_call_without_completion_is_an_error_not_a_mask() -> None:
    records = tuple(replace(one, status="") for one in known())
    choice = choose(selection={"call_ids": ["c1"], "terminal_call_id": "c1"})
    with pytest.raises(SelectionRefusedError) as caught:
        forest.mask_of_selection(evidence(sealed(), records), choice.selection)
    assert caught.value.fault == "completion_missing"


def verified(selected: tuple[str, ...], attempt: Attempt | None = None) -> Forest | core.Mask:
    made = attempt or branching()
    choice = choose(selection={"call_ids": selected, "terminal_call_id": selected[-1]})
    return forest.verify(KEY, known(made), choice, made.staged())


@pytest.mark.requirement("FOR-1", "FOR-4")
def test_a_selection_becomes_several_rows() -> None:
    grown = verified(("c1", "c2", "c3", "c4", "r"))
    assert isinstance(grown, Forest)
    paths = [row.line.call_ids for row in grown.rows]
    assert paths == [("c1", "c2"), ("c1", "c3", "c4"), ("r",)]


@pytest.mark.requirement("FOR-4")
@pytest.mark.bugcase("B20")
def test_one_flipped_token_of_a_branch_that_does_not_train_masks_with_its_code() -> None:
    attempt = branching()
    call = attempt.calls["c2"]
    flipped = call.token_ids.copy()
    flipped[0] ^= 1
    attempt.calls["c2"] = replace(call, token_ids=flipped)
    mask = verified(("c1", "c3"), attempt)
    assert isinstance(mask, core.Mask)
    assert mask.reason == "corrupt_digest"
    assert "c2" in mask.detail


@pytest.mark.requirement("FOR-4")
def test_a_selected_call_of_another_distribution_masks() -> None:
    attempt = Attempt(Turn("c1", None, [1], [2]), Turn("c2", "c1", [3], [4]))
    records = known(attempt)
    calls = attempt.staged()
    calls[1] = replace(calls[1], extras=encode_extras({"sampling": {"temperature": 0.5}}))
    choice = choose(records=records, selection={"call_ids": ["c1", "c2"], "terminal_call_id": "c2"})
    mask = forest.verify(KEY, records, choice, calls)
    assert isinstance(mask, core.Mask)
    assert mask.reason == "sampling_mismatch"


def receipt_for(
    selected: tuple[str, ...],
    mask: core.Mask | None = None,
    records: tuple[CallRecord, ...] = (),
    **asked: object,
) -> receipt_pb2.Receipt:
    choice = choose(selection={"call_ids": selected, "terminal_call_id": selected[-1]})
    grown = verified(selected)
    assert isinstance(grown, Forest)
    given = evidence(sealed(mode=FOREST), records or known())
    return forest.make_receipt(request(**asked), given, choice, grown, mask)


@pytest.mark.requirement("FIN-1", "FOR-7")
def test_a_receipt_says_of_every_call_why_it_trains_or_not() -> None:
    receipt = receipt_for(("c1", "c3", "r"))
    assert [(one.call_id, one.selected, one.reason) for one in receipt.calls] == [
        ("c1", True, "selected"),
        ("c2", False, "not_chosen"),
        ("c3", True, "selected"),
        ("r", True, "selected"),
        ("c4", False, "not_chosen"),
    ]
    parents = {one.call_id: one.parent_call_id for one in receipt.calls}
    assert parents == {"c1": "", "c2": "c1", "c3": "c1", "r": "", "c4": "c3"}
    assert not receipt.calls[0].HasField("parent_call_id")
    assert list(receipt.selected_call_ids) == ["c1", "c3", "r"]
    assert (receipt.mode, receipt.selection_policy) == (FOREST, "explicit")
    assert (receipt.terminal_call_id, receipt.terminal_selection) == ("r", "explicit")
    assert receipt.generated_token_count == 2 + 1 + 1
    assert receipt.longest_generation_token_count == 2
    assert receipt.total_token_count == 7
    assert not receipt.truncated
    assert receipt.digest == receipt_digest(receipt)


@pytest.mark.requirement("FOR-6")
@pytest.mark.parametrize(("cut", "truncated"), [("c1", True), ("c3", True), ("c2", False)])
def test_a_selected_generation_that_stopped_for_length_truncates_the_rollout(
    cut: str, *, truncated: bool
) -> None:
    records = tuple(
        replace(one, status="incomplete", finish_reason="length") if one.call_id == cut else one
        for one in known()
    )
    assert receipt_for(("c1", "c3"), records=records).truncated == truncated


@pytest.mark.requirement("FIN-9")
def test_an_environment_mask_keeps_what_was_generated() -> None:
    mask = core.Mask(core.ENVIRONMENT_MASKED)
    receipt = receipt_for(("c1", "c3"), mask, environment_masked=True)
    assert (receipt.masked, receipt.mask_reason) == (True, "environment_masked")
    assert receipt.environment_masked
    assert receipt.generated_token_count == 3
    assert [one.selected for one in receipt.calls] == [False] * 5
    assert {one.reason for one in receipt.calls} == {"masked", "not_chosen"}


@pytest.mark.requirement("LED-7")
def test_a_rollout_masked_before_its_selection_selects_nothing() -> None:
    given = evidence(sealed(mode=FOREST), known(), [failure()])
    mask = core.Mask("capture_poisoned", "c9")
    receipt = forest.make_receipt(request(), given, None, None, mask)
    assert not receipt.selected_call_ids
    assert {one.reason for one in receipt.calls} == {"masked"}
    assert (receipt.generated_token_count, receipt.mask_cause) == (0, "worker_capture_failed")
    assert receipt.digest == receipt_digest(receipt)


def test_a_refusal_names_the_fault_and_the_calls() -> None:
    error = refused(selection={"call_ids": ["c1", "z"], "terminal_call_id": "c1"})
    told = forest.refusal("r0", error)
    assert told.reason == er.ERROR_REASON_SELECTION_REFUSED
    assert told.facts == {"rollout_id": "r0", "fault": "policy_unknown", "call_ids": "z"}


def test_refused_selections_are_counted_by_their_fault() -> None:
    metrics = Metrics()
    counted = spans.Refused(metrics)
    error = refused(selection={"call_ids": ["c1", "z"], "terminal_call_id": "c1"})
    counted.count(error.fault)
    (counter,) = metrics.counters
    assert counter.description.name == "callforest.finalizer.selection_refused"
    assert counter.sums() == [({"fault": "policy_unknown"}, 1)]
    mask = forest.mask_of_refusal(error)
    assert (mask.reason, mask.cause) == ("selection_refused", "policy_unknown")
    assert mask.reason in spans.MASK_REASONS


@pytest.mark.requirement("FOR-7", "FIN-9", "SEL-5")
def test_each_logical_rollout_is_measured_once_and_what_is_unverified_as_nothing() -> None:
    metrics = Metrics()
    counted = spans.Finalized(metrics)
    counted.count(receipt_for(("c1", "c3", "r")))
    environment = core.Mask(core.ENVIRONMENT_MASKED)
    counted.count(receipt_for(("c1", "c3", "r"), environment, environment_masked=True))
    broken = forest.make_receipt(
        request(), evidence(sealed()), None, None, core.Mask("selection_not_closed")
    )
    counted.count(broken)
    counters = {one.description.name: one.sums() for one in metrics.counters}
    prefix = "callforest.finalizer"
    assert counters[f"{prefix}.rollouts"] == [
        ({"mask_reason": "none"}, 1),
        ({"mask_reason": "environment_masked"}, 1),
        ({"mask_reason": "selection_not_closed"}, 1),
    ]
    assert counters[f"{prefix}.selection_not_closed_rollouts"] == [({}, 1)]
    assert counters[f"{prefix}.environment_masked_rollouts"] == [({}, 1)]
    lengths = {one.description.name: one.distributions() for one in metrics.histograms}
    for name, total in (
        ("gen_tokens_per_sample", 4 + 4 + 0),
        ("max_gen_tokens_per_turn", 2 + 2 + 0),
        ("total_tokens_per_sample", 7 + 7 + 0),
    ):
        ((labels, seen),) = lengths[f"{prefix}.{name}"]
        assert (labels, sum(seen.counts), seen.total) == ({"mode": "forest"}, 3, total)
