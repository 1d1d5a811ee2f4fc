"""One run of the engine's process: start it, talk to it, end it with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc.aio

from callforest.worker.v1 import engine_service_pb2 as pb
from callforest.worker.v1 import engine_service_pb2_grpc as pb_grpc
from callforest_client.errors import error_of_rpc
from callforest_mesh.worker.engine import EngineDescription, EngineUnavailableError
from callforest_mesh.worker.vllm.engine_messages import describe_from_message
from callforest_mesh.worker.vllm.limits import MESSAGE_OPTIONS, VllmLimits
from callforest_mesh.worker.vllm.options import VllmOptions

_Answer = TypeVar("_Answer")

_CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    # The socket appears when the engine is up; look for it often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_LOG = "log"
_LOG_TAIL_BYTES = 2000


class ChildProcess:
    """The process of one engine, leader of its own process group.

    Attributes:
        stub: calls its `EngineService`.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: grpc.aio.Channel,
        scratch: Path,
        limits: VllmLimits,
    ) -> None:
        self._process = process
        self._channel = channel
        self._scratch = scratch
        self._limits = limits
        self.stub = pb_grpc.EngineServiceStub(channel)

    @classmethod
    async def spawn(
        cls, command: Sequence[str], options: VllmOptions, limits: VllmLimits
    ) -> ChildProcess:
        """Start `command`, told its socket by `--socket PATH`, in a directory of its own.

        Raises:
            EngineUnavailableError: the command cannot be run.
        """
        # Short: the path of a socket in it has at most 107 bytes.
        scratch = Path(tempfile.mkdtemp(prefix="callforest-"))
        socket = scratch / "engine.sock"
        try:
            with (scratch / _LOG).open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--socket",
                    str(socket),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | options.environment(scratch),
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(scratch)
            raise EngineUnavailableError(f"the engine cannot be run: {error}") from error
        channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
        return cls(process, channel, scratch, limits)

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    async def wait_ready(self) -> EngineDescription:
        """Wait until the engine can generate.

        Raises:
            EngineUnavailableError: the process ended, or did not get ready in time.
        """
        ready = asyncio.ensure_future(
            self.stub.DescribeEngine(
                pb.DescribeEngineRequest(), timeout=self._limits.start_s, wait_for_ready=True
            )
        )
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise EngineUnavailableError(
                    f"the engine ended with status {self._process.returncode}: {self.log_tail()}"
                )
            return describe_from_message(ready.result())
        except grpc.aio.AioRpcError as error:
            raise EngineUnavailableError(f"the engine did not start: {error.details()}") from error
        finally:
            ended.cancel()
            ready.cancel()

    async def answer_of(self, call: Awaitable[_Answer]) -> _Answer:
        """Await a call of `stub`.

        Raises:
            CallforestError: the engine answered with an error, or not in time.
            EngineUnavailableError: the process was ended meanwhile.
        """
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_of_rpc(error) from error
        except asyncio.CancelledError:
            # A closing channel cancels its calls, which is no cancellation of their callers.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineUnavailableError("the engine ended before it answered") from None

    async def wait_ended(self) -> int:
        """Wait until the process has ended; return its exit status."""
        return await self._process.wait()

    def log_tail(self) -> str:
        """Return the end of what the process wrote."""
        return (self._scratch / _LOG).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    async def end(self, *, politely: bool) -> None:
        """End the process and all it started, and remove its directory. Idempotent.

        Args:
            politely: give it `stop_s` to end by itself first.
        """
        try:
            await self._channel.close()
            if self._process.stdin is not None:
                self._process.stdin.close()
            if politely:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), self._limits.stop_s)
        finally:
            # The engine's own children are in the group, and may have outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            shutil.rmtree(self._scratch, ignore_errors=True)
