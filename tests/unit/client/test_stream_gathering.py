"""When items wait for others: never for few callers, and never longer than until there are enough.

A linger of an hour stands for a wait that nothing but enough items ends.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc

from callforest.capture.v1 import staged_call_pb2
from callforest.staging.v1 import staging_service_pb2 as pb
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


async def test_who_comes_late_to_a_crowd_waits_for_half_of_it() -> None:
    call = Holding()
    stream = ItemStream(STAGE, lambda **_: call, linger_s=HOUR_S)
    first = sending(stream, 8)
    await call.taken.wait()
    late = sending(stream, 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert call.sizes == [8]
    call.taken.clear()
    later = sending(stream, 3)
    await call.taken.wait()
    assert call.sizes == [8, 4]
    call.release.set()
    await asyncio.gather(*first, *late, *later)
    await stream.close()
