"""Reading a request in a capture mode: what both modes promise, and chain mode. Pure."""

from __future__ import annotations

from typing import Protocol

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core
from callforest_mesh.gateway.asked import digest_body
from callforest_mesh.gateway.conversations import Conversations
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.refusals import unsupported


class RequestReader(Protocol):
    """Reads requests in one capture mode."""

    def read(
        self,
        capture_key: str,
        body: bytes,
        dialect: Dialect,
        claim: Claim | None = None,
        body_digest: bytes | None = None,
    ) -> core.NormalisedRequest:
        """Parse and judge a request.

        Args:
            capture_key: the attempt.
            body: as received.
            dialect: its API.
            claim: the call that it says it continues.
            body_digest: tells it from another, if that is known already.

        Raises:
            HttpRefusal: it is malformed, asks for what cannot be captured, or builds upon a
                history that is not kept.
        """
        ...


class ChainReader:
    """Reads requests of chain mode; which call they continue is found without any claim.

    Args:
        conversations: what earlier requests hash to; it is read here, and grows when a call was
            served.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def read(
        self,
        capture_key: str,
        body: bytes,
        dialect: Dialect,
        claim: Claim | None = None,
        body_digest: bytes | None = None,
    ) -> core.NormalisedRequest:
        """Parse and judge a request; see `RequestReader.read`."""
        if claim is not None and not claim.history_is_whole:
            raise unsupported(
                "continues_call_id",
                "Histories are kept in forest mode alone. Send the whole history.",
            )
        if body_digest is None and claim is not None:
            body_digest = digest_body(body, dialect, claim)
        memory = self._conversations.of(capture_key)
        request = core.read_added(body, dialect, body_digest, memory)
        return request or core.read_request(body, dialect, body_digest, memory)
