"""A proxy between two processes that speak gRPC, which loses, tears, replays, holds and delays.

It reads HTTP/2 frame by frame, so that it can tell a message from what the transport says to
itself, and forwards frames as they are. What can go wrong with a TCP connection is what it does:

* lost: the connection is cut where a message was to be forwarded, before a byte of it was;
* torn: the connection is cut within a message;
* replayed: what the caller sent so far is sent again over a connection of its own, so that the
  server does all of it twice; nobody gets those answers;
* held: from the next message on nothing is read in a direction, so that what is sent waits, at last
  with its sender;
* swallowed: what is sent in a direction is read and lost, and the connection is cut afterwards;
* delayed: each message waits.

A fault is counted when it hit a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, Literal

Direction = Literal["requests", "answers"]
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD: Final = 9
_DATA: Final = 0
_REPLAY_BYTES_MAX: Final = 4 << 20
_REPLAY_S: Final = 2.0


class _CutError(Exception):
    """The connection ends here."""


@dataclass(slots=True)
class Faults:
    """What befalls the messages of one direction.

    Attributes:
        lost: share of messages at which the connection is cut.
        torn: share of messages within which it is cut.
        delay_s: longest delay of a message, drawn evenly.
    """

    lost: float = 0.0
    torn: float = 0.0
    delay_s: float = 0.0


@dataclass(eq=False)
class FaultProxy:
    """Stands before one address.

    Args:
        upstream: `unix:/path` or `host:port`.
        seed: of what is drawn.

    Attributes:
        requests: what befalls what callers send.
        answers: what befalls what the server sends.
        replayed: share of cut connections whose requests are sent again.
        counts: what happened.
        address: where it listens, once started.
    """

    upstream: str
    seed: int = 0
    requests: Faults = field(default_factory=Faults)
    answers: Faults = field(default_factory=Faults)
    replayed: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    address: str = ""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._server: asyncio.Server | None = None
        self._open = {"requests": asyncio.Event(), "answers": asyncio.Event()}
        self._swallows: set[Direction] = set()
        self._reached = {"requests": asyncio.Event(), "answers": asyncio.Event()}
        self._connections: set[asyncio.Task[None]] = set()
        for gate in self._open.values():
            gate.set()

    async def start(self) -> str:
        """Listen; give the address."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self.address

    async def stop(self) -> None:
        """Cut everything and listen no more."""
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def hold(self, direction: Direction) -> None:
        """Forward nothing in a direction until it is released; what is sent waits."""
        self._reached[direction].clear()
        self._open[direction].clear()

    async def holding(self, direction: Direction) -> None:
        """Wait until a message is held, or was swallowed."""
        await self._reached[direction].wait()

    def swallow(self, direction: Direction) -> None:
        """Lose what is sent in a direction until it is released; the caller is not told."""
        self._reached[direction].clear()
        self._swallows.add(direction)

    def release(self, direction: Direction) -> None:
        """Forward again. What a swallowed part would have followed cannot go on: it is cut."""
        if direction in self._swallows:
            self._swallows.discard(direction)
            self.cut()
        self._open[direction].set()

    def cut(self) -> None:
        """Cut every connection."""
        for connection in self._connections:
            connection.cancel()

    def calm(self) -> None:
        """Let everything pass from now on."""
        self.requests, self.answers, self.replayed = Faults(), Faults(), 0.0
        for direction in self._open:
            self.release(direction)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.counts["connections"] += 1
        sent = bytearray()
        try:
            await self._connect(reader, writer, sent)
        except (asyncio.CancelledError, _CutError, OSError):
            if self._chance.random() < self.replayed and len(sent) < _REPLAY_BYTES_MAX:
                await self._replay(bytes(sent))
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytearray
    ) -> None:
        up_reader, up_writer = await self._reach()
        is_cut = False
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump("requests", reader, up_writer, sent))
                pumps.create_task(self._pump("answers", up_reader, writer, None))
        except* (_CutError, OSError):
            is_cut = True  # raised here it would be a group of itself, which nobody awaits
        finally:
            up_writer.transport.abort()
        if is_cut:
            raise _CutError

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if (path := self.upstream.removeprefix("unix:")) != self.upstream:
            return await asyncio.open_unix_connection(path)
        host, _, port = self.upstream.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pump(
        self,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sent: bytearray | None,
    ) -> None:
        if direction == "requests":
            writer.write(await _exactly(reader, len(_PREFACE)))
            if sent is not None:
                sent += _PREFACE
        async for frame in _frames(reader):
            is_message = frame[3] == _DATA and len(frame) > _HEAD
            if is_message and not self._open[direction].is_set():
                self.counts[f"{direction} held"] += 1
                self._reached[direction].set()
                await self._open[direction].wait()
            if direction in self._swallows:
                if is_message:
                    self.counts[f"{direction} swallowed"] += 1
                    self._reached[direction].set()
                continue
            if sent is not None and len(sent) < _REPLAY_BYTES_MAX:
                sent += frame
            if is_message:
                await self._harm(direction, frame, writer)
            writer.write(frame)
            await writer.drain()
        raise _CutError

    async def _harm(self, direction: Direction, frame: bytes, writer: asyncio.StreamWriter) -> None:
        """Do to a message what befalls it.

        Raises:
            _CutError: the connection ends with it.
        """
        faults = self.requests if direction == "requests" else self.answers
        self.counts[direction] += 1
        drawn = self._chance.random()
        if drawn < faults.lost:
            self.counts[f"{direction} lost"] += 1
            raise _CutError
        if drawn < faults.lost + faults.torn:
            self.counts[f"{direction} torn"] += 1
            writer.write(frame[: _HEAD + (len(frame) - _HEAD) // 2])
            await writer.drain()
            raise _CutError
        if faults.delay_s:
            self.counts[f"{direction} delayed"] += 1
            await asyncio.sleep(self._chance.uniform(0, faults.delay_s))

    async def _replay(self, sent: bytes) -> None:
        """Send a connection's requests again; read the answers for a while, for nobody."""
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await self._reach()
            try:
                self.counts["replayed"] += 1
                writer.write(sent)
                async with asyncio.timeout(_REPLAY_S):
                    while await reader.read(1 << 16):
                        self.counts["replayed answers"] += 1
            finally:
                writer.transport.abort()


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError:
        raise _CutError from None


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Give whole HTTP/2 frames until the connection ends."""
    while True:
        try:
            head = await reader.readexactly(_HEAD)
            yield head + await reader.readexactly(int.from_bytes(head[:3], "big"))
        except asyncio.IncompleteReadError:
            return
