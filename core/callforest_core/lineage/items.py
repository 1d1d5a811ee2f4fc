"""The conversation items of a request and of a served response (contract 3.1).

Items keep the shape in which the harness sent them; fingerprints even the dialects out.
"""

import json
from enum import StrEnum

ENVELOPE_ROLE = "_ng_request_envelope"
TOKEN_FIELDS = frozenset(
    {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"}
)

Item = dict[str, object]


class Dialect(StrEnum):
    """The API in which a harness speaks."""

    CHAT = "chat"
    RESPONSES = "responses"


class ItemsError(ValueError):
    """A body does not carry items in its dialect; `fact` says what is wrong."""

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact


def request_items(body: Item, dialect: Dialect) -> list[object]:
    """Return the envelope, if there is one, and the turns of a request body.

    The turns are `messages` (Chat) or the `input` list (Responses), without nulls and otherwise
    as received: what is no object is refused when it is fingerprinted. A string `input` is no
    turn, so the context digest does not cover it (the contract's rule).
    """
    turns = body.get("messages" if dialect is Dialect.CHAT else "input")
    items: list[object] = []
    if isinstance(turns, list):
        items = [turn for turn in turns if turn is not None]
    return [*_envelope(body), *items]


def response_items(served: Item, dialect: Dialect) -> list[Item]:
    """Return the items of a served response without its token columns.

    Chat: the message of each choice, as an assistant message; Responses: the `output` objects.
    Raises ItemsError when more than one item carries token columns, or a choice is no object.
    """
    items = _chat_items(served) if dialect is Dialect.CHAT else _objects(served.get("output"))
    carriers = [item for item in items if item.get("generation_token_ids") is not None]
    if len(carriers) > 1:
        raise ItemsError("more than one response item carries token columns")
    return [
        {name: value for name, value in item.items() if name not in TOKEN_FIELDS} for item in items
    ]


def _envelope(body: Item) -> list[Item]:
    """Return what shapes the prompt beside the turns, as a pseudo-turn of its own."""
    instructions, tools = body.get("instructions"), body.get("tools")
    if not instructions and not tools:
        return []
    text = json.dumps({"instructions": instructions, "tools": tools}, sort_keys=True)
    return [{"role": ENVELOPE_ROLE, "content": text}]


def _chat_items(served: Item) -> list[Item]:
    choices = served.get("choices") or []
    if not isinstance(choices, list):
        raise ItemsError("choices is not a list")
    items: list[Item] = []
    for choice in choices:
        known = choice or {}
        if not isinstance(known, dict):
            raise ItemsError("a choice is not an object")
        message = known.get("message") or {}
        if isinstance(message, dict):
            items.append({"type": "message", "role": "assistant", **message})
    return items


def _objects(value: object) -> list[Item]:
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, dict)]
