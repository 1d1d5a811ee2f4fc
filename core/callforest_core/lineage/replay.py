"""Replay summaries: the constant-size evidence of what a call was asked (seed 1, ADM-7).

Forest mode matches a later request against them. A summary holds no items and no ancestors, so
what a rollout stores grows linearly with its calls.

Normalization version 1 takes the items as they are received:

    d_0 = SHA-256("callforest-replay-source-v1")
    d_i = SHA-256("callforest-replay-source-v1" + d_{i-1} + u64(len(t_i)) + t_i)

with t_i the UTF-8 canonical JSON of item i and u64 big-endian. Hashing can resume from any d_i.

    render digest = SHA-256("callforest-replay-render-v1" + t)

with t the UTF-8 canonical JSON of an object with every name of RENDER_OPTIONS, null where the
effective option is absent.
"""

import hashlib
from collections.abc import Iterable, Mapping

from callforest_core.lineage.canonical_json import canonical_json

NORMALIZATION_VERSION = 1

_SOURCE_DOMAIN = b"callforest-replay-source-v1"
_RENDER_DOMAIN = b"callforest-replay-render-v1"

EMPTY_SOURCE_DIGEST = hashlib.sha256(_SOURCE_DOMAIN).digest()

RENDER_OPTIONS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "instructions",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "model",
    "parallel_tool_calls",
    "reasoning_effort",
    "tool_choice",
    "tools",
)
"""The options that change how items become prompt tokens; sampling options are not among them."""


def source_digests(items: Iterable[object], start: bytes = EMPTY_SOURCE_DIGEST) -> list[bytes]:
    """Return the source digest after each item, resuming after `start`.

    Raises CanonicalJsonError for an item without canonical JSON.
    """
    digests: list[bytes] = []
    digest = start
    for item in items:
        text = canonical_json(item).encode("utf-8")
        length = len(text).to_bytes(8, "big")
        digest = hashlib.sha256(_SOURCE_DOMAIN + digest + length + text).digest()
        digests.append(digest)
    return digests


def render_digest(options: Mapping[str, object]) -> bytes:
    """Return the 32-byte digest of the effective render options; null and absent are equal.

    Raises CanonicalJsonError for an option without canonical JSON.
    """
    effective = {name: options.get(name) for name in RENDER_OPTIONS}
    text = canonical_json(effective).encode("utf-8")
    return hashlib.sha256(_RENDER_DOMAIN + text).digest()
