"""What chain mode knows of a request's history: fingerprints and context digests. Pure.

Contract: docs/lineage.md, sections 1 to 6 and 9.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from callforest.capture.v1 import (
    attempt_pb2,
    call_record_pb2,
    capture_admission_pb2,
    replay_summary_pb2,
)
from callforest_core.lineage.canonical_json import CanonicalJsonError
from callforest_core.lineage.fingerprint import (
    DIGEST_SIZE,
    FINGERPRINT_VERSION,
    ConversationScan,
    UnreadableItemError,
)
from callforest_core.lineage.items import Dialect, Item, request_items
from callforest_core.lineage.replay import NORMALIZATION_VERSION, render_digest
from callforest_mesh.gateway.body_frame import BodyFrame
from callforest_mesh.gateway.conversations import (
    ChainMemory,
    Conversation,
    continued,
    read_conversation,
)
from callforest_mesh.gateway.evidence import ServedResponse

_UNREADABLE_DOMAIN: Final = b"callforest-unreadable-request-v1"
_NO_CONTEXT: Final = bytes(DIGEST_SIZE)


@dataclass(frozen=True, slots=True, eq=False)
class ChainEvidence:
    """A request's history in chain mode.

    Attributes:
        probe: what the ledger needs to find the predecessor.
        conversation: the request's items, hashed.
        replay: the summary of the request; None when an item has no canonical form.
        memory: where the conversation is kept once it is served; None for nowhere.
    """

    probe: capture_admission_pb2.ChainProbe
    conversation: Conversation
    replay: replay_summary_pb2.ReplaySummary | None
    memory: ChainMemory | None = None

    @property
    def scan(self) -> ConversationScan | None:
        """The request's fingerprints; None when an item that a model wrote cannot be read."""
        return self.conversation.scan

    def announce(self, intent: attempt_pb2.CallIntent) -> None:
        """Put the probe into an announcement."""
        intent.chain.CopyFrom(self.probe)

    def describe(self, record: call_record_pb2.CallRecord, served: ServedResponse) -> None:
        """Put into a record by what a later request finds the call."""
        fingerprints = _fingerprints(self.scan, served)
        if fingerprints is not None:
            record.fingerprints.CopyFrom(fingerprints)
        if self.replay is not None:
            record.replay.CopyFrom(self.replay)

    def explain(self, verdict: capture_admission_pb2.Verdict) -> None:
        """Say nothing: in chain mode a history that is not known is no root."""

    def keep(self, call_id: str, served: ServedResponse) -> None:  # noqa: ARG002 - as in forest
        """Remember what the request hashes to: the next one begins with it."""
        if self.memory is not None:
            self.memory.keep(self.conversation)


def read_chain_evidence(
    fields: Item,
    dialect: Dialect,
    options: Item,
    body_digest: bytes,
    memory: ChainMemory | None = None,
    frame: BodyFrame | None = None,
) -> ChainEvidence:
    """Fingerprint a request.

    Args:
        fields: the request.
        dialect: its API.
        options: the request as the engine gets it, in Chat's names.
        body_digest: SHA-256 of what was received.
        memory: the attempt's last conversation, which this one may continue.
        frame: what was received, if the engine gets that.
    """
    conversation = read_conversation(
        _items(fields, dialect),
        None if memory is None else memory.get(),
        render_digest=_render_digest({**options, "instructions": fields.get("instructions")}),
        frame=frame,
    )
    return _evidence(conversation, body_digest, memory)


def continue_chain_evidence(
    known: Conversation,
    added: list[object],
    frame: BodyFrame,
    body_digest: bytes,
    memory: ChainMemory,
) -> ChainEvidence:
    """Fingerprint a request that adds turns to an earlier one, and is the same otherwise.

    Args:
        known: the earlier one's.
        added: its new turns.
        frame: what was received.
        body_digest: SHA-256 of what was received.
        memory: the attempt's last conversation.
    """
    conversation = continued(known, added, known.render_digest, frame)
    return _evidence(conversation, body_digest, memory)


def _evidence(
    conversation: Conversation, body_digest: bytes, memory: ChainMemory | None
) -> ChainEvidence:
    probe = _probe(conversation, body_digest)
    return ChainEvidence(probe, conversation, _replay(conversation), memory)


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


def _probe(conversation: Conversation, body_digest: bytes) -> capture_admission_pb2.ChainProbe:
    """Make the probe. What cannot be read matches no record: it is never a silent root.

    Only the prefixes that the last answer directly follows have a digest. What stands between a
    recorded context and its answer was never shown to the model: the captured tokens would replace
    it unseen.
    """
    scan, count = conversation.scan, conversation.item_count
    if scan is None:
        fingerprint = hashlib.sha256(_UNREADABLE_DOMAIN + body_digest).digest()
        digests = b""
    else:
        fingerprint, digests = scan.assistant_fingerprint, scan.context_digests
        if fingerprint:
            begin, end, _ = conversation.answer
            digests = bytes(DIGEST_SIZE * begin) + digests[DIGEST_SIZE * begin : DIGEST_SIZE * end]
    missing = count + 1 - len(digests) // DIGEST_SIZE
    return capture_admission_pb2.ChainProbe(
        assistant_fingerprint=fingerprint,
        item_count=count,
        context_digests=digests + _NO_CONTEXT * missing,
        fingerprint_version=FINGERPRINT_VERSION,
    )


def _render_digest(options: Item) -> bytes | None:
    try:
        return render_digest(options)
    except CanonicalJsonError:
        return None


def _replay(conversation: Conversation) -> replay_summary_pb2.ReplaySummary | None:
    if conversation.source_digest is None or conversation.render_digest is None:
        return None
    return replay_summary_pb2.ReplaySummary(
        normalization_version=NORMALIZATION_VERSION,
        item_count=conversation.item_count,
        source_digest=conversation.source_digest,
        render_digest=conversation.render_digest,
    )
