"""One run of a child that serves gRPC on a unix socket: start it, ask it, end it with its group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import grpc.aio

from callforest_client.channel import MESSAGE_BYTES_MAX
from callforest_client.errors import error_of_rpc

_Answer = TypeVar("_Answer")

MESSAGE_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
)
"""gRPC options of both ends. No keepalive: the process is watched, and may be busy for long."""

_CHANNEL_OPTIONS = (
    *MESSAGE_OPTIONS,
    # The socket appears when the child is up; look for it often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_LOG = "log"
_LOG_TAIL_BYTES = 2000


class ChildLostError(Exception):
    """The child cannot be run, has ended, or does not answer; the message says which, and why."""


def _no_environment(_scratch: Path) -> Mapping[str, str]:
    return {}


class ChildProcess:
    """A child's process, leader of its own process group, and the way to it.

    Its standard input is a pipe that ends with this process; see `lifeline`. What it writes is kept
    in a directory of its own, which goes when it is ended.

    Attributes:
        channel: reaches what it serves.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        channel: grpc.aio.Channel,
        scratch: Path,
    ) -> None:
        self._name = name
        self._process = process
        self._scratch = scratch
        self.channel = channel

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        *,
        name: str,
        environment: Callable[[Path], Mapping[str, str]] = _no_environment,
    ) -> ChildProcess:
        """Start `command`, told its socket by `--socket PATH`.

        Args:
            command: the program and its arguments.
            name: what errors call it, for instance "engine".
            environment: variables on top of this process's, given the child's own directory.

        Raises:
            ChildLostError: the command cannot be run.
        """
        # Short: the path of a socket in it has at most 107 bytes.
        scratch = Path(tempfile.mkdtemp(prefix="callforest-"))
        socket = scratch / "socket"
        try:
            with (scratch / _LOG).open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--socket",
                    str(socket),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | environment(scratch),
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(scratch)
            raise ChildLostError(f"the {name} cannot be run: {error}") from error
        channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_CHANNEL_OPTIONS)
        return cls(name, process, channel, scratch)

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.returncode is None

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the child listens.

        Raises:
            ChildLostError: it ended, or did not listen in time.
        """
        ready = asyncio.ensure_future(self.channel.channel_ready())
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait(
                {ready, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                status = self._process.returncode
                raise ChildLostError(
                    f"the {self._name} ended with status {status}: {self.log_tail()}"
                )
            if not ready.done():
                raise ChildLostError(
                    f"the {self._name} did not answer within {timeout_s} s: {self.log_tail()}"
                )
        finally:
            ready.cancel()
            ended.cancel()

    async def answer_of(self, call: Awaitable[_Answer]) -> _Answer:
        """Await a call over `channel`.

        Raises:
            CallforestError: the child answered with an error, or not in time.
            ChildLostError: it was ended meanwhile.
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
            raise ChildLostError(f"the {self._name} ended before it answered") from None

    async def wait_ended(self) -> int:
        """Wait until the process has ended; return its exit status."""
        return await self._process.wait()

    def log_tail(self) -> str:
        """Return the end of what the process wrote; "" once it was ended."""
        log = self._scratch / _LOG
        if not log.exists():
            return ""
        return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    async def end(self, *, grace_s: float = 0.0) -> None:
        """End the process and all it started, and remove its directory. Idempotent.

        Args:
            grace_s: how long it may take to end by itself before it is killed.
        """
        try:
            await self.channel.close()
            if self._process.stdin is not None:
                self._process.stdin.close()
            if grace_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace_s)
        finally:
            # Its own children are in the group, and may have outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            shutil.rmtree(self._scratch, ignore_errors=True)
