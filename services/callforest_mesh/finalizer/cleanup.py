"""Cleanup: staged calls go by their exact keys, only behind the committed cursor (FIN-3).

The duty is durable: the cleaned cursor lags the committed one until the staged calls are gone, and
a restarted finalizer goes on where it stopped. Everything here may be repeated.
"""

from __future__ import annotations

import asyncio
import logging

from callforest_client.errors import CallforestError
from callforest_client.staging import StagingClient
from callforest_core.custody.attempts import AttemptName
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.finalizer.store import RowLog

_LOG = logging.getLogger("callforest")
_RETRY_FIRST_S = 1.0
_RETRY_LAST_S = 60.0


class Cleanup:
    """Removes the staged calls of consumed groups, one task a tenant.

    Args:
        row_log: knows what was consumed.
        staging: holds what is removed.
    """

    def __init__(self, row_log: RowLog, staging: StagingClient) -> None:
        self._row_log = row_log
        self._staging = staging
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def wake(self, tenant: str) -> None:
        """See to it that a tenant's consumed groups are cleaned."""
        task = self._tasks.get(tenant)
        if task is None or task.done():
            self._tasks[tenant] = asyncio.ensure_future(self._run(tenant))

    async def settle(self, tenant: str) -> None:
        """Wait until the tenant's present cleanup is done."""
        if (task := self._tasks.get(tenant)) is not None:
            await asyncio.shield(task)

    async def stop(self) -> None:
        """End all tasks; the duty stays."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, tenant: str) -> None:
        pause_s = _RETRY_FIRST_S
        while True:
            try:
                if not await self._step(tenant):
                    return
                pause_s = _RETRY_FIRST_S
            except (CallforestError, Refusal) as error:
                if isinstance(error, Refusal) and error.retry_after_ms is None:
                    # The row log is damaged or closed: the next commit or start tries again.
                    _LOG.error("cleanup of consumed groups stopped: %s", error)
                    return
                _LOG.warning("cleanup of consumed groups waits %d s: %s", pause_s, error)
                await asyncio.sleep(pause_s)  # a duty has no end; its pauses grow to a minute
                pause_s = min(2 * pause_s, _RETRY_LAST_S)

    async def _step(self, tenant: str) -> bool:
        """Clean behind the next consumed position; say whether there was one."""
        state = self._row_log.state(tenant)
        if state.cleaned_cursor >= state.committed_cursor:
            return False
        cursor = state.cleaned_cursor + 1
        failpoint("finalizer.before_clean")
        await self._clean(tenant, cursor)
        failpoint("finalizer.after_clean")
        await self._row_log.cleaned(tenant, cursor)
        failpoint("finalizer.after_cleaned")
        return True

    async def _clean(self, tenant: str, cursor: int) -> None:
        logged = self._row_log.at(tenant, cursor)
        if logged is None:
            return
        staging = self._staging.for_tenant(tenant)
        for rollout_id in logged.rollout_ids:
            finalized = self._row_log.rollout(tenant, rollout_id)
            if finalized is None:
                continue
            receipt = finalized.receipt
            # Restored calls are staged under earlier attempts, which go whole.
            keys = [call.call_id for call in receipt.calls if not call.source_capture_key]
            if keys:
                await staging.delete(receipt.capture_key, keys)
                failpoint("finalizer.after_delete")
            for capture_key in AttemptName(rollout_id, finalized.attempt_number).earlier:
                await staging.drop_partition(capture_key)
