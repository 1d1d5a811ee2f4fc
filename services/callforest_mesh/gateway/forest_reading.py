"""Reading a request of forest mode: whole, or as a delta to a kept history.

A request that begins with the turns of an earlier one, as nearly all do, is digested from there
on: its cost beside the parsing does not grow with the history. What the earlier turns are is
compared byte for byte, types and order of keys included, before anything of them is taken over.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final

from callforest.capture.v1 import capture_admission_pb2
from callforest_client.source_codec import source_probe_to_proto
from callforest_core.lineage.canonical_json import CanonicalJsonError
from callforest_core.lineage.fingerprint import is_model_authored
from callforest_core.lineage.items import Dialect, Item
from callforest_core.lineage.source import (
    EMPTY_HISTORY,
    SourceHistory,
    effective_options,
    source_items,
    source_render_digest,
)
from callforest_mesh.gateway import core, responses
from callforest_mesh.gateway.asked import digest_body
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.histories import Histories, KeptCall, RenderOptions, Turns
from callforest_mesh.gateway.json_body import exact_bytes, parse_body, write_items, write_json
from callforest_mesh.gateway.refusals import (
    HttpRefusal,
    history_claim_refused,
    history_required,
    malformed,
    too_large,
)
from callforest_mesh.gateway.source_evidence import SourceEvidence

_UNREADABLE_OPTIONS: Final = b"callforest-unreadable-options-v1"


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A request, read: what is new of it, and what that stands behind.

    Attributes:
        converted: the whole request as the engine takes it.
        known: the call with whose request it begins.
        begun: the atoms before the new items, digested.
        echoed: the answer of `known`, where the request leaves it out.
        items: the new items.
        messages: the same in Chat's form.
        count: how many turns are new, `echoed` included.
    """

    converted: core.Conversion
    known: KeptCall | None
    begun: SourceHistory
    echoed: Turns | None
    items: list[object]
    messages: list[object]
    count: int


class ForestReader:
    """Reads requests of forest mode.

    Args:
        histories: the kept histories; they are read here, and grow when a call was served.
    """

    def __init__(self, histories: Histories) -> None:
        self._histories = histories

    def read(
        self,
        capture_key: str,
        body: bytes,
        dialect: Dialect,
        claim: Claim | None = None,
        body_digest: bytes | None = None,
    ) -> core.NormalisedRequest:
        """Parse and judge a request; see `RequestReader.read`."""
        fields = parse_body(body)
        digest = body_digest or digest_body(body, dialect, claim)
        if claim is not None and not claim.history_is_whole:
            return self._read_delta(capture_key, fields, body, dialect, claim, digest)
        return self._read_whole(capture_key, fields, body, dialect, claim, digest)

    def _read_whole(
        self,
        capture_key: str,
        fields: Item,
        body: bytes,
        dialect: Dialect,
        claim: Claim | None,
        digest: bytes,
    ) -> core.NormalisedRequest:
        turns = fields.get(core.turns_name(dialect))
        known, mark = self._marked(capture_key, fields, dialect, turns)
        if known is not None and isinstance(turns, list):
            read = _read_from(known, turns[known.turn_count :], fields, body, dialect)
            if read is not None:
                return self._request(capture_key, fields, digest, dialect, claim, read, mark)
        converted = core.convert(fields, body, dialect)
        items = source_items(fields, dialect)
        plain = dialect is Dialect.CHAT and not fields.get("instructions")
        messages = items if plain else _messages_of(converted.chat)
        count = len(turns) if isinstance(turns, list) else 1
        read = _Read(converted, None, EMPTY_HISTORY, None, items, messages, count)
        return self._request(capture_key, fields, digest, dialect, claim, read, mark)

    def _read_delta(
        self,
        capture_key: str,
        fields: Item,
        body: bytes,
        dialect: Dialect,
        claim: Claim,
        digest: bytes,
    ) -> core.NormalisedRequest:
        base = self._histories.get(capture_key, claim.call_id)
        if base is None or base.dialect is not dialect:
            raise history_required(capture_key, claim.call_id)
        if (fields.get("instructions") or None) != base.options.instructions:
            # They are the first atom: no call that had others ends in this history.
            raise history_claim_refused(capture_key, claim.call_id, "not_this_call")
        # The instructions stand in the history already, in front of its turns.
        turns = {**fields, "instructions": None}
        converted = core.convert(fields if dialect is Dialect.CHAT else turns, body, dialect)
        items = source_items(turns, dialect)
        messages = items if dialect is Dialect.CHAT else _messages_of(converted.chat)
        count = base.answer.count + len(items)
        if base.turn_count + count > core.ITEMS_MAX:
            raise malformed(
                f"The history has more than {core.ITEMS_MAX} items.", core.turns_name(dialect)
            )
        parts = [*base.messages(), write_items(messages)]
        whole = _completed(converted, parts, fields, dialect)
        read = _Read(whole, base, base.history, base.answer, items, messages, count)
        return self._request(capture_key, fields, digest, dialect, claim, read, b"")

    def _request(
        self,
        capture_key: str,
        fields: Item,
        digest: bytes,
        dialect: Dialect,
        claim: Claim | None,
        read: _Read,
        mark: bytes,
    ) -> core.NormalisedRequest:
        """Put together what was read of a request."""
        options = _options(fields, read.converted.chat, digest)
        history = read.begun.extended(read.items)
        evidence = SourceEvidence(
            probe=_probe(history, options, claim),
            capture_key=capture_key,
            dialect=dialect,
            history=history,
            options=options,
            known=read.known,
            echoed=read.echoed,
            new_items=read.items,
            new_messages=read.messages,
            turn_count=read.count,
            mark=mark,
            histories=self._histories,
        )
        return core.normalised(read.converted, dialect, digest, evidence)

    def _marked(
        self, capture_key: str, fields: Item, dialect: Dialect, turns: object
    ) -> tuple[KeptCall | None, bytes]:
        """Name a request's turns; find the call with whose request they begin.

        Sought is the call whose request ends where the last answer begins: the one that was
        answered so, if the harness changed nothing.
        """
        if not isinstance(turns, list):
            return None, b""
        written = hashlib.sha256(exact_bytes([dialect.value, fields.get("instructions")]))
        end = _last_answer_begins(turns)
        known = None
        if end:
            written.update(exact_bytes(turns[:end]))
            known = self._histories.recognise(capture_key, written.digest())
        written.update(exact_bytes(turns[end:]))
        return known, written.digest()


def _read_from(
    known: KeptCall, new: list[object], fields: Item, body: bytes, dialect: Dialect
) -> _Read | None:
    """Read a request that begins with a known one's turns; None when it must be read whole.

    Chat requests go on as they came. Of a Responses request the new items are translated alone: an
    answer opens a message of its own, whatever stands before it. Where they do not begin with one,
    or are refused, the whole is read, so that a refusal names the place in it.
    """
    begun, count = known.request_history, len(new)
    if dialect is Dialect.CHAT:
        converted = core.convert(fields, body, dialect, judged=known.turn_count)
        return _Read(converted, known, begun, None, new, new, count)
    part = {**fields, core.turns_name(dialect): new, "instructions": None}
    try:
        converted = core.convert(part, body, dialect)
    except HttpRefusal:
        return None
    messages = _messages_of(converted.chat)
    if not _is_answer(messages[0]) or known.turn_count + count > core.ITEMS_MAX - 1:
        return None
    parts = [*known.request_messages(), write_items(messages)]
    whole = _completed(converted, parts, fields, dialect)
    return _Read(whole, known, begun, None, new, messages, count)


def _last_answer_begins(turns: list[object]) -> int:
    """Give where a conversation's last answer begins; 0 without one."""
    end = len(turns)
    while end and not _is_answer(turns[end - 1]):
        end -= 1
    while end and _is_answer(turns[end - 1]):
        end -= 1
    return end


def _is_answer(turn: object) -> bool:
    if not isinstance(turn, dict):
        return False
    return is_model_authored(turn) or turn.get("type") == "reasoning"


def _options(fields: Item, chat: Item, body_digest: bytes) -> RenderOptions:
    """Give what decides, beside its turns, how a request becomes tokens.

    Options without canonical form have a digest that no other request has.
    """
    values = effective_options(chat)
    instructions = fields.get("instructions")
    try:
        digest = source_render_digest(values)
    except CanonicalJsonError:
        digest = hashlib.sha256(_UNREADABLE_OPTIONS + body_digest).digest()
    return RenderOptions(
        digest, write_json(values), instructions if isinstance(instructions, str) else None
    )


def _probe(
    history: SourceHistory, options: RenderOptions, claim: Claim | None
) -> capture_admission_pb2.SourceProbe:
    if claim is None:
        return source_probe_to_proto(history.probe(options.digest))
    probe = history.probe(options.digest, claim.call_id, claim_breaks_ties=claim.history_is_whole)
    return source_probe_to_proto(probe)


def _completed(
    converted: core.Conversion, parts: list[bytes], fields: Item, dialect: Dialect
) -> core.Conversion:
    """Complete a request for the engine: kept turns are joined as they were written.

    Args:
        converted: the request with its new turns alone.
        parts: the messages of all turns, written.
        fields: the request as received.
        dialect: its API.

    Raises:
        HttpRefusal: it is larger than a whole request may be.
    """
    chat = converted.chat
    asked = {"messages", "stream", "stream_options"}
    head = write_json({name: chat[name] for name in chat if name not in asked})[:-1]
    parts[0] = b"".join((head, b"," if len(head) > 1 else b"", b'"messages":[', parts[0]))
    parts[-1] += b"]}"
    body = b",".join(parts)  # once: a conversation may be large
    if len(body) > core.BODY_BYTES_MAX:
        raise too_large(core.BODY_BYTES_MAX)
    echo = {} if dialect is Dialect.CHAT else responses.echo_of(fields)
    return replace(converted, body=body, echo=echo)


def _messages_of(chat: Item) -> list[object]:
    messages = chat["messages"]
    assert isinstance(messages, list), "it was judged"
    return messages
