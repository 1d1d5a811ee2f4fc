"""What goes into the engine: spliced where it is proven, else a fresh root, never without proof."""

import hashlib

import numpy as np
import pytest

from callforest_core.custody.call import CallIdentity
from callforest_core.custody.capture_input import (
    Candidate,
    CaptureInput,
    HistoryMatch,
    Rendering,
    decide_capture_input,
    require_proof,
)
from callforest_core.custody.completion import complete_call
from callforest_core.custody.digests import chain_hash
from callforest_core.custody.errors import CandidateWithoutProofError
from callforest_core.custody.reasoning import ReasoningReader
from callforest_core.custody.tokens import TokenIds
from callforest_core.custody.verification import verify_and_linearize
from tests.unit.custody.chains import KEY, ids, receipt_of

ENDS = frozenset({4, 9})
TEXTS = {20: "go", 21: "on", 30: "yes", 31: "no", 50: "<think>", 51: "hm", 52: "</think>", 60: "\n"}
PROMPT = [1, 20, 2, 3]
NEXT = [1, 21, 2, 3]


def text_of(token_ids: TokenIds) -> str:
    return "".join(TEXTS.get(one, f"[{one}]") for one in token_ids.tolist())


def decide(
    captured: list[int],
    prompt: list[int],
    history: list[int] | None,
    *,
    match: HistoryMatch = HistoryMatch.EXACT,
    spellings: tuple[list[int] | None, ...] = (),
    is_token_list: bool = True,
) -> CaptureInput:
    rendering = Rendering(
        ids(*prompt),
        None if history is None else ids(*history),
        tuple(None if one is None else ids(*one) for one in spellings),
        is_token_list=is_token_list,
    )
    candidate = Candidate(ids(*captured), chain_hash(None, ids(*captured)), match)
    return decide_capture_input(candidate, rendering, ENDS, ReasoningReader(text_of))


def dropped(answer: list[int], shown: list[int]) -> tuple[list[int], list[int], list[int]]:
    """A captured answer, the prompt that shows some of it, and the history that shows it all."""
    history = [*PROMPT, *answer, 4]
    return history, [*PROMPT, *shown, 4, *NEXT], history


@pytest.mark.requirement("ADM-5", "ADM-6")
def test_a_proven_boundary_is_spliced_with_its_proof() -> None:
    captured, history = [*PROMPT, 31, 4], [*PROMPT, 30, 4]
    decided = decide(captured, [*history, *NEXT], history)
    assert decided.token_ids.tolist() == [*captured, *NEXT]
    decision = decided.decision
    assert (decision.is_spliced, decision.reason, decision.notes) == (True, "", ())
    assert (decision.prefix_cut, decision.render_cut) == (5, 5)

    def column(*values: int) -> bytes:
        return b"".join(value.to_bytes(8, "big") for value in (len(values), *values))

    parts = (5).to_bytes(8, "big") * 2 + column(*history) + column(4, 9)
    root = hashlib.sha256(b"nemo-gym-staging-chain-v1\x00" + column(*captured)).digest()
    assert decision.proof == hashlib.sha256(b"callforest-splice-v1" + parts + root).digest()


@pytest.mark.requirement("ADM-4")
@pytest.mark.parametrize("history", [[*PROMPT, 30, 4], None])
def test_a_candidate_without_proof_is_refused(history: list[int] | None) -> None:
    with pytest.raises(CandidateWithoutProofError):
        decide([*PROMPT, 30, 4], [*PROMPT, 30, 4, *NEXT], history, match=HistoryMatch.UNPROVEN)
    with pytest.raises(CandidateWithoutProofError):
        require_proof(HistoryMatch.UNPROVEN)
    for match in (HistoryMatch.EXACT, HistoryMatch.TOOL_CONTENT_EQUIVALENT):
        require_proof(match)


def test_a_candidate_without_tokens_is_a_fault_and_no_root() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        decide([], [*PROMPT], None)


@pytest.mark.requirement("ADM-5")
@pytest.mark.parametrize(
    ("reason", "captured", "prompt", "history"),
    [
        ("boundary_not_found", [*PROMPT, 30, 4], NEXT, None),
        ("boundary_not_found", [*PROMPT, 30, 4], [1, 5], [*PROMPT, 30, 4]),
        ("turn_count_differs", [*PROMPT, 30, 4, 31, 4], [*PROMPT, 30, 4, *NEXT], [*PROMPT, 30, 4]),
        ("terminator_differs", [*PROMPT, 30, 9], [*PROMPT, 30, 4, *NEXT], [*PROMPT, 30, 4]),
        ("turn_differs", [*PROMPT, 30, 4], [1, 21, 2, 3, 30, 4, *NEXT], [*PROMPT, 30, 4]),
        # The render of the whole leaves something out that is no reasoning.
        ("turn_differs", [*PROMPT, 30, 4], [1, 2, 3, 30, 4, *NEXT], [*PROMPT, 30, 4]),
        # Or something behind it, or before a mark that is never closed.
        ("turn_differs", *dropped([50, 51, 52, 30, 31], [50, 51, 52, 30])),
        ("turn_differs", *dropped([50, 51, 52, 30, 31], [31])),
        ("turn_differs", *dropped([51, 52, 30, 31], [31])),
        ("turn_differs", *dropped([50, 51, 30], [50, 51])),
        ("nothing_follows", [*PROMPT, 30, 4], [*PROMPT, 30, 4], [*PROMPT, 30, 4]),
    ],
)
def test_what_is_not_proven_is_a_fresh_root(
    reason: str, captured: list[int], prompt: list[int], history: list[int] | None
) -> None:
    decided = decide(captured, prompt, history)
    assert decided.token_ids.tolist() == prompt
    assert (decided.decision.is_spliced, decided.decision.reason) == (False, reason)
    assert (decided.decision.proof, decided.decision.prefix_cut) == (b"", 0)


@pytest.mark.requirement("ADM-5")
def test_a_prompt_that_is_no_token_list_is_a_fresh_root() -> None:
    history = [*PROMPT, 30, 4]
    decided = decide(history, [*history, *NEXT], history, is_token_list=False)
    assert decided.decision.reason == "unsupported_prompt"


@pytest.mark.requirement("ADM-5")
def test_no_terminators_is_a_fresh_root() -> None:
    history = ids(*PROMPT, 30, 4)
    decided = decide_capture_input(
        Candidate(history, bytes(32), HistoryMatch.EXACT),
        Rendering(ids(*history, *NEXT), history),
        frozenset(),
        ReasoningReader(text_of),
    )
    assert decided.decision.reason == "no_terminators"


@pytest.mark.requirement("ADM-5")
@pytest.mark.bugcase("B06")
@pytest.mark.parametrize(
    ("other", "reason", "notes"),
    [
        ([*PROMPT, 30, 4], "", ("tool_content_equivalence",)),
        ([*PROMPT, 31, 30, 4], "renderer_not_equivalent", ()),
        (None, "renderer_not_equivalent", ()),
    ],
)
def test_equivalence_is_asked_of_the_renderer(
    other: list[int] | None, reason: str, notes: tuple[str, ...]
) -> None:
    history = [*PROMPT, 30, 4]
    decided = decide(
        history,
        [*history, *NEXT],
        history,
        match=HistoryMatch.TOOL_CONTENT_EQUIVALENT,
        spellings=(history, other, history),
    )
    assert (decided.decision.reason, decided.decision.notes) == (reason, notes)
    assert decided.decision.is_spliced == (not reason)


@pytest.mark.requirement("ADM-5")
def test_equivalence_that_nobody_asked_for_is_not_proven() -> None:
    history = [*PROMPT, 30, 4]
    match = HistoryMatch.TOOL_CONTENT_EQUIVALENT
    decided = decide(history, [*history, *NEXT], history, match=match)
    assert decided.decision.reason == "renderer_not_equivalent"


@pytest.mark.requirement("ADM-5", "ADM-6")
@pytest.mark.bugcase("B02")
@pytest.mark.parametrize(
    "history",
    [[*PROMPT, 50, 51, 52, 30, 4], [*PROMPT, 30, 4]],
    ids=["kept in the history", "left out of it"],
)
def test_reasoning_that_the_template_drops_keeps_its_loss(history: list[int]) -> None:
    captured = [*PROMPT, 50, 51, 52, 30, 4]
    decided = decide(captured, [*PROMPT, 30, 4, *NEXT], history)
    assert decided.token_ids.tolist() == [1, 20, 2, 3, 50, 51, 52, 30, 4, 1, 21, 2, 3]
    assert decided.decision.notes == ("template_truncated_reasoning",)
    root = complete_call(
        CallIdentity(KEY, "c1", None),
        prefix=None,
        parent_chain_hash=None,
        prompt_ids=PROMPT,
        generated_ids=captured[4:],
        logprobs=[-0.1] * 5,
        weight_version=0,
    )
    child = complete_call(
        CallIdentity(KEY, "c2", "c1"),
        prefix=ids(*captured),
        parent_chain_hash=root.chain_hash,
        prompt_ids=decided.token_ids,
        generated_ids=[31, 4],
        logprobs=[-1.0, -1.0],
        weight_version=0,
    )
    row = verify_and_linearize(receipt_of([root, child], "c2"), [root, child])
    assert row.token_ids[4:9].tolist() == captured[4:]
    assert row.token_mask[4:9].tolist() == [1] * 5


@pytest.mark.bugcase("B02")
@pytest.mark.parametrize(
    ("captured", "shown", "noted"),
    [
        ([50, 51, 52, 30], [50, 51, 52, 30], False),
        ([50, 60, 52, 30], [30], False),  # an empty block
        ([50, 51, 52, 31], [30], True),  # other tokens of the answer besides
        ([51, 52, 30], [30], True),  # the opening mark was no part of the turn
        ([30, 60], [30], False),  # white space
        ([50, 51], [], True),  # cut inside the reasoning
        ([50, 51, 52, 50, 51, 52, 30], [50, 51, 52, 30], True),  # one of two
    ],
)
def test_only_reasoning_that_was_lost_is_noted(
    captured: list[int], shown: list[int], *, noted: bool
) -> None:
    history = [*PROMPT, *shown, 4]
    decided = decide([*PROMPT, *captured, 4], [*history, *NEXT], history)
    assert decided.decision.is_spliced
    assert ("template_truncated_reasoning" in decided.decision.notes) == noted


@pytest.mark.requirement("ADM-5", "ADM-6")
@pytest.mark.bugcase("B02")
@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ([50, 51, 52, 60, 30], [30]),
        ([50, 51, 52, 30], [50, 52, 30]),  # the marks stay
        ([51, 52, 60, 60, 30], [30]),  # the opening mark was the prompt's
        ([51, 52, 60, 60, 30], [60, 30]),
        ([30, 31, 52, 60, 30, 31], [30, 31]),  # the answer begins like its reasoning
        ([51, 52, 30], [52, 30]),
        ([60, 30, 60], [30, 60]),
    ],
)
def test_reasoning_and_white_space_may_be_left_out(answer: list[int], shown: list[int]) -> None:
    captured, prompt, history = dropped(answer, shown)
    decided = decide(captured, prompt, history)
    assert decided.decision.reason == ""
    assert decided.token_ids.tolist() == [*captured, *NEXT]


@pytest.mark.bugcase("B02", "B07")
@pytest.mark.parametrize(("sampled", "noted"), [([50, 51], True), ([50, 60], False), ([30], False)])
def test_reasoning_of_a_turn_that_was_cut_inside_it_is_noted(
    sampled: list[int], *, noted: bool
) -> None:
    """Its last token counts too: the end is the template's."""
    history = [*PROMPT, 4]
    decided = decide([*PROMPT, *sampled], [*history, *NEXT], history)
    assert decided.token_ids.tolist() == [*PROMPT, *sampled, 4, *NEXT]
    assert ("template_truncated_reasoning" in decided.decision.notes) == noted


@pytest.mark.bugcase("B02")
def test_a_fresh_root_says_too_that_reasoning_was_left_out() -> None:
    """Here a whole turn is missing, so that the texts are compared as wholes."""
    captured = [*PROMPT, 50, 51, 52, 30, 4, 1, 21, 2, 3, 31, 4]
    history = [1, 21, 2, 3, 31, 4]
    decided = decide(captured, [*history, 20, 3], history)
    assert decided.decision.reason == "turn_count_differs"
    assert decided.decision.notes == ("template_truncated_reasoning",)


@pytest.mark.bugcase("B02")
def test_reasoning_of_one_turn_does_not_stand_for_that_of_another() -> None:
    """The earlier turn lost its reasoning, the later one quotes as much."""
    captured = [*PROMPT, 50, 51, 52, 30, 4, *NEXT, 30, 4]
    history = [*PROMPT, 30, 4, *NEXT, 50, 51, 52, 30, 4]
    decided = decide(captured, [*history, *NEXT], history)
    assert decided.decision.notes == ("template_truncated_reasoning",)


@pytest.mark.bugcase("B07")
@pytest.mark.requirement("ADM-6")
def test_a_cut_turn_is_ended_by_the_template_and_a_sampled_end_stands_once() -> None:
    history = [*PROMPT, 30, 31, 4]
    for sampled in ([30, 31], [30, 31, 4]):
        decided = decide([*PROMPT, *sampled], [*history, *NEXT], history)
        assert decided.token_ids.tolist() == [*history, *NEXT]
    assert np.count_nonzero(decided.token_ids == 4) == 1


@pytest.mark.bugcase("B07")
@pytest.mark.requirement("ADM-6")
def test_a_token_over_the_boundary_never_reaches_the_engine() -> None:
    merged, bang = 99, 41
    history = [*PROMPT, 30, merged, 4]
    decided = decide([*PROMPT, 30, bang, 4], [*history, 60, 60, *NEXT], history)
    assert decided.token_ids.tolist() == [*PROMPT, 30, bang, 4, 60, 60, *NEXT]
    unended = [*PROMPT, 30, merged]
    decided = decide([*PROMPT, 30, bang], [*unended, *NEXT], unended)
    assert decided.decision.reason == "boundary_not_found"


@pytest.mark.requirement("ADM-5")
@pytest.mark.parametrize(
    ("captured", "is_left_out"),
    [
        ("<think>why</think>so", True),
        ("<think> </think>so", False),
        ("so<think>why</think>", True),
        ("why</think>so", True),
        ("</think>so", False),
        ("so<think>why", True),
        ("so<think>", False),
    ],
)
def test_only_reasoning_that_says_something_is_left_out(captured: str, is_left_out: bool) -> None:
    reader = ReasoningReader(lambda text: text)
    assert reader.is_left_out(captured, "so") is is_left_out
