"""The digest over everything that decides how a conversation becomes tokens (CAP-11)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

_SUFFIXES: Final = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".py"})
"""Of a checkpoint's files beside its weights: configurations, templates, vocabularies, code."""
_WEIGHT_INDEX: Final = ".index.json"

_RENDERING: Final = (
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "trust_request_mm_kwargs",
    "response_role",
    "enable_auto_tool_choice",
    "exclude_tools_when_tool_choice_none",
    "tool_call_parser",
    "tool_strict_level",
    "tokenizer_mode",
    "tokenizer_revision",
    "hf_overrides",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "generation_config",
    "override_generation_config",
)
"""The serving layer's own defaults that shape prompts, or what is parsed out of answers."""
_BY_ANSWER_OPTIONS: Final = frozenset({"kimi_k3"})
"""Renderers of upstream that write `tool_choice` and `response_format` into the prompt."""
_CODE: Final = ("tool_parser_plugin", "reasoning_parser_plugin")


def digest_configuration(
    model: Path, chat_template: str | None, arguments: Mapping[str, Any]
) -> bytes:
    """Hash model, template, tokenizer, processor and rendering defaults to 32 bytes (SHA-256).

    The layout is, for each part in the order of its name: length and bytes of the name, length and
    bytes of the content, lengths as unsigned 64-bit big-endian. The parts are the checkpoint's
    files and, if it has a directory of its own, the tokenizer's; the template that overrides the
    checkpoint's; files of code that parsers are loaded from; and the defaults as JSON.

    Args:
        model: the checkpoint's directory.
        chat_template: the template that overrides the checkpoint's, its content; None without one.
        arguments: the parsed command line of upstream's server.

    Raises:
        FileNotFoundError: the directory has no config.json, or a file that is named is not there.
    """
    parts = dict(_files_of(model, "model"))
    if "model/config.json" not in parts:
        raise FileNotFoundError(f"{model / 'config.json'}")
    tokenizer = arguments.get("tokenizer")
    if tokenizer and Path(tokenizer).resolve() != model.resolve():
        parts.update(_files_of(Path(tokenizer), "tokenizer"))
    if chat_template is not None:
        parts["override"] = chat_template.encode()
    for name in _CODE:
        if path := arguments.get(name):
            parts[name] = Path(path).read_bytes()
    defaults = {name: arguments.get(name) for name in _RENDERING}
    defaults["reasoning_parser"] = reasoning_parser_of(arguments)
    parts["defaults"] = json.dumps(defaults, sort_keys=True, default=str).encode()
    digest = hashlib.sha256()
    for name in sorted(parts):
        for part in (name.encode(), parts[name]):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.digest()


def require_options_without_prompt(arguments: Mapping[str, Any], tokenizer_mode: str) -> None:
    """Refuse an engine whose prompts depend on how an answer is to look.

    Whether a request continues a call is decided by its history and its rendering options;
    `tool_choice` and `response_format` are none of them (docs/lineage.md, 11). Where they are
    written into the prompt, captured tokens would stand for a rendering with another choice.

    Args:
        arguments: the parsed command line of upstream's server.
        tokenizer_mode: as the engine resolved it; it names the renderer.

    Raises:
        ValueError: the message names the setting.
    """
    if arguments.get("exclude_tools_when_tool_choice_none"):
        raise ValueError(
            "--exclude-tools-when-tool-choice-none makes prompts depend on tool_choice, which no "
            "history is compared by; have the harness leave `tools` out instead"
        )
    if tokenizer_mode in _BY_ANSWER_OPTIONS:
        raise ValueError(
            f"the renderer {tokenizer_mode!r} writes tool_choice and response_format into prompts, "
            "which no history is compared by"
        )


def reasoning_parser_of(arguments: Mapping[str, Any]) -> str:
    """Name the reasoning parser of upstream's server; "" for none."""
    nested = getattr(arguments.get("structured_outputs_config"), "reasoning_parser", "")
    return str(nested or arguments.get("reasoning_parser") or "")


def _files_of(directory: Path, kind: str) -> Iterator[tuple[str, bytes]]:
    for path in directory.rglob("*"):
        place = path.relative_to(directory)
        if any(part.startswith(".") for part in place.parts) or not path.is_file():
            continue
        if path.suffix in _SUFFIXES and not path.name.endswith(_WEIGHT_INDEX):
            yield f"{kind}/{place.as_posix()}", path.read_bytes()
