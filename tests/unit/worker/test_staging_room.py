"""A full Staging is learnt of once, and calls that it would refuse are not generated."""

import asyncio

import grpc
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as staging_pb
from callforest_client.errors import CallforestError, RefusedError, UnavailableError
from callforest_core.refusal import Refusal
from callforest_mesh.worker.staging_room import StagingRoom
from tests.unit.worker.played_staging import PlayedStaging

pytestmark = pytest.mark.requirement("CAP-7")

FACTS = {"store": "staging", "quota_bytes": "9"}


class Counted(PlayedStaging):
    """A store that says how much room it has, or that it cannot be asked."""

    def __init__(self, answer: int | CallforestError | None) -> None:
        super().__init__()
        self.answer = answer
        self.asked = 0
        self.go = asyncio.Event()
        self.go.set()

    async def stat(self) -> staging_pb.StatResponse:
        self.asked += 1
        await self.go.wait()
        if isinstance(self.answer, CallforestError):
            raise self.answer
        return staging_pb.StatResponse(room_bytes=self.answer)


def refused(
    reason: er.ErrorReason.ValueType = er.ERROR_REASON_STORE_FULL, *, delay_ms: int = 0
) -> RefusedError:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return RefusedError(code, "no", reason=reason, metadata=FACTS, retry_after_ms=delay_ms)


async def refusal_of(room: StagingRoom) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await room.require("t")
    return caught.value


async def test_nothing_is_asked_while_nothing_was_refused() -> None:
    staging = Counted(0)
    room = StagingRoom(staging, 1.0)
    room.note(refused(er.ERROR_REASON_OVERLOADED), 10)
    await room.require("t")
    assert staging.asked == 0


async def test_calls_are_pushed_back_with_what_staging_said() -> None:
    staging = Counted(1 << 30)
    room = StagingRoom(staging, 1.0)
    room.note(refused(delay_ms=60_000), 10)
    for _ in range(3):
        refusal = await refusal_of(room)
    assert (refusal.reason, refusal.retry_after_ms) == (er.ERROR_REASON_STORE_FULL, 60_000)
    assert refusal.facts == FACTS
    assert staging.asked == 0, "not before the delay that it named"


@pytest.mark.parametrize(("room_bytes", "is_taken"), [(0, False), (29, False), (30, True)])
async def test_it_must_have_room_for_the_largest_that_it_refused(
    room_bytes: int, *, is_taken: bool
) -> None:
    staging = Counted(room_bytes)
    room = StagingRoom(staging, 1.0)
    for size in (30, 10):
        room.note(refused(), size)
    if is_taken:
        await room.require("t")
    else:
        await refusal_of(room)
    assert staging.tenants == ["t"]


@pytest.mark.parametrize(
    "answer", [None, UnavailableError(grpc.StatusCode.UNAVAILABLE, "away"), refused()], ids=str
)
async def test_one_that_does_not_say_is_not_taken_for_full(answer: CallforestError | None) -> None:
    room = StagingRoom(Counted(answer), 1.0)
    room.note(refused(), 10)
    await room.require("t")


async def test_one_that_does_not_answer_is_waited_for_within_the_bound() -> None:
    staging = Counted(0)
    staging.go.clear()
    room = StagingRoom(staging, 0.01)
    room.note(refused(), 10)
    await room.require("t")


async def test_one_caller_asks_for_all() -> None:
    staging = Counted(0)
    staging.go.clear()
    room = StagingRoom(staging, 60.0)
    room.note(refused(delay_ms=100), 10)
    async with asyncio.timeout(20):
        while not staging.asked:
            asking = asyncio.ensure_future(room.require("t"))
            await asyncio.wait({asking}, timeout=0.02)
            if asking.done():
                assert isinstance(asking.exception(), Refusal)
    await refusal_of(room)
    staging.go.set()
    with pytest.raises(Refusal):
        await asking
    assert staging.asked == 1


async def test_one_call_tries_until_one_as_large_is_staged() -> None:
    """It may have room for no more than one, and a generation takes longer than the question."""
    staging = Counted(30)
    room = StagingRoom(staging, 1.0)
    room.note(refused(delay_ms=60_000), 30)
    room._ask_at = 0.0
    await room.require("t")
    for size in (0, 29):
        await refusal_of(room)
        room.staged(size)
    await refusal_of(room)
    room.staged(30)
    await room.require("t")
    assert staging.asked == 1
