"""A request that continues a captured call, and what the right prompt is: written by hand.

All texts were read out of the templates, not made by them. `captured` is what the first calls were
given and sampled; `follows` is what the right prompt has behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from callforest_core.custody.capture_input import HistoryMatch
from tests.golden.chat_templates import ChatTemplate, Message

EXACT, EQUIVALENT = HistoryMatch.EXACT, HistoryMatch.TOOL_CONTENT_EQUIVALENT
TRUNCATED, ALIKE = "template_truncated_reasoning", "tool_content_equivalence"


@dataclass(frozen=True)
class Case:
    """One request that continues a captured call.

    Attributes:
        template: renders it.
        name: what is asked.
        captured: text of the predecessor's tokens.
        messages: the request.
        follows: what the spliced prompt has behind the captured tokens; None for a fresh root.
        reason: why it is a fresh root; "" when it is spliced.
        notes: what is seen besides.
        match: how the ledger matched the history.
    """

    template: ChatTemplate
    name: str
    captured: str
    messages: Sequence[Message]
    follows: str | None = None
    reason: str = ""
    notes: tuple[str, ...] = field(default=())
    match: HistoryMatch = EXACT

    def __str__(self) -> str:
        return f"{self.template.name}: {self.name}"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **fields: object) -> Message:
    return {"role": "assistant", "content": text, **fields}


def called(*, count: int = 1, arguments: object = None, **content: object) -> Message:
    function = {"name": "add", "arguments": {"a": 1} if arguments is None else arguments}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in range(count)]
    return {"role": "assistant", "tool_calls": calls, **content}


def result(text: str, call: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"c{call}", "content": text}


SYSTEM: Message = {"role": "system", "content": "Be brief."}
HI, AGAIN = user("Hi"), user("Again")
