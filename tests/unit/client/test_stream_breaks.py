"""Item streams that break: what is sent again, and what is told to the caller."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status

from callforest.capture.v1 import item_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest_client.errors import RefusedError, UnavailableError, status_of
from callforest_client.item_stream import ItemStream
from callforest_client.streams import STAGE
from callforest_core.refusal import Refusal

WAIT_S = 20.0
CALL = staged_call_pb2.StagedCall(call_id="c")


class Answering:
    """A stream that answers every item."""

    def __init__(self) -> None:
        self._responses: asyncio.Queue[pb.StageResponse] = asyncio.Queue(16)

    async def write(self, request: pb.StageRequest) -> None:
        results = [
            pb.StageResult(sequence=item.context.sequence, receipt=pb.StagedReceipt())
            for item in request.items
        ]
        await self._responses.put(pb.StageResponse(results=results))

    async def __aiter__(self) -> AsyncIterator[pb.StageResponse]:
        while True:
            yield await self._responses.get()

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> bool:
        return True


class Broken(Answering):
    """A stream that its server has ended, as one side of the client sees it first."""

    def __init__(self, error: grpc.aio.AioRpcError, side: str) -> None:
        super().__init__()
        self._error = error
        self._side = side

    async def write(self, _request: pb.StageRequest) -> None:
        if self._side == "write":
            raise self._error

    async def __aiter__(self) -> AsyncIterator[pb.StageResponse]:
        if self._side == "write":
            await asyncio.Event().wait()
        raise self._error
        yield  # makes it a generator


def untyped(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "from gRPC")


def typed(reason: er.ErrorReason.ValueType) -> grpc.aio.AioRpcError:
    status = rpc_status.to_status(status_of(Refusal(reason, "from the service")))
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details)


async def send_over(*calls: Answering) -> pb.StagedReceipt:
    left = list(calls)
    stream = ItemStream(STAGE, lambda **_: left.pop(0))
    try:
        return await stream.send(CALL, tenant="t", timeout_s=WAIT_S)
    finally:
        await stream.close()


@pytest.mark.requirement("API-6")
@pytest.mark.parametrize("side", ["write", "read"])
@pytest.mark.parametrize(
    "error",
    [
        untyped(grpc.StatusCode.UNAVAILABLE),
        untyped(grpc.StatusCode.CANCELLED),
        untyped(grpc.StatusCode.INTERNAL),
        untyped(grpc.StatusCode.UNKNOWN),
        typed(er.ERROR_REASON_DRAINING),
    ],
    ids=lambda error: error.code().name + (error.details() or ""),
)
async def test_a_stream_that_the_server_ended_is_opened_again(
    error: grpc.aio.AioRpcError, side: str
) -> None:
    assert await send_over(Broken(error, side), Answering()) == pb.StagedReceipt()


@pytest.mark.parametrize("side", ["write", "read"])
@pytest.mark.parametrize(
    "error",
    [
        untyped(grpc.StatusCode.UNIMPLEMENTED),
        untyped(grpc.StatusCode.PERMISSION_DENIED),
        typed(er.ERROR_REASON_INTERNAL),
        typed(er.ERROR_REASON_INVALID_MESSAGE),
    ],
    ids=lambda error: error.code().name + (error.details() or ""),
)
async def test_a_refusal_of_the_whole_stream_reaches_its_callers(
    error: grpc.aio.AioRpcError, side: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        await send_over(Broken(error, side))
    assert caught.value.code is error.code()


class Kept(Answering):
    """A stream that notes what it is told of its items; it may end at the first of them."""

    def __init__(self, error: grpc.aio.AioRpcError | None = None) -> None:
        super().__init__()
        self._error = error
        self.contexts: list[item_pb2.ItemContext] = []

    async def write(self, request: pb.StageRequest) -> None:
        self.contexts += [item.context for item in request.items]
        if self._error is not None:
            raise self._error
        await super().write(request)


async def test_an_item_that_is_sent_again_says_so() -> None:
    broken = [Kept(untyped(grpc.StatusCode.UNAVAILABLE)) for _ in range(2)]
    whole = Kept()
    await send_over(*broken, whole)
    told = [context.is_repeat for stream in (*broken, whole) for context in stream.contexts]
    assert told == [False, True, True]


class Full(Answering):
    """A stream whose service is at its bound."""

    async def write(self, request: pb.StageRequest) -> None:
        status = status_of(Refusal(er.ERROR_REASON_OVERLOADED, "full", retry_after_ms=1))
        results = [
            pb.StageResult(sequence=item.context.sequence, error=status) for item in request.items
        ]
        await self._responses.put(pb.StageResponse(results=results))


@pytest.mark.parametrize("breaks", [0, 1])
async def test_a_refusal_of_what_was_sent_again_says_so(breaks: int) -> None:
    """It says nothing of the first, which may have been done."""
    broken = [Kept(untyped(grpc.StatusCode.UNAVAILABLE)) for _ in range(breaks)]
    with pytest.raises(RefusedError) as caught:
        await send_over(*broken, Full())
    assert caught.value.reason == er.ERROR_REASON_OVERLOADED
    assert caught.value.of_repeat is bool(breaks)


class Slow(Answering):
    """A stream whose first message takes as long as the test wants; it notes what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.open = asyncio.Event()
        self.sequences: list[int] = []

    async def write(self, request: pb.StageRequest) -> None:
        self.begun.set()
        await self.open.wait()
        self.sequences += [item.context.sequence for item in request.items]
        await super().write(request)


@pytest.mark.requirement("API-6")
async def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    """Its caller was told that there is no answer, and may have made another call since."""
    slow = Slow()
    stream = ItemStream(STAGE, lambda **_: slow)
    try:
        first = asyncio.ensure_future(stream.send(CALL, tenant="t", timeout_s=WAIT_S))
        await slow.begun.wait()
        with pytest.raises(UnavailableError):
            await stream.send(CALL, tenant="t", timeout_s=0.01)
        slow.open.set()
        await first
        await stream.send(CALL, tenant="t", timeout_s=WAIT_S)
        assert slow.sequences == [1, 3]
    finally:
        await stream.close()


async def test_an_old_stream_gives_way_to_a_new_one_and_loses_nothing() -> None:
    opened: list[Answering] = []

    def connect(**_: object) -> Answering:
        opened.append(Answering())
        return opened[-1]

    stream = ItemStream(STAGE, connect, renew_s=0.0)
    try:
        for _ in range(3):
            await stream.send(CALL, tenant="t", timeout_s=WAIT_S)
    finally:
        await stream.close()
    assert len(opened) > 1


async def test_an_old_stream_answers_what_it_took_before_another_is_opened() -> None:
    first_stream, second_stream = Slow(), Slow()
    left = [first_stream, second_stream]
    # The first item is written at once; the stream is old when the second one comes.
    stream = ItemStream(STAGE, lambda **_: left.pop(0), renew_s=0.0, linger_s=0)
    second_stream.open.set()
    try:
        first = asyncio.ensure_future(stream.send(CALL, tenant="t", timeout_s=WAIT_S))
        await first_stream.begun.wait()
        second = asyncio.ensure_future(stream.send(CALL, tenant="t", timeout_s=WAIT_S))
        first_stream.open.set()
        assert await first == pb.StagedReceipt()
        assert await second == pb.StagedReceipt()
    finally:
        await stream.close()
    assert (first_stream.sequences, second_stream.sequences) == ([1], [2])
