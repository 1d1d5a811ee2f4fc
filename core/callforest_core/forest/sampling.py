"""Whether a call was sampled from the distribution that the learner scores.

The learner scores the model's own distribution, at temperature 1 and untruncated. A call that was
sampled from another one (another temperature, a truncated or masked or penalised one), or that
holds tokens which the engine put there itself, would be trained with importance ratios that are
silently wrong, so it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from callforest_core.custody.errors import ExtrasError
from callforest_core.custody.extras import ExtrasValue, decode_extras

_NEUTRAL: Final[Mapping[str, tuple[ExtrasValue, ...]]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "structured_outputs": (False,),
    "logit_bias": (),
    "bad_words": (),
    "allowed_token_ids": (),
    "thinking_token_budget": (),
    "watermarking": (),
    "trace_decode_token_ids": (),
    "extra_args": (),
}
"""The values that leave the distribution as it is, a float as well as the equal integer; a
parameter without any must be absent."""

_LOGPROBS: Final = frozenset({"raw_logprobs", "processed_logprobs"})
"""What log-probabilities may count as; of the own distribution the two are the same numbers."""


def sampling_fault(extras: bytes) -> str:
    """Say what in a call's extras is not the learner's distribution; "" when nothing is.

    Extras that state no sampling, as those of a peer's records, are taken at their word.

    Args:
        extras: the canonical encoding of the call's extras.
    """
    try:
        stated = decode_extras(extras)
    except ExtrasError as error:
        return f"unreadable extras: {error}"
    sampling = stated.get("sampling") if stated else None
    if not isinstance(sampling, dict):
        return ""
    for name, neutral in _NEUTRAL.items():
        value = sampling.get(name)
        if value is not None and value not in neutral:
            return f"{name} is {value!r}"
    mode = stated.get("logprobs_mode") if stated else None
    return "" if mode is None or mode in _LOGPROBS else f"logprobs_mode is {mode!r}"
