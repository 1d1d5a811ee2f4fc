"""What ends a turn, and what marks reasoning in it, as the engine's own configuration has it."""

from __future__ import annotations

from typing import Any

from callforest_core.custody.reasoning import ReasoningReader


def read_terminators(engine: Any) -> frozenset[int]:
    """Return the ids that end a turn: the generation configuration's and the tokenizer's."""
    terminators: set[int] = set()
    configured = engine.model_config.try_get_generation_config().get("eos_token_id")
    if isinstance(configured, int):
        terminators.add(configured)
    elif configured is not None:
        terminators.update(configured)
    own = engine.get_tokenizer().eos_token_id
    if own is not None:
        terminators.add(own)
    return frozenset(terminators)


def read_reasoning(tokenizer: Any, parser: str) -> ReasoningReader:
    """Return what finds reasoning in turns.

    Args:
        tokenizer: of the engine.
        parser: name of upstream's reasoning parser; "" for the usual marks.
    """

    def decode(token_ids: Any) -> str:
        text: str = tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
        return text

    usual = ReasoningReader(decode)
    if not parser:
        return usual
    from vllm.reasoning import ReasoningParserManager

    found = ReasoningParserManager.get_reasoning_parser(parser)(tokenizer)
    opens, closes = found.reasoning_start_str, found.reasoning_end_str
    return ReasoningReader(decode, opens, closes) if opens and closes else usual
