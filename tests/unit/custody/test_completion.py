"""Completing a call: delta, digests, and every reason to refuse."""

from typing import Any

import numpy as np
import pytest

from callforest_core.custody.call import CallIdentity, CallRecord, StagedCall
from callforest_core.custody.completion import complete_call
from callforest_core.custody.digests import chain_hash, cumulative_hash
from callforest_core.custody.errors import (
    CaptureError,
    CountMismatchError,
    EmptyDeltaError,
    IdentityError,
    NonFiniteLogprobError,
    PrefixMismatchError,
    TokenOutOfRangeError,
    WeightVersionError,
)
from callforest_core.custody.extras import encode_extras, extras_digest
from tests.unit.custody.chains import KEY, Attempt, Turn, ids

PARENT_HASH = bytes(range(32))


def complete(**changes: Any) -> StagedCall:
    given: dict[str, Any] = {
        "identity": CallIdentity(KEY, "c2", "c1"),
        "prefix": ids(1, 2, 3),
        "parent_chain_hash": PARENT_HASH,
        "prompt_ids": ids(1, 2, 3, 4, 5),
        "generated_ids": ids(6, 7),
        "logprobs": [-0.5, -0.25],
        "weight_version": 7,
    } | changes
    return complete_call(given.pop("identity"), **given)


def test_a_continuation_adds_carry_and_generation() -> None:
    call = complete(extras=encode_extras({"a": 1}))
    assert call.token_ids.tolist() == [4, 5, 6, 7]
    assert call.token_ids.dtype == np.uint32
    assert (call.prev_len, call.carry_len, call.generation_len) == (3, 2, 2)
    assert (call.delta_len, call.cum_len, call.mode) == (4, 7, "token_in")
    assert call.logprobs.tolist() == [-0.5, -0.25]
    assert call.chain_hash == chain_hash(PARENT_HASH, ids(4, 5, 6, 7))
    assert call.cumulative_hash == cumulative_hash(ids(1, 2, 3, 4, 5, 6, 7))
    assert call.extras_digest == extras_digest(encode_extras({"a": 1}))
    assert call.staging_key == f"{KEY}/c2"


def test_a_root_has_the_whole_prompt_as_carry() -> None:
    call = complete(identity=CallIdentity(KEY, "c1", None), prefix=None, parent_chain_hash=None)
    assert call.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert (call.prev_len, call.carry_len, call.mode) == (0, 5, "text")


def test_the_record_repeats_the_staged_call() -> None:
    call = complete()
    record = CallRecord.of(call, "resp-1", admitted_at=5.0, finish_reason="stop")
    assert record.custody == call.custody
    assert (record.call_id, record.staging_key) == ("c2", call.staging_key)
    assert (record.response_id, record.admitted_at, record.status) == ("resp-1", 5.0, "")


def test_an_empty_generation_is_staged_when_the_prompt_is_new() -> None:
    assert complete(generated_ids=ids(), logprobs=[]).token_ids.tolist() == [4, 5]


def test_the_staged_call_does_not_share_the_engine_s_memory() -> None:
    prompt, logprobs = ids(1, 2, 3, 4), np.array([-1.0], np.float32)
    call = complete(prompt_ids=prompt, generated_ids=ids(9), logprobs=logprobs)
    prompt[:], logprobs[:] = 0, 0
    assert call.token_ids.tolist() == [4, 9]
    assert call.logprobs.tolist() == [-1.0]


@pytest.mark.requirement("CAP-14")
def test_staged_bytes_do_not_depend_on_history() -> None:
    def size_after(history: int) -> tuple[int, int, int]:
        attempt = Attempt(Turn("c1", None, range(history), [1, 2]))
        call = attempt.add(Turn("c2", "c1", [3, 4, 5], [6, 7]))
        return call.token_ids.nbytes, call.logprobs.nbytes, len(call.extras)

    assert size_after(10) == size_after(50_000) == (20, 8, 1)


@pytest.mark.requirement("ADM-6")
@pytest.mark.parametrize(
    ("prompt", "position"),
    [((1, 2, 9, 4), 2), ((9, 2, 3, 4), 0), ((1, 2), 2), ((), 0), ((2, 1, 2, 3), 0)],
)
def test_a_prompt_must_begin_with_the_authorised_prefix(
    prompt: tuple[int, ...], position: int
) -> None:
    with pytest.raises(PrefixMismatchError) as refused:
        complete(prompt_ids=ids(*prompt))
    assert (refused.value.reason, refused.value.position) == ("prefix_mismatch", position)


@pytest.mark.bugcase("B08")
@pytest.mark.parametrize(
    ("generated", "logprobs", "reported"), [(3, 3, 57), (57, 56, 57), (0, 1, None), (2, 2, 0)]
)
def test_counts_that_differ_are_refused(
    generated: int, logprobs: int, reported: int | None
) -> None:
    with pytest.raises(CountMismatchError) as refused:
        complete(
            generated_ids=ids(*range(generated)),
            logprobs=[-0.5] * logprobs,
            reported_generation_len=reported,
        )
    assert refused.value.reason == "count_mismatch"


@pytest.mark.bugcase("B08")
def test_counts_that_agree_are_staged() -> None:
    call = complete(generated_ids=ids(*range(57)), logprobs=[-0.5] * 57, reported_generation_len=57)
    assert call.generation_len == 57


@pytest.mark.bugcase("B10")
@pytest.mark.parametrize("bad", [float("-inf"), float("nan"), float("inf"), -3.5e38])
@pytest.mark.parametrize("kind", [list, np.float64, np.float32])
def test_a_logprob_that_is_not_finite_is_refused(bad: float, kind: Any) -> None:
    with np.errstate(over="ignore"):
        logprobs = [-0.5, bad] if kind is list else np.array([-0.5, bad]).astype(kind)
    with pytest.raises(NonFiniteLogprobError) as refused:
        complete(logprobs=logprobs)
    assert (refused.value.reason, refused.value.position) == ("non_finite_logprob", 1)


@pytest.mark.parametrize(
    "bad", [[2**32], [-1], [1.0], [True], [[1]], ["1"], [2**64], np.array([-1], np.int64)]
)
@pytest.mark.parametrize("column", ["generated_ids", "prompt_ids"])
def test_ids_outside_the_wire_s_range_are_refused(bad: Any, column: str) -> None:
    with pytest.raises(TokenOutOfRangeError) as refused:
        complete(**{"logprobs": [-1.0], "generated_ids": [6], column: bad})
    assert refused.value.reason == "token_out_of_range"


def test_ids_of_any_integer_type_are_taken() -> None:
    wide = complete(generated_ids=np.array([2**32 - 1, 0], np.int64))
    assert wide.token_ids.tolist() == [4, 5, 2**32 - 1, 0]
    assert complete(prompt_ids=[1, 2, 3, 4, 5]).digest == complete().digest


def test_an_empty_delta_is_refused() -> None:
    with pytest.raises(EmptyDeltaError) as refused:
        complete(prompt_ids=ids(1, 2, 3), generated_ids=[], logprobs=[])
    assert refused.value.reason == "empty_delta"


@pytest.mark.parametrize("weight_version", [-1, 2**64])
def test_a_weight_version_outside_64_bits_is_refused(weight_version: int) -> None:
    with pytest.raises(WeightVersionError):
        complete(weight_version=weight_version)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix": None},
        {"prefix": ids()},
        {"parent_chain_hash": None},
        {"parent_chain_hash": b"short"},
        {"identity": CallIdentity(KEY, "c2", None)},
        {"identity": CallIdentity(KEY, "c2", None), "prefix": None},
        {"identity": CallIdentity("", "c2", "c1")},
        {"identity": CallIdentity(KEY, "", "c1")},
        {"identity": CallIdentity(KEY, "c2", "")},
        {"identity": CallIdentity(KEY, "\ud800", "c1")},
    ],
)
def test_an_incomplete_identity_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(IdentityError) as refused:
        complete(**changes)
    assert refused.value.reason == "invalid_identity"
    assert isinstance(refused.value, CaptureError)
