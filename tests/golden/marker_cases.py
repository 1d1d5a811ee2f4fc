"""What Llama, DeepSeek and GLM make of second requests, and what is right: written by hand."""

from tests.golden.chat_templates import DEEPSEEK, GLM, LLAMA3, LLAMA3_1
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

BEGIN = "<|begin_of_text|>"
DATED = (
    f"{BEGIN}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n"
)


def turn(role: str, text: str = "", end: str = "") -> str:
    """A turn as the Llama models are shown it; without text and end, its opening."""
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}{end}"


ASKED = turn("user", "Hi", "<|eot_id|>") + turn("assistant")
THEN = turn("user", "Again", "<|eot_id|>") + turn("assistant")
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'

LLAMA_CASES = (
    Case(LLAMA3, "two turns", f"{BEGIN}{ASKED}Hello<|eot_id|>", (HI, said("Hello"), AGAIN), THEN),
    # White space that the template trims was sampled all the same.
    Case(
        LLAMA3,
        "cut by length, white space at the end",
        f"{BEGIN}{ASKED}Hel\n",
        (HI, said("Hel\n"), AGAIN),
        f"<|eot_id|>{THEN}",
    ),
    Case(
        LLAMA3,
        "another end token was sampled",
        f"{BEGIN}{ASKED}Hello<|end_of_text|>",
        (HI, said("Hello"), AGAIN),
        reason="terminator_differs",
    ),
    Case(
        LLAMA3,
        "system text",
        BEGIN + turn("system", "Be brief.", "<|eot_id|>") + f"{ASKED}Hello<|eot_id|>",
        (SYSTEM, HI, said("Hello"), AGAIN),
        THEN,
    ),
    # Null is the text "None" to this template.
    Case(
        LLAMA3,
        "tool call without text, echoed otherwise",
        f"{BEGIN}{ASKED}{LLAMA_CALL}<|eot_id|>",
        (HI, called(content=None), result("3")),
        reason="renderer_not_equivalent",
        match=EQUIVALENT,
    ),
    Case(
        LLAMA3_1,
        "two turns",
        f"{DATED}<|eot_id|>{ASKED}Hello<|eot_id|>",
        (HI, said("Hello"), AGAIN),
        THEN,
    ),
    # Captured on another day than it is rendered: the model saw the first, and still does.
    Case(
        LLAMA3_1,
        "another date, system text",
        f"{DATED.replace('26 Jul', '25 Jul')}Be brief.<|eot_id|>{ASKED}Hello<|eot_id|>",
        (SYSTEM, HI, said("Hello"), AGAIN),
        THEN,
    ),
    Case(
        LLAMA3_1,
        "observation after a tool call, its text spelt otherwise",
        f"{DATED}<|eot_id|>{ASKED}{LLAMA_CALL}<|eot_id|>",
        (HI, called(content=None), result("3")),
        turn("ipython", '"3"', "<|eot_id|>") + turn("assistant"),
        notes=(ALIKE,),
        match=EQUIVALENT,
    ),
    Case(
        LLAMA3_1,
        "consecutive results",
        f"{DATED}<|eot_id|>{ASKED}{LLAMA_CALL}<|eot_id|>",
        (HI, called(), result("3"), result("4")),
        turn("ipython", '"3"', "<|eot_id|>")
        + turn("ipython", '"4"', "<|eot_id|>")
        + turn("assistant"),
    ),
    # The end of a message that awaits a tool; without built-in tools the template writes another.
    Case(
        LLAMA3_1,
        "a tool call that ends its message, not its turn",
        f"{DATED}<|eot_id|>{ASKED}{LLAMA_CALL}<|eom_id|>",
        (HI, called(), result("3")),
        reason="terminator_differs",
    ),
)

ASK_R1 = "<|begin_of_sentence|><|User|>Hi<|Assistant|><think>\n"
THEN_R1 = "<|User|>Again<|Assistant|><think>\n"
R1_CALL = '<|tool_call_begin|>function<|tool_sep|>add\n```json\n{"a": 1}\n```<|tool_call_end|>'

DEEPSEEK_CASES = (
    Case(
        DEEPSEEK,
        "reasoning in an earlier turn",
        f"{ASK_R1}Hm\n</think>\n\nHello<|end_of_sentence|>",
        (HI, said("\n\nHello", reasoning_content="Hm"), AGAIN),
        THEN_R1,
        notes=(TRUNCATED,),
    ),
    Case(
        DEEPSEEK,
        "reasoning in an earlier turn, as text",
        f"{ASK_R1}Hm\n</think>\n\nHello<|end_of_sentence|>",
        (HI, said("<think>\nHm\n</think>\n\nHello"), AGAIN),
        THEN_R1,
        notes=(TRUNCATED,),
    ),
    # The prompt opens a block that the model closed at once: no reasoning was lost.
    Case(
        DEEPSEEK,
        "two turns without reasoning",
        f"{ASK_R1}\n</think>\n\nHello<|end_of_sentence|>",
        (HI, said("\n\nHello"), AGAIN),
        THEN_R1,
    ),
    Case(
        DEEPSEEK,
        "cut by length in the reasoning",
        f"{ASK_R1}Hm",
        (HI, said("", reasoning_content="Hm"), AGAIN),
        f"<|end_of_sentence|>{THEN_R1}",
        notes=(TRUNCATED,),
    ),
    # A single call's turn has no end in this template: no boundary.
    Case(
        DEEPSEEK,
        "observation after a tool call",
        f"{ASK_R1}Hm\n</think>\n\n<|tool_calls_begin|>{R1_CALL}<|tool_calls_end|>"
        "<|end_of_sentence|>",
        (HI, called(content=None, arguments='{"a": 1}'), result("3")),
        reason="boundary_not_found",
        notes=(TRUNCATED,),
    ),
    Case(
        DEEPSEEK,
        "two calls, consecutive results",
        f"{ASK_R1}Hm\n</think>\n\n<|tool_calls_begin|>{R1_CALL}\n{R1_CALL}<|tool_calls_end|>"
        "<|end_of_sentence|>",
        (HI, called(count=2, content=None, arguments='{"a": 1}'), result("3"), result("4", 1)),
        "<|tool_outputs_begin|><|tool_output_begin|>3<|tool_output_end|>\n"
        "<|tool_output_begin|>4<|tool_output_end|><|tool_outputs_end|>",
        notes=(TRUNCATED,),
    ),
    Case(
        DEEPSEEK,
        "two calls without text, echoed otherwise",
        f"{ASK_R1}Hm\n</think>\n\n<|tool_calls_begin|>{R1_CALL}\n{R1_CALL}<|tool_calls_end|>"
        "<|end_of_sentence|>",
        (HI, called(count=2, content=None, arguments='{"a": 1}'), result("3")),
        reason="renderer_not_equivalent",
        notes=(TRUNCATED,),
        match=EQUIVALENT,
    ),
)

ASK_GLM = "[gMASK]<sop><|user|>\nHi<|assistant|>"
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"

GLM_CASES = (
    # The turn ends with the next one's opening, which the model samples.
    Case(
        GLM,
        "two turns",
        f"{ASK_GLM}\n<think></think>\nHello<|user|>",
        (HI, said("Hello"), AGAIN),
        "\nAgain<|assistant|>",
    ),
    Case(
        GLM,
        "reasoning in an earlier turn",
        f"{ASK_GLM}\n<think>Hm</think>\nHello<|user|>",
        (HI, said("Hello", reasoning_content="Hm"), AGAIN),
        "\nAgain<|assistant|>",
        notes=(TRUNCATED,),
    ),
    Case(
        GLM,
        "cut by length",
        f"{ASK_GLM}\n<think>Hm</think>\nHel",
        (HI, said("Hel", reasoning_content="Hm"), AGAIN),
        "<|user|>\nAgain<|assistant|>",
        notes=(TRUNCATED,),
    ),
    Case(
        GLM,
        "consecutive results after a reasoned tool call",
        f"{ASK_GLM}\n<think>Hm</think>\n{GLM_CALL}<|observation|>",
        (HI, called(content="", reasoning_content="Hm"), result("3"), result("4")),
        "\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|assistant|>",
    ),
    # The model gave the word to the user, the harness to a tool.
    Case(
        GLM,
        "a tool result where the model awaited the user",
        f"{ASK_GLM}\n<think>Hm</think>\n{GLM_CALL}<|user|>",
        (HI, called(content="", reasoning_content="Hm"), result("3")),
        reason="terminator_differs",
    ),
    # Null is the text "None" to this template.
    Case(
        GLM,
        "tool call without text, echoed otherwise",
        f"{ASK_GLM}\n<think></think>\n{GLM_CALL}<|observation|>",
        (HI, called(content=""), result("3")),
        reason="renderer_not_equivalent",
        match=EQUIVALENT,
    ),
)
