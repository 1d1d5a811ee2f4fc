"""Writes to Staging: each goes on to its end, whoever stops waiting for it."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TypeAlias

from callforest.capture.v1 import item_pb2, staged_call_pb2
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest_client.errors import RefusedError
from callforest_client.staging import StagingClient
from callforest_mesh.worker.staging_room import StagingRoom

_LOG = logging.getLogger("callforest")
_BOUND_MIN_S = 0.001
_Write: TypeAlias = asyncio.Task[pb.StagedReceipt]


class Stagings:
    """Stages calls.

    Args:
        staging: keeps them.
        room: is told what became of them.
        timeout_s: how long one may take at most.
    """

    def __init__(self, staging: StagingClient, room: StagingRoom, timeout_s: float) -> None:
        self._staging = staging
        self._room = room
        self._timeout_s = timeout_s
        self._running: set[_Write] = set()

    async def stage(
        self, context: item_pb2.ItemContext, call: staged_call_pb2.StagedCall, until: float
    ) -> pb.StagedReceipt:
        """Stage in a task of its own: who stops waiting does not undo a write that had begun.

        Args:
            context: of the item that the call came with.
            call: the call.
            until: when the answer must be there, on the loop's clock.

        Raises:
            CallforestError: it was refused, or its time is up; then it may have been staged.
        """
        loop = asyncio.get_running_loop()
        bound_s = max(_BOUND_MIN_S, min(self._timeout_s, until - loop.time()))
        staging = self._staging.for_tenant(context.tenant)
        write = loop.create_task(
            staging.stage(call, timeout_s=bound_s, traceparent=context.traceparent)
        )
        self._running.add(write)
        ended: asyncio.Future[None] = loop.create_future()
        write.add_done_callback(functools.partial(self._done, ended))
        await ended  # as asyncio.shield does, with less on the way
        try:
            receipt = write.result()
        except RefusedError as error:
            self._room.note(error, call.ByteSize())
            raise
        if self._room.is_full:  # the size serializes the call, so it is seldom asked
            self._room.staged(call.ByteSize())
        return receipt

    async def settle(self, timeout_s: float) -> None:
        """Wait until what is being staged is done, for `timeout_s` at most."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def _done(self, ended: asyncio.Future[None], write: _Write) -> None:
        self._running.discard(write)
        if not ended.done():
            ended.set_result(None)
        if not write.cancelled() and (error := write.exception()) is not None:
            _LOG.info("staging ended with %s", error)
