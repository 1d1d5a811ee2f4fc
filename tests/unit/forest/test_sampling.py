"""A call that was sampled from another distribution than the learner scores is refused."""

from __future__ import annotations

import pytest

from callforest_core.custody.extras import EMPTY_EXTRAS, ExtrasValue, encode_extras
from callforest_core.forest.sampling import sampling_fault

_PLAIN: dict[str, ExtrasValue] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 7,
    "max_tokens": 64,
    "min_tokens": 0,
    "ignore_eos": False,
    "structured_outputs": False,
}


def _extras(**changed: ExtrasValue) -> bytes:
    return encode_extras({"sampling": {**_PLAIN, **changed}, "logprobs_mode": "raw_logprobs"})


def test_the_models_own_distribution_is_trained() -> None:
    assert sampling_fault(_extras()) == ""
    assert sampling_fault(_extras(temperature=1, top_k=0, seed=None, stop='["x"]')) == ""


def test_extras_that_state_no_sampling_are_taken_at_their_word() -> None:
    assert sampling_fault(EMPTY_EXTRAS) == ""
    assert sampling_fault(encode_extras({"routed_experts": "x"})) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7),
        ("temperature", 0),
        ("top_p", 0.9),
        ("top_k", 50),
        ("min_p", 0.1),
        ("min_p", 1),
        ("presence_penalty", 0.5),
        ("presence_penalty", 1),
        ("frequency_penalty", 1),
        ("repetition_penalty", 2),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 4),
        ("structured_outputs", True),
        ("logit_bias", '{"5":1}'),
        ("bad_words", '["x"]'),
        ("allowed_token_ids", "[1,2]"),
        ("thinking_token_budget", "0"),
        ("watermarking", "true"),
        ("trace_decode_token_ids", "[1,2]"),
        ("extra_args", '{"x":1}'),
    ],
)
def test_another_distribution_is_named(name: str, value: ExtrasValue) -> None:
    assert sampling_fault(_extras(**{name: value})) == f"{name} is {value!r}"


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", 1])
def test_what_is_no_log_probability_is_named(mode: ExtrasValue) -> None:
    extras = encode_extras({"sampling": {**_PLAIN}, "logprobs_mode": mode})
    assert sampling_fault(extras) == f"logprobs_mode is {mode!r}"


def test_unreadable_extras_are_refused() -> None:
    assert sampling_fault(b"Z").startswith("unreadable extras")
