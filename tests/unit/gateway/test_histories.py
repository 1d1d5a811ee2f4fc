"""Kept histories: bounded, shared, and what was used last stays."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.items import Dialect
from callforest_core.lineage.source import EMPTY_HISTORY
from callforest_mesh.gateway.body_start import BodyStart, Prefixes
from callforest_mesh.gateway.histories import Histories, KeptCall, RenderOptions, Turns

OPTIONS = RenderOptions(bytes(32), b"{}", None)


def turns(text: bytes, count: int = 1) -> Turns:
    return Turns(text, text, count)


def call(
    call_id: str,
    parent: KeptCall | None = None,
    *,
    text: bytes = b"1",
    key: str = "k",
    marked: bool = True,
) -> KeptCall:
    return KeptCall(
        capture_key=key,
        call_id=call_id,
        dialect=Dialect.CHAT,
        parent=parent,
        asked=turns(text),
        answer=turns(b"2"),
        request_history=EMPTY_HISTORY,
        history=EMPTY_HISTORY,
        options=OPTIONS if parent is None else parent.options,
        start=start(call_id) if marked else None,
    )


def body_to(call_id: str) -> bytes:
    return b'{"messages":["%s"' % call_id.encode()


def start(call_id: str) -> BodyStart:
    written = body_to(call_id)
    return BodyStart(written.index(b"[") + 1, len(written), sha256(written).digest())


def begun(histories: Histories, call_id: str, key: str = "k") -> KeptCall | None:
    body = body_to(call_id) + b',"more"]}'
    return histories.begun(key, Dialect.CHAT, body, Prefixes(body))


def chain(histories: Histories, *call_ids: str, key: str = "k") -> list[KeptCall]:
    calls: list[KeptCall] = []
    for call_id in call_ids:
        calls.append(call(call_id, calls[-1] if calls else None, key=key))
        histories.keep(calls[-1])
    return calls


@pytest.mark.requirement("API-8")
def test_a_call_gives_the_turns_of_its_whole_chain() -> None:
    histories = Histories(1 << 20, 100)
    root = call("a", text=b"10,11")
    histories.keep(root)
    child = call("b", root, text=b"12,13")
    histories.keep(child)
    assert histories.get("k", "b") is child
    assert [part.items for part in child.parts()] == [b"10,11", b"12,13", b"2"]
    assert child.turn_count == 2
    assert begun(histories, "b") is child
    assert begun(histories, "b", key="other") is None
    assert histories.get("other", "b") is None


@pytest.mark.requirement("API-8")
@pytest.mark.parametrize(
    ("calls_max", "kept"),
    [
        (6, "a1 a2 b1 b2 c1 c2"),
        (5, "a1 a2 b1 c1 c2"),  # of the chain used longest ago the end
        (4, "a1 a2 c1 c2"),  # then what it stood on
        (3, "a1 c1 c2"),
    ],
)
def test_what_was_used_longest_ago_makes_room_its_newest_calls_first(
    calls_max: int, kept: str
) -> None:
    histories = Histories(1 << 20, 6)
    chain(histories, "a1", "a2")
    chain(histories, "b1", "b2")
    histories.get("k", "a2")
    chain(histories, "c1", "c2")
    for number in range(6 - calls_max):
        histories.keep(call(f"new{number}", key="other"))
    names = ("a1", "a2", "b1", "b2", "c1", "c2")
    assert " ".join(name for name in names if histories.get("k", name)) == kept
    assert " ".join(name for name in names if begun(histories, name)) == kept


def test_a_chain_that_fills_everything_keeps_what_fits() -> None:
    histories = Histories(1 << 20, 3)
    calls = chain(histories, "a", "b", "c", "d")
    assert len(histories) == 3
    assert histories.get("k", "d") is None
    histories.keep(call("e", calls[3]))
    assert histories.get("k", "e") is None, "its parent is not kept"
    histories.keep(call("f"))
    assert [name for name in "abcf" if histories.get("k", name)] == ["a", "b", "f"]


def test_one_that_is_too_large_displaces_nothing() -> None:
    histories = Histories(10_000, 100)
    chain(histories, "a", "b")
    before = histories.size_bytes
    histories.keep(call("huge", text=b"1" * 10_000))
    assert (len(histories), histories.size_bytes) == (2, before)
    Histories(0, 0).keep(call("a"))


def test_the_calls_kept_last_are_named_newest_first() -> None:
    histories = Histories(1 << 20, 100)
    chain(histories, "a", "b", "c")
    assert [one.call_id for one in histories.recent("k", 2)] == ["c", "b"]
    assert histories.recent("other", 2) == []


def test_conversations_are_named_by_the_calls_kept_last() -> None:
    histories = Histories(1 << 20, 100)
    chain(histories, "a", "b", "c")
    root = histories.get("k", "a")
    histories.keep(call("d", root))
    histories.keep(call("e"))
    assert root is not None
    assert [one.call_id for one in histories.newest_of_roots("k", 9)] == ["e", "d"]
    assert [one.call_id for one in histories.newest_of_roots("k", 1)] == ["e"]
    assert [one.call_id for one in histories.ends_of(root, 9)] == ["d", "c"]
    assert [one.call_id for one in histories.ends_of(root, 1)] == ["d"]
    assert histories.newest_of_roots("other", 2) == []


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 30), st.integers(1, 300)), max_size=60),
    st.integers(0, 40_000),
    st.integers(0, 12),
)
def test_bounds_and_chains_hold_whatever_comes(
    steps: list[tuple[int, int, int]], bytes_max: int, calls_max: int
) -> None:
    histories = Histories(bytes_max, calls_max)
    made: list[KeptCall] = []
    for number, (attempt, parent_place, size) in enumerate(steps):
        key = f"k{attempt}"
        parent = made[parent_place % len(made)] if made and parent_place >= 0 else None
        if parent is not None and parent.capture_key != key:
            parent = None
        made.append(call(f"c{number}", parent, text=b"x" * size, key=key))
        histories.keep(made[-1])
        assert histories.size_bytes <= bytes_max
        assert len(histories) <= calls_max
    kept = [one for one in made if histories.get(one.capture_key, one.call_id) is one]
    assert len(kept) == len(histories)
    assert sum(one.size_bytes for one in kept) == histories.size_bytes
    assert all(one.parent is None or one.parent in kept for one in kept)
    for one in kept:
        assert begun(histories, one.call_id, one.capture_key) is one


@pytest.mark.parametrize("by_deltas", [True, False])
def test_memory_grows_with_new_turns_alone(by_deltas: bool) -> None:
    histories = Histories(1 << 30, 10_000)
    sizes = {0: 0}
    parent: KeptCall | None = None
    for number in range(512):
        parent = call(f"c{number}", parent, text=b"x" * 300, marked=not by_deltas)
        histories.keep(parent)
        sizes[number + 1] = histories.size_bytes
    assert sizes[512] / 512 <= 1.1 * sizes[16] / 16


@given(st.lists(st.integers(0, 40), max_size=80), st.booleans())
def test_joined_messages_are_those_of_the_parts(places: list[int], by_deltas: bool) -> None:
    """Wherever a chain branches, and however often it was joined."""
    calls = [call("c0", text=b"0")]
    for number, place in enumerate(places, 1):
        parent = calls[max(0, len(calls) - 1 - place % 3)]
        text = str(number).encode()
        calls.append(call(f"c{number}", parent, text=text, marked=not by_deltas))
    for one in calls:
        assert b",".join(one.messages()) == b",".join([part.messages for part in one.parts()])
