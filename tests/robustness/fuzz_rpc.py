"""Every RPC of the schemas, fed with broken messages as raw bytes, and what may come back."""

from __future__ import annotations

import asyncio
import importlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

import callforest
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import DOMAIN, STATUS_CODES, reason_name
from callforest_client.frames import FRAME_FIELDS, frames_of
from tests.robustness.fuzz_seeds import Seeds
from tests.robustness.mutation import MessageMutation

PRIVATE: Final = {
    "callforest.worker.v1.EngineService": "engine",
    "callforest.trainer.v1.LearnerService": "learner",
}
"""Services that only the process that started them can reach."""
ANSWER_S: Final = 30.0
"""By then a server has ended a call whose every wait is bounded, or it hangs."""
QUIET_S: Final = 0.05
"""A wait of the caller's choice is cancelled once it was silent for so long."""
_WAITS: Final = ("Await", "Subscribe", "Watch")
_SERVED: Final = frozenset({"OK", "ITEM_OK", "CANCELLED_BY_CALLER", "200"})
_ENDS: Final = ("Close", "Seal", "Drop", "Delete", "Forget", "Restore")
_BY_NUMBER: Final = {code.value[0]: code for code in grpc.StatusCode}
_REASONS: Final = {reason_name(number): number for number in er.ErrorReason.values()}
_EXCEPTION_TEXT: Final = re.compile(
    r"Traceback|File \"|\b[A-Za-z]+(Error|Exception)\b(?!_)|has no attribute|object is not|"
    r"NoneType|<class |object at 0x|unexpected keyword|KeyError|\bpb2\b|site-packages|"
    r"codec can't|\bsys\.|bytearray\(|(?<![\w.~/-])b'|values to unpack"
)
_OUT_OF_TIME: Final = re.compile(r"in time\b")
"""Seeds leave some items a millisecond: that a peer did not answer within it is the truth."""
_WRITE_RACE: Final = "Internal error from Core"
"""What grpc.aio says of a write into a stream that the server has just ended, as its client."""
_LIBRARY_TOO_LARGE: Final = re.compile(r"larger than max|message length", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC.

    Attributes:
        descriptor: as the schema has it.
    """

    descriptor: MethodDescriptor

    @property
    def path(self) -> str:
        """What a request names it by."""
        return f"/{self.service}/{self.descriptor.name}"

    @property
    def service(self) -> str:
        """The full name of its service."""
        return self.descriptor.containing_service.full_name

    @property
    def server(self) -> str:
        """The short name of what serves it."""
        return PRIVATE.get(self.service, self.service.split(".")[1])

    @property
    def waits(self) -> bool:
        """Whether it lasts as long as its caller wants."""
        return self.descriptor.name.startswith(_WAITS)

    @property
    def item(self) -> Descriptor | None:
        """The type of its items, when it is an item stream."""
        held = self.descriptor.input_type.fields_by_name.get("items")
        if held is None or "context" not in held.message_type.fields_by_name:
            return None
        return held.message_type


def methods() -> list[Method]:
    """Find every RPC of every schema of the project."""
    found: dict[str, Method] = {}
    root = Path(next(iter(callforest.__path__)))
    for file in root.rglob("*_pb2.py"):
        name = ".".join(("callforest", *file.relative_to(root).with_suffix("").parts))
        for service in importlib.import_module(name).DESCRIPTOR.services_by_name.values():
            for one in service.methods:
                found[one.full_name] = Method(one)
    return [found[name] for name in sorted(found)]


@dataclass
class Tally:
    """What came back.

    Attributes:
        messages: how many were sent.
        answers: how often each code or reason came.
        faults: what may not come back, with what had been sent.
        served: the methods and routes that did what they were asked at least once: there, messages
            reach more than a parser.
    """

    messages: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    served: set[str] = field(default_factory=set)

    def count(self, where: str, answer: str, fault: str | None, sent: bytes = b"") -> None:
        """Take an answer."""
        self.answers[answer] += 1
        if answer in _SERVED:
            self.served.add(where)
        if fault is not None:
            self.faults.append(f"{where}: {fault}; sent {sent[:400].hex()}")


def fault_of_text(text: str) -> str | None:
    """Say what of an answer's text looks like an exception's."""
    found = _EXCEPTION_TEXT.search(text)
    return None if found is None else f"exception text {found[0]!r} in {text[:300]!r}"


def fault_of_status(status: status_pb2.Status) -> tuple[str, str | None]:
    """Give the reason of an error, and what is wrong with how it was said."""
    code = _BY_NUMBER.get(status.code)
    infos = []
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            infos.append(info)
    if not infos:
        named = code.name if code else str(status.code)
        return named, f"an error without ErrorInfo: {named} {status.message!r}"
    info = infos[0]
    reason = _REASONS.get(info.reason)
    if info.domain != DOMAIN or reason is None:
        return info.reason, f"an unknown reason {info.domain} {info.reason}"
    if STATUS_CODES.get(reason) is not code:
        return info.reason, f"{info.reason} came as {code}"
    if reason in (er.ERROR_REASON_INTERNAL, er.ERROR_REASON_STORE_CORRUPT):
        return info.reason, f"a fault of the service: {status.message}"
    if code is grpc.StatusCode.UNAVAILABLE and not _OUT_OF_TIME.search(status.message):
        return info.reason, f"bad input looks like an outage: {status.message}"
    # As it is: quoted, a caller's own "b" would look like bytes that were printed.
    facts = " ".join(f"{key}={value}" for key, value in info.metadata.items())
    return info.reason, fault_of_text(f"{status.message} {facts}")


STRANGE_PATHS: Final = (
    *("/", "/a", "//", "/a/b/c", "/a/", "//a", "/callforest.ledger.v1.LedgerService"),
    *("/callforest.ledger.v1.LedgerService/", "/callforest.ledger.v1.LedgerService/HasRows/x"),
)
"""Paths of no method."""


async def fault_of_path(channel: grpc.aio.Channel, path: str) -> str | None:
    """Say what is wrong with the answer to a path of no method."""
    method = channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
    try:
        await method(b"", timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return fault_of_text(error.details() or "")
        return f"{path} is {error.code().name}: {error.details()}"
    return f"{path} is answered"


class RpcFuzz:
    """Sends broken messages to the services.

    Args:
        channels: one to each server, by its short name.
        chance: decides.
        seeds: makes valid messages.
        doomed: makes those that end or delete what they name.
        tally: where answers are counted.
    """

    def __init__(
        self,
        channels: dict[str, grpc.aio.Channel],
        chance: random.Random,
        seeds: Seeds,
        doomed: Seeds,
        tally: Tally,
    ) -> None:
        self._channels = channels
        self._chance = chance
        self._seeds = seeds
        self._doomed = doomed
        self._mutation = MessageMutation(chance, seeds)
        self._tally = tally

    def messages(self, method: Method) -> list[bytes]:
        """Give what one call sends: one message, or a few of a stream."""
        if not method.descriptor.client_streaming:
            seeds = self._doomed if method.descriptor.name.startswith(_ENDS) else self._seeds
            return [self._mutated(seeds.message(method.descriptor.input_type))]
        if method.item is not None:
            return self._item_messages(method, method.item)
        count = self._chance.randint(1, 6)
        made = [self._seeds.message(method.descriptor.input_type) for _ in range(count)]
        oneof = method.descriptor.input_type.oneofs[0].fields
        if self._chance.random() < 0.8:  # as it should begin
            first = made[0]
            first.Clear()
            self._seeds.fill(first, oneof[0])
        last = self._mutated(made[-1])
        return [*(one.SerializeToString() for one in made[:-1]), last]

    async def send(self, method: Method, messages: Sequence[bytes]) -> None:
        """Make one call; take what comes back."""
        self._tally.messages += len(messages)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._call(method, messages)
        except TimeoutError:
            fault = f"no end within {ANSWER_S} s"
            self._tally.count(method.path, "HANGS", fault, messages[-1])

    async def _call(self, method: Method, messages: Sequence[bytes]) -> None:
        call = self._open(method, messages)
        ended = "OK"
        try:
            if method.descriptor.server_streaming:
                await self._read_stream(method, call, messages)
            elif method.waits:
                await asyncio.wait({asyncio.ensure_future(_answer_of(call))}, timeout=QUIET_S)
                if not call.done():
                    call.cancel()
                await call
            else:
                await call
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            ended = "CANCELLED_BY_CALLER"
        except grpc.aio.AioRpcError as error:
            self._take_error(method, error, messages)
            return
        self._tally.count(
            method.path, "STREAM_OK" if method.item and ended == "OK" else ended, None
        )

    def _open(self, method: Method, messages: Sequence[bytes]):
        channel = self._channels[method.server]
        if not method.descriptor.client_streaming:
            kind = (
                channel.unary_stream if method.descriptor.server_streaming else channel.unary_unary
            )
            return kind(method.path)(messages[0])

        async def requests():
            for message in messages:
                yield message

        kind = channel.stream_stream if method.descriptor.server_streaming else channel.stream_unary
        return kind(method.path)(requests())

    async def _read_stream(self, method: Method, call, messages: Sequence[bytes]) -> None:
        response = GetMessageClass(method.descriptor.output_type)
        while True:
            reading = asyncio.ensure_future(call.read())
            if method.waits:
                await asyncio.wait({reading}, timeout=QUIET_S)
                if not reading.done():
                    call.cancel()
            answer = await reading
            if answer is grpc.aio.EOF:
                break
            if method.item is not None:
                for result in response.FromString(answer).results:
                    self._take_result(method, result, messages)
        if call.cancelled():
            raise asyncio.CancelledError
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            trailing = await call.trailing_metadata()
            raise grpc.aio.AioRpcError(
                code, await call.initial_metadata(), trailing, await call.details()
            )

    def _take_result(self, method: Method, result: Message, messages: Sequence[bytes]) -> None:
        outcome = result.WhichOneof("outcome")
        if outcome is None:
            self._tally.count(method.path, "NOTHING", "a result without an outcome", messages[-1])
        elif outcome != "error":
            self._tally.count(method.path, "ITEM_OK", None)
        elif result.error.code == grpc.StatusCode.CANCELLED.value[0]:
            self._tally.count(method.path, "ITEM_CANCELLED", None)  # as a message of ours asked
        else:
            reason, fault = fault_of_status(result.error)
            self._tally.count(method.path, reason, fault, b"|".join(messages))

    def _take_error(
        self, method: Method, error: grpc.aio.AioRpcError, messages: Sequence[bytes]
    ) -> None:
        status = rpc_status.from_call(error)
        if status is not None:
            reason, fault = fault_of_status(status)
        elif error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _LIBRARY_TOO_LARGE.search(
            error.details() or ""
        ):
            reason, fault = "GRPC_MESSAGE_TOO_LARGE", None  # gRPC itself refuses to read it
        elif method.descriptor.client_streaming and error.details() == _WRITE_RACE:
            reason, fault = "GRPC_WRITE_RACE", None
        else:
            reason = error.code().name
            fault = f"an untyped error: {reason} {error.details()!r}"
        self._tally.count(method.path, reason, fault, b"|".join(messages))

    def _mutated(self, message: Message) -> bytes:
        """Break a message in its fields, in its bytes, in both, or now and then not at all."""
        how = self._chance.random()
        if how < 0.65:
            self._mutation.fields(message)
        content = message.SerializeToString()
        return self._mutation.serialized(content) if 0.6 < how < 0.9 else content

    def _item_messages(self, method: Method, item: Descriptor) -> list[bytes]:
        """Give messages of items whose sequences rise, until something is broken."""
        request = GetMessageClass(method.descriptor.input_type)
        made = [request() for _ in range(self._chance.randint(1, 4))]
        sequence = 0
        for message in made:
            for _ in range(self._chance.randint(1, 3)):
                sequence += 1
                for one in self._item(item, sequence):
                    message.items.append(one)
        for message in made:
            if self._chance.random() < 0.7:
                self._mutation.fields(message)
        serialized = [message.SerializeToString() for message in made]
        if self._chance.random() < 0.3:
            serialized[-1] = self._mutation.serialized(serialized[-1])
        return serialized

    def _item(self, kind: Descriptor, sequence: int) -> Iterator[Message]:
        """Give the items of one sequence: a payload, a cancel, or frames in some order."""
        payload = kind.oneofs_by_name["body"].fields[0]
        make = GetMessageClass(kind)
        whole = make()
        self._seeds.fill(whole, kind.fields_by_name["context"])
        whole.context.sequence = sequence
        arm = self._chance.random()
        if arm < 0.1:
            whole.cancel.SetInParent()
            yield whole
        elif arm < 0.75:
            getattr(whole, payload.name).CopyFrom(self._seeds.message(payload.message_type))
            yield whole
            if self._chance.random() < 0.1:
                yield whole  # its sequence again
            if self._chance.random() < 0.1:
                again = make(context=whole.context)
                again.cancel.SetInParent()
                yield again
        else:
            content = self._seeds.message(payload.message_type).SerializeToString() or b"\0"
            if self._chance.random() < 0.3:
                content = self._mutation.serialized(content) or b"\0"
            for frame in self._disordered(list(frames_of(content))):
                yield make(context=whole.context, **{FRAME_FIELDS[type(frame)]: frame})

    def _disordered(self, frames: list[Message]) -> list[Message]:
        match self._chance.randrange(8):
            case 0:
                self._chance.shuffle(frames)
            case 1:
                frames.pop(self._chance.randrange(len(frames)))
            case 2:
                frames.insert(1, frames[self._chance.randrange(len(frames))])
            case 3:
                frames[0].size_bytes = self._chance.choice((0, 1, 1 << 20, 1 << 26, 1 << 40))
            case 4:
                frames[0].sha256 = self._chance.randbytes(32)
        return frames


async def _answer_of(call) -> None:
    await asyncio.gather(call, return_exceptions=True)
