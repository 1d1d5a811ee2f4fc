"""What the core decides of one rollout: refusals, masks, terminals, receipts."""

import hashlib
import json
from dataclasses import replace

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.custody.extras import encode_extras
from callforest_core.custody.row import LinearizedRow
from callforest_core.forest.receipts import receipt_digest
from callforest_core.lineage.fingerprint import FINGERPRINT_VERSION, assistant_fingerprint
from callforest_core.refusal import Refusal
from callforest_mesh.finalizer import core
from tests.unit.custody.chains import KEY, Attempt, Turn, branching
from tests.unit.finalizer.rollouts import (
    declared,
    evidence,
    failure,
    records_of,
    request,
    sealed,
    two_turns,
)


@pytest.mark.requirement("FIN-2")
@pytest.mark.parametrize(
    ("changes", "reason", "facts"),
    [
        (
            {"rollout_id": "other"},
            er.ERROR_REASON_GROUP_MISMATCH,
            {"field": "capture_key", "rollout_id": KEY, "group_id": "g"},
        ),
        ({"superseded": True}, er.ERROR_REASON_GROUP_MISMATCH, {"field": "capture_key"}),
        (
            {"state": attempt_pb2.ATTEMPT_STATE_OPEN},
            er.ERROR_REASON_ATTEMPT_NOT_SEALED,
            {"state": "ATTEMPT_STATE_OPEN", "capture_key": KEY},
        ),
        (
            {"state": attempt_pb2.ATTEMPT_STATE_CLOSED},
            er.ERROR_REASON_ATTEMPT_NOT_SEALED,
            {"state": "ATTEMPT_STATE_CLOSED"},
        ),
        (
            {"epoch": 2},
            er.ERROR_REASON_STALE_MANIFEST,
            {"expected": "2.5", "actual": "1.5", "capture_key": KEY},
        ),
        ({"revision": 6}, er.ERROR_REASON_STALE_MANIFEST, {"expected": "1.6", "actual": "1.5"}),
    ],
)
def test_an_attempt_that_is_not_the_named_one_is_refused(
    changes: dict[str, object], reason: int, facts: dict[str, str]
) -> None:
    with pytest.raises(Refusal) as refused:
        core.check_attempt(request(), sealed(**changes))
    assert refused.value.reason == reason
    assert facts.items() <= refused.value.facts.items()


def test_the_named_attempt_passes() -> None:
    core.check_attempt(request(), sealed())


@pytest.mark.requirement("LED-12")
@pytest.mark.parametrize(
    ("given", "reason", "detail"),
    [
        (evidence(), "attempt_not_captured", "no attempt"),
        (evidence(sealed()), "attempt_not_captured", "no call"),
        (evidence(sealed(pending_call_ids=["c7", "c8"])), "pending_call", "c7, c8"),
        (
            evidence(sealed(pending_call_ids=["c7"]), records_of(two_turns()), [failure()]),
            "pending_call",
            "c7",
        ),
        (
            evidence(sealed(), failures=[failure(detail="gone")]),
            "capture_poisoned",
            "c9: worker_capture_failed gone",
        ),
        (
            evidence(sealed(), records_of(two_turns()), [failure("unresolved_parent")]),
            "capture_poisoned",
            "c9: unresolved_parent",
        ),
    ],
)
def test_what_the_ledger_alone_shows_masks(given: core.Evidence, reason: str, detail: str) -> None:
    mask = core.mask_before_tokens(given)
    assert mask is not None
    assert mask.reason == reason
    assert detail in mask.detail


def test_a_whole_attempt_is_not_masked_before_its_tokens() -> None:
    assert core.mask_before_tokens(evidence(sealed(), records_of(two_turns()))) is None


def scored(**response: object) -> bytes:
    return json.dumps(response).encode()


def answer(text: str) -> dict[str, object]:
    return {"type": "message", "role": "assistant", "content": text}


def fingerprinted(attempt: Attempt) -> tuple[object, ...]:
    """Records whose calls said their own names."""
    return tuple(
        replace(
            record,
            output_fingerprint=assistant_fingerprint([answer(f"I am {record.call_id}")]),
            continuation_fingerprint=None,
            fingerprint_version=FINGERPRINT_VERSION,
        )
        for record in records_of(attempt)
    )


CHAT = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "I am c2"}}]}


@pytest.mark.requirement("SEL-1")
@pytest.mark.parametrize(
    ("asked", "call_id", "stage"),
    [
        ({"declared_response_id": "resp-c1"}, "c1", "declared"),
        ({"declared_response_id": "nobody"}, None, "declared"),
        (
            {"declared_response_id": "nobody", "scored_response": scored(id="resp-c2")},
            None,
            "declared",
        ),
        ({"scored_response": scored(id="resp-c1")}, "c1", "response_id"),
        ({"scored_response": scored(output=[answer("I am c1")])}, "c1", "content"),
        ({"scored_response": scored(**CHAT)}, "c2", "content"),
        (
            {"scored_response": scored(id="resp-c2", output=[answer("I am c2")])},
            "c2",
            "response_id",
        ),
        (
            {"scored_response": scored(id="resp-c1", output=[answer("I am c2")])},
            None,
            "content",
        ),
        ({"scored_response": scored(id="resp-c1", **CHAT)}, None, "content"),
        (
            {"declared_response_id": "resp-c1", "scored_response": scored(id="resp-c2")},
            None,
            "declared",
        ),
        ({}, "c2", "heuristic"),
        ({"scored_response": b"\xff{not json"}, "c2", "heuristic"),
        ({"scored_response": b"[" * 100_000}, "c2", "heuristic"),
        ({"scored_response": scored(id="someone else's")}, "c2", "heuristic"),
    ],
)
def test_terminal_stages(asked: dict[str, object], call_id: str | None, stage: str) -> None:
    terminal = core.attribute(request(**asked), fingerprinted(two_turns()))
    assert (terminal.call_id, terminal.stage.value) == (call_id, stage)
    assert call_id is not None or terminal.trail


@pytest.mark.parametrize(
    "response",
    [
        b'{"output": ' + b'[{"role": "assistant", "content": ' + b"[" * 600 + b"]" * 600 + b"}]}",
        b'{"output": [{"role": "assistant", "content": "\\ud800"}]}',
        b'{"choices": 7}',
        b'{"choices": [7]}',
    ],
    ids=["deep", "surrogate", "choices", "choice"],
)
def test_content_that_cannot_be_read_abstains(response: bytes) -> None:
    terminal = core.attribute(request(scored_response=response), fingerprinted(two_turns()))
    assert (terminal.call_id, terminal.stage.value) == ("c2", "heuristic")


@pytest.mark.requirement("SEL-1")
def test_an_ambiguous_shape_masks_with_its_reason() -> None:
    fork = Attempt(
        Turn("c1", None, [1], [2]), Turn("c2", "c1", [3], [4]), Turn("c3", "c1", [3], [5])
    )
    terminal = core.attribute(request(), records_of(fork))
    assert terminal.call_id is None
    assert "ambiguous_terminal" in terminal.trail


def verify(
    attempt: Attempt, terminal: str, **changes: dict[str, object]
) -> LinearizedRow | core.Mask:
    calls = [replace(call, **changes.get(call.identity.call_id, {})) for call in attempt.staged()]
    return core.verify(KEY, records_of(attempt), declared(terminal), calls)


def test_the_path_is_joined_and_dead_branches_are_left_out() -> None:
    row = verify(branching(), "c4")
    assert isinstance(row, LinearizedRow)
    assert row.call_ids == ("c1", "c3", "c4")


@pytest.mark.requirement("FOR-4")
@pytest.mark.bugcase("B20")
@pytest.mark.parametrize("damaged", ["c1", "c2", "r"])
def test_a_flipped_id_masks_on_the_path_and_off_it(damaged: str) -> None:
    call = branching().calls[damaged]
    flipped = call.token_ids.copy()
    flipped[0] ^= 1
    mask = verify(branching(), "c4", **{damaged: {"token_ids": flipped}})
    assert isinstance(mask, core.Mask)
    assert mask.reason == "corrupt_digest"
    assert damaged in mask.detail


@pytest.mark.requirement("FOR-4")
def test_the_chain_hash_of_a_dead_branch_is_checked_too() -> None:
    """A record and a staged call that agree on a chain hash that is not theirs."""
    attempt = branching()
    chains = {"c2": bytes(32)}
    attempt.calls["c2"] = relabelled(attempt, "c2", chains["c2"])
    mask = core.verify(KEY, records_of(attempt), declared("c4"), attempt.staged())
    assert isinstance(mask, core.Mask)
    assert mask.reason == "chain_hash_mismatch"
    assert "c2" in mask.detail


def relabelled(attempt: Attempt, call_id: str, chain_hash: bytes):
    """A call with another chain hash and the digest that fits it."""
    from callforest_core.custody.digests import digest_opening
    from callforest_core.custody.tokens import encode_floats, encode_ids

    call = replace(attempt.calls[call_id], chain_hash=chain_hash)
    digest = call.recompute_digest(
        digest_opening(KEY), encode_ids(call.token_ids), encode_floats(call.logprobs)
    )
    return replace(call, digest=digest)


def test_swapped_payloads_mask() -> None:
    twins = Attempt(Turn("a", None, [1], [2, 3]), Turn("b", None, [4], [5, 6]))
    a, b = (call.token_ids for call in twins.staged())
    mask = verify(twins, "a", a={"token_ids": b}, b={"token_ids": a})
    assert isinstance(mask, core.Mask)
    assert (mask.reason, "a" in mask.detail) == ("corrupt_digest", True)


def test_a_path_sampled_from_another_distribution_masks_and_names_the_call() -> None:
    cold = encode_extras({"sampling": {"temperature": 0.7}, "logprobs_mode": "raw_logprobs"})
    mask = verify(branching(), "c4", c3={"extras": cold})
    assert mask == core.Mask("sampling_mismatch", "c3: temperature is 0.7")
    # A dead branch trains nothing, whatever it was sampled with.
    assert isinstance(verify(branching(), "c4", c2={"extras": cold}), LinearizedRow)


def test_a_generation_without_tokens_cannot_train() -> None:
    silent = Attempt(Turn("c1", None, [1, 2], []))
    mask = verify(silent, "c1")
    assert isinstance(mask, core.Mask)
    assert mask.reason == "empty_generation"


def test_a_receipt_selects_the_path_and_keeps_the_rest_for_cleanup() -> None:
    attempt = branching()
    records = tuple(
        replace(record, finish_reason="length" if record.call_id == "c2" else "stop")
        for record in records_of(attempt)
    )
    row = verify(attempt, "c4")
    assert isinstance(row, LinearizedRow)
    receipt = core.make_receipt(request(), evidence(sealed(), records), declared("c4"), row, None)
    assert [(call.call_id, call.selected) for call in receipt.calls] == [
        ("c1", True),
        ("c2", False),
        ("c3", True),
        ("r", False),
        ("c4", True),
    ]
    assert not receipt.truncated, "an abandoned call that stopped for length does not count"
    assert (receipt.generated_token_count, receipt.total_token_count) == (6, len(row.token_ids))
    assert receipt.digest == receipt_digest(receipt)
    assert (receipt.terminal_call_id, receipt.terminal_selection) == ("c4", "declared")


def test_a_selected_call_that_stopped_for_length_truncates_the_rollout() -> None:
    attempt = two_turns()
    first, second = records_of(attempt, finish_reason="stop")
    row = verify(attempt, "c2")
    assert isinstance(row, LinearizedRow)
    given = evidence(sealed(), (replace(first, finish_reason="length"), second))
    assert core.make_receipt(request(), given, declared("c2"), row, None).truncated


def test_a_masked_receipt_selects_nothing_and_says_why() -> None:
    given = evidence(
        sealed(), records_of(two_turns()), [failure(worker_reason="stage_timeout", detail="x")]
    )
    mask = core.Mask("capture_poisoned", "y" * 2000)
    receipt = core.make_receipt(request(), given, None, None, mask)
    assert (receipt.masked, receipt.mask_reason) == (True, "capture_poisoned")
    assert receipt.mask_cause == "worker_capture_failed/stage_timeout"
    assert len(receipt.mask_detail) == 1024
    assert [call.selected for call in receipt.calls] == [False, False]
    assert (receipt.generated_token_count, receipt.total_token_count) == (0, 0)
    assert not receipt.HasField("terminal_call_id")
    assert receipt.digest == receipt_digest(receipt)


NOTHING = hashlib.sha256(b"").digest()
ASKED = core.Asked(b"s", NOTHING)


def stored() -> row_log_pb2.FinalizedRollout:
    receipt = core.make_receipt(
        request(), evidence(sealed(), records_of(two_turns())), None, None, core.Mask("x")
    )
    return row_log_pb2.FinalizedRollout(
        receipt=receipt, declared_response_id="d", scored_response_sha256=b"s"
    )


def test_the_same_request_again_differs_in_nothing() -> None:
    assert core.differing_field(stored(), request(declared_response_id="d"), ASKED) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"group_id": "h"}, "group_id"),
        ({"slot": 1}, "slot"),
        ({"capture_key": f"{KEY}-a1"}, "capture_key"),
        ({"epoch": 2}, "epoch"),
        ({"revision": 6}, "revision"),
        ({"reward": 0.25}, "reward"),
        ({"declared_response_id": "e"}, "declared_response_id"),
        ({"environment_masked": True}, "environment_masked"),
        ({"selection": {"call_ids": ["c1"], "terminal_call_id": "c1"}}, "selection"),
    ],
)
def test_a_repeat_that_differs_names_the_field(changes: dict[str, object], field: str) -> None:
    asked = request(**({"declared_response_id": "d"} | changes))
    assert core.differing_field(stored(), asked, ASKED) == field


def test_another_result_differs() -> None:
    asked = core.Asked(b"s", hashlib.sha256(b"{}").digest())
    assert core.differing_field(stored(), request(declared_response_id="d"), asked) == "result"


def test_another_scored_response_differs() -> None:
    asked: pb.FinalizeRolloutRequest = request(declared_response_id="d")
    assert core.differing_field(stored(), asked, core.Asked(b"t", NOTHING)) == "scored_response"
