"""Reading a request: what both capture modes promise. Pure."""

from __future__ import annotations

from typing import Protocol

from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core
from callforest_mesh.gateway.evidence import Claim


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
