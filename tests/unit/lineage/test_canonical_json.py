"""The pinned JSON form, with orjson as oracle."""

import json

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from callforest_core.lineage.canonical_json import (
    CanonicalJsonError,
    canonical_arguments,
    canonical_json,
    float_text,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**64), max_value=2**65)
    | st.floats()
    | st.floats(min_value=-1e-3, max_value=1e-3)
    | st.text(st.characters())
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
)


def oracle(value: object) -> str | None:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:
        return None


def ours(value: object) -> str | None:
    try:
        return canonical_json(value)
    except CanonicalJsonError:
        return None


@given(VALUES)
@example({"e-0": 1e-05, "é": [1.5e-7, -9.9e-05], "\U0001f642": "\x7f/\u2028"})
@example([2**64 - 1, -(2**63), 10**18])
@example(2**64)
@example(-(2**63) - 1)
@example("\ud800")
@example({"\udfff": 1})
def test_every_value_is_written_as_orjson_writes_it(value: object) -> None:
    assert ours(value) == oracle(value)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_double_is_written_as_orjson_writes_it(value: float) -> None:
    assert float_text(value) == orjson.dumps(value).decode()


@pytest.mark.parametrize("leaf", [1, "x", [], {}], ids=["number", "text", "list", "object"])
@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"a": v}], ids=["lists", "objects"])
@pytest.mark.parametrize("levels", [252, 253, 254, 255])
def test_the_depth_limit_is_that_of_orjson(leaf: object, wrap: object, levels: int) -> None:
    value = leaf
    for _ in range(levels):
        value = wrap(value)
    assert ours(value) == oracle(value)


def test_a_value_too_deep_for_the_stack_is_an_error() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    try:
        with pytest.raises(CanonicalJsonError):
            canonical_json(value)
    finally:
        while value:  # freed level by level: the interpreter would recurse
            value = value.pop()


@pytest.mark.parametrize(
    ("arguments", "canonical"),
    [
        (None, ""),
        ("", ""),
        ("null", "null"),
        (" not json\u3000", "not json"),
        ("[1, 2.0,1E5]", "[1,2.0,100000.0]"),
        ('{"b":1,"a":{"d":[],"c":null}}', '{"a":{"c":null,"d":[]},"b":1}'),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"a":NaN,"b":-Infinity,"c":1e400}', '{"a":null,"b":null,"c":null}'),
        ('{"a":-0.0,"b":0.000015,"c":1e16}', '{"a":-0.0,"b":0.000015,"c":1e+16}'),
        ("1" * 5000, "1" * 5000),  # more digits than the parser takes: it does not parse
        ('"\\u00e9\\/"', '"é/"'),
        ({"z": 1, "a": [True]}, '{"a":[true],"z":1}'),
    ],
)
def test_arguments_have_one_form(arguments: object, canonical: str) -> None:
    assert canonical_arguments(arguments) == canonical


@pytest.mark.parametrize(
    "arguments",
    ['{"a":18446744073709551616}', "-9223372036854775809", '"\\ud800"', "[" * 300 + "]" * 300],
)
def test_arguments_without_a_form_are_an_error(arguments: str) -> None:
    with pytest.raises(CanonicalJsonError) as caught:
        canonical_arguments(arguments)
    assert caught.value.fact


@given(VALUES.filter(lambda value: ours(value) is not None))
def test_arguments_do_not_depend_on_how_the_harness_wrote_them(value: object) -> None:
    if "null" in canonical_json(value):  # NaN, written as null, is read back as None
        value = json.loads(canonical_json(value))
    spaced = json.dumps(value, indent=1)
    assert canonical_arguments(spaced) == canonical_json(value)


@pytest.mark.parametrize("value", [object(), {"a": b"x"}, [1.5e-9, (1,)], [1e300, {"a": {1, 2}}]])
def test_what_no_parser_makes_is_refused(value: object) -> None:
    with pytest.raises(CanonicalJsonError, match="not a JSON value"):
        canonical_json(value)
