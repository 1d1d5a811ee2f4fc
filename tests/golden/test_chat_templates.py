"""Real chat templates: what was sampled heads the next prompt exactly, or a context begins anew.

Every outcome was written by hand, from reading the template (chatml_cases, marker_cases).
"""

import hashlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from callforest_core.custody.capture_input import (
    Candidate,
    CaptureInput,
    HistoryMatch,
    Rendering,
    decide_capture_input,
)
from callforest_core.custody.digests import chain_hash
from callforest_core.custody.tokens import TokenIds
from tests.golden.chat_templates import (
    CHATML,
    DEEPSEEK,
    FOLDER,
    GLM,
    LLAMA3,
    LLAMA3_1,
    QWEN2_5,
    QWEN3,
    SMOLLM2,
    TEMPLATES,
    ChatTemplate,
    Message,
)
from tests.golden.chatml_cases import CHATML_CASES, QWEN2_5_CASES, QWEN3_CASES, SMOLLM2_CASES
from tests.golden.marker_cases import DEEPSEEK_CASES, GLM_CASES, LLAMA_CASES
from tests.golden.template_case import HI, Case, called, result, said

CASES = (
    *CHATML_CASES,
    *SMOLLM2_CASES,
    *QWEN2_5_CASES,
    *QWEN3_CASES,
    *LLAMA_CASES,
    *DEEPSEEK_CASES,
    *GLM_CASES,
)

SPELLINGS: dict[str, dict[str, object]] = {
    "absent": {},
    "null": {"content": None},
    "empty": {"content": ""},
}
# The spellings that render alike, by hand; one that is named nowhere is refused by the template.
TOOL_TURN = {
    "chatml": [{"empty"}],
    "smollm2": [{"empty"}],
    "qwen2_5": [{"absent", "null", "empty"}],
    "qwen3": [{"absent", "null", "empty"}],
    "llama3": [{"absent", "empty"}, {"null"}],
    "llama3_1": [{"absent", "null", "empty"}],
    "deepseek_r1_distill": [{"null"}, {"empty"}],
    "glm4moe": [{"absent", "empty"}, {"null"}],
}
PLAIN_TURN = {
    "chatml": [{"empty"}],
    "smollm2": [{"empty"}],
    "qwen2_5": [{"empty"}],
    "qwen3": [{"absent", "null", "empty"}],
    "llama3": [{"absent", "empty"}, {"null"}],
    "llama3_1": [{"absent", "empty"}, {"null"}],
    # Null makes it a turn of calls, of which there are none: no tokens at all.
    "deepseek_r1_distill": [{"null"}, {"empty"}],
    "glm4moe": [{"absent", "empty"}, {"null"}],
}


def by_name(template: ChatTemplate) -> str:
    return template.name


def test_every_template_is_the_one_of_the_manifest() -> None:
    rows = re.findall(r"\| `([\w.]+)` \|.*`([0-9a-f]{64})` \|", (FOLDER / "README.md").read_text())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in jinja_files()}
    assert dict(rows) == found
    assert {f"{template.name}.jinja" for template in TEMPLATES} == set(found)


def jinja_files() -> list[Path]:
    return sorted(FOLDER.glob("*.jinja"))


def decide(case: Case) -> tuple[TokenIds, TokenIds, CaptureInput]:
    template = case.template
    last = max(n for n, message in enumerate(case.messages) if message["role"] == "assistant")
    history = case.messages[: last + 1]
    prefix = template.encode(case.captured)
    prompt = template.render(case.messages, prompt=True)
    decided = decide_capture_input(
        Candidate(prefix, chain_hash(None, prefix), case.match),
        Rendering(prompt, template.render(history, prompt=False), template.spelled(history)),
        template.terminators,
        template.reader,
    )
    return prefix, prompt, decided


@pytest.mark.requirement("ADM-5", "ADM-6")
@pytest.mark.bugcase("B02", "B06", "B07")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_real_template_has_the_outcome_that_was_read_out_of_it(case: Case) -> None:
    prefix, prompt, decided = decide(case)
    decision = decided.decision
    assert (decision.reason, decision.notes) == (case.reason, case.notes)
    assert decision.is_spliced == (case.follows is not None)
    if case.follows is None:
        assert decided.token_ids.tolist() == prompt.tolist()
        assert (decision.prefix_cut, decision.render_cut, decision.proof) == (0, 0, b"")
        return
    follows = case.template.encode(case.follows)
    assert decided.token_ids.tolist() == [*prefix.tolist(), *follows.tolist()]
    assert len(decision.proof) == 32
    head, tail = prefix[: decision.prefix_cut], prompt[decision.render_cut :]
    assert decided.token_ids.tolist() == [*head.tolist(), *tail.tolist()]
    assert len(prefix) - decision.prefix_cut in (0, 1)


def rendered(template: ChatTemplate, answer: Message) -> dict[str, list[int] | None]:
    """Render a turn in each spelling of its missing text."""
    shown = {}
    for name, content in SPELLINGS.items():
        ids = template.rendered_or_none([HI, {**answer, **content}])
        shown[name] = None if ids is None else ids.tolist()
    return shown


def alike(classes: list[set[str]], one: str, other: str) -> bool:
    return any({one, other} <= together for together in classes)


@pytest.mark.requirement("ADM-5")
@pytest.mark.bugcase("B06")
@pytest.mark.parametrize("template", TEMPLATES, ids=by_name)
def test_the_nine_spellings_of_a_tool_call_match_only_if_the_renderer_says_so(
    template: ChatTemplate,
) -> None:
    arguments = '{"a": 1}' if template is DEEPSEEK else None
    answer = called(arguments=arguments)
    shown, classes = rendered(template, answer), TOOL_TURN[template.name]
    for emitted, echoed in itertools.product(SPELLINGS, SPELLINGS):
        same = shown[emitted] is not None and shown[emitted] == shown[echoed]
        assert same == alike(classes, emitted, echoed), (emitted, echoed)
    for emitted, echoed in itertools.product(SPELLINGS, SPELLINGS):
        ids = shown[echoed]
        if ids is None:
            continue  # the request itself is refused
        history = [HI, {**answer, **SPELLINGS[echoed]}]
        decided = decide_capture_input(
            Candidate(np.array(ids, np.uint32), bytes(32), HistoryMatch.TOOL_CONTENT_EQUIVALENT),
            Rendering(
                template.render([*history, result("3")], prompt=True),
                np.array(ids, np.uint32),
                template.spelled(history),
            ),
            template.terminators,
            template.reader,
        ).decision
        equivalent = decided.reason != "renderer_not_equivalent"
        assert equivalent == (len(classes) == 1 and len(classes[0]) == 3), (emitted, echoed)
        assert ("tool_content_equivalence" in decided.notes) == equivalent


@pytest.mark.bugcase("B06")
@pytest.mark.parametrize("template", TEMPLATES, ids=by_name)
def test_the_nine_spellings_of_an_empty_answer_are_what_the_template_makes_of_them(
    template: ChatTemplate,
) -> None:
    shown = rendered(template, {"role": "assistant"})
    for emitted, echoed in itertools.product(SPELLINGS, SPELLINGS):
        same = shown[emitted] is not None and shown[emitted] == shown[echoed]
        assert same == alike(PLAIN_TURN[template.name], emitted, echoed), (emitted, echoed)


@pytest.mark.bugcase("B05")
@pytest.mark.parametrize("template", [CHATML, QWEN2_5, QWEN3, LLAMA3, LLAMA3_1, GLM], ids=by_name)
def test_a_call_that_was_cleared_is_not_in_the_rendering(template: ChatTemplate) -> None:
    """What such a request is rendered to, and it is a root: its history is nobody's."""
    text = template.decode(template.render([HI, said(""), result("3")], prompt=True))
    assert "add" not in text
    assert "3" in text


def test_ids_are_those_of_the_text() -> None:
    for template in (QWEN3, SMOLLM2, DEEPSEEK):
        text = template.specials[0] + "é\n" + template.specials[1]
        ids = template.encode(text)
        assert ids.tolist() == [256, *"é\n".encode(), 257]
        assert template.decode(ids) == text
