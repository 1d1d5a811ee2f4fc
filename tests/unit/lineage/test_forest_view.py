"""Whom a request continues when it is found by its whole history."""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callforest_core.lineage.forest_view import (
    CANDIDATES_SHOWN,
    AmbiguousHistory,
    ClaimFault,
    ClaimRefused,
    ForestMatch,
    ForestRoot,
    ForestVerdict,
    ForestView,
    RootReason,
)
from callforest_core.lineage.native_ids import call_ids_in, names_call
from callforest_core.lineage.source import EMPTY_HISTORY, SourceProbe, source_render_digest
from tests.unit.lineage.conftest import digest_of

Items = Sequence[dict[str, object]]
RENDER = source_render_digest({"model": "m"})


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def said(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def commit(
    view: ForestView,
    call_id: str,
    asked: Items,
    answer: Items,
    render: bytes = RENDER,
    response_id: str = "",
) -> None:
    history = EMPTY_HISTORY.extended(asked).extended(answer)
    view.append(
        call_id,
        cum_len=history.atom_count,
        chain_hash=digest_of(call_id),
        summary=history.summary(render),
        response_id=response_id,
    )


def probe(
    asked: Sequence[object],
    claim: str | None = None,
    render: bytes = RENDER,
    *,
    whole: bool = False,
) -> SourceProbe:
    return EMPTY_HISTORY.extended(asked).probe(render, claim, claim_breaks_ties=whole)


def parent(verdict: ForestVerdict) -> str:
    assert isinstance(verdict, ForestMatch), verdict
    return verdict.parent_call_id


TASK: Items = [user("task")]


@pytest.fixture
def view() -> ForestView:
    """Hold a call `a` that answered the task with A."""
    view = ForestView()
    commit(view, "a", TASK, [said("A")])
    return view


@pytest.mark.requirement("ADM-2")
def test_a_request_continues_the_call_that_its_last_answer_ends(view: ForestView) -> None:
    verdict = view.resolve(probe([*TASK, said("A"), user("next")]))
    assert verdict == ForestMatch("a", 2, digest_of("a"), exact=True)
    commit(view, "b", [*TASK, said("A"), user("next")], [said("B")])
    deeper = [*TASK, said("A"), user("next"), said("B"), user("more")]
    assert parent(view.resolve(probe(deeper))) == "b"
    assert parent(view.resolve(probe([*TASK, said("A"), user("again")]))) == "a", "an older call"


@pytest.mark.requirement("ADM-2", "ADM-3")
def test_what_is_not_known_is_a_root_with_its_reason(view: ForestView) -> None:
    assert view.resolve(probe(TASK)) == ForestRoot(RootReason.NO_MODEL_ITEMS, None, 0)
    for bad in ({"role": "user", "content": "\ud800"}, "text"):
        asked = [*TASK, said("A"), bad, user("next")]
        assert view.resolve(probe(asked)) == ForestRoot(RootReason.UNREADABLE_ITEM)
    never = [*TASK, said("Z"), user("next")]
    assert view.resolve(probe(never)) == ForestRoot(RootReason.HISTORY_NOT_RECORDED)
    further = [*TASK, said("A"), user("next"), said("Z"), user("more")]
    assert view.resolve(probe(further)) == ForestRoot(RootReason.HISTORY_NOT_RECORDED, "a", 2)
    known = [*TASK, said("A"), user("next")]
    other = source_render_digest({"model": "n"})
    changed = ForestRoot(RootReason.RENDER_OPTIONS_CHANGED, "a", 2)
    assert view.resolve(probe(known, render=other)) == changed
    not_alone = ForestRoot(RootReason.NOT_OBSERVATIONS, "a", 2)
    for behind in ([], [user("next"), {"role": "system", "content": "s"}]):
        assert view.resolve(probe([*TASK, said("A"), *behind])) == not_alone


@pytest.mark.requirement("ADM-2")
def test_exposed_reasoning_counts(view: ForestView) -> None:
    commit(view, "r", TASK, [said("A", reasoning="because")])
    asked = [*TASK, said("A", reasoning="because"), user("next")]
    assert parent(view.resolve(probe(asked))) == "r"
    assert parent(view.resolve(probe([*TASK, said("A"), user("next")]))) == "a"
    changed = [*TASK, said("A", reasoning="why"), user("next")]
    assert isinstance(view.resolve(probe(changed)), ForestRoot)


@pytest.mark.requirement("ADM-2")
@pytest.mark.parametrize("order", [("a", "b", "c"), ("a", "c", "b"), ("c", "a", "b")])
def test_the_parent_is_whose_text_is_repeated_in_any_order_of_commits(
    order: tuple[str, ...],
) -> None:
    """Bug case B12: A, then B behind A, then a rollback C of A; D repeats C."""
    rolled_back = [said("A and what B was asked")]
    calls: dict[str, tuple[Items, Items]] = {
        "a": (TASK, [said("A")]),
        "b": ([*TASK, said("A"), user("u")], [said("B")]),
        "c": (TASK, rolled_back),
    }
    view = ForestView()
    for call_id in order:
        commit(view, call_id, *calls[call_id])
    assert parent(view.resolve(probe([*TASK, *rolled_back, user("d")]))) == "c"
    assert parent(view.resolve(probe([*TASK, said("A"), user("u"), said("B"), user("e")]))) == "b"


@pytest.mark.requirement("ADM-2")
def test_identical_siblings_are_told_apart_by_echoed_ids_or_not_at_all(view: ForestView) -> None:
    """Bug case B15: never the latest, never the first."""
    commit(view, "twin", TASK, [said("A")])
    plain = [*TASK, said("A"), user("next")]
    assert view.resolve(probe(plain)) == AmbiguousHistory(("a", "twin"), 2)
    for native_id, expected in (("msg_twin", "twin"), ("chatcmpl-a", "a"), ("fc_twin_0", "twin")):
        echoed = [*TASK, said("A", id=native_id), user("next")]
        assert parent(view.resolve(probe(echoed))) == expected
    foreign = [*TASK, said("A", id="msg_of_another_system"), user("next")]
    assert view.resolve(probe(foreign)) == AmbiguousHistory(("a", "twin"), 2)
    both = [*TASK, said("A", id="msg_twin"), said("", id="msg_a"), user("next")]
    assert view.resolve(probe(both)) == AmbiguousHistory(("a", "twin"), 2)
    for call_id, response_id in (("x", "resp_x"), ("y", "resp_y"), ("z", "resp_y")):
        commit(view, call_id, TASK, [said("A")], response_id=response_id)
    assert parent(view.resolve(probe([*TASK, said("A", id="resp_x"), user("next")]))) == "x"
    shared = view.resolve(probe([*TASK, said("A", id="resp_y"), user("next")]))
    assert shared == AmbiguousHistory(("y", "z"), 2)


@pytest.mark.requirement("ADM-2")
def test_ids_that_name_several_leave_an_ambiguity_in_commit_order() -> None:
    view = ForestView()
    answer = [{"type": "reasoning", "id": "rs_c", "summary": "t"}, said("A", id="msg_b")]
    for call_id in ("a", "b", "c"):
        commit(view, call_id, TASK, answer)
    verdict = view.resolve(probe([*TASK, *answer, user("next")]))
    assert verdict == AmbiguousHistory(("b", "c"), 2)


@pytest.mark.requirement("ADM-2")
def test_an_ambiguity_that_only_rendering_tells_apart_is_none(view: ForestView) -> None:
    other = source_render_digest({"model": "n"})
    commit(view, "n", TASK, [said("A")], other)
    asked = [*TASK, said("A"), user("next")]
    assert parent(view.resolve(probe(asked))) == "a"
    assert parent(view.resolve(probe(asked, render=other))) == "n"


@pytest.mark.requirement("ADM-2")
def test_a_claim_is_checked_and_chooses_only_among_equals(view: ForestView) -> None:
    commit(view, "twin", TASK, [said("A")])
    commit(view, "other", TASK, [said("B")])
    asked = [*TASK, said("A"), user("next")]
    assert parent(view.resolve(probe(asked, "twin"))) == "twin"
    assert parent(view.resolve(probe(asked, "a"))) == "a"
    changed = source_render_digest({"model": "n"})
    refused: list[tuple[Sequence[object], str, bytes, ClaimFault]] = [
        (asked, "other", RENDER, ClaimFault.NOT_THIS_CALL),
        (asked, "nobody", RENDER, ClaimFault.NOT_THIS_CALL),
        (TASK, "a", RENDER, ClaimFault.NO_BOUNDARY),
        ([*asked, "unreadable"], "a", RENDER, ClaimFault.NO_BOUNDARY),
        ([*TASK, said("Z"), user("next")], "a", RENDER, ClaimFault.NOT_THIS_CALL),
        ([*TASK, said("A")], "a", RENDER, ClaimFault.NOT_OBSERVATIONS),
        (asked, "a", changed, ClaimFault.RENDER_OPTIONS),
        ([*TASK, said("A", id="msg_twin"), user("next")], "a", RENDER, ClaimFault.NOT_THIS_CALL),
    ]
    for items, claim, render, fault in refused:
        assert view.resolve(probe(items, claim, render)) == ClaimRefused(claim, fault)


@pytest.mark.requirement("ADM-2")
def test_a_claim_with_a_whole_history_only_breaks_ties(view: ForestView) -> None:
    asked = [*TASK, said("A"), user("next")]
    assert parent(view.resolve(probe(asked, "nobody", whole=True))) == "a"
    commit(view, "twin", TASK, [said("A")])
    assert parent(view.resolve(probe(asked, "twin", whole=True))) == "twin"
    tie = AmbiguousHistory(("a", "twin"), 2)
    assert view.resolve(probe(asked, "nobody", whole=True)) == tie
    echoed = [*TASK, said("A", id="msg_twin"), user("next")]
    assert parent(view.resolve(probe(echoed, "a", whole=True))) == "twin", "ids come first"
    never = [*TASK, said("Z"), user("next")]
    changed = source_render_digest({"model": "n"})
    for items, render, reason in (
        (TASK, RENDER, RootReason.NO_MODEL_ITEMS),
        (never, RENDER, RootReason.HISTORY_NOT_RECORDED),
        (asked, changed, RootReason.RENDER_OPTIONS_CHANGED),
        (asked[:-1], RENDER, RootReason.NOT_OBSERVATIONS),
    ):
        found = view.resolve(probe(items, "a", render, whole=True))
        assert isinstance(found, ForestRoot)
        assert found.reason == reason


@pytest.mark.requirement("ADM-2")
def test_among_equals_the_same_spelling_is_preferred() -> None:
    view = ForestView()
    calls = {"role": "assistant", "tool_calls": [CALL]}
    commit(view, "null", TASK, [{**calls, "content": None}])
    commit(view, "empty", TASK, [{**calls, "content": ""}])

    def resolved(echo: dict[str, object], claim: str | None = None) -> ForestVerdict:
        return view.resolve(probe([*TASK, echo, RESULT], claim))

    assert parent(resolved({**calls, "content": ""})) == "empty"
    assert parent(resolved({**calls, "content": None})) == "null"
    assert parent(resolved({**calls, "content": ""}, "null")) == "null", "the claim comes first"
    assert parent(resolved({**calls, "content": "", "id": "msg_null"})) == "null", "ids, too"
    assert resolved(calls) == AmbiguousHistory(("null", "empty"), 2)
    commit(view, "again", TASK, [{**calls, "content": ""}])
    assert resolved({**calls, "content": ""}) == AmbiguousHistory(("empty", "again"), 2)
    for call_id, content in (("x", None), ("y", "")):
        commit(view, call_id, TASK, [{**calls, "content": content}], response_id="resp_xy")
    named = {**calls, "id": "resp_xy"}
    assert parent(resolved({**named, "content": None})) == "x", "of those that ids name, alone"
    assert parent(resolved({**named, "content": ""})) == "y"


CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
CONTENTS: dict[str, dict[str, object]] = {
    "absent": {},
    "null": {"content": None},
    "empty": {"content": ""},
}
RESULT: dict[str, object] = {"role": "tool", "tool_call_id": "c1", "content": "done"}


@pytest.mark.requirement("ADM-2", "ADM-4")
@pytest.mark.parametrize("emitted", CONTENTS)
@pytest.mark.parametrize("echoed", CONTENTS)
def test_an_equivalence_that_was_needed_is_stated(emitted: str, echoed: str) -> None:
    """Bug case B06: all nine match, and say whether the renderer must prove it."""
    for more in ({"tool_calls": [CALL]}, {}):
        view = ForestView()
        commit(view, "a", TASK, [{"role": "assistant", **more, **CONTENTS[emitted]}])
        asked = [*TASK, {"role": "assistant", **more, **CONTENTS[echoed]}, RESULT]
        verdict = view.resolve(probe(asked))
        assert verdict == ForestMatch("a", 2, digest_of("a"), exact=emitted == echoed)


@pytest.mark.requirement("ADM-2")
def test_a_cleared_call_makes_a_root() -> None:
    """Bug case B05: the call is gone from the history, its result is still there."""
    view = ForestView()
    commit(view, "a", TASK, [{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    cleared = {"role": "assistant", "content": None, "tool_calls": None}
    verdict = view.resolve(probe([*TASK, cleared, RESULT]))
    assert verdict == ForestRoot(RootReason.HISTORY_NOT_RECORDED)


@pytest.mark.requirement("ADM-2")
def test_sub_agents_that_share_an_attempt_keep_three_chains() -> None:
    """Bug case B16: a root and two children, their calls in any order that each chain allows."""
    chains = {
        "r": [user("root")],
        "x": [{"role": "system", "content": "X"}, user("go")],
        "y": [{"role": "system", "content": "Y"}, user("go")],
    }
    steps = [name for name in chains for _ in range(3)]
    chance = random.Random(16)
    for _ in range(200):
        chance.shuffle(steps)
        view = ForestView()
        done = dict.fromkeys(chains, 0)
        asked = {name: list(items) for name, items in chains.items()}
        for name in steps:
            verdict = view.resolve(probe(asked[name]))
            before = done[name]
            if before:
                assert parent(verdict) == f"{name}{before - 1}"
            else:
                assert isinstance(verdict, ForestRoot)
            commit(view, f"{name}{before}", asked[name], [said("ok")])
            asked[name] += [said("ok"), user(f"step {before}")]
            done[name] += 1


class _Counted(UserDict[object, object]):
    """A dictionary that counts who asks it."""

    asked = 0

    def get(self, key: object, default: object = None) -> object:
        self.asked += 1
        return self.data.get(key, default)


@pytest.mark.requirement("ADM-2")
@given(st.integers(1, 300), st.booleans())
def test_a_verdict_costs_the_same_however_many_calls_there_are(count: int, known: bool) -> None:
    view = ForestView()
    history = EMPTY_HISTORY
    for number in range(count):
        history = history.extended([user(f"u{number}"), said(f"a{number}")])
        name, summary = f"c{number}", history.summary(RENDER)
        view.append(name, cum_len=number, chain_hash=digest_of(name), summary=summary)
    counted = _Counted(view._groups)
    view._groups = counted  # type: ignore[assignment]  # it is asked in the one way that counts
    tail = [] if known else [user("x"), said("never")]
    verdict = view.resolve(history.extended([*tail, user("next")]).probe(RENDER))
    assert isinstance(verdict, ForestMatch) == known
    assert counted.asked == (1 if known else 2)


def test_a_long_ambiguity_is_cut() -> None:
    view = ForestView()
    names = [f"c{number}" for number in range(CANDIDATES_SHOWN + 5)]
    for name in names:
        commit(view, name, TASK, [said("A")])
    verdict = view.resolve(probe([*TASK, said("A"), user("next")]))
    assert verdict == AmbiguousHistory(tuple(names[:CANDIDATES_SHOWN]), len(names))


def test_what_an_id_can_name() -> None:
    assert {"c1", "c1_0"} < call_ids_in(["msg_c1", "fc_c1_0", "chatcmpl-c1"])
    assert call_ids_in([""]) == frozenset()
    both = list(itertools.permutations(["rs_x", "rs_y"]))
    assert len({call_ids_in(one) for one in both}) == 1
    for native_id, named in (
        ("c1", True),
        ("c1_7", True),
        ("msg_c1", True),
        ("rs_c1_0", True),
        ("fc_c1_12", True),
        ("chatcmpl-c1", True),
        ("answer-1", True),
        ("resp_c1", False),
        ("msg_answer-1", False),
        ("msg_fc_c1", False),
        ("c1_", False),
        ("c1_x", False),
        ("c1_\u0661", False),
        ("c12", False),
    ):
        assert names_call(native_id, "c1", "answer-1") is named, native_id
    assert names_call("fc_a_b_12", "a_b", "")
    assert names_call("fc_a_b_12", "a_b_12", "")
    assert names_call("msg_x", "msg_x", ""), "a call's own id may look like a prefix"


def test_reasons_are_written_as_the_contract_has_them() -> None:
    """They are in records and refusals, and stay."""
    assert [*map(str, RootReason)] == [
        *("no_model_items", "unreadable_item", "history_not_recorded"),
        *("render_options_changed", "not_observations"),
    ]
    assert [*map(str, ClaimFault)] == [
        *("no_boundary", "not_this_call", "render_options", "not_observations"),
    ]
