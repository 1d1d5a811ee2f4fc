"""What the edge decides about one call: reading the request, and the record of what was served.

Pure: ids, times and bytes come in as arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
    commit_coords_pb2,
    completion_pb2,
    replay_summary_pb2,
)
from callforest_core.lineage.canonical_json import CanonicalJsonError
from callforest_core.lineage.fingerprint import (
    DIGEST_SIZE,
    FINGERPRINT_VERSION,
    ConversationScan,
    UnreadableItemError,
    is_model_authored,
)
from callforest_core.lineage.items import (
    TOKEN_FIELDS,
    Dialect,
    Item,
    ItemsError,
    request_items,
    response_items,
)
from callforest_core.lineage.replay import NORMALIZATION_VERSION, render_digest
from callforest_mesh.gateway import responses
from callforest_mesh.gateway.conversations import Conversation, read_conversation
from callforest_mesh.gateway.events import Streaming, chat_events, read_streaming, response_events
from callforest_mesh.gateway.json_body import parse_body, write_json
from callforest_mesh.gateway.refusals import malformed
from callforest_mesh.gateway.response_output import TranslationError, response_of
from callforest_mesh.gateway.unsupported import refuse_unsupported

BODY_BYTES_MAX: Final = 32 << 20
ITEMS_MAX: Final = 16384

_UNREADABLE_DOMAIN: Final = b"callforest-unreadable-request-v1"
_NO_CONTEXT: Final = bytes(DIGEST_SIZE)
_TOKEN_MATERIAL: Final = TOKEN_FIELDS | {"token_ids", "prompt_logprobs", "kv_transfer_params"}


class ServedResponseError(ValueError):
    """A worker's answer that must not be served; `fact` says why."""

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact


@dataclass(frozen=True, slots=True, eq=False)
class NormalisedRequest:
    """A request that may be admitted.

    Attributes:
        dialect: the API in which it was asked, and is answered.
        body: the Chat Completions request for the engine; as received, unless it had to be
            translated or asked for a stream.
        body_digest: SHA-256 of what was received.
        probe: what the ledger needs to find the predecessor.
        conversation: its items, and what they hash to.
        replay: the summary of the request; None when an item has no canonical form.
        streaming: how the response is to be streamed; None for a plain one.
        echo: what a Responses response says again of its request.
    """

    dialect: Dialect
    body: bytes
    body_digest: bytes
    probe: capture_admission_pb2.ChainProbe
    conversation: Conversation
    replay: replay_summary_pb2.ReplaySummary | None
    streaming: Streaming | None = None
    echo: Mapping[str, object] = field(default_factory=dict)

    @property
    def scan(self) -> ConversationScan | None:
        """The request's fingerprints; None when an item that a model wrote cannot be read."""
        return self.conversation.scan


@dataclass(frozen=True, slots=True, eq=False)
class ServedResponse:
    """A response as it will leave.

    Attributes:
        body: its bytes: the plain response, or its events.
        response_id: the id that the harness gets; "" when there is none.
        items: the response's items; None when they cannot be read.
    """

    body: bytes
    response_id: str
    items: list[Item] | None


def read_request(
    body: bytes, dialect: Dialect = Dialect.CHAT, known: Conversation | None = None
) -> NormalisedRequest:
    """Parse and judge a request.

    Args:
        body: as received.
        dialect: the API in which it is asked.
        known: a conversation that this one may continue; saves hashing it again.

    Raises:
        HttpRefusal: it is malformed, or asks for what cannot be captured.
    """
    fields = parse_body(body)
    streaming = read_streaming(fields)
    if dialect is Dialect.CHAT:
        refuse_malformed_chat(fields)
        chat, forwarded = fields, body
        if streaming is not None:
            asked = {"stream", "stream_options"}
            forwarded = write_json({name: fields[name] for name in fields if name not in asked})
    else:
        chat = responses.chat_request(fields)
        forwarded = write_json(chat)
    items = _items(fields, dialect)
    if len(items) > ITEMS_MAX:
        where = "messages" if dialect is Dialect.CHAT else "input"
        raise malformed(f"`{where}` has more than {ITEMS_MAX} items.", where)
    conversation = read_conversation(items, known)
    digest = hashlib.sha256(body).digest()
    return NormalisedRequest(
        dialect=dialect,
        body=forwarded,
        body_digest=digest,
        probe=_probe(conversation.scan, digest, items),
        conversation=conversation,
        replay=_replay(conversation, {**chat, "instructions": fields.get("instructions")}),
        streaming=streaming,
        echo={} if dialect is Dialect.CHAT else responses.echo_of(fields),
    )


def refuse_malformed_chat(fields: Item) -> None:
    """Refuse a Chat Completions request that is malformed or cannot be captured.

    Raises:
        HttpRefusal: 400.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise malformed("`messages` must be a list with at least one message.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise malformed(f"`messages[{index}]` must be an object.", f"messages[{index}]")
    refuse_unsupported(fields)


def parameter_of(request: NormalisedRequest, chat_parameter: str | None) -> str | None:
    """Give the request's own name of the field that an engine found at fault."""
    if request.dialect is Dialect.RESPONSES:
        return responses.parameter_of(chat_parameter)
    return chat_parameter


def intent_of(
    request: NormalisedRequest, capture_key: str, call_id: str, admit_time: timestamp_pb2.Timestamp
) -> attempt_pb2.CallIntent:
    """Make the announcement of a call."""
    return attempt_pb2.CallIntent(
        capture_key=capture_key,
        call_id=call_id,
        admit_time=admit_time,
        body_digest=request.body_digest,
        chain=request.probe,
    )


def admission_of(
    verdict: capture_admission_pb2.Verdict, capture_key: str, call_id: str
) -> capture_admission_pb2.CaptureAdmission | None:
    """Make what the worker may capture; None for a call that is served without capture."""
    match verdict.WhichOneof("verdict"):
        case "root":
            return capture_admission_pb2.CaptureAdmission(
                capture_key=capture_key, call_id=call_id, root=verdict.root
            )
        case "continuation":
            return capture_admission_pb2.CaptureAdmission(
                capture_key=capture_key, call_id=call_id, continuation=verdict.continuation
            )
        case _:
            return None


def read_response(completion: bytes, request: NormalisedRequest) -> ServedResponse:
    """Make what is served of the engine's completion.

    A plain Chat response is the completion's own bytes.

    Raises:
        ServedResponseError: it is no JSON object, holds token material (CAP-6), or has no form in
            which it was asked for.
    """
    try:
        fields = json.loads(completion)
    except ValueError as error:
        raise ServedResponseError("the response is no JSON") from error
    if not isinstance(fields, dict):
        raise ServedResponseError("the response is no object")
    leaked = _token_material(fields)
    if leaked is not None:
        raise ServedResponseError(f"the response holds `{leaked}`")
    body = completion
    if request.dialect is Dialect.RESPONSES:
        try:
            fields = response_of(fields, request.echo)
        except TranslationError as error:
            raise ServedResponseError(error.fact) from error
        body = write_json(fields) if request.streaming is None else response_events(fields)
    elif request.streaming is not None:
        if not _is_completion(fields):
            raise ServedResponseError("the response has no choices with messages")
        body = chat_events(fields, request.streaming)
    response_id = fields.get("id")
    try:
        items = response_items(fields, request.dialect)
    except ItemsError:
        items = None
    return ServedResponse(body, response_id if isinstance(response_id, str) else "", items)


def _is_completion(fields: Item) -> bool:
    choices = fields.get("choices")
    return isinstance(choices, list) and all(
        isinstance(choice, dict) and isinstance(choice.get("message"), dict) for choice in choices
    )


def _token_material(fields: Item) -> str | None:
    """Name a field of a response that holds tokens; None when there is none."""
    holders: list[object] = [fields]
    choices = fields.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        holders.append(choice)
        if isinstance(choice, dict):
            holders.append(choice.get("message"))
    for holder in holders:
        if isinstance(holder, dict):
            for name in _TOKEN_MATERIAL & holder.keys():
                if holder[name] is not None:
                    return name
    return None


def record_of(
    coords: commit_coords_pb2.CommitCoords,
    request: NormalisedRequest,
    served: ServedResponse,
    completion: completion_pb2.Completion,
    admit_time: timestamp_pb2.Timestamp,
) -> call_record_pb2.CallRecord:
    """Make the ledger's row of a call; its fingerprints are of what was served."""
    return call_record_pb2.CallRecord(
        coords=coords,
        response_id=served.response_id,
        admit_time=admit_time,
        fingerprints=_fingerprints(request.scan, served),
        completion=completion,
        replay=request.replay,
    )


def _fingerprints(
    scan: ConversationScan | None, served: ServedResponse
) -> call_record_pb2.CallFingerprints | None:
    """Fingerprint a call; None when it cannot be done: such a call is never a predecessor."""
    if scan is None or served.items is None:
        return None
    try:
        continuation = scan.continued(served.items)
        context_digest = scan.context_digest
    except UnreadableItemError:
        return None
    return call_record_pb2.CallFingerprints(
        version=FINGERPRINT_VERSION,
        output=continuation.output_fingerprint,
        continuation=continuation.fingerprint,
        context_item_count=scan.item_count,
        context_digest=context_digest,
    )


def _items(fields: Item, dialect: Dialect) -> list[object]:
    """Give a request's items; an `input` that is text is the one message that it stands for.

    Left out, it could be exchanged for another text without any digest noticing.
    """
    turns = fields.get("input")
    if dialect is Dialect.RESPONSES and isinstance(turns, str):
        fields = {**fields, "input": [{"role": "user", "content": turns}]}
    return request_items(fields, dialect)


def _probe(
    scan: ConversationScan | None, body_digest: bytes, items: list[object]
) -> capture_admission_pb2.ChainProbe:
    """Make the probe. What cannot be read matches no record: it is never a silent root.

    Only the prefixes that the last answer directly follows have a digest. What stands between a
    recorded context and its answer was never shown to the model: the captured tokens would replace
    it unseen.
    """
    count = len(items)
    if scan is None:
        fingerprint = hashlib.sha256(_UNREADABLE_DOMAIN + body_digest).digest()
        digests = b""
    else:
        fingerprint, digests = scan.assistant_fingerprint, scan.context_digests
        if fingerprint:
            begin, end = (DIGEST_SIZE * place for place in _last_answer(items))
            digests = bytes(begin) + digests[begin:end]
    missing = count + 1 - len(digests) // DIGEST_SIZE
    return capture_admission_pb2.ChainProbe(
        assistant_fingerprint=fingerprint,
        item_count=count,
        context_digests=digests + _NO_CONTEXT * missing,
        fingerprint_version=FINGERPRINT_VERSION,
    )


def _last_answer(items: list[object]) -> tuple[int, int]:
    """Give where the last answer begins and ends: what models wrote, its reasoning included."""
    end = len(items)
    while end and not is_model_authored(_fields(items[end - 1])):
        end -= 1
    begin = end
    while begin and _is_answer(_fields(items[begin - 1])):
        begin -= 1
    return begin, end


def _is_answer(item: Item) -> bool:
    return is_model_authored(item) or item.get("type") == "reasoning"


def _fields(item: object) -> Item:
    return item if isinstance(item, dict) else {}


def _replay(conversation: Conversation, fields: Item) -> replay_summary_pb2.ReplaySummary | None:
    if conversation.source_digest is None:
        return None
    try:
        rendering = render_digest(fields)
    except CanonicalJsonError:
        return None
    return replay_summary_pb2.ReplaySummary(
        normalization_version=NORMALIZATION_VERSION,
        item_count=len(conversation.items),
        source_digest=conversation.source_digest,
        render_digest=rendering,
    )
