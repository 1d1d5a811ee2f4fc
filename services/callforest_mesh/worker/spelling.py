"""The three ways to spell the missing text of an answer that has none, whether it calls or not.

Harnesses echo it as they like: without `content`, as null, or as an empty text. Whether that makes
a difference is the renderer's secret, so it is asked with each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

_ABSENT: Final = object()
_SPELLINGS: Final = (_ABSENT, None, "")


def spellings_of(messages: Sequence[Mapping[str, object]]) -> list[list[Mapping[str, object]]]:
    """Give the conversation once with each spelling: absent, null, empty.

    Every answer without text is spelled so; everything else stays as it is.
    """
    return [[_spelled(message, spelling) for message in messages] for spelling in _SPELLINGS]


def _spelled(message: Mapping[str, object], spelling: object) -> Mapping[str, object]:
    if not _has_no_text(message):
        return message
    others = {name: value for name, value in message.items() if name != "content"}
    return others if spelling is _ABSENT else {**others, "content": spelling}


def _has_no_text(message: Mapping[str, object]) -> bool:
    if message.get("role") != "assistant":
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(_is_empty_text(part) for part in content)
    return content is None or content == ""


def _is_empty_text(part: object) -> bool:
    if not isinstance(part, dict):
        return part == ""
    return part.get("type", "text") == "text" and part.get("text") in (None, "")
