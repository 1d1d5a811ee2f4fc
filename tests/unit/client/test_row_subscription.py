"""One stream of groups, from the client's side: whatever ends it reaches everyone who waits."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest

from callforest.capture.v1 import frame_pb2, group_batch_pb2, group_part_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.errors import UnavailableError
from callforest_client.finalizer import CREDIT_MAX, WAITING_MAX, FinalizerClient, RowSubscription
from callforest_client.frames import frames_of
from callforest_client.group_assembly import GROUP_BYTES_MAX, GroupTooLargeError

WAIT_S = 20
Response = pb.SubscribeRowsResponse


class FakeCall:
    """A stream whose server says what the test tells it to."""

    def __init__(self) -> None:
        self.written: list[pb.SubscribeRowsRequest] = []
        self.responses: asyncio.Queue[Response | None] = asyncio.Queue(64)
        self.cancelled = False
        self.on_commit: list[Response] = []

    async def write(self, request: pb.SubscribeRowsRequest) -> None:
        self.written.append(request)
        if request.HasField("commit"):
            self.say(*self.on_commit)

    def cancel(self) -> None:
        self.cancelled = True

    async def __aiter__(self) -> AsyncIterator[Response]:
        while (response := await self.responses.get()) is not None:
            yield response

    def say(self, *responses: Response | None) -> None:
        for response in responses:
            self.responses.put_nowait(response)


class FakeStub:
    def __init__(self) -> None:
        self.call = FakeCall()

    def SubscribeRows(self, timeout: float) -> FakeCall:  # noqa: N802 - gRPC's name
        assert timeout > 0
        return self.call


@pytest.fixture
async def stub() -> FakeStub:
    return FakeStub()


@pytest.fixture
async def rows(stub: FakeStub) -> AsyncIterator[RowSubscription]:
    start = pb.StartSubscription(tenant="acme", consumer="trainer")
    rows = RowSubscription(stub, start)
    yield rows
    await rows.close()


def group(cursor: int) -> Response:
    return Response(batch=group_batch_pb2.GroupBatch(cursor=cursor))


async def taken(rows: RowSubscription) -> list[int]:
    """The cursors that come before the stream ends, which it must."""
    cursors: list[int] = []
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(take_all(rows, cursors), WAIT_S)
    return cursors


async def take_all(rows: RowSubscription, cursors: list[int]) -> None:
    async for batch in rows:
        cursors += [batch.cursor]


async def test_the_start_comes_first_and_once(stub: FakeStub, rows: RowSubscription) -> None:
    await rows.credit(2 * CREDIT_MAX + 1)
    await rows.credit(1)
    assert [one.WhichOneof("action") for one in stub.call.written] == ["start"] + ["credit"] * 4
    assert stub.call.written[0].start.takes_parts
    granted = [one.credit.groups for one in stub.call.written[1:]]
    assert granted == [CREDIT_MAX, CREDIT_MAX, 1, 1]


async def test_credit_has_a_limit(rows: RowSubscription) -> None:
    await rows.credit(WAITING_MAX)
    with pytest.raises(ValueError, match="credit"):
        await rows.credit(1)


async def test_a_commit_is_confirmed_behind_groups_that_nobody_takes(
    stub: FakeStub, rows: RowSubscription
) -> None:
    await rows.credit(9)
    confirmed = Response(committed=pb.CommitCursor(cursor=1))
    stub.call.on_commit = [*(group(cursor) for cursor in range(1, 10)), confirmed]
    await asyncio.wait_for(rows.commit(1), WAIT_S)
    stub.call.say(None)
    assert await taken(rows) == list(range(1, 10))


def broken_frames() -> list[Response]:
    begin, chunk, _ = frames_of(group_batch_pb2.GroupBatch(group_id="g").SerializeToString())
    assert isinstance(chunk, frame_pb2.FrameChunk)
    return [
        Response(begin=begin),
        Response(chunk=frame_pb2.FrameChunk(content=bytes(len(chunk.content)))),
        Response(end=frame_pb2.FrameEnd()),
    ]


def garbled_group() -> list[Response]:
    begin, chunk, _ = frames_of(b"\xff\xff\xff")
    return [Response(begin=begin), Response(chunk=chunk), Response(end=frame_pb2.FrameEnd())]


def orphaned_chunk() -> list[Response]:
    return [Response(chunk=frame_pb2.FrameChunk(content=b"x"))]


def begin_of_parts(cursor: int = 2, size_bytes: int = 1) -> Response:
    return Response(
        group_begin=group_part_pb2.GroupBegin(
            cursor=cursor, group_id="g", part_count=2, size_bytes=size_bytes
        )
    )


def cut_between_parts() -> list[Response | None]:
    content = group_batch_pb2.GroupBatch(cursor=2, group_id="g")
    part = group_part_pb2.GroupPart(number=0, content=content)
    begin, chunk, end = frames_of(part.SerializeToString())
    frames = [Response(begin=begin), Response(chunk=chunk), Response(end=end)]
    return [begin_of_parts(), *frames, None]


def missing_part() -> list[Response | None]:
    end = Response(group_end=group_part_pb2.GroupEnd(sha256=bytes(32)))
    return [*cut_between_parts()[:-1], end]


def parts_beyond_credit() -> list[Response]:
    return [group(2), group(3), begin_of_parts(4)]


def more_than_credit() -> list[Response]:
    return [group(2), group(3), group(4)]


@pytest.mark.parametrize(
    ("responses", "cursors"),
    [
        (broken_frames, [1]),
        (garbled_group, [1]),
        (orphaned_chunk, [1]),
        (more_than_credit, [1, 2, 3]),
        (cut_between_parts, [1]),
        (missing_part, [1]),
        (parts_beyond_credit, [1, 2, 3]),
        (lambda: [None], [1]),
    ],
    ids=["broken", "garbled", "orphan", "credit", "cut", "missing", "parts", "end"],
)
async def test_whatever_ends_the_stream_comes_behind_the_groups_before_it(
    stub: FakeStub,
    rows: RowSubscription,
    responses: Callable[[], list[Response | None]],
    cursors: list[int],
) -> None:
    await rows.credit(3)
    commit = asyncio.ensure_future(rows.commit(1))
    stub.call.say(group(1), *responses())
    assert await taken(rows) == cursors
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(commit, WAIT_S)
    assert await taken(rows) == [], "and it stays ended"
    for late in (rows.credit(1), rows.commit(1)):
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(late, WAIT_S)


async def test_a_group_that_is_too_large_ends_the_stream_for_good(
    stub: FakeStub, rows: RowSubscription
) -> None:
    """As a refusal, so that nobody subscribes again and again."""
    await rows.credit(2)
    stub.call.say(group(1), begin_of_parts(size_bytes=GROUP_BYTES_MAX + 1))
    cursors: list[int] = []
    with pytest.raises(GroupTooLargeError) as caught:
        await asyncio.wait_for(take_all(rows, cursors), WAIT_S)
    assert cursors == [1]
    assert (caught.value.metadata["group_id"], caught.value.metadata["cursor"]) == ("g", "2")
    assert stub.call.cancelled
    with pytest.raises(GroupTooLargeError):
        await rows.commit(1)


async def test_closing_wakes_everyone(stub: FakeStub, rows: RowSubscription) -> None:
    await rows.credit(1)
    waiting = [asyncio.ensure_future(taken(rows)), asyncio.ensure_future(rows.commit(0))]
    await asyncio.sleep(0)
    await rows.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), WAIT_S)
    assert outcomes[0] == []
    assert isinstance(outcomes[1], UnavailableError)
    assert stub.call.cancelled


async def test_a_confirmation_that_does_not_come_in_time_is_unknown(rows: RowSubscription) -> None:
    with pytest.raises(UnavailableError, match="not confirmed"):
        await rows.commit(1, timeout_s=0.01)


class OneGroup:
    """A Finalizer whose answer to GetGroup is cut, or changed, in the middle."""

    def __init__(self, *responses: Response) -> None:
        self._parts = [as_read(one) for one in responses]

    async def GetGroup(  # noqa: N802 - gRPC's name
        self, request: pb.GetGroupRequest, **settings: float
    ) -> AsyncIterator[pb.GetGroupResponse]:
        assert request.takes_parts
        assert settings["timeout"] > 0
        for part in self._parts:
            yield part


def as_read(response: Response) -> pb.GetGroupResponse:
    event = response.WhichOneof("event")
    return pb.GetGroupResponse(**{event: getattr(response, event)})


@pytest.mark.requirement("FIN-3", "FIN-4")
@pytest.mark.parametrize(
    "responses", [cut_between_parts()[:-1], missing_part(), broken_frames(), garbled_group(), []]
)
async def test_a_group_that_is_read_broken_is_not_given(responses: list[Response]) -> None:
    async with grpc.aio.insecure_channel("unix:/nothing") as channel:
        client = FinalizerClient(channel)
        client._stub = OneGroup(*responses)
        with pytest.raises(UnavailableError, match="group g"):
            await client.group("g")
