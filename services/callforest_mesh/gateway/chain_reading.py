"""Reading a request of chain mode: always whole, hashed from where the last one left off. Pure."""

from __future__ import annotations

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core
from callforest_mesh.gateway.asked import digest_body
from callforest_mesh.gateway.conversations import Conversations
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.refusals import unsupported


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
        """Parse and judge a request; see `reading.RequestReader.read`."""
        if claim is not None and not claim.history_is_whole:
            raise unsupported(
                "continues_call_id",
                "Histories are kept in forest mode alone. Send the whole history.",
            )
        digest = body_digest or digest_body(body, dialect, claim)
        return core.read_request(body, dialect, self._conversations.of(capture_key), digest)
