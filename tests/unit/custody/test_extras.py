"""The canonical encoding of extras (capture contract 2.5)."""

import struct
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.custody.errors import ExtrasError
from callforest_core.custody.extras import (
    EMPTY_EXTRAS,
    EMPTY_EXTRAS_DIGEST,
    MAX_DEPTH,
    decode_extras,
    encode_extras,
    extras_digest,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("aé漢𝄞", max_size=3), inner)
    ),
    max_leaves=12,
)


def u64(value: int) -> bytes:
    return struct.pack(">Q", value)


@given(st.none() | st.dictionaries(st.text("abé", max_size=3), VALUES))
def test_decoding_gives_back_what_was_encoded(value: dict[str, Any] | None) -> None:
    decoded = decode_extras(encode_extras(value))
    assert encode_extras(decoded) == encode_extras(value)
    assert decoded == value


@given(st.binary(max_size=40))
def test_bytes_that_decode_are_canonical(encoded: bytes) -> None:
    try:
        value = decode_extras(encoded)
    except ExtrasError:
        return
    assert encode_extras(value) == encoded


def test_known_digests() -> None:
    assert EMPTY_EXTRAS_DIGEST.hex() == (
        "a1edc33c107616cf344faf0103daa025cfb125f8e1c784ae5f6a49faf2b768b6"
    )
    assert extras_digest(encode_extras({})).hex() == (
        "1fd859b283c766e508af525e02edd53f1861163b644f36caccdb8b2316f52e77"
    )


def test_integer_and_float_differ_and_zero_keeps_its_sign() -> None:
    encoded = {encode_extras({"a": value}) for value in (0, 0.0, -0.0, False, None, "")}
    assert len(encoded) == 6


def test_keys_are_ordered_by_their_bytes() -> None:
    assert encode_extras({"\uffff": 1, "𝄞": 2, "a": 3}) == (
        b"D"
        + u64(3)
        + u64(1) + b"a" + b"I" + u64(3)
        + u64(3) + "\uffff".encode() + b"I" + u64(1)
        + u64(4) + "𝄞".encode() + b"I" + u64(2)
    )  # fmt: skip


def test_only_the_outermost_may_be_another_mapping() -> None:
    assert encode_extras(MappingProxyType({"a": 1})) == encode_extras({"a": 1})
    with pytest.raises(ExtrasError):
        encode_extras({"a": OrderedDict(b=1)})


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        [],
        "text",
        1,
        {"a": (1,)},
        {"a": b"bytes"},
        {"a": {1}},
        {"a": np.int64(1)},
        {"a": np.float64(1.0)},
        {"a": Text("x")},
        {Text("a"): 1},
        {1: "a"},
        {None: "a"},
        {"a": 2**63},
        {"a": -(2**63) - 1},
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": "\ud800"},
        {"\udfff": 1},
    ],
)
def test_values_without_an_encoding_are_refused(value: Any) -> None:
    with pytest.raises(ExtrasError) as refused:
        encode_extras(value)
    assert refused.value.reason == "invalid_extras"


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"X",
        b"B\x02",
        b"B\x01",
        b"I" + u64(1),
        b"S" + u64(0),
        b"L" + u64(0),
        EMPTY_EXTRAS + b"N",
        b"D" + u64(1),
        b"D" + u64(2**64 - 1),
        b"D" + u64(1) + u64(1) + b"a",
        b"D" + u64(1) + u64(9) + b"a" + b"N",
        b"D" + u64(1) + u64(1) + b"a" + b"B\x02",
        b"D" + u64(1) + u64(1) + b"\xff" + b"N",
        b"D" + u64(1) + u64(1) + b"a" + b"F" + struct.pack(">d", float("nan")),
        b"D" + u64(1) + u64(1) + b"a" + b"L" + u64(2**40),
        b"D" + u64(2) + (u64(1) + b"a" + b"N") * 2,
        b"D" + u64(2) + u64(1) + b"b" + b"N" + u64(1) + b"a" + b"N",
    ],
)
def test_other_encodings_are_refused(encoded: bytes) -> None:
    with pytest.raises(ExtrasError):
        decode_extras(encoded)


def test_depth_is_bounded_both_ways() -> None:
    value: Any = None
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert decode_extras(encode_extras({"a": value})) == {"a": value}
    with pytest.raises(ExtrasError, match="deeper"):
        encode_extras({"a": [value]})
    deep = b"D" + u64(1) + u64(1) + b"a" + (b"L" + u64(1)) * 100_000 + b"N"
    with pytest.raises(ExtrasError, match="deeper"):
        decode_extras(deep)
