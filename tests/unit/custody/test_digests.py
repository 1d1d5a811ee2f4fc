"""Digest layouts, written out once more from the capture contract (2.2 to 2.6)."""

import hashlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from callforest_core.custody.call import CallIdentity, StagedCall
from callforest_core.custody.digests import (
    FORMAT_VERSIONS,
    CallHeader,
    DigestInputError,
    FormatVersions,
    canonical_call_digest,
    chain_hash,
    cumulative_hash,
    cumulative_hash_encoded,
    digest_opening,
    exact_call_digest,
)
from callforest_core.custody.exact_call import ExactCall
from callforest_core.custody.extras import EMPTY_EXTRAS_DIGEST
from callforest_core.custody.routes import RouteSpan, classify_route_span
from callforest_core.custody.tokens import encode_floats, encode_ids
from tests.unit.custody.chains import branching

WIDE_IDS = st.lists(st.integers(0, 2**64 - 1), max_size=8)
HASH = bytes(range(32))


def u64(value: int) -> bytes:
    return struct.pack(">Q", value)


def tok(values: list[int]) -> bytes:
    return u64(len(values)) + b"".join(map(u64, values))


def lp(value: bytes) -> bytes:
    return u64(len(value)) + value


@given(WIDE_IDS)
def test_cumulative_hash_layout(values: list[int]) -> None:
    layout = b"nemo-gym-staging-prefix-v2" + tok(values)
    assert cumulative_hash(np.array(values, np.uint64)) == hashlib.sha256(layout).digest()


@given(WIDE_IDS, WIDE_IDS)
def test_pieces_hash_as_their_whole(first: list[int], second: list[int]) -> None:
    pieces = [encode_ids(np.array(values, np.uint64)) for values in (first, second)]
    whole = cumulative_hash(np.array(first + second, np.uint64))
    assert cumulative_hash_encoded(*pieces) == whole


@given(WIDE_IDS, st.none() | st.just(HASH))
def test_chain_hash_layout(values: list[int], parent: bytes | None) -> None:
    marker = b"\x00" if parent is None else b"\x01" + parent
    layout = b"nemo-gym-staging-chain-v1" + marker + tok(values)
    assert chain_hash(parent, np.array(values, np.uint64)) == hashlib.sha256(layout).digest()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_narrow_and_wide_ids_hash_alike(values: list[int]) -> None:
    narrow, wide = np.array(values, np.uint32), np.array(values, np.uint64)
    assert cumulative_hash(narrow) == cumulative_hash(wide)
    assert chain_hash(HASH, narrow) == chain_hash(HASH, wide)


def test_strided_columns_hash_as_their_values() -> None:
    every_other = np.arange(20, dtype=np.uint32)[::2]
    assert cumulative_hash(every_other) == cumulative_hash(every_other.copy())


def exact(**changes: Any) -> bytes:
    """The digest of the contract's worked example, with changes."""
    fields: dict[str, Any] = {
        "versions": FORMAT_VERSIONS,
        "capture_key": "rollout-1",
        "call_id": "call-1",
        "parent_call_id": "parent-1",
        "mode": "token_in",
        "prev_len": 3,
        "delta_len": 2,
        "cum_len": 5,
        "weight_version": 7,
        "ids": [10, 11],
        "mask": [0.0, 1.0],
        "logprobs": [0.0, -0.25],
    } | changes
    columns = [fields.pop(name) for name in ("ids", "mask", "logprobs")]
    return exact_call_digest(
        CallHeader(**fields),
        np.array(columns[0], np.uint64),
        np.array(columns[1], np.float64),
        np.array(columns[2], np.float64),
        (EMPTY_EXTRAS_DIGEST, b"\x11" * 32, b"\x22" * 32),
    )


def test_call_digest_layout() -> None:
    columns = (
        tok([10, 11]),
        u64(2) + struct.pack(">2f", 0, 1),
        u64(2) + struct.pack(">2f", 0, -0.25),
    )
    layout = (
        b"nemo-gym-staging-call-v2\x02\x02\x01"
        + lp(b"rollout-1")
        + lp(b"call-1")
        + b"\x01"
        + lp(b"parent-1")
        + lp(b"token_in")
        + u64(3) + u64(2) + u64(5) + u64(7)
        + b"".join(map(lp, columns))
        + EMPTY_EXTRAS_DIGEST
        + b"\x01" + b"\x11" * 32
        + b"\x01" + b"\x22" * 32
    )  # fmt: skip
    assert exact() == hashlib.sha256(layout).digest()


def test_logprobs_are_digested_as_float32_with_the_sign_of_zero() -> None:
    assert exact(logprobs=[0.0, -0.1]) == exact(logprobs=[0.0, float(np.float32(-0.1))])
    assert exact(logprobs=[-0.0, -0.25]) != exact()
    assert exact(mask=[-0.0, 1.0]) != exact()


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": FormatVersions(3, 2, 1)},
        {"versions": FormatVersions(2, 1, 1)},
        {"versions": FormatVersions(2, 2, 2)},
        {"capture_key": ""},
        {"call_id": ""},
        {"parent_call_id": ""},
        {"call_id": "\ud800"},
        {"mode": "text"},
        {"mode": "x"},
        {"parent_call_id": None},
        {"parent_call_id": None, "mode": "text"},
        {"prev_len": 0, "cum_len": 2},
        {"prev_len": -1, "cum_len": 1},
        {"delta_len": 0, "cum_len": 3, "ids": [], "mask": [], "logprobs": []},
        {"delta_len": 3, "cum_len": 6},
        {"cum_len": 6},
        {"prev_len": 2**64 - 1, "cum_len": 2**64 + 1},
        {"weight_version": 2**64},
        {"weight_version": -1},
        {"mask": [0.0, 0.5]},
        {"mask": [0.0]},
        {"mask": [0.0, float("nan")]},
        {"logprobs": [0.0]},
        {"logprobs": [0.5, -0.25]},
        {"logprobs": [0.0, float("nan")]},
        {"logprobs": [0.0, float("-inf")]},
        {"logprobs": [0.0, -3.5e38]},
    ],
)
def test_fields_without_a_digest_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DigestInputError):
        exact(**changes)


@pytest.mark.parametrize("call", branching().staged(), ids=lambda call: call.identity.call_id)
def test_canonical_and_exact_form_have_one_digest(call: StagedCall) -> None:
    carry = np.zeros(call.carry_len)
    wide = ExactCall(
        call.identity,
        call.mode,
        call.prev_len,
        call.delta_len,
        call.cum_len,
        call.weight_version,
        call.token_ids.astype(np.uint64),
        np.concatenate((carry, np.ones(call.generation_len))),
        np.concatenate((carry, call.logprobs)),
        call.digest,
        call.extras_digest,
        call.chain_hash,
        call.cumulative_hash,
    )
    assert wide.recompute_digest() == call.digest


def test_staging_key_names_attempt_and_call() -> None:
    assert CallIdentity("a-1", "c", None).staging_key == "a-1/c"


@pytest.mark.parametrize(
    ("carry", "generation", "rows", "span"),
    [
        (3, 2, 5, RouteSpan.FULL),
        (3, 2, 4, RouteSpan.TAIL),
        (3, 2, 9, RouteSpan.TAIL),
        (3, 2, 1, RouteSpan.SENTINEL),
        (0, 0, 0, RouteSpan.SENTINEL),
        (3, 0, 3, RouteSpan.FULL),
        (3, 0, 2, RouteSpan.SENTINEL),
    ],
)
def test_route_spans(carry: int, generation: int, rows: int, span: RouteSpan) -> None:
    assert classify_route_span(carry, generation, rows) is span


@given(
    st.integers(0, 700),
    st.lists(st.floats(-9, 0, width=32), max_size=700),
    st.none() | st.text("ab/", min_size=1),
)
def test_the_canonical_form_digests_as_the_full_one(
    carry_len: int, scores: list[float], parent: str | None
) -> None:
    """At any size, zeros for the carry and ones for the generation are what the full form has."""
    size, prev_len = carry_len + len(scores), 0 if parent is None else 5
    assume(size)
    token_ids = np.arange(size, dtype=np.uint32) * 1_000_003
    header = CallHeader(
        *(FORMAT_VERSIONS, "k", "c", parent, "text" if parent is None else "token_in"),
        *(prev_len, size, prev_len + size, 7),
    )
    mask = np.repeat([0.0, 1.0], [carry_len, len(scores)])
    logprobs = np.concatenate((np.zeros(carry_len), scores))
    digests = (EMPTY_EXTRAS_DIGEST, HASH, HASH[::-1])
    full = exact_call_digest(header, token_ids, mask, logprobs, digests)
    canonical = canonical_call_digest(
        *(digest_opening("k"), "c", parent, prev_len, carry_len, 7),
        *(encode_ids(token_ids), encode_floats(np.array(scores, np.float32)), digests),
    )
    assert canonical == full


def test_columns_of_another_call_have_no_digest() -> None:
    first, second = list(branching().calls.values())[:2]
    opening = digest_opening(first.identity.capture_key)
    own, scores = encode_ids(first.token_ids), encode_floats(first.logprobs)
    assert first.recompute_digest(opening, own, scores) == first.digest
    for encoded, floats in ((encode_ids(second.token_ids), scores), (own, scores[:-4])):
        with pytest.raises(DigestInputError, match="not those of this call"):
            first.recompute_digest(opening, encoded, floats)
