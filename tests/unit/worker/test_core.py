"""What becomes of an engine's answer: a capture, or a reason why there is none."""

from dataclasses import replace

import numpy as np
import pytest

from callforest.capture.v1 import capture_admission_pb2, completion_pb2
from callforest_core.custody.digests import chain_hash, cumulative_hash
from callforest_core.custody.errors import CaptureError
from callforest_core.custody.extras import decode_extras, extras_digest
from callforest_core.custody.path import TokenPath
from callforest_core.custody.tokens import TokenIds
from callforest_mesh.worker import core
from callforest_mesh.worker.engine import EngineResult, WeightVersionSpan

ROOT = capture_admission_pb2.CaptureAdmission(
    capture_key="k", call_id="c", root=capture_admission_pb2.Root()
)


def ids(*values: int) -> TokenIds:
    return np.array(values, np.uint32)


PREFIX = core.extend(None, [ids(1, 20, 2, 3, 10, 11, 4)])
CHILD = capture_admission_pb2.CaptureAdmission(
    capture_key="k",
    call_id="c",
    continuation=capture_admission_pb2.Continuation(
        parent_call_id="p", prev_token_count=7, parent_chain_hash=PREFIX.chain_hash
    ),
)
RESULT = EngineResult(
    prompt_ids=ids(1, 20, 2, 3),
    generated_ids=ids(10, 11, 4),
    logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
    response=b"{}",
    finish_reason="stop",
    reported_completion_tokens=3,
    weight_version=5,
    weight_version_spans=(WeightVersionSpan(0, 3, 5),),
    sampling={"temperature": 1.0, "seed": None},
)


def fault_of(
    admission: capture_admission_pb2.CaptureAdmission,
    prefix: core.Sequence | None,
    **changed: object,
) -> str:
    with pytest.raises(CaptureError) as caught:
        core.capture(admission, prefix, replace(RESULT, **changed))
    return caught.value.reason


@pytest.mark.requirement("CAP-5")
def test_root_is_what_the_model_saw_and_sampled() -> None:
    staged, _ = core.capture(ROOT, None, RESULT)
    assert staged.token_ids.tolist() == [1, 20, 2, 3, 10, 11, 4]
    assert (staged.prev_len, staged.carry_len, staged.weight_version) == (0, 4, 5)
    assert staged.logprobs.tolist() == np.array([-0.1, -0.2, -0.3], np.float32).tolist()
    assert staged.chain_hash == chain_hash(None, staged.token_ids)
    assert decode_extras(staged.extras) == {
        "sampling": {"temperature": 1.0, "seed": None},
        "logprobs_mode": "raw_logprobs",
    }


@pytest.mark.requirement("CAP-5")
def test_calls_of_other_extras_never_share_an_encoding() -> None:
    """Equal numbers of Python's are not one value: a bool, an integer, a negative zero."""
    given = [{"temperature": value} for value in (0.0, -0.0, 0, False, None, 1.0, 1, True, "1")]
    changed = [
        *({"sampling": sampling} for sampling in given),
        {"logprobs_mode": "processed_logprobs"},
        {"weight_version_spans": (WeightVersionSpan(0, 1, 5), WeightVersionSpan(1, 3, 6))},
        {"weight_version_spans": (WeightVersionSpan(0, 3, 6),)},
    ]
    for _ in range(2):  # the second time from what is kept
        calls = [core.capture(ROOT, None, replace(RESULT, **one))[0] for one in changed]
        assert len({call.extras for call in calls}) == len({call.extras_digest for call in calls})
        assert len({call.extras for call in calls}) == len(changed)
    assert [call.extras_digest for call in calls] == [extras_digest(call.extras) for call in calls]


@pytest.mark.requirement("ADM-6", "CAP-5")
@pytest.mark.bugcase("B01")
def test_continuation_has_only_what_it_adds() -> None:
    prompt = ids(1, 20, 2, 3, 10, 11, 4, 1, 20, 2, 3)
    staged, _ = core.capture(CHILD, PREFIX, replace(RESULT, prompt_ids=prompt))
    assert staged.identity.parent_call_id == "p"
    assert (staged.prev_len, staged.carry_len) == (7, 4)
    assert staged.token_ids.tolist() == [1, 20, 2, 3, 10, 11, 4]
    assert staged.chain_hash == chain_hash(PREFIX.chain_hash, staged.token_ids)
    assert staged.cumulative_hash == cumulative_hash(np.concatenate((prompt, ids(10, 11, 4))))


@pytest.mark.requirement("ADM-6")
@pytest.mark.parametrize(
    "prompt",
    [
        ids(1, 20, 2, 3, 12, 13, 4, 1, 20, 2, 3),
        ids(1, 20, 2, 3, 10, 11),
        ids(),
    ],
)
def test_prompt_that_does_not_begin_with_the_prefix_is_no_capture(prompt: TokenIds) -> None:
    assert fault_of(CHILD, PREFIX, prompt_ids=prompt) == "prefix_mismatch"


@pytest.mark.requirement("ADM-6")
def test_prefix_that_the_engine_refused_is_no_capture() -> None:
    """Even when the plain rendering begins with the same ids by chance."""
    prompt = ids(1, 20, 2, 3, 10, 11, 4, 1, 20, 2, 3)
    reason = fault_of(CHILD, PREFIX, prompt_ids=prompt, prefix_refused="turn_differs")
    assert reason == "prefix_mismatch"


@pytest.mark.bugcase("B08")
@pytest.mark.parametrize(
    ("sampled", "logprobs", "reported"), [(3, 3, 57), (57, 56, 57), (57, 57, 56), (0, 0, 57)]
)
def test_counts_that_differ_are_no_capture(sampled: int, logprobs: int, reported: int) -> None:
    reason = fault_of(
        ROOT,
        None,
        generated_ids=np.arange(sampled, dtype=np.uint32),
        logprobs=np.full(logprobs, -0.5, np.float32),
        reported_completion_tokens=reported,
    )
    assert reason == "count_mismatch"


@pytest.mark.bugcase("B10")
@pytest.mark.parametrize("value", [-np.inf, np.nan, np.inf])
def test_logprob_that_is_not_finite_is_no_capture(value: float) -> None:
    logprobs = np.array([-0.5, value, -0.5], np.float32)
    assert fault_of(ROOT, None, logprobs=logprobs) == "non_finite_logprob"


def test_empty_generation_is_no_capture() -> None:
    nothing = {"generated_ids": ids(), "logprobs": np.empty(0, np.float32)}
    assert fault_of(ROOT, None, **nothing, reported_completion_tokens=0) == "empty_generation"


@pytest.mark.bugcase("B08")
@pytest.mark.parametrize(("admission", "prefix"), [(ROOT, None), (CHILD, PREFIX)])
def test_text_that_ends_before_the_tokens_is_no_capture(
    admission: capture_admission_pb2.CaptureAdmission, prefix: core.Sequence | None
) -> None:
    assert fault_of(admission, prefix, text_ends_early=True) == "text_ends_early"


def test_ids_beyond_32_bits_are_no_capture() -> None:
    wide = np.array([1, 2**32, 3], np.int64)
    assert fault_of(ROOT, None, generated_ids=wide) == "token_out_of_range"


@pytest.mark.requirement("CAP-8")
def test_straddling_call_keeps_its_first_version_and_says_which_sampled() -> None:
    spans = (WeightVersionSpan(0, 1, 5), WeightVersionSpan(1, 3, 6))
    straddling = replace(RESULT, weight_version_spans=spans)
    staged, _ = core.capture(ROOT, None, straddling)
    extras = decode_extras(staged.extras)
    assert staged.weight_version == 5
    assert extras is not None
    assert extras["weight_version_spans"] == [[0, 1, 5], [1, 3, 6]]
    assert core.completion_of(straddling).weight_version_count == 2
    assert core.completion_of(RESULT).weight_version_count == 1


@pytest.mark.bugcase("B07")
@pytest.mark.parametrize(
    ("finish_reason", "ended"),
    [
        ("stop", True),
        ("tool_calls", True),
        ("length", False),
        ("content_filter", False),
        ("abort", False),
        ("", False),
    ],
)
def test_only_a_known_end_is_an_end(finish_reason: str, ended: bool) -> None:
    completion = core.completion_of(replace(RESULT, finish_reason=finish_reason))
    assert (completion.status == completion_pb2.COMPLETION_STATUS_COMPLETED) == ended
    assert completion.finish_reason == finish_reason
    assert completion.generation_token_count == 3


def test_sequence_grows_by_deltas_and_hashes_each() -> None:
    grown = core.extend(PREFIX, [ids(5, 6), ids(7)])
    assert grown.token_ids.tolist() == [1, 20, 2, 3, 10, 11, 4, 5, 6, 7]
    expected = chain_hash(chain_hash(PREFIX.chain_hash, ids(5, 6)), ids(7))
    assert grown.chain_hash == expected
    with pytest.raises(core.PrefixUnavailableError):
        core.extend(None, [])


def test_predecessor_is_the_admitted_one_or_none() -> None:
    place = CHILD.continuation
    assert core.admitted(PREFIX, place)
    assert not core.admitted(core.extend(None, [ids(1, 20, 2, 3, 10, 11, 5)]), place)
    # The same tokens, cut otherwise into calls: another chain.
    assert not core.admitted(core.extend(None, [ids(1, 20, 2), ids(3, 10, 11, 4)]), place)
    assert not core.admitted(core.Sequence(TokenPath.of(ids(1)), PREFIX.chain_hash), place)


def test_captured_call_gives_the_sequence_that_a_child_inherits() -> None:
    _, sequence = core.capture(ROOT, None, RESULT)
    assert core.admitted(sequence, CHILD.continuation)
