"""What the edge decides about one call: reading the request, and the record of what was served.

Pure: ids, times and bytes come in as arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf import timestamp_pb2

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
)
from callforest.error.v1 import error_reason_pb2 as er
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_core.lineage.items import (
    TOKEN_FIELDS,
    Dialect,
    Item,
    ItemsError,
    response_items,
)
from callforest_mesh.gateway import responses
from callforest_mesh.gateway.asked import digest_body
from callforest_mesh.gateway.body_frame import frame_of
from callforest_mesh.gateway.chain_evidence import continue_chain_evidence, read_chain_evidence
from callforest_mesh.gateway.conversations import ChainMemory
from callforest_mesh.gateway.events import Streaming, chat_events, read_streaming, response_events
from callforest_mesh.gateway.evidence import Evidence, ServedResponse
from callforest_mesh.gateway.json_body import parse_body, read_body, write_json
from callforest_mesh.gateway.refusals import HttpRefusal, malformed
from callforest_mesh.gateway.response_output import TranslationError, response_of
from callforest_mesh.gateway.unsupported import refuse_unsupported

__all__ = ["NormalisedRequest", "ServedResponse", "read_request", "read_response"]

BODY_BYTES_MAX: Final = 32 << 20
ITEMS_MAX: Final = 16384

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
        body_digest: tells it from another request (`asked.digest_body`).
        evidence: by what the call finds the one that it continues, in the attempt's mode.
        streaming: how the response is to be streamed; None for a plain one.
        echo: what a Responses response says again of its request.
    """

    dialect: Dialect
    body: bytes
    body_digest: bytes
    evidence: Evidence
    streaming: Streaming | None = None
    echo: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """A request as the engine takes it.

    Attributes:
        chat: the Chat Completions request, parsed.
        body: its bytes.
        streaming: how the response is to be streamed; None for a plain one.
        echo: what a Responses response says again of its request.
    """

    chat: Item
    body: bytes
    streaming: Streaming | None
    echo: Mapping[str, object]


def read_request(
    body: bytes,
    dialect: Dialect = Dialect.CHAT,
    body_digest: bytes | None = None,
    memory: ChainMemory | None = None,
) -> NormalisedRequest:
    """Parse and judge a request of chain mode.

    Args:
        body: as received.
        dialect: the API in which it is asked.
        body_digest: tells it from another request, if that is known already.
        memory: the attempt's last conversation, which this one may continue.

    Raises:
        HttpRefusal: it is malformed, or asks for what cannot be captured.
    """
    parsed = read_body(body)
    fields = parsed.fields
    converted = convert(fields, body, dialect)
    digest = body_digest or digest_body(body, dialect)
    frame = frame_of(parsed, dialect, turns_name(dialect)) if converted.body is body else None
    evidence = read_chain_evidence(fields, dialect, converted.chat, digest, memory, frame)
    return normalised(converted, dialect, digest, evidence)


def read_added(
    body: bytes, dialect: Dialect, body_digest: bytes | None, memory: ChainMemory
) -> NormalisedRequest | None:
    """Read what a request of chain mode adds to the attempt's last, which it says again.

    None when the whole must be read: where anything is refused, so that the refusal names the
    place in it; or where more differs than the turns that were added.

    Args:
        body: as received.
        dialect: the API in which it is asked.
        body_digest: tells it from another request, if that is known already or it has a claim.
        memory: the attempt's last conversation.
    """
    known = memory.get()
    if known is None or known.frame is None or dialect is not Dialect.CHAT:
        return None
    added = known.frame.added(body)
    if not added or known.item_count + len(added) > ITEMS_MAX:
        return None
    try:
        refuse_malformed_chat({"messages": added})
    except HttpRefusal:
        return None
    frame = known.frame.moved(body)
    digest = body_digest or frame.digest
    evidence = continue_chain_evidence(known, added, frame, digest, memory)
    return NormalisedRequest(dialect, body, digest, evidence)


def normalised(
    converted: Conversion, dialect: Dialect, body_digest: bytes, evidence: Evidence
) -> NormalisedRequest:
    """Put together what is known of a request."""
    return NormalisedRequest(
        dialect=dialect,
        body=converted.body,
        body_digest=body_digest,
        evidence=evidence,
        streaming=converted.streaming,
        echo=converted.echo,
    )


def convert(fields: Item, body: bytes, dialect: Dialect) -> Conversion:
    """Judge a request and make of it what the engine takes.

    Args:
        fields: the request, parsed.
        body: as received.
        dialect: its API.

    Raises:
        HttpRefusal: it is malformed, or asks for what cannot be captured.
    """
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
    turns = fields.get(turns_name(dialect))
    if isinstance(turns, list) and len(turns) + _envelope_count(fields) > ITEMS_MAX:
        where = turns_name(dialect)
        raise malformed(f"`{where}` has more than {ITEMS_MAX} items.", where)
    echo = {} if dialect is Dialect.CHAT else responses.echo_of(fields)
    return Conversion(chat, forwarded, streaming, echo)


def dialect_of(body: bytes) -> Dialect:
    """Say in which API a request is written: one with `input` alone is of Responses.

    Raises:
        HttpRefusal: it is malformed.
    """
    fields = parse_body(body)
    is_responses = "input" in fields and "messages" not in fields
    return Dialect.RESPONSES if is_responses else Dialect.CHAT


def turns_name(dialect: Dialect) -> str:
    """Name the field that holds a request's turns."""
    return "messages" if dialect is Dialect.CHAT else "input"


def _envelope_count(fields: Item) -> int:
    return int(bool(fields.get("instructions") or fields.get("tools")))


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
    request: NormalisedRequest,
    capture_key: str,
    call_id: str,
    admit_time: timestamp_pb2.Timestamp,
    configuration_digest: bytes = b"",
) -> attempt_pb2.CallIntent:
    """Make the announcement of a call; an engine without a digest binds nothing."""
    intent = attempt_pb2.CallIntent(
        capture_key=capture_key,
        call_id=call_id,
        body_digest=request.body_digest,
        configuration_digest=configuration_digest,
    )
    intent.admit_time.CopyFrom(admit_time)
    request.evidence.announce(intent)
    return intent


def generation_of(
    request: NormalisedRequest,
    verdict: capture_admission_pb2.Verdict,
    intent: attempt_pb2.CallIntent,
    *,
    captured: bool = True,
) -> worker_pb.GenerateCall:
    """Make what the worker is asked of an announced call."""
    capture_key, call_id = intent.capture_key, intent.call_id
    call = worker_pb.GenerateCall(
        capture_key=capture_key,
        call_id=call_id,
        chat_request=request.body,
        configuration_digest=intent.configuration_digest,
    )
    call.create_time.CopyFrom(intent.admit_time)
    if captured:
        admission = admission_of(verdict, capture_key, call_id, is_forest=is_forest(intent))
        if admission is not None:
            call.admission.CopyFrom(admission)
    return call


def is_forest(intent: attempt_pb2.CallIntent | None) -> bool:
    """Say whether a call was announced in forest mode."""
    return intent is not None and intent.WhichOneof("probe") == "source"


def is_configuration_change(reason: er.ErrorReason.ValueType) -> bool:
    """Say whether somebody found another engine than the one that a call named."""
    return reason == er.ERROR_REASON_CONFIGURATION_CHANGED


def admission_of(
    verdict: capture_admission_pb2.Verdict,
    capture_key: str,
    call_id: str,
    *,
    is_forest: bool = False,
) -> capture_admission_pb2.CaptureAdmission | None:
    """Make what the worker may capture; None for a call that is served without capture."""
    admission = capture_admission_pb2.CaptureAdmission(
        capture_key=capture_key, call_id=call_id, is_forest=is_forest
    )
    match verdict.WhichOneof("verdict"):
        case "root":
            admission.root.CopyFrom(verdict.root)
        case "continuation":
            admission.continuation.CopyFrom(verdict.continuation)
        case _:
            return None
    return admission


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
    message = _message_of(fields)
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
    return ServedResponse(body, response_id if isinstance(response_id, str) else "", items, message)


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
        if isinstance(holder, dict) and not _TOKEN_MATERIAL.isdisjoint(holder):
            for name in _TOKEN_MATERIAL & holder.keys():
                if holder[name] is not None:
                    return name
    return None


def record_of(
    generated: worker_pb.GeneratedCall,
    request: NormalisedRequest,
    served: ServedResponse,
    admit_time: timestamp_pb2.Timestamp,
) -> call_record_pb2.CallRecord:
    """Make the ledger's row of a staged call; what it is found by is of what was served."""
    record = call_record_pb2.CallRecord(response_id=served.response_id)
    record.coords.CopyFrom(generated.staged)
    record.admit_time.CopyFrom(admit_time)
    record.completion.CopyFrom(generated.completion)
    if generated.HasField("decision"):
        record.decision.CopyFrom(generated.decision)
    request.evidence.describe(record, served)
    return record


def _message_of(fields: Item) -> Item:
    """Give the message of a completion with one choice, {} without."""
    choices = fields.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return {}
    message = choices[0].get("message")
    return message if isinstance(message, dict) else {}
