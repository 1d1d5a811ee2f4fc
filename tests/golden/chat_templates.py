"""Real chat templates on a toy tokenizer: bytes, and each special token as one id."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from callforest_core.custody.reasoning import ReasoningReader
from callforest_core.custody.tokens import TokenIds
from callforest_mesh.worker.spelling import spellings_of

FOLDER = Path(__file__).parent / "data" / "templates"
Message = Mapping[str, object]
# Some models' special tokens have a full-width bar and a block; here they are written plainly.
_PLAIN = {0xFF5C: "|", 0x2581: "_"}
_FIRST_SPECIAL = 256


@dataclass(frozen=True)
class ChatTemplate:
    """A template, with what its models' configurations say.

    Attributes:
        name: of the file.
        specials: texts that are one token; those that no text of a turn can be.
        ends: those of them that end a turn: generation configuration and tokenizer.
        variables: what a tokenizer hands to its template.
    """

    name: str
    specials: tuple[str, ...]
    ends: tuple[str, ...]
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()

    @property
    def terminators(self) -> frozenset[int]:
        return frozenset(_FIRST_SPECIAL + self.specials.index(end) for end in self.ends)

    @property
    def reader(self) -> ReasoningReader:
        return ReasoningReader(self.decode)

    def encode(self, text: str) -> TokenIds:
        pattern = "|".join(re.escape(special) for special in self.specials)
        ids: list[int] = []
        for piece in re.split(f"({pattern})", text):
            if piece in self.specials:
                ids.append(_FIRST_SPECIAL + self.specials.index(piece))
            else:
                ids.extend(piece.encode())
        return np.array(ids, np.uint32)

    def decode(self, token_ids: TokenIds) -> str:
        pieces = [
            bytes([one]) if one < _FIRST_SPECIAL else self.specials[one - _FIRST_SPECIAL].encode()
            for one in token_ids.tolist()
        ]
        return b"".join(pieces).decode(errors="replace")

    def render(self, messages: Sequence[Message], *, prompt: bool) -> TokenIds:
        """Render as the tokenizers do, and tokenise; raises what the template raises."""
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), _ = render_jinja_template(
            [[dict(message) for message in messages]],
            chat_template=self.source,
            add_generation_prompt=prompt,
            **self.variables,
        )
        return self.encode(text.translate(_PLAIN))

    def spelled(self, messages: Sequence[Message]) -> tuple[TokenIds | None, ...]:
        """Render a history in each spelling: absent, null, empty; None where it raises."""
        return tuple(self.rendered_or_none(spelling) for spelling in spellings_of(messages))

    def rendered_or_none(self, messages: Sequence[Message]) -> TokenIds | None:
        from jinja2 import TemplateError

        try:
            return self.render(messages, prompt=False)
        except (TemplateError, TypeError):
            return None


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_THINK = ("<think>", "</think>")
_TOOL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_HEADER = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
_BOS = {"bos_token": "<|begin_of_text|>"}

CHATML = ChatTemplate("chatml", _IM, ("<|im_end|>",))
SMOLLM2 = ChatTemplate("smollm2", _IM, ("<|im_end|>",))
QWEN2_5 = ChatTemplate("qwen2_5", (*_IM, *_TOOL), ("<|im_end|>", "<|endoftext|>"))
QWEN3 = ChatTemplate("qwen3", (*_IM, *_TOOL, *_THINK), ("<|im_end|>", "<|endoftext|>"))
LLAMA3 = ChatTemplate(
    "llama3",
    (*_HEADER, "<|eot_id|>", "<|end_of_text|>"),
    ("<|eot_id|>", "<|end_of_text|>"),
    _BOS,
)
LLAMA3_1 = ChatTemplate(
    "llama3_1",
    (*_HEADER, "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"),
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    _BOS,
)
DEEPSEEK = ChatTemplate(
    "deepseek_r1_distill",
    (
        *("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>"),
        *("<|tool_calls_begin|>", "<|tool_calls_end|>", "<|tool_sep|>"),
        *("<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_outputs_begin|>", "<|tool_outputs_end|>"),
        *("<|tool_output_begin|>", "<|tool_output_end|>"),
        *_THINK,
    ),
    ("<|end_of_sentence|>",),
    {"bos_token": "<|begin_of_sentence|>"},
)
GLM = ChatTemplate(
    "glm4moe",
    (
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<|endoftext|>", *_THINK, *_TOOL),
    ),
    ("<|endoftext|>", "<|user|>", "<|observation|>"),
)
TEMPLATES = (CHATML, SMOLLM2, QWEN2_5, QWEN3, LLAMA3, LLAMA3_1, DEEPSEEK, GLM)
