"""When items wait for others: never for few callers, and never longer than until there are enough.

A linger of an hour stands for a wait that nothing but enough items ends.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc

from callforest.capture.v1 import staged_call_pb2
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest_client.gathering import Gathering
from callforest_client.item_stream import ItemStream
from callforest_client.streams import STAGE

WAIT_S = 20.0
HOUR_S = 3600.0
CALL = staged_call_pb2.StagedCall(call_id="c")


class Holding:
    """A stream that answers what it has taken once it is told to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.release = asyncio.Event()
        self.taken = asyncio.Event()
        self._responses: asyncio.Queue[pb.StageResponse] = asyncio.Queue(64)

    async def write(self, request: pb.StageRequest) -> None:
        self.sizes.append(len(request.items))
        self.taken.set()
        results = [
            pb.StageResult(sequence=item.context.sequence, receipt=pb.StagedReceipt())
            for item in request.items
        ]
        await self._responses.put(pb.StageResponse(results=results))

    async def __aiter__(self) -> AsyncIterator[pb.StageResponse]:
        while True:
            response = await self._responses.get()
            await self.release.wait()
            yield response

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> bool:
        return True


def sending(stream: ItemStream, count: int) -> list[asyncio.Task[pb.StagedReceipt]]:
    return [
        asyncio.ensure_future(stream.send(CALL, tenant="t", timeout_s=WAIT_S)) for _ in range(count)
    ]


async def test_three_callers_never_wait() -> None:
    call = Holding()
    call.release.set()
    stream = ItemStream(STAGE, lambda **_: call, linger_s=HOUR_S)
    for _ in range(5):
        await asyncio.gather(*sending(stream, 3))
    assert sum(call.sizes) == 15
    await stream.close()


async def test_a_crowd_leaves_together_at_once() -> None:
    call = Holding()
    call.release.set()
    stream = ItemStream(STAGE, lambda **_: call, linger_s=HOUR_S)
    await asyncio.gather(*sending(stream, 40))
    assert call.sizes == [40]
    await stream.close()


async def settled() -> None:
    """Let everything run that needs no wait."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_who_comes_while_the_crowd_is_away_waits_for_nobody() -> None:
    call = Holding()
    stream = ItemStream(STAGE, lambda **_: call, linger_s=HOUR_S)
    first = sending(stream, 8)
    await call.taken.wait()
    late = sending(stream, 1)
    await settled()
    assert call.sizes == [8, 1]
    call.release.set()
    await asyncio.gather(*first, *late)
    await stream.close()


async def test_who_comes_back_first_waits_for_those_who_were_answered_too() -> None:
    call = Holding()
    call.release.set()
    stream = ItemStream(STAGE, lambda **_: call, linger_s=HOUR_S)
    await asyncio.gather(*sending(stream, 8))
    early = sending(stream, 3)
    await settled()
    assert call.sizes == [8]
    await asyncio.gather(*early, *sending(stream, 5))
    assert call.sizes == [8, 8]
    await stream.close()


async def test_who_did_not_come_in_time_is_not_waited_for_again() -> None:
    call = Holding()
    call.release.set()
    stream = ItemStream(STAGE, lambda **_: call, linger_s=0.01)
    await asyncio.gather(*sending(stream, 8))
    await asyncio.gather(*sending(stream, 5))
    stream._gathering._linger_s = HOUR_S
    await asyncio.gather(*sending(stream, 5))
    assert call.sizes == [8, 5, 5]
    await stream.close()


async def test_no_message_waits_for_more_than_64() -> None:
    call = Holding()
    call.release.set()
    stream = ItemStream(STAGE, lambda **_: call, linger_s=HOUR_S)
    await asyncio.gather(*sending(stream, 200))
    await asyncio.gather(*sending(stream, 64))
    assert call.sizes == [200, 64]
    await stream.close()


async def test_a_message_waits_for_whom_the_owner_expects() -> None:
    call = Holding()
    call.release.set()
    coming = 5
    stream = ItemStream(STAGE, lambda **_: call)
    stream.expect(lambda: coming, HOUR_S)
    first = sending(stream, 3)
    await settled()
    assert call.sizes == []
    coming = 0
    await asyncio.gather(*first, *sending(stream, 5))
    assert call.sizes == [8]
    await asyncio.gather(*sending(stream, 1))
    assert call.sizes == [8, 1], "nobody is expected"
    await stream.close()


async def test_an_item_spends_no_more_than_a_part_of_its_time_on_others() -> None:
    call = Holding()
    call.release.set()
    stream = ItemStream(STAGE, lambda **_: call)
    stream.expect(lambda: 100, HOUR_S)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await stream.send(CALL, tenant="t", timeout_s=4.0)
    assert 0.4 < loop.time() - begun < 4.0
    await stream.close()


def test_a_wait_that_gathers_few_is_shorter_the_next_time() -> None:
    """256 calls are generated for seconds each: one in a while is not kept for the others."""
    gathering = Gathering(0.05, lambda: 255)

    def waits(gathered: int, times: int) -> float:
        for _ in range(times):
            gathering.see(gathered, 0, 0.0)
            gathering.waited(gathered, gathered)
        gathering.see(1, 0, 0.0)
        return gathering.linger_s

    assert waits(1, 0) == 0.05
    assert waits(1, 1) == 0.025
    assert waits(3, 20) == 0.05 / 16
    assert waits(6, 2) == 0.0125, "some come in what was waited: longer again"
    assert waits(6, 20) == 0.05
    waits(1, 20)
    assert waits(64, 1) == 0.05, "as many as are wanted"


async def test_callers_who_left_are_not_counted_as_sent() -> None:
    call = Holding()
    stream = ItemStream(STAGE, lambda **_: call, linger_s=HOUR_S)
    left = sending(stream, 8)
    await call.taken.wait()
    for one in left:
        one.cancel()
    await asyncio.wait(left)
    call.release.set()
    back = sending(stream, 3)
    await settled()
    assert call.sizes[0] == 8
    assert sum(call.sizes[1:]) == 8, "their cancels alone"
    await asyncio.gather(*back, *sending(stream, 5))
    assert call.sizes[-1] == 8
    await stream.close()
