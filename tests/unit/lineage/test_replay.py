"""Replay summaries: chained, resumable, of constant size."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.canonical_json import CanonicalJsonError
from callforest_core.lineage.replay import (
    EMPTY_SOURCE_DIGEST,
    render_digest,
    source_digests,
)

ITEMS = st.lists(st.dictionaries(st.text(), st.integers(-5, 5) | st.text()), max_size=6)


@given(ITEMS, ITEMS)
def test_the_source_digest_can_be_resumed(
    earlier: list[dict[str, object]], later: list[dict[str, object]]
) -> None:
    first = [EMPTY_SOURCE_DIGEST, *source_digests(earlier)]
    resumed = [*first, *source_digests(later, first[-1])]
    assert resumed == [EMPTY_SOURCE_DIGEST, *source_digests([*earlier, *later])]


def test_the_written_layout_is_what_is_hashed() -> None:
    domain = b"callforest-replay-source-v1"
    text = b'{"a":"\xc3\xa9","b":1.0}'
    start = hashlib.sha256(domain).digest()
    expected = hashlib.sha256(domain + start + len(text).to_bytes(8, "big") + text).digest()
    assert source_digests([{"b": 1.0, "a": "é"}]) == [expected]


def test_order_and_boundaries_count() -> None:
    one, two = {"a": 1}, {"b": 2}
    assert source_digests([one, two])[-1] != source_digests([two, one])[-1]
    assert source_digests([[one, two]])[-1] != source_digests([one, two])[-1]


def test_render_options_count_and_sampling_options_do_not() -> None:
    options = {"model": "m", "tools": [{"name": "run"}], "chat_template_kwargs": {"think": True}}
    digest = render_digest(options)
    assert render_digest({**options, "temperature": 0.5, "seed": 3}) == digest
    assert render_digest({**options, "tool_choice": None}) == digest
    for changed in (
        {"model": "n"},
        {"tools": []},
        {"tool_choice": "auto"},
        {"chat_template_kwargs": {"think": False}},
        {"add_generation_prompt": True},
    ):
        assert render_digest({**options, **changed}) != digest


def test_what_has_no_canonical_form_is_an_error() -> None:
    with pytest.raises(CanonicalJsonError):
        source_digests([{"n": 2**64}])
    with pytest.raises(CanonicalJsonError):
        render_digest({"model": "\ud800"})
