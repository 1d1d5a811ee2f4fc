"""What the edge refuses before anything is generated, since exact capture cannot serve it (CAP-3).

Contract: docs/protocol.md, section "The HTTP edge".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from callforest_core.lineage.items import TOKEN_FIELDS, Item
from callforest_mesh.gateway.refusals import unsupported


@dataclass(frozen=True, slots=True)
class Rule:
    """Fields that are refused, unless their value asks for nothing."""

    names: tuple[str, ...]
    harmless: tuple[object, ...]
    why: str


_PREFILL: Final = "Text that the model did not sample cannot begin its turn (assistant prefill)"
_STATE: Final = "No conversation is kept here. Send the whole history with each request."
_TRUNCATION: Final = (
    "A truncated prompt is not the conversation that was recorded. Shorten the history."
)
_MATERIAL: Final = "Token material does not leave the server."
_INPUTS: Final = (
    *("prompt_token_ids", "required_prefix_token_ids"),
    *("kv_transfer_params", "ec_transfer_params", "offload_params", "vllm_xargs"),
    *("ng_capture", "ng_commit_coords"),
)

_RULES: Final = (
    Rule(("n", "best_of"), (None, 1), "A call is one generation. Send one request for each."),
    Rule(("use_beam_search",), (None, False), "Beam search does not sample from the policy."),
    Rule(("previous_response_id", "conversation"), (None,), _STATE),
    Rule(
        ("store",),
        (None, False),
        "No completion is kept here for later retrieval. Send the request with `store` false.",
    ),
    Rule(("continue_final_message",), (None, False), f"{_PREFILL}."),
    Rule(("add_generation_prompt",), (None, True), f"{_PREFILL}."),
    Rule(("truncate_prompt_tokens",), (None,), _TRUNCATION),
    Rule(("truncation",), (None, "disabled"), _TRUNCATION),
    Rule(_INPUTS, (None,), "Tokens and capture fields are the server's own; callers send text."),
    Rule(
        ("echo", "return_token_ids", "return_tokens_as_token_ids", "return_prompt_text"),
        (None, False),
        _MATERIAL,
    ),
    Rule(("prompt_logprobs", "logprob_token_ids"), (None,), _MATERIAL),
)

_NAMES: Final = frozenset(name for rule in _RULES for name in rule.names)

MEDIA: Final = frozenset(
    {
        *("image", "image_url", "input_image", "image_pil", "image_embeds", "image_file"),
        *("audio", "audio_url", "input_audio", "audio_embeds"),
        *("video", "video_url", "input_video", "video_embeds"),
        *("file", "input_file"),
    }
)
"""Types of content that become pixels or samples; also the keys by which an untyped part is one."""


def refuse_fields(body: Item, rules: Iterable[Rule] = _RULES) -> None:
    """Refuse the first field that asks for something that cannot be captured.

    Raises:
        HttpRefusal: 400 `unsupported_value`.
    """
    if rules is _RULES and _NAMES.isdisjoint(body):
        return  # nearly every request
    for rule in rules:
        for name in rule.names:
            if name in body and not _is_one_of(body[name], rule.harmless):
                raise unsupported(name, f"`{name}` is not supported. {rule.why}")


def refuse_turns(turns: list[Item], where: str) -> None:
    """Refuse tokens and media in the turns of a conversation.

    Args:
        turns: the messages (Chat) or input items (Responses).
        where: the field that holds them.

    Raises:
        HttpRefusal: 400 `unsupported_value`, with the first place at fault.
    """
    for index, turn in enumerate(turns):
        if len(turn) == 2 and "role" in turn and type(turn.get("content")) is str:
            continue  # nearly every turn
        named = [] if TOKEN_FIELDS.isdisjoint(turn) else sorted(TOKEN_FIELDS & turn.keys())
        for name in named:
            if turn[name] is not None:
                raise unsupported(
                    f"{where}[{index}].{name}", "Tokens are the server's own; callers send text."
                )
        for field in ("content", "output"):
            parts = turn.get(field)
            if not isinstance(parts, list):
                continue
            for number, part in enumerate(parts):
                if isinstance(part, dict) and _is_media(part):
                    raise unsupported(
                        f"{where}[{index}].{field}[{number}]",
                        "Images, audio, video and files are not captured by this release. "
                        "Send text.",
                    )


def refuse_prefill(last: Item, where: str) -> None:
    """Refuse a conversation that ends in the assistant's turn.

    Args:
        last: its last message, in Chat shape.
        where: the request's field that holds the conversation.

    Raises:
        HttpRefusal: 400 `unsupported_value`.
    """
    if last.get("role") == "assistant":
        raise unsupported(
            where,
            f"The last turn is the assistant's. {_PREFILL}; end with a turn of the user or with "
            "the result of a tool.",
        )


def refuse_unsupported(body: Item) -> None:
    """Refuse what exact capture cannot serve of a Chat Completions request.

    Args:
        body: parsed; its `messages` is a list of objects, not empty.

    Raises:
        HttpRefusal: 400 `unsupported_value`, with the first field at fault.
    """
    refuse_fields(body)
    messages = body["messages"]
    assert isinstance(messages, list)
    refuse_turns(messages, "messages")
    refuse_prefill(messages[-1], "messages")


def _is_media(part: Item) -> bool:
    kind = part.get("type")
    return kind in MEDIA if isinstance(kind, str) and kind else bool(MEDIA & part.keys())


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    return any(type(value) is type(allowed) and value == allowed for allowed in harmless)
