"""Content fingerprints of a conversation, equal across the API dialects (contract 3.1 to 3.6).

Two digests of one list of items: the assistant fingerprint covers only what the model wrote and
is the key by which a request finds the call it continues; the conversation digest covers every
item and proves that the recorded context is unchanged. Digests are raw 32-byte SHA-256 here and
hexadecimal only at JSON edges.

Items are parsed JSON objects in Chat, Responses or Messages shape, also mixed. Fields whose type
no dialect allows still count: a number as a role is hashed as Python prints it, because the peer
package does and a hash that differs would only surface as a lost parent.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from callforest_core.lineage.canonical_json import (
    CanonicalJsonError,
    canonical_arguments,
    canonical_json,
)

FINGERPRINT_VERSION = 2
"""Stored beside fingerprints, never hashed; rows of another version are no parents."""

DIGEST_SIZE = 32
NO_FINGERPRINT = b""
"""The fingerprint of a conversation in which the model wrote nothing."""

_ASSISTANT_DOMAIN = b"nemo-gym-lineage"
_CONTEXT_DOMAIN = b"nemo-gym-lineage-context"
_FIELD_HEADER = struct.Struct(">BQ")
_TEXT_TYPES = frozenset({"", "text", "input_text", "output_text"})
_TOOL_TYPES = frozenset({"tool_use", "tool_result"})


class UnreadableItemError(ValueError):
    """An item cannot be fingerprinted; `fact` says what about it is unknown."""

    def __init__(self, fact: str) -> None:
        super().__init__(f"unreadable conversation item: {fact}")
        self.fact = fact


def is_model_authored(item: dict[str, object]) -> bool:
    """Say whether the model wrote this item (reasoning items do not count)."""
    return item.get("role") == "assistant" or item.get("type") == "function_call"


def assistant_fingerprint(items: Iterable[object]) -> bytes:
    """Return the 32-byte fingerprint of the model-authored items, b"" when there is none.

    Raises UnreadableItemError for an item that is no object and for an unreadable
    model-authored item.
    """
    hasher = hashlib.sha256(_ASSISTANT_DOMAIN)
    authored = False
    for item in items:
        known = _object(item)
        if is_model_authored(known):
            authored = True
            hasher.update(_assistant_fields(_read(known)))
    return hasher.digest() if authored else NO_FINGERPRINT


def conversation_digest(items: Iterable[object]) -> bytes:
    """Return the 32-byte digest of every item; raises UnreadableItemError."""
    hasher = hashlib.sha256(_CONTEXT_DOMAIN)
    for item in items:
        known = _object(item)
        hasher.update(_context_fields(known, _read(known)))
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a served response adds to a request.

    `fingerprint` covers request and response, `output_fingerprint` the response alone; each is
    32 bytes, or b"" when the model wrote nothing.
    """

    fingerprint: bytes
    output_fingerprint: bytes


class ConversationScan:
    """One walk over a request's items: fingerprint and the digest of every prefix.

    `context_digests` holds 32 bytes for each prefix length from 0 on. It ends before the first
    item that only the conversation digest cannot read: such a request may still continue a call
    whose context lies before that item, and a request without model text is a root anyway.

    Raises UnreadableItemError where `assistant_fingerprint` would.
    """

    __slots__ = (
        "_assistant",
        "_context",
        "_readable",
        "assistant_fingerprint",
        "context_digests",
        "item_count",
    )

    def __init__(self, items: Sequence[object] = ()) -> None:
        self._assistant = hashlib.sha256(_ASSISTANT_DOMAIN)
        self._context = hashlib.sha256(_CONTEXT_DOMAIN)
        self._readable = True
        self.item_count = 0
        self.context_digests = self._context.digest()
        self.assistant_fingerprint = NO_FINGERPRINT
        self._walk(items)

    def extended(self, items: Sequence[object]) -> "ConversationScan":
        """Return the scan of these items behind the scanned ones, which are not hashed again.

        Raises UnreadableItemError as a scan of all of them would.
        """
        longer = object.__new__(ConversationScan)
        longer._readable = self._readable
        longer.item_count = self.item_count
        longer.context_digests = self.context_digests
        longer.assistant_fingerprint = self.assistant_fingerprint
        longer._assistant = self._assistant.copy()
        longer._context = self._context.copy()
        longer._walk(items)
        return longer

    def _walk(self, items: Sequence[object]) -> None:
        digests = [self.context_digests]
        authored = False
        for item in items:
            known = _object(item)
            model_authored = is_model_authored(known)
            if not (model_authored or self._readable):
                continue
            plain = _plain_fields(known)
            if plain is not None and self._readable:
                role, kind, text = plain
                if model_authored:
                    authored = True
                    self._assistant.update(b"\0" + kind + b"\1" + text)
                self._context.update(b"\0" + role + b"\1" + kind + b"\2" + text)
                digests.append(self._context.digest())
                continue
            try:
                content = _read(known)
            except UnreadableItemError:
                if model_authored:
                    raise
                self._readable = False
                continue
            if model_authored:
                authored = True
                self._assistant.update(_assistant_fields(content))
            if self._readable:
                self._readable = _extend(self._context, digests, known, content)
        self.item_count += len(items)
        self.context_digests = b"".join(digests)
        if authored:
            self.assistant_fingerprint = self._assistant.digest()

    @property
    def context_digest(self) -> bytes:
        """The digest of all items; raises UnreadableItemError when one cannot be read."""
        if len(self.context_digests) != DIGEST_SIZE * (self.item_count + 1):
            position = len(self.context_digests) // DIGEST_SIZE - 1
            raise UnreadableItemError(f"the context cannot be read from item {position} on")
        return self.context_digests[-DIGEST_SIZE:]

    def continued(self, response_items: Iterable[object]) -> Continuation:
        """Return the fingerprints after these response items; the scan itself is unchanged.

        Raises UnreadableItemError.
        """
        whole = self._assistant.copy()
        output = hashlib.sha256(_ASSISTANT_DOMAIN)
        authored = False
        for item in response_items:
            known = _object(item)
            if is_model_authored(known):
                authored = True
                fields = _text_alone(known) or _assistant_fields(_read(known))
                whole.update(fields)
                output.update(fields)
        return Continuation(
            fingerprint=(
                whole.digest() if authored or self.assistant_fingerprint else NO_FINGERPRINT
            ),
            output_fingerprint=output.digest() if authored else NO_FINGERPRINT,
        )


class _Call(NamedTuple):
    call_id: str
    name: str
    arguments: str


class _Content(NamedTuple):
    """What one item says: typed parts (type, payload), then tool calls."""

    parts: list[tuple[str, str]]
    calls: list[_Call]


def _plain_fields(item: dict[str, object]) -> tuple[bytes, bytes, bytes] | None:
    """Encode role, kind and text of an item that has a role and a text alone, else None.

    Nearly every item of a conversation is one, and a request brings all of them again. The
    encodings are those of `_field` without their tags.
    """
    if len(item) != 2:
        return None
    role, content = item.get("role"), item.get("content")
    if type(role) is not str or type(content) is not str:
        return None
    if not role or not content or role == "tool":
        return None
    try:
        return _untagged(role), _TEXT_KIND, _untagged(content)
    except UnicodeEncodeError:
        return None


def _text_alone(item: dict[str, object]) -> bytes:
    """Return the hashed fields of what a model wrote if that is a text, and no call; else b""."""
    content = item.get("content")
    if type(content) is not str or not content or item.get("tool_calls"):
        return b""
    return b"" if item.get("type") == "function_call" else _TEXT_FIELD + _field(1, content)


def _untagged(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return len(encoded).to_bytes(8, "big") + encoded


_TEXT_KIND = _untagged("text")
_TEXT_FIELD = b"\0" + _TEXT_KIND


def _extend(
    context: "hashlib._Hash", digests: list[bytes], item: dict[str, object], content: _Content
) -> bool:
    """Hash one more item into the context; False when it cannot be read there."""
    try:
        context.update(_context_fields(item, content))
    except UnreadableItemError:
        return False
    digests.append(context.digest())
    return True


def _read(item: dict[str, object]) -> _Content:
    content = item.get("content")
    try:
        return _Content(_parts(content), _calls(item, content))
    except CanonicalJsonError as error:
        raise UnreadableItemError(error.fact) from error


def _assistant_fields(content: _Content) -> bytes:
    fields: list[bytes] = []
    for kind, payload in content.parts:
        fields += (_field(0, kind), _field(1, payload))
    for call in content.calls:
        fields += (_field(2, call.call_id), _field(3, call.name), _field(4, call.arguments))
    return b"".join(fields)


def _context_fields(item: dict[str, object], content: _Content) -> bytes:
    fields = [_field(0, _text(item.get("role") or item.get("type") or ""))]
    for kind, payload in content.parts:
        fields += (_field(1, kind), _field(2, payload))
    for call in content.calls:
        fields += (_field(3, call.call_id), _field(4, call.name), _field(5, call.arguments))
    for call_id, payload in _results(item):
        fields += (_field(6, call_id), _field(7, payload))
    return b"".join(fields)


def _field(tag: int, text: str) -> bytes:
    """One hashed field: tag byte, u64 length of the UTF-8 text, the text (contract 3.2)."""
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnreadableItemError("a lone surrogate") from error
    return _FIELD_HEADER.pack(tag, len(encoded)) + encoded


def _parts(content: object) -> list[tuple[str, str]]:
    if isinstance(content, str):
        return [("text", content)] if content else []
    if content is None:
        return []
    if not isinstance(content, list):
        raise UnreadableItemError(f"content of type {type(content).__name__}")
    parts: list[tuple[str, str]] = []
    for block in content:
        if isinstance(block, str):
            if block:
                parts.append(("text", block))
            continue
        if not isinstance(block, dict):
            raise UnreadableItemError(f"a content block of type {type(block).__name__}")
        kind = _text(block.get("type") or "")
        if kind in _TOOL_TYPES:
            continue
        text = block.get("text")
        if kind in _TEXT_TYPES and isinstance(text, str):
            if text:
                parts.append(("text", text))
            continue
        if not kind:
            raise UnreadableItemError("a content block without a type")
        parts.append((kind, canonical_json(block)))
    return parts


def _calls(item: dict[str, object], content: object) -> list[_Call]:
    calls: list[_Call] = []
    if item.get("type") == "function_call":
        name = _text(item.get("name", ""))
        namespace = item.get("namespace")
        if namespace:
            name = f"{_text(namespace)}__{name}"
        call_id = _text(item.get("call_id") or item.get("id") or "")
        calls.append(_Call(call_id, name, canonical_arguments(item.get("arguments"))))
    if isinstance(content, list):
        uses = [b for b in content if isinstance(b, dict) and b.get("type") == "tool_use"]
        calls += [_call(use, use, use.get("input")) for use in uses]
    chat_calls = item.get("tool_calls")
    if chat_calls:
        calls += _chat_calls(chat_calls)
    return calls


def _chat_calls(value: object) -> list[_Call]:
    # An object instead of a list is read as the list of its keys, as the peer package does.
    if not isinstance(value, list | dict):
        raise UnreadableItemError(f"tool_calls of type {type(value).__name__}")
    calls: list[_Call] = []
    for entry in value:
        known = _object(entry or {})
        function = _object(known.get("function") or {})
        calls.append(_call(known, function, function.get("arguments")))
    return calls


def _call(identity: dict[str, object], function: dict[str, object], arguments: object) -> _Call:
    return _Call(
        _text(identity.get("id") or ""),
        _text(function.get("name", "")),
        canonical_arguments(arguments),
    )


def _results(item: dict[str, object]) -> list[tuple[str, str]]:
    results: list[tuple[str, str]] = []
    content = item.get("content")
    if item.get("type") == "function_call_output":
        call_id = item.get("call_id") or item.get("id") or ""
        results.append((_text(call_id), _payload(item.get("output"))))
    elif item.get("role") == "tool":
        results.append((_text(item.get("tool_call_id") or ""), _payload(content)))
    if isinstance(content, list):
        for block in content:
            if isinstance(block, dict) and block.get("type") == "tool_result":
                call_id = block.get("tool_use_id") or block.get("id") or ""
                results.append((_text(call_id), _payload(block.get("content"))))
    return results


def _payload(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return canonical_json(value)
    except CanonicalJsonError as error:
        raise UnreadableItemError(error.fact) from error


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return str(value)
    except ValueError as error:  # an integer of more digits than Python prints
        raise UnreadableItemError("a number too long to print") from error


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise UnreadableItemError(f"{type(value).__name__} where an object belongs")
    return value
