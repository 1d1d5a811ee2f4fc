"""One call inside the process: two bounded pipes of bytes between a caller and a handler."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
import grpc.aio

from callforest_client.channel import MESSAGE_BYTES_MAX

MetadataLike: TypeAlias = grpc.aio.Metadata | Sequence[tuple[str, str | bytes]]

_METADATA_ENTRY_BYTES = 32
"""What HTTP/2 counts for an entry beside its key and value."""


@dataclass(frozen=True, slots=True)
class LocalLimits:
    """The bounds of calls in the process; the defaults are those of a socket.

    Attributes:
        window_bytes: most bytes under way in one direction of a call; a single larger message
            passes alone.
        window_messages: most messages under way in one direction of a call.
        message_bytes: largest message.
        metadata_bytes: most bytes of keys and values a call or its answer may carry.
    """

    window_bytes: int = 4 << 20
    window_messages: int = 64
    message_bytes: int = MESSAGE_BYTES_MAX
    metadata_bytes: int = 16 << 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended.

    Attributes:
        code: the status code.
        details: the status message.
        trailing: the trailing metadata; a rich status travels there.
        withdrawn: the caller itself cancelled the call.
    """

    code: grpc.StatusCode
    details: str = ""
    trailing: grpc.aio.Metadata = field(default_factory=grpc.aio.Metadata)
    withdrawn: bool = False

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.code is grpc.StatusCode.OK


OK = Outcome(grpc.StatusCode.OK)
WITHDRAWN = Outcome(grpc.StatusCode.CANCELLED, "cancelled by its caller", withdrawn=True)


class PipeEndedError(Exception):
    """The other side takes no more messages."""


class Pipe:
    """Messages under way in one direction; the sender waits while the window is full."""

    def __init__(self, limits: LocalLimits) -> None:
        self._limits = limits
        self._messages: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._changed = asyncio.Event()

    async def put(self, message: bytes) -> None:
        """Send a message once the window has room.

        Raises:
            PipeEndedError: no message is taken any more.
        """
        while not self._ended and self._full(len(message)):
            self._changed.clear()
            await self._changed.wait()
        self.offer(message)

    def offer(self, message: bytes) -> None:
        """Send a message without regard to the window.

        Raises:
            PipeEndedError: no message is taken any more.
        """
        if self._ended:
            raise PipeEndedError
        self._messages.append(message)
        self._size += len(message)
        self._changed.set()

    async def get(self) -> bytes | None:
        """Receive the next message; None at the end."""
        while not self._messages:
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        self._size -= len(message)
        self._changed.set()
        return message

    def end(self) -> None:
        """Take no more messages; what is under way still arrives."""
        self._ended = True
        self._changed.set()

    def abandon(self) -> None:
        """Take no more messages, and drop what is under way."""
        self._messages.clear()
        self._size = 0
        self.end()

    def _full(self, coming: int) -> bool:
        if not self._messages:
            return False
        return (
            self._size + coming > self._limits.window_bytes
            or len(self._messages) >= self._limits.window_messages
        )


class Exchange:
    """One call as both its sides see it. Its outcome is set once.

    Args:
        method: the full name of the RPC, with slashes.
        metadata: what the caller sent along.
        timeout_s: the caller's deadline, from now; None has none.
        limits: the bounds of the call.
    """

    def __init__(
        self,
        method: str,
        metadata: grpc.aio.Metadata,
        timeout_s: float | None,
        limits: LocalLimits,
    ) -> None:
        self.method = method
        self.metadata = metadata
        self.limits = limits
        self.requests = Pipe(limits)
        self.responses = Pipe(limits)
        self.initial = grpc.aio.Metadata()
        self.outcome: Outcome | None = None
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()
        self._handler: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._deadline = None if timeout_s is None else self._loop.time() + timeout_s
        self._timer = (
            None if timeout_s is None else self._loop.call_later(max(0.0, timeout_s), self._expire)
        )

    def attach(self, handler: asyncio.Task[None]) -> None:
        """Name the task that serves the call: it is cancelled when the caller gives up."""
        self._handler = handler

    def time_remaining(self) -> float | None:
        """Give the seconds until the deadline, at least 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def begin_answer(self, initial: grpc.aio.Metadata | None = None) -> None:
        """Send the initial metadata; the first response message does so too."""
        if not self._begun.is_set():
            self.initial = initial or self.initial
            self._begun.set()

    async def begun(self) -> None:
        """Wait until the initial metadata is there."""
        await self._begun.wait()

    async def ended(self) -> Outcome:
        """Wait for the outcome."""
        await self._ended.wait()
        assert self.outcome is not None
        return self.outcome

    def complete(self, outcome: Outcome) -> None:
        """End the call from the handler's side: responses under way still arrive."""
        if oversize(outcome.trailing, self.limits):
            outcome = Outcome(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"trailing metadata is over its limit of {self.limits.metadata_bytes} bytes",
            )
        self._settle(outcome)

    def give_up(self, outcome: Outcome) -> bool:
        """End the call from the caller's side: nothing more arrives, the handler is cancelled."""
        if not self._settle(outcome):
            return False
        self.responses.abandon()
        if self._handler is not None and not self._handler.done() and not self._loop.is_closed():
            self._handler.cancel()
        return True

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back at the end, or soon if the call has ended."""
        if self.outcome is None:
            self._callbacks.append(callback)
        else:
            self._loop.call_soon(callback)

    def _expire(self) -> None:
        self.give_up(Outcome(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _settle(self, outcome: Outcome) -> bool:
        if self.outcome is not None:
            return False
        self.outcome = outcome
        if self._timer is not None:
            self._timer.cancel()
        self.requests.abandon()
        self.responses.end()
        self._begun.set()
        self._ended.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            if not self._loop.is_closed():
                self._loop.call_soon(callback)
        return True


def as_metadata(entries: MetadataLike | None) -> grpc.aio.Metadata:
    """Copy what a caller or handler gave into metadata of its own."""
    return grpc.aio.Metadata(*(tuple(entries) if entries else ()))


def oversize(metadata: grpc.aio.Metadata, limits: LocalLimits) -> bool:
    """Say whether metadata exceeds its limit."""
    size = sum(len(key) + len(value) + _METADATA_ENTRY_BYTES for key, value in metadata)
    return size > limits.metadata_bytes
