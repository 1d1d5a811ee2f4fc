"""What the ChatML family makes of second requests, and what is right: written by hand."""

from tests.golden.chat_templates import CHATML, QWEN2_5, QWEN3, SMOLLM2
from tests.golden.template_case import (
    AGAIN,
    ALIKE,
    EQUIVALENT,
    HI,
    SYSTEM,
    TRUNCATED,
    Case,
    called,
    result,
    said,
)

REASONED = "<think>\nHm\n</think>\n\nHello"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

# Turns of the ChatML family, as text.
ASK = "<|im_start|>user\nHi<|im_end|>\n"
OPEN = "<|im_start|>assistant\n"
NEXT = f"\n<|im_start|>user\nAgain<|im_end|>\n{OPEN}"
BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n"
QWEN = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n"
)


def responses(*results: str) -> str:
    """Tool results as the Qwen models are shown them: one user turn for all that follow."""
    texts = "".join(f"\n<tool_response>\n{one}\n</tool_response>" for one in results)
    return f"\n<|im_start|>user{texts}<|im_end|>\n{OPEN}"


CHATML_CASES = (
    Case(CHATML, "two turns", f"{ASK}{OPEN}Hello<|im_end|>", (HI, said("Hello"), AGAIN), NEXT),
    Case(
        CHATML,
        "cut by length",
        f"{ASK}{OPEN}Hel",
        (HI, said("Hel"), AGAIN),
        f"<|im_end|>{NEXT}",
    ),
    Case(
        CHATML,
        "system text",
        f"{BRIEF}{ASK}{OPEN}Hello<|im_end|>",
        (SYSTEM, HI, said("Hello"), AGAIN),
        NEXT,
    ),
    # The template shows no calls, so their turn is empty in it; the captured one is not.
    Case(
        CHATML,
        "observation after a tool call",
        f"{ASK}{OPEN}{CALL}<|im_end|>",
        (HI, called(content=""), result("3")),
        f"\n<|im_start|>tool\n3<|im_end|>\n{OPEN}",
    ),
    Case(
        CHATML,
        "tool call without text, echoed otherwise",
        f"{ASK}{OPEN}{CALL}<|im_end|>",
        (HI, called(content=""), result("3")),
        reason="renderer_not_equivalent",
        match=EQUIVALENT,
    ),
    # Reasoning in the text stays in the text.
    Case(
        CHATML,
        "reasoning as text",
        f"{ASK}{OPEN}{REASONED}<|im_end|>",
        (HI, said(REASONED), AGAIN),
        NEXT,
    ),
    Case(
        CHATML,
        "reasoning parsed away",
        f"{ASK}{OPEN}{REASONED}<|im_end|>",
        (HI, said("Hello", reasoning_content="Hm"), AGAIN),
        NEXT,
        notes=(TRUNCATED,),
    ),
)

SMOLLM2_CASES = (
    Case(
        SMOLLM2,
        "two turns, system text",
        f"{BRIEF}{ASK}{OPEN}Hello<|im_end|>",
        (SYSTEM, HI, said("Hello"), AGAIN),
        NEXT,
    ),
    Case(
        SMOLLM2,
        "cut by length",
        f"{BRIEF}{ASK}{OPEN}Hel",
        (SYSTEM, HI, said("Hel"), AGAIN),
        f"<|im_end|>{NEXT}",
    ),
    # The answer had no token but its end.
    Case(
        SMOLLM2,
        "empty answer",
        f"{BRIEF}{ASK}{OPEN}<|im_end|>",
        (SYSTEM, HI, said(""), AGAIN),
        NEXT,
    ),
    Case(
        SMOLLM2,
        "tool call without text, echoed otherwise",
        f"{BRIEF}{ASK}{OPEN}{CALL}<|im_end|>",
        (SYSTEM, HI, called(content=""), result("3")),
        reason="renderer_not_equivalent",
        match=EQUIVALENT,
    ),
    # A turn's end inside the answer: which of the two ends it in the rendering is not known.
    Case(
        SMOLLM2,
        "terminator inside the answer",
        f"{BRIEF}{ASK}{OPEN}Hel<|im_end|>lo<|im_end|>",
        (SYSTEM, HI, said("Hello"), AGAIN),
        reason="turn_count_differs",
    ),
)

QWEN2_5_CASES = (
    Case(
        QWEN2_5,
        "two turns",
        f"{QWEN}{ASK}{OPEN}Hello<|im_end|>",
        (HI, said("Hello"), AGAIN),
        NEXT,
    ),
    Case(
        QWEN2_5,
        "cut by length",
        f"{QWEN}{ASK}{OPEN}Hel",
        (HI, said("Hel"), AGAIN),
        f"<|im_end|>{NEXT}",
    ),
    Case(
        QWEN2_5,
        "system text",
        f"{BRIEF}{ASK}{OPEN}Hello<|im_end|>",
        (SYSTEM, HI, said("Hello"), AGAIN),
        NEXT,
    ),
    Case(
        QWEN2_5,
        "the other end token was sampled",
        f"{QWEN}{ASK}{OPEN}Hello<|endoftext|>",
        (HI, said("Hello"), AGAIN),
        reason="terminator_differs",
    ),
    *(
        Case(
            QWEN2_5,
            f"observation after a tool call, its text {spelling}",
            f"{QWEN}{ASK}{OPEN}{CALL}<|im_end|>",
            (HI, called(**content), result("3")),
            responses("3"),
            notes=(ALIKE,),
            match=EQUIVALENT,
        )
        for spelling, content in [
            ("absent", {}),
            ("null", {"content": None}),
            ("empty", {"content": ""}),
        ]
    ),
    # Sampled without spaces, rendered with them: what was sampled stands.
    Case(
        QWEN2_5,
        "two calls, consecutive results",
        f"{QWEN}{ASK}{OPEN}{CALL.replace(': ', ':')}\n{CALL}<|im_end|>",
        (HI, called(count=2, content=None), result("3"), result("4", 1)),
        responses("3", "4"),
    ),
    Case(
        QWEN2_5,
        "a question behind the tool results",
        f"{QWEN}{ASK}{OPEN}{CALL}<|im_end|>",
        (HI, called(content=None), result("3"), AGAIN),
        f"{responses('3').removesuffix(OPEN)}<|im_start|>user\nAgain<|im_end|>\n{OPEN}",
    ),
    Case(
        QWEN2_5,
        "reasoning parsed away",
        f"{QWEN}{ASK}{OPEN}{REASONED}<|im_end|>",
        (HI, said("Hello", reasoning_content="Hm"), AGAIN),
        NEXT,
        notes=(TRUNCATED,),
    ),
)

QWEN3_CASES = (
    # Behind the last question the template shows an empty block where there was no reasoning.
    Case(QWEN3, "two turns", f"{ASK}{OPEN}Hello<|im_end|>", (HI, said("Hello"), AGAIN), NEXT),
    Case(
        QWEN3,
        "reasoning in an earlier turn",
        f"{ASK}{OPEN}{REASONED}<|im_end|>",
        (HI, said("Hello", reasoning_content="Hm"), AGAIN),
        NEXT,
        notes=(TRUNCATED,),
    ),
    Case(
        QWEN3,
        "reasoning in an earlier turn, as text",
        f"{ASK}{OPEN}{REASONED}<|im_end|>",
        (HI, said(REASONED), AGAIN),
        NEXT,
        notes=(TRUNCATED,),
    ),
    Case(
        QWEN3,
        "cut by length in the reasoning",
        f"{ASK}{OPEN}<think>\nHm",
        (HI, said("", reasoning_content="Hm"), AGAIN),
        f"<|im_end|>{NEXT}",
        notes=(TRUNCATED,),
    ),
    Case(
        QWEN3,
        "system text",
        f"{BRIEF}{ASK}{OPEN}{REASONED}<|im_end|>",
        (SYSTEM, HI, said("Hello", reasoning_content="Hm"), AGAIN),
        NEXT,
        notes=(TRUNCATED,),
    ),
    # Results are no question: the reasoning that led to the call is still shown.
    Case(
        QWEN3,
        "observation after a reasoned tool call",
        f"{ASK}{OPEN}<think>\nHm\n</think>\n\n{CALL}<|im_end|>",
        (HI, called(content="", reasoning_content="Hm"), result("3")),
        responses("3"),
    ),
    Case(
        QWEN3,
        "consecutive results, text echoed otherwise",
        f"{ASK}{OPEN}<think>\nHm\n</think>\n\n{CALL}<|im_end|>",
        (HI, called(content=None, reasoning_content="Hm"), result("3"), result("4")),
        responses("3", "4"),
        notes=(ALIKE,),
        match=EQUIVALENT,
    ),
    # Two reasoned turns and the results between them; the next question drops both.
    Case(
        QWEN3,
        "a question behind a tool loop",
        f"{ASK}{OPEN}<think>\nHm\n</think>\n\n{CALL}<|im_end|>{responses('3')}{REASONED}<|im_end|>",
        (
            HI,
            called(content="", reasoning_content="Hm"),
            result("3"),
            said("Hello", reasoning_content="Hm"),
            AGAIN,
        ),
        NEXT,
        notes=(TRUNCATED,),
    ),
    # A second tool call without reasoning: its empty block goes once it is not the last.
    Case(
        QWEN3,
        "observation after a tool call without reasoning",
        f"{ASK}{OPEN}{CALL}<|im_end|>",
        (HI, called(content=""), result("3")),
        responses("3"),
    ),
)
