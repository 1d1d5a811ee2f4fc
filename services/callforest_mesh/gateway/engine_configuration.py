"""The digest of the engine's configuration, as the gateway last learned it (CAP-11).

Every call names it: the ledger binds an attempt to the first, and a worker whose engine has another
refuses. It changes only when an engine is replaced, so it is asked for once, and again after
somebody found that it has changed.
"""

from __future__ import annotations

import asyncio

from callforest_client.worker import WorkerClient
from callforest_mesh.gateway.refusals import unavailable


class EngineConfiguration:
    """Knows the digest of model, template and processor.

    Args:
        worker: asked for it.
        required: whether a call must name one; forest mode compares no histories without.
    """

    def __init__(self, worker: WorkerClient, *, required: bool = False) -> None:
        self._worker = worker
        self._required = required
        self._digest: bytes | None = None
        self._asking = asyncio.Lock()

    @property
    def is_known(self) -> bool:
        """Whether nobody has to be asked."""
        return self._digest is not None

    async def digest(self) -> bytes:
        """Give the digest: 32 bytes, or none of an engine that has no digest.

        Raises:
            CallforestError: it is not known, and the worker or its engine is away.
            HttpRefusal: the engine has none, and one is required.
        """
        if self._digest is None:
            async with self._asking:
                if self._digest is None:
                    self._digest = (await self._worker.describe()).configuration_digest
        if self._required and not self._digest:
            self._digest = None
            raise unavailable("The engine's configuration is not known; nothing was generated.")
        return self._digest

    def forget(self, digest: bytes) -> None:
        """Ask again at the next call; nothing if another digest was learned meanwhile.

        Args:
            digest: what was found to be no longer true.
        """
        if self._digest == digest:
            self._digest = None
