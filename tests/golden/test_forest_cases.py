"""The forest and padding suites: recorded cases, and random ones against the rules read naively."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callforest_core.custody.call import StagedCall
from callforest_mesh.conformance.command import check
from callforest_mesh.conformance.json_case import Json, same
from callforest_mesh.conformance.suites import SUITES
from tests.unit.finalizer.forests import Grown

CASES = Path(__file__).parent / "data" / "cases"


@pytest.mark.requirement("FOR-1", "FOR-2", "FOR-3", "FOR-7", "SEL-5", "SEL-6", "FIN-6")
@pytest.mark.parametrize(("suite", "count"), [("forest", 40), ("padding", 30)])
def test_every_recorded_case_is_answered_by_the_rules(suite: str, count: int) -> None:
    out = io.StringIO()
    assert check(suite, CASES / f"{suite}.jsonl", out) == 0
    assert out.getvalue() == f"{count} passed, 0 failed\n"


def staged(call: StagedCall) -> dict[str, Json]:
    """An honest staged record as the suite takes it."""
    identity = call.identity
    generated = [float(one) for one in call.logprobs]
    mask: list[Json] = [0.0] * call.carry_len + [1.0] * len(generated)
    logprobs: list[Json] = [0.0] * call.carry_len + generated
    ids: list[Json] = [int(one) for one in call.token_ids]
    return {
        "schema_version": 2,
        "digest_version": 2,
        "extras_digest_version": 1,
        "rollout_id": identity.capture_key,
        "model_call_id": identity.call_id,
        "parent_call_id": identity.parent_call_id,
        "mode": call.mode,
        "prev_len": call.prev_len,
        "delta_len": call.delta_len,
        "cum_len": call.cum_len,
        "weight_version": call.weight_version,
        "token_ids_delta": ids,
        "token_mask_delta": mask,
        "generation_log_probs_delta": logprobs,
        "extras_digest": call.extras_digest.hex(),
        "chain_hash": call.chain_hash.hex(),
        "cumulative_hash": call.cumulative_hash.hex(),
        "digest": call.digest.hex(),
        "response_id": f"resp-{identity.call_id}",
        "staging_key": f"{identity.capture_key}/{identity.call_id}",
    }


def expected(calls: dict[str, StagedCall], selection: list[str], scored: str) -> Json:
    """Read the rules word by word: each endpoint, walked back to its root."""
    if scored not in selection:
        return {"error": "terminal_not_selected"}
    parents = {name: calls[name].identity.parent_call_id for name in selection}
    if any(parent is not None and parent not in selection for parent in parents.values()):
        return {"masked": "selection_not_closed"}

    def below(parent: str | None) -> list[list[str]]:
        found = []
        for name in selection:
            if parents[name] == parent:
                found += [[name, *path] for path in below(name) or [[]]]
        return found

    trained: set[str] = set()
    rows: list[Json] = []
    for path in below(None):
        spans: list[Json] = []
        ids: list[Json] = []
        masks: list[Json] = []
        logprobs: list[Json] = []
        for name in path:
            call = calls[name]
            owned = name not in trained
            trained.add(name)
            start = len(ids)
            ids += [int(one) for one in call.token_ids]
            masks += [0] * call.carry_len + [int(owned)] * call.generation_len
            logprobs += [0.0] * call.carry_len + [float(one) for one in call.logprobs]
            spans.append(
                {
                    "model_call_id": name,
                    "start": start,
                    "gen_start": start + call.carry_len,
                    "end": len(ids),
                    "owned": owned,
                }
            )
        named: list[Json] = [*path]
        versions: list[Json] = [calls[name].weight_version for name in path]
        rows.append(
            {
                "model_call_ids": named,
                "token_ids": ids,
                "loss_mask": masks,
                "logprobs": logprobs,
                "spans": spans,
                "weight_versions": versions,
            }
        )
    generations = [calls[name].generation_len for name in selection]
    metrics: Json = {
        "gen_tokens_per_sample": sum(generations),
        "max_gen_tokens_per_turn": max(generations),
        "total_tokens_per_sample": max(calls[name].cum_len for name in selection),
    }
    return {"rows": rows, "metrics": metrics}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Grown, list[str], str]:
    """A random forest and any selection of it, closed or not."""
    rollout = Grown("r0", 0)
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *rollout.calls]))
        carry, gen = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        rollout.call(f"c{number}", parent, carry=carry, gen=gen)
    names = draw(st.permutations(list(rollout.calls)))
    selection = names[: draw(st.integers(1, len(names)))]
    return rollout, selection, draw(st.sampled_from(list(rollout.calls)))


@pytest.mark.requirement("FOR-1", "FOR-3", "FOR-7", "SEL-5", "SEL-6")
@settings(max_examples=200, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_random_cases_are_answered_as_the_rules_say(
    case: tuple[Grown, list[str], str], random: Random
) -> None:
    rollout, selection, scored = case
    given_calls = [staged(call) for call in rollout.calls.values()]
    random.shuffle(given_calls)
    chosen: list[Json] = [*selection]
    asked: dict[str, Json] = {
        "id": "own",
        "rollout_id": "r0",
        "calls": [*given_calls],
        "selection": chosen,
        "scored_terminal": scored,
    }
    answer = SUITES["forest"].answer(asked)
    assert same(answer, expected(rollout.calls, selection, scored))
