"""What of an incomplete attempt trains, when that is asked for, and how biased it is (FIN-8)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.custody.call import CallRecord
from callforest_core.forest.receipts import receipt_digest
from callforest_core.forest.reconstruction import Forest
from callforest_core.lineage.source import output_summary
from callforest_mesh.chassis.instruments import Metrics
from callforest_mesh.finalizer import core, forest, spans
from callforest_mesh.finalizer.policies import Policy, resolve_policy
from callforest_mesh.trainer.core import AdvantageOptions, MaskedRewardPolicy
from callforest_mesh.trainer.rows import gather_step
from tests.unit.finalizer.forests import FOREST, Grown, batch_of
from tests.unit.finalizer.rollouts import evidence, request, sealed

pytestmark = pytest.mark.requirement("FIN-8")
RETURNED = resolve_policy("returned_history")
EVERYTHING = resolve_policy("all_captured")
EXCLUDE = AdvantageOptions(normalise=False)
INCLUDE = AdvantageOptions(normalise=False, masked_reward_policy=MaskedRewardPolicy.INCLUDE)


def said(call_id: str) -> dict[str, object]:
    return {"type": "message", "role": "assistant", "content": f"I am {call_id}"}


def shown(*call_ids: str) -> bytes:
    return json.dumps({"responses": [{"output": [said(one)]} for one in call_ids]}).encode()


def lost(call_id: str, reason: str = "worker_capture_failed") -> attempt_pb2.CallFailure:
    return attempt_pb2.CallFailure(capture_key="r", call_id=call_id, reason=reason)


def tree() -> Grown:
    """a with b and c, d behind c, and the root e."""
    grown = Grown("r", 0)
    for call_id, parent in (("a", None), ("b", "a"), ("c", "a"), ("d", "c"), ("e", None)):
        grown.call(call_id, parent)
    return grown


def speaking(grown: Grown) -> tuple[CallRecord, ...]:
    return tuple(
        replace(one, output=output_summary([said(one.call_id)])) for one in grown.records()
    )


def salvaged(
    policy: Policy = EVERYTHING,
    *,
    failures: Sequence[attempt_pb2.CallFailure] = (),
    pending: Sequence[str] = (),
    **asked: object,
) -> forest.Choice | core.Mask:
    attempt = sealed(mode=FOREST, pending_call_ids=pending)
    given = evidence(attempt, speaking(tree()), failures)
    return forest.salvage(request(**asked), given, policy)


def kept(found: forest.Choice | core.Mask) -> tuple[str, ...]:
    assert isinstance(found, forest.Choice), found
    return found.selection.call_ids


def test_what_failed_and_all_that_continues_it_does_not_train() -> None:
    everything = {"declared_response_id": "chatcmpl-e"}
    assert kept(salvaged(pending=["p"], **everything)) == ("a", "b", "c", "d", "e")
    assert kept(salvaged(failures=[lost("x")], **everything)) == ("a", "b", "c", "d", "e")
    assert kept(salvaged(failures=[lost("c")], **everything)) == ("a", "b", "e")
    assert kept(salvaged(failures=[lost("a")], **everything)) == ("e",)
    found = salvaged(failures=[lost("c")], **everything)
    assert isinstance(found, forest.Choice)
    reasons = found.selection.reasons_of("abcde", masked=False)
    assert reasons == ["selected", "selected", "capture_failed", "capture_failed", "selected"]


def test_without_its_scored_call_a_rollout_stays_masked() -> None:
    found = salvaged(failures=[lost("c")], declared_response_id="chatcmpl-d")
    assert found == core.Mask("capture_poisoned", "the scored call d failed")
    unknown = salvaged(failures=[lost("x")], declared_response_id="chatcmpl-x")
    assert isinstance(unknown, core.Mask)
    assert unknown.cause == "terminal_missing"


def test_evidence_may_name_and_show_lost_calls_and_no_others() -> None:
    asked = {"failures": [lost("x")], "pending": ["p"], "declared_response_id": "chatcmpl-d"}
    assert kept(salvaged(RETURNED, result=shown("a", "x", "c", "d"), **asked)) == ("a", "c", "d")
    two = shown("a", "x", "c", "p", "d")
    assert kept(salvaged(RETURNED, result=two, **asked)) == ("a", "c", "d")
    three = salvaged(RETURNED, result=shown("a", "x", "y", "c", "p", "d"), **asked)
    assert isinstance(three, core.Mask)
    assert three.cause == "answer_not_captured", "more than were lost"
    turns = {"turns": [{"model_calls": ["a", "x", "c", "chatcmpl-p", "d"]}]}
    named = json.dumps({"ng_trajectory": turns}).encode()
    assert kept(salvaged(RETURNED, result=named, **asked)) == ("a", "c", "d")
    mine = [said("a"), {**said("x"), "id": "msg_x"}, said("c"), said("d")]
    joined = json.dumps({"response": {"output": mine}}).encode()
    assert kept(salvaged(RETURNED, result=joined, **asked)) == ("a", "c", "d"), "its id tells"
    explicit = {"call_ids": ["a", "x", "c"], "terminal_call_id": "c"}
    assert kept(salvaged(failures=[lost("x")], selection=explicit)) == ("a", "c")
    scored = salvaged(
        failures=[lost("x")], selection={"call_ids": ["a", "x"], "terminal_call_id": "x"}
    )
    assert isinstance(scored, core.Mask)
    last = json.dumps({"response": {"output": [said("x")]}, "responses": [{"output": [said("a")]}]})
    ends = salvaged(RETURNED, failures=[lost("x")], result=last.encode())
    assert isinstance(ends, core.Mask)
    assert ends.cause == "terminal_missing", "the scored answer is that of a lost call"


def test_accounts_that_disagree_on_a_lost_answer_are_not_salvaged() -> None:
    def told(*call_ids: str) -> list[dict[str, object]]:
        return [{"output": [said(one)]} for one in call_ids]

    asked = {"failures": [lost("x")], "declared_response_id": "chatcmpl-a"}
    for transitions in (told("a"), told("x", "a"), told("a", "y")):
        result = {"responses": told("a", "x"), "transitions": transitions}
        found = salvaged(RETURNED, result=json.dumps(result).encode(), **asked)
        assert isinstance(found, core.Mask)
        assert found.cause == "history_contradicts_references"
    agreed = {"responses": told("a", "x"), "transitions": told("a", "x")}
    assert kept(salvaged(RETURNED, result=json.dumps(agreed).encode(), **asked)) == ("a",)


def test_a_lost_answer_is_not_taken_for_a_rejected_one_that_says_the_same() -> None:
    """The id of the response tells: what "b" said was rejected, and "x" said the same."""
    asked = {"failures": [lost("x")], "declared_response_id": "chatcmpl-d"}
    told = [(one, {"output": [said(one)], "id": f"chatcmpl-{one}"}) for one in "abcd"]
    told[1][1]["id"] = "chatcmpl-x"
    for result in (
        {"responses": [response for _, response in told]},
        {"transitions": [{"response": response} for _, response in told]},
    ):
        found = salvaged(RETURNED, result=json.dumps(result).encode(), **asked)
        assert kept(found) == ("a", "c", "d")
    scored = json.dumps(told[1][1]).encode()
    by_item = json.dumps({"output": [{**said("b"), "id": "msg_x"}]}).encode()
    for policy in (RETURNED, EVERYTHING):
        for response in (scored, by_item):
            ends = salvaged(
                policy,
                failures=[lost("x")],
                result=shown("a", "b"),
                scored_response=response,
            )
            assert isinstance(ends, core.Mask)
            assert ends.cause == "terminal_missing"


def test_a_selection_that_is_unfit_for_training_is_not_salvaged() -> None:
    found = salvaged(RETURNED, pending=["p"], result=shown("d"), declared_response_id="chatcmpl-d")
    assert isinstance(found, core.Mask)
    assert found.reason == "selection_not_closed"


def test_a_salvaged_receipt_says_so_and_its_digest_covers_it() -> None:
    grown, given = tree(), evidence(sealed(mode=FOREST), speaking(tree()), [lost("c")])
    asked = request(declared_response_id="chatcmpl-e", capture_key="r", rollout_id="r")
    choice = forest.salvage(asked, given, EVERYTHING)
    assert isinstance(choice, forest.Choice)
    verified = forest.verify("r", given.records, choice, list(grown.calls.values()))
    assert isinstance(verified, Forest), verified
    mask = forest.mask_before_selection(given)
    assert mask is not None
    receipt = forest.make_receipt(asked, given, choice, verified, None, mask)
    assert (receipt.masked, receipt.mask_reason) == (False, "")
    assert (receipt.salvaged_from, receipt.mask_cause) == (
        "capture_poisoned",
        "worker_capture_failed",
    )
    assert receipt.mask_detail == "c: worker_capture_failed"
    assert [(one.call_id, one.selected) for one in receipt.calls if one.selected] == [
        ("a", True),
        ("b", True),
        ("e", True),
    ]
    assert receipt.digest == receipt_digest(receipt)
    metrics = Metrics()
    spans.Finalized(metrics).count(receipt)
    counted = {one.description.name: one.sums() for one in metrics.counters}
    assert counted["callforest.finalizer.salvaged_rollouts"] == [({}, 1)]
    receipt.salvaged_from = ""
    assert receipt.digest != receipt_digest(receipt)


# How biased it is: two rollouts, one of one call and one of three, each call lost with probability
# one quarter; every pattern of losses is played to its gradient's ingredients.
LOST = Fraction(1, 4)
CALLS = {"short": ("s1",), "long": ("l1", "l2", "l3")}
REWARDS = {"short": 1.0, "long": 0.0}


def finalized(name: str, slot: int, missing: frozenset[str], *, salvages: bool):
    """Finalize a rollout that lost these calls; the call behind a lost one begins anew."""
    grown = Grown(name, slot)
    parent: str | None = None
    for call_id in CALLS[name]:
        parent = None if call_id in missing else grown.call(call_id, parent)
    attempt = sealed(rollout_id=name, capture_key=name, mode=FOREST)
    failures = [lost(call_id) for call_id in CALLS[name] if call_id in missing]
    given = evidence(attempt, grown.records() if grown.calls else (), failures)
    asked = request(
        rollout_id=name,
        capture_key=name,
        slot=slot,
        reward=REWARDS[name],
        declared_response_id=f"chatcmpl-{CALLS[name][-1]}",
    )
    mask = forest.mask_before_selection(given)
    choice: forest.Choice | None = None
    before = mask
    if mask is None:
        choice = forest.choose(asked, given.records, EVERYTHING)
    elif salvages:
        found = forest.salvage(asked, given, EVERYTHING)
        choice, mask = (found, None) if isinstance(found, forest.Choice) else (None, mask)
    verified: Forest | None = None
    if mask is None and choice is not None:
        calls = list(grown.calls.values())
        grew = forest.verify(name, given.records, choice, calls)
        assert isinstance(grew, Forest), grew
        verified = grew
    receipt = forest.make_receipt(asked, given, choice, verified, mask, None if mask else before)
    made = row_log_pb2.FinalizedRollout(receipt=receipt)
    for row in () if verified is None else verified.rows:
        made.paths.add(call_ids=row.line.call_ids)
    return grown, made


def patterns() -> Iterator[tuple[frozenset[str], Fraction]]:
    calls = [call_id for names in CALLS.values() for call_id in names]
    for flags in product((False, True), repeat=len(calls)):
        missing = frozenset(one for one, gone in zip(calls, flags, strict=True) if gone)
        yield missing, LOST ** len(missing) * (1 - LOST) ** (len(calls) - len(missing))


def expected(*, salvages: bool, options: AdvantageOptions) -> dict[str, Fraction]:
    """Expected values over all patterns: tokens that train, votes, and advantage times tokens."""
    found: dict[str, Fraction] = defaultdict(Fraction)
    for missing, chance in patterns():
        rollouts = [
            finalized(name, slot, missing, salvages=salvages) for slot, name in enumerate(CALLS)
        ]
        for _, made in rollouts:
            receipt = made.receipt
            found[f"{receipt.rollout_id} trains"] += chance * (not receipt.masked)
            for call in receipt.calls:
                found[f"{call.call_id} trains"] += chance * call.selected
        if all(made.receipt.masked for _, made in rollouts):
            continue
        step = gather_step([batch_of(rollouts)], options)
        found["mean reward"] += chance * Fraction(step.reward_mean)
        for row in step.rows:
            tokens = int(row.retained_mask.sum())
            found["denominator"] += chance * tokens
            found[f"{row.rollout_id} tokens"] += chance * tokens
            found[f"{row.rollout_id} push"] += chance * tokens * Fraction(row.advantage)
    return dict(found)


def test_the_default_mask_thins_long_rollouts_out() -> None:
    """Without losses: 3 and 9 tokens, 12 in all, and a push of 3 and -9."""
    mask = expected(salvages=False, options=EXCLUDE)
    assert (mask["short trains"], mask["long trains"]) == (Fraction(3, 4), Fraction(27, 64))
    assert (mask["short tokens"], mask["long tokens"]) == (Fraction(9, 4), Fraction(243, 64))
    assert mask["long tokens"] / mask["short tokens"] == Fraction(27, 16), "of 3"
    assert {mask[f"l{n} trains"] for n in (1, 2, 3)} == {Fraction(27, 64)}, "whole or not at all"
    assert (mask["short push"], mask["long push"]) == (Fraction(243, 256), -Fraction(729, 256))


def test_salvage_keeps_every_rollout_whose_end_was_captured_and_thins_what_came_before() -> None:
    found = expected(salvages=True, options=EXCLUDE)
    assert found["short trains"] == found["long trains"] == Fraction(3, 4), "whatever its length"
    assert (found["short tokens"], found["long tokens"]) == (Fraction(9, 4), Fraction(45, 8))
    assert found["denominator"] == Fraction(63, 8)
    assert found["long tokens"] / found["short tokens"] == Fraction(5, 2), "of 3; masked, 27/16"
    mask = expected(salvages=False, options=EXCLUDE)
    assert mask["denominator"] == Fraction(387, 64)
    # Inside a rollout the scored call trains 4/3 as often as the ones before it.
    assert found["l3 trains"] == Fraction(3, 4)
    assert found["l1 trains"] == found["l2 trains"] == Fraction(9, 16)
    assert (found["short push"], found["long push"]) == (Fraction(27, 16), -Fraction(135, 32))


def test_the_baseline_is_that_of_the_rollouts_that_vote() -> None:
    mask, salvage = (expected(salvages=one, options=EXCLUDE) for one in (False, True))
    # The short one votes alone: 1.0; the long one alone: 0.0; both: 0.5; neither: no group.
    assert mask["mean reward"] == Fraction(3, 4) * (Fraction(37, 64) + Fraction(27, 128))
    assert salvage["mean reward"] == Fraction(3, 4) * (Fraction(1, 4) + Fraction(3, 8))
    # When masked rollouts vote, the baseline hides the losses; what trains is the same.
    for salvages, of in ((False, mask), (True, salvage)):
        voting = expected(salvages=salvages, options=INCLUDE)
        assert voting["denominator"] == of["denominator"]
        assert voting["short push"] == voting["short tokens"], "its advantage is always 1"
        assert voting["long push"] == -voting["long tokens"]
