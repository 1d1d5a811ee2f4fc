"""Which weights serve: updates in order, each checked, the last one remembered."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.failpoint import failpoint
from callforest_mesh.worker.calls import engine_away
from callforest_mesh.worker.core import shortened
from callforest_mesh.worker.engine import Engine, EngineRefusalError, EngineUnavailableError
from callforest_mesh.worker.weight_record import (
    WeightRecord,
    digest_file,
    read_weight_record,
    write_weight_record,
)

_LOG = logging.getLogger("callforest")


class Weights:
    """Loads weights into the engine, one update at a time.

    Args:
        engine: what loads them.
        directory: where the last update is remembered.
        engine_name: names the engine in errors.
    """

    def __init__(self, engine: Engine, directory: Path, engine_name: str) -> None:
        self._engine = engine
        self._directory = directory
        self._engine_name = engine_name
        self._lock = asyncio.Lock()
        self._last: WeightRecord | None = None
        self._updates: set[asyncio.Task[int]] = set()

    async def restore(self) -> None:
        """Load the last update again, if its file and the engine's configuration are the same.

        Otherwise the engine serves what it was started with, and the log says so: the trainer
        pushes its next version in any case, and every call is stamped with what it saw.

        Raises:
            ValueError: the record is damaged.
            EngineUnavailableError: the engine could not load it.
        """
        record = await asyncio.to_thread(read_weight_record, self._directory)
        engine = self._engine.describe()
        if record is None or record.version <= engine.weight_version:
            return
        if record.configuration_digest != engine.configuration_digest:
            _LOG.warning(
                "weights %d are not loaded again: they are another model's", record.version
            )
            return
        try:
            actual = await asyncio.to_thread(digest_file, record.path)
        except OSError as error:
            _LOG.warning("weights %d are not loaded again: %s", record.version, error)
            return
        if actual != record.sha256:
            _LOG.warning("weights %d are not loaded again: their file changed", record.version)
            return
        await self._engine.update_weights(record.path, record.version)
        self._last = record

    async def update(self, record: WeightRecord) -> int:
        """Load new weights; a repeat of the last update is a no-op.

        Raises:
            Refusal: WEIGHT_VERSION_STALE, REQUEST_REFUSED (missing, changed or foreign file) or
                ENGINE_UNAVAILABLE.
        """
        # A caller that gives up must not leave loaded weights unrecorded.
        task = asyncio.ensure_future(self._update(record))
        self._updates.add(task)
        task.add_done_callback(self._update_done)
        return await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait for an update in work."""
        if self._updates:
            await asyncio.wait(self._updates, timeout=60.0)

    def _update_done(self, task: asyncio.Task[int]) -> None:
        self._updates.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("a weight update failed: %s", error)

    async def _update(self, record: WeightRecord) -> int:
        async with self._lock:
            try:
                current = self._engine.describe().weight_version
            except EngineUnavailableError as error:
                raise engine_away(self._engine_name) from error
            if record.version == current and self._is_last(record):
                return current
            if record.version <= current:
                raise _stale(record.version, current)
            await self._check_file(record)
            failpoint("worker.before_load")
            await self._load(record, current)
            failpoint("worker.after_load")
            loaded_by = self._engine.describe().configuration_digest
            record = replace(record, configuration_digest=loaded_by)
            await asyncio.to_thread(write_weight_record, self._directory, record)
            failpoint("worker.after_record")
            self._last = record
            return record.version

    def _is_last(self, record: WeightRecord) -> bool:
        last = self._last
        return last is not None and (last.version, last.sha256) == (record.version, record.sha256)

    async def _check_file(self, record: WeightRecord) -> None:
        try:
            actual = await asyncio.to_thread(digest_file, record.path)
        except OSError as error:
            raise Refusal(
                er.ERROR_REASON_REQUEST_REFUSED,
                "the worker cannot read the weight file",
                parameter="path",
            ) from error
        if actual != record.sha256:
            raise Refusal(
                er.ERROR_REASON_REQUEST_REFUSED,
                "the weight file has another digest; nothing was loaded",
                parameter="sha256",
            )

    async def _load(self, record: WeightRecord, current: int) -> None:
        try:
            await self._engine.update_weights(record.path, record.version)
        except EngineRefusalError as error:
            raise Refusal(
                er.ERROR_REASON_REQUEST_REFUSED, shortened(str(error)), parameter=error.parameter
            ) from error
        except EngineUnavailableError as error:
            _LOG.warning("weights %d could not be loaded: %s", record.version, error)
            raise engine_away(self._engine_name) from error
        except ValueError as error:
            raise _stale(record.version, current) from error


def _stale(version: int, current: int) -> Refusal:
    return Refusal(
        er.ERROR_REASON_WEIGHT_VERSION_STALE,
        f"weight version {version} does not exceed {current}, or has another digest",
        version=version,
        current_version=current,
    )
