"""Reading a request of forest mode: whole, or as a delta to a kept history.

A request that begins with the turns of an earlier one, as nearly all do, is read from there on: its
cost beside digesting its bytes does not grow with the history. It must begin with the very bytes of
the earlier one (`body_start`).
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
from callforest_mesh.gateway.body_start import BodyStart, Prefixes, rest_of, start_of
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.histories import Histories, KeptCall, RenderOptions, Turns
from callforest_mesh.gateway.json_body import parse_body, read_body, write_items, write_json
from callforest_mesh.gateway.refusals import (
    HttpRefusal,
    history_claim_refused,
    history_required,
    malformed,
    too_large,
)
from callforest_mesh.gateway.source_evidence import SourceEvidence

_UNREADABLE_OPTIONS: Final = b"callforest-unreadable-options-v1"
_ENVELOPE_ITEMS: Final = 1
"""Instructions and tools count as one item of a request."""


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A request, read: what is new of it, and what that stands behind.

    Attributes:
        fields: the request; of its turns those that are new, if others are known.
        converted: the whole request as the engine takes it.
        known: the call with whose request it begins.
        begun: the atoms before the new items, digested.
        echoed: the answer of `known`, where the request leaves it out.
        items: the new items.
        messages: the same in Chat's form.
        count: how many turns are new, `echoed` included.
        start: with what the request begins; None for a delta request, and where its turns are no
            list.
    """

    fields: Item
    converted: core.Conversion
    known: KeptCall | None
    begun: SourceHistory
    echoed: Turns | None
    items: list[object]
    messages: list[object]
    count: int
    start: BodyStart | None


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
        digest = body_digest or digest_body(body, dialect, claim)
        if claim is not None and not claim.history_is_whole:
            return self._read_delta(capture_key, body, dialect, claim, digest)
        prefixes = Prefixes(body)
        known = self._histories.begun(capture_key, dialect, body, prefixes)
        read = None if known is None else _read_from(known, body, dialect, prefixes)
        if read is None:
            read = _read_whole(body, dialect, prefixes)
        return self._request(capture_key, digest, dialect, claim, read)

    def _read_delta(
        self,
        capture_key: str,
        body: bytes,
        dialect: Dialect,
        claim: Claim,
        digest: bytes,
    ) -> core.NormalisedRequest:
        fields = parse_body(body)
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
        read = _Read(fields, whole, base, base.history, base.answer, items, messages, count, None)
        return self._request(capture_key, digest, dialect, claim, read)

    def _request(
        self,
        capture_key: str,
        digest: bytes,
        dialect: Dialect,
        claim: Claim | None,
        read: _Read,
    ) -> core.NormalisedRequest:
        """Put together what was read of a request."""
        options = _options(read.fields, read.converted.chat, digest)
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
            start=read.start,
            histories=self._histories,
        )
        return core.normalised(read.converted, dialect, digest, evidence)


def _read_whole(body: bytes, dialect: Dialect, prefixes: Prefixes) -> _Read:
    """Read all of a request.

    Raises:
        HttpRefusal: it is malformed, or asks for what cannot be captured.
    """
    parsed = read_body(body)
    fields = parsed.fields
    converted = core.convert(fields, body, dialect)
    items = source_items(fields, dialect)
    plain = dialect is Dialect.CHAT and not fields.get("instructions")
    messages = items if plain else _messages_of(converted.chat)
    name = core.turns_name(dialect)
    turns = fields.get(name)
    count = len(turns) if isinstance(turns, list) else 1
    start = start_of(parsed, name, prefixes)
    return _Read(fields, converted, None, EMPTY_HISTORY, None, items, messages, count, start)


def _read_from(known: KeptCall, body: bytes, dialect: Dialect, prefixes: Prefixes) -> _Read | None:
    """Read what follows the turns of a known request; None when the whole must be read.

    The new turns are translated alone. Of a Responses request they must begin with an answer, which
    opens a message of its own, whatever stands before it. Where anything is refused the whole is
    read, so that the refusal names the place in it.
    """
    assert known.start is not None, "it was found by that"
    rest, left_out = rest_of(body, known.start)
    name = core.turns_name(dialect)
    try:
        parsed = read_body(rest)
        part = parsed.fields
        new = part[name]
        if not isinstance(new, list) or not new:
            return None  # a comma without a turn behind it
        if (part.get("instructions") or None) != known.options.instructions:
            return None  # they are the first atom, and may stand behind the turns
        told = part if dialect is Dialect.CHAT else {**part, "instructions": None}
        converted = core.convert(told, body, dialect)
    except HttpRefusal:
        return None
    if known.turn_count + len(new) + _ENVELOPE_ITEMS > core.ITEMS_MAX:
        return None
    messages = new if dialect is Dialect.CHAT else _messages_of(converted.chat)
    if dialect is Dialect.RESPONSES and not _is_answer(messages[0]):
        return None
    if dialect is Dialect.RESPONSES or converted.streaming is not None:
        parts = [*known.request_messages(), write_items(messages)]
        converted = _completed(converted, parts, part, dialect)
    start = start_of(parsed, name, prefixes, left_out)
    begun = known.request_history
    return _Read(part, converted, known, begun, None, new, messages, len(new), start)


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
