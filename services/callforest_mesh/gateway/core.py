"""What the edge decides about one call: reading the request, and the record of what was served.

Pure: ids, times and bytes come in as arguments.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Final, NoReturn

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
)
from callforest_core.lineage.items import (
    TOKEN_FIELDS,
    Dialect,
    Item,
    ItemsError,
    request_items,
    response_items,
)
from callforest_core.lineage.replay import summarize_replay
from callforest_mesh.gateway.refusals import malformed, refuse_unsupported

BODY_BYTES_MAX: Final = 32 << 20
ITEMS_MAX: Final = 16384
DEPTH_MAX: Final = 128
"""Lists and objects inside one another; no request needs more, and a parser has a stack."""

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
        body: the bytes to forward, as received.
        body_digest: SHA-256 of them.
        probe: what the ledger needs to find the predecessor.
        scan: the request's fingerprints; None when an item that a model wrote cannot be read.
        replay: the summary of the request; None when an item has no canonical form.
    """

    body: bytes
    body_digest: bytes
    probe: capture_admission_pb2.ChainProbe
    scan: ConversationScan | None
    replay: replay_summary_pb2.ReplaySummary | None


@dataclass(frozen=True, slots=True, eq=False)
class ServedResponse:
    """What the gateway reads of a response that it serves.

    Attributes:
        response_id: the id that the harness gets; "" when there is none.
        items: the response's items; None when they cannot be read.
    """

    response_id: str
    items: list[Item] | None


def read_request(body: bytes) -> NormalisedRequest:
    """Parse and judge a Chat Completions request.

    Raises:
        HttpRefusal: it is malformed, or asks for what cannot be captured.
    """
    fields = _parse(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise malformed("`messages` must be a list with at least one message.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise malformed(f"`messages[{index}]` must be an object.", f"messages[{index}]")
    refuse_unsupported(fields)
    items = request_items(fields, Dialect.CHAT)
    if len(items) > ITEMS_MAX:
        raise malformed(f"`messages` has more than {ITEMS_MAX} items.", "messages")
    scan = _scan(items)
    digest = hashlib.sha256(body).digest()
    return NormalisedRequest(
        body=body,
        body_digest=digest,
        probe=_probe(scan, digest, len(items)),
        scan=scan,
        replay=_replay(items, fields),
    )


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


def read_response(body: bytes) -> ServedResponse:
    """Read what is about to be served; the bytes themselves stay as they are.

    Raises:
        ServedResponseError: it is no JSON object, or holds token material (CAP-6).
    """
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise ServedResponseError("the response is no JSON") from error
    if not isinstance(fields, dict):
        raise ServedResponseError("the response is no object")
    leaked = _token_material(fields)
    if leaked is not None:
        raise ServedResponseError(f"the response holds `{leaked}`")
    response_id = fields.get("id")
    try:
        items = response_items(fields, Dialect.CHAT)
    except ItemsError:
        items = None
    return ServedResponse(response_id if isinstance(response_id, str) else "", items)


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


def _parse(body: bytes) -> Item:
    try:
        text = body.decode("utf-8")
        fields = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise malformed(f"The body is nested more than {DEPTH_MAX} deep.") from error
    except ValueError as error:
        raise malformed(f"The body is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise malformed("The body must be a JSON object.")
    if text.count("[") + text.count("{") > DEPTH_MAX and _is_deeper(fields, DEPTH_MAX):
        raise malformed(f"The body is nested more than {DEPTH_MAX} deep.")
    return fields


def _object(pairs: list[tuple[str, object]]) -> Item:
    """Refuse a key that appears twice: two readers could take different values for it."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _is_deeper(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        level = [inner for container in level for inner in _containers_in(container)]
        if not level:
            return False
    return True


def _containers_in(container: object) -> list[object]:
    members: list[object] = []
    if isinstance(container, dict):
        members = list(container.values())
    elif isinstance(container, list):
        members = container
    return [one for one in members if isinstance(one, list | dict)]


def _scan(items: list[object]) -> ConversationScan | None:
    try:
        return ConversationScan(items)
    except UnreadableItemError:
        return None


def _probe(
    scan: ConversationScan | None, body_digest: bytes, item_count: int
) -> capture_admission_pb2.ChainProbe:
    """Make the probe. What cannot be read matches no record: it is never a silent root."""
    if scan is None:
        fingerprint = hashlib.sha256(_UNREADABLE_DOMAIN + body_digest).digest()
        digests = b""
    else:
        fingerprint, digests = scan.assistant_fingerprint, scan.context_digests
    missing = item_count + 1 - len(digests) // DIGEST_SIZE
    return capture_admission_pb2.ChainProbe(
        assistant_fingerprint=fingerprint,
        item_count=item_count,
        context_digests=digests + _NO_CONTEXT * missing,
        fingerprint_version=FINGERPRINT_VERSION,
    )


def _replay(items: list[object], fields: Item) -> replay_summary_pb2.ReplaySummary | None:
    try:
        summary = summarize_replay(items, fields)
    except CanonicalJsonError:
        return None
    return replay_summary_pb2.ReplaySummary(
        normalization_version=summary.normalization_version,
        item_count=summary.item_count,
        source_digest=summary.source_digest,
        render_digest=summary.render_digest,
    )
