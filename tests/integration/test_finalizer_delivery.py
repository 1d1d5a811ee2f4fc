"""Delivery: credit, cursors, one consumer, frames, and what the Finalizer's own death leaves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc.aio
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import finalizer_service_pb2_grpc as rpc
from callforest_client.errors import CallforestError, RefusedError, UnavailableError, error_of_rpc
from callforest_client.finalizer import FinalizerClient, RowSubscription
from callforest_client.frames import FRAME_BYTES
from tests.integration.finalizer_mesh import (
    TENANT,
    WAIT_S,
    FinalizerMesh,
    publish_chain_group,
    read_again,
    take,
)
from tests.integration.offline_rows import verify_offline


@pytest.fixture(params=["socket", "local"])
async def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(tmp_path, request.param)
    await mesh.start()
    yield mesh
    await mesh.stop()


@pytest.fixture
async def socket_mesh(tmp_path: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(tmp_path, "socket")
    await mesh.start()
    yield mesh
    await mesh.stop()


async def ended(rows: RowSubscription) -> CallforestError:
    """What a subscription that sends nothing more ends with."""
    with pytest.raises(CallforestError) as caught:
        async with asyncio.timeout(WAIT_S):
            await take(rows, 1)
    return caught.value


async def refused(asked: Awaitable[object]) -> CallforestError:
    with pytest.raises(CallforestError) as caught:
        await asked
    return caught.value


def nothing_waits(rows: RowSubscription) -> bool:
    return rows._batches.empty()


@pytest.mark.requirement("API-3")
async def test_credit_bounds_what_is_sent(mesh: FinalizerMesh) -> None:
    for number in range(5):
        await publish_chain_group(mesh, f"g{number}", 1)
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(2)
    assert [batch.cursor for batch in await take(rows, 2)] == [1, 2]
    await rows.commit(1)  # answered in order: a third group would have come before it
    assert nothing_waits(rows), "a commit gives no credit"
    await rows.credit(1)
    await rows.credit(1)
    assert [batch.cursor for batch in await take(rows, 2)] == [3, 4]
    await rows.commit(4)
    assert nothing_waits(rows)
    await rows.close()


async def test_a_commit_is_confirmed_while_groups_wait_to_be_taken(mesh: FinalizerMesh) -> None:
    for number in range(6):
        await publish_chain_group(mesh, f"g{number}", 1)
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(6)
    assert [batch.cursor for batch in await take(rows, 1)] == [1]
    await rows.commit(1, timeout_s=WAIT_S)
    assert [batch.cursor for batch in await take(rows, 5)] == [2, 3, 4, 5, 6]
    await rows.close()


async def test_a_group_is_sent_as_it_is_published(mesh: FinalizerMesh) -> None:
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(4)
    coming = asyncio.ensure_future(take(rows, 2))
    await publish_chain_group(mesh, "g1")
    await publish_chain_group(mesh, "g2")
    batches = await asyncio.wait_for(coming, WAIT_S)
    assert [batch.group_id for batch in batches] == ["g1", "g2"]
    await rows.close()


@pytest.mark.requirement("API-3")
async def test_a_newer_stream_of_the_consumer_ends_the_older(mesh: FinalizerMesh) -> None:
    await publish_chain_group(mesh, "g1")
    older = mesh.finalizer.subscribe("trainer")
    await older.credit(1)
    await take(older, 1)
    newer = mesh.finalizer.subscribe("trainer")
    await newer.credit(1)
    assert [batch.cursor for batch in await take(newer, 1)] == [1], "it was not committed"
    failure = await ended(older)
    assert (failure.reason, failure.code) == (
        er.ERROR_REASON_SUBSCRIPTION_SUPERSEDED,
        grpc.StatusCode.ABORTED,
    )
    late = await refused(older.commit(1))
    assert late.reason == er.ERROR_REASON_SUBSCRIPTION_SUPERSEDED
    assert (await mesh.finalizer.row_log()).committed_cursor == 0
    await newer.commit(1)
    for rows in (older, newer):
        await rows.close()


async def test_a_superseded_stream_cannot_commit_what_was_on_its_way(
    mesh: FinalizerMesh,
) -> None:
    """Whatever order they run in: what is committed is not sent again, nor dropped."""
    for number in range(3):
        await publish_chain_group(mesh, f"g{number}", 1)
    older = mesh.finalizer.subscribe("trainer")
    await older.credit(3)
    await take(older, 3)
    newer = mesh.finalizer.subscribe("trainer")
    commit = asyncio.ensure_future(older.commit(3))
    await newer.credit(3)
    (outcome,) = await asyncio.gather(commit, return_exceptions=True)
    cursor = (await mesh.finalizer.row_log()).committed_cursor
    if outcome is None:
        assert cursor == 3
    else:
        assert isinstance(outcome, RefusedError)
        assert outcome.reason == er.ERROR_REASON_SUBSCRIPTION_SUPERSEDED
    await mesh.cleaned()
    batches = await take(newer, 3 - cursor) if cursor < 3 else []
    assert [batch.cursor for batch in batches] == list(range(cursor + 1, 4))
    assert not any(batch.drop_reason for batch in batches)
    for rows in (older, newer):
        await rows.close()


@pytest.mark.requirement("API-3", "API-6")
async def test_a_log_has_one_consumer(mesh: FinalizerMesh) -> None:
    await publish_chain_group(mesh, "g1")
    mine = mesh.finalizer.subscribe("trainer")
    await mine.credit(1)
    await take(mine, 1)
    other = mesh.finalizer.subscribe("another")
    await other.credit(1)
    failure = await ended(other)
    assert (failure.reason, failure.code) == (
        er.ERROR_REASON_CONSUMER_BOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    assert failure.metadata == {"consumer": "another", "bound_consumer": "trainer"}
    await mine.commit(1)  # it was not ended
    tenant = mesh.finalizer.for_tenant("elsewhere").subscribe("another")
    await tenant.credit(1)
    await tenant.commit(0)
    for rows in (mine, other, tenant):
        await rows.close()


@pytest.mark.requirement("API-3")
async def test_cursors_lie_between_what_was_committed_and_what_was_sent(
    mesh: FinalizerMesh,
) -> None:
    for number in range(3):
        await publish_chain_group(mesh, f"g{number}", 1)
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(2)
    await take(rows, 2)
    await rows.commit(2)
    await rows.commit(1)
    await rows.commit(2)
    failure = await refused(rows.commit(3))
    assert (failure.reason, failure.code) == (
        er.ERROR_REASON_CURSOR_INVALID,
        grpc.StatusCode.OUT_OF_RANGE,
    )
    assert failure.metadata == {"cursor": "3", "low": "2", "high": "2"}
    assert (await mesh.finalizer.row_log()).committed_cursor == 2
    for after, low, high in ((1, "2", "3"), (4, "2", "3")):
        outside = mesh.finalizer.subscribe("trainer", after_cursor=after)
        await outside.credit(1)
        failure = await ended(outside)
        assert failure.reason == er.ERROR_REASON_CURSOR_INVALID
        assert failure.metadata == {"cursor": str(after), "low": low, "high": high}
    skipping = mesh.finalizer.subscribe("trainer", after_cursor=3)
    await skipping.credit(1)
    await skipping.commit(3)
    assert (await mesh.finalizer.row_log()).committed_cursor == 3
    await skipping.close()


@pytest.mark.requirement("API-6")
@pytest.mark.parametrize(
    "messages",
    [
        [pb.SubscribeRowsRequest(credit=pb.RowCredit(groups=1))],
        [pb.SubscribeRowsRequest()],
        [pb.SubscribeRowsRequest(start=pb.StartSubscription(tenant="no such/tenant"))],
        [
            pb.SubscribeRowsRequest(start=pb.StartSubscription(tenant=TENANT, consumer="trainer")),
            pb.SubscribeRowsRequest(credit=pb.RowCredit(groups=0)),
        ],
        [pb.SubscribeRowsRequest(start=pb.StartSubscription(tenant=TENANT, consumer="trainer"))]
        * 2,
        [],
    ],
    ids=["credit first", "empty", "bad names", "no credit", "two starts", "nothing"],
)
async def test_messages_that_break_the_schema_end_the_stream(
    mesh: FinalizerMesh, messages: list[pb.SubscribeRowsRequest]
) -> None:
    call = rpc.FinalizerServiceStub(mesh.channels["finalizer"]).SubscribeRows(timeout=WAIT_S)
    for message in messages:
        await call.write(message)
    if not messages:
        await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert error_of_rpc(caught.value).reason == er.ERROR_REASON_INVALID_MESSAGE


@pytest.mark.requirement("API-6")
async def test_a_drain_ends_subscriptions_so_that_they_are_opened_again(
    socket_mesh: FinalizerMesh,
) -> None:
    mesh = socket_mesh
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    await rows.commit(0)
    waiting = asyncio.ensure_future(ended(rows))
    await mesh.restart("finalizer")
    failure = await asyncio.wait_for(waiting, WAIT_S)
    assert isinstance(failure, UnavailableError)
    assert failure.reason == er.ERROR_REASON_DRAINING
    await rows.close()


@pytest.mark.requirement("FIN-3", "API-3")
async def test_a_restart_keeps_receipts_positions_and_cursor(socket_mesh: FinalizerMesh) -> None:
    mesh = socket_mesh
    first = await publish_chain_group(mesh, "g1")
    await publish_chain_group(mesh, "g2")
    before = [batch.SerializeToString() for batch in await read_again(mesh, 2)]
    receipt = await mesh.finalizer.receipt("g1-r0")
    await mesh.restart("finalizer")
    assert await mesh.finalizer.receipt("g1-r0") == receipt
    assert [batch.SerializeToString() for batch in await read_again(mesh, 2)] == before
    assert (await mesh.finalizer.finalize_group("g1", 2)).cursor == 1
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    await take(rows, 1)
    await rows.commit(1)
    await rows.close()
    await mesh.restart("finalizer")
    await mesh.restart("staging")
    state = await mesh.finalizer.row_log()
    assert (state.head_cursor, state.committed_cursor, state.consumer) == (2, 1, "trainer")
    (second,) = await read_again(mesh, 1)
    assert second.SerializeToString() == before[1]
    await publish_chain_group(mesh, "g3")
    assert (await mesh.finalizer.row_log()).head_cursor == 3
    await mesh.cleaned()
    assert await first[0].staged_ids() == []


@pytest.mark.requirement("FIN-3")
@pytest.mark.parametrize("tenants", [(TENANT,), ()], ids=["at start", "at subscription"])
async def test_cleanup_goes_on_after_a_restart(tmp_path: Path, tenants: tuple[str, ...]) -> None:
    """Staging is away when the cursor is committed, and the Finalizer dies before it is back."""
    mesh = FinalizerMesh(tmp_path, "socket", cleanup_tenants=tenants)
    await mesh.start()
    try:
        gone = await publish_chain_group(mesh, "g1")
        left = await publish_chain_group(mesh, "g2")
        rows = mesh.finalizer.subscribe("trainer")
        await rows.credit(1)
        await take(rows, 1)
        await mesh.end("staging")
        await rows.commit(1)
        await rows.close()
        await mesh.end("finalizer")
        await mesh.begin("staging")
        assert await gone[0].staged_ids() == ["a", "b"]
        await mesh.begin("finalizer")
        if not tenants:
            await mesh.cleaned()
            assert await gone[0].staged_ids() == ["a", "b"]
            await read_again(mesh, 1)
        await mesh.cleaned()
        assert [await player.staged_ids() for player in gone] == [[], []]
        assert [await player.staged_ids() for player in left] == [["a", "b"]] * 2
    finally:
        await mesh.stop()


@pytest.mark.requirement("FIN-3")
async def test_one_commit_cleans_every_group_up_to_it(mesh: FinalizerMesh) -> None:
    groups = [await publish_chain_group(mesh, f"g{number}", 1) for number in range(4)]
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(4)
    await take(rows, 4)
    await rows.commit(3)
    await rows.close()
    await mesh.cleaned()
    staged = [await player.staged_ids() for players in groups for player in players]
    assert staged == [[], [], [], ["a", "b"]]


@pytest.mark.requirement("API-3", "API-6")
async def test_a_large_group_travels_in_frames_to_a_default_client(
    socket_mesh: FinalizerMesh,
) -> None:
    """9 MB of tokens; gRPC's own default takes messages of 4 MiB."""
    mesh = socket_mesh
    await publish_chain_group(mesh, "large", 3, calls=2, tokens=260_000)
    address = f"unix:{mesh.folder}/finalizer.sock"
    async with grpc.aio.insecure_channel(address) as channel:
        client = FinalizerClient(channel, tenant=TENANT, timeout_s=WAIT_S)
        rows = client.subscribe("trainer")
        await rows.credit(1)
        (batch,) = await take(rows, 1)
        assert batch.ByteSize() > 9_000_000
        verify_offline(batch)
        await rows.commit(1)
        await rows.close()


async def test_no_frame_is_larger_than_a_frame(socket_mesh: FinalizerMesh) -> None:
    mesh = socket_mesh
    await publish_chain_group(mesh, "large", 1, calls=2, tokens=260_000)
    await publish_chain_group(mesh, "small", 1)
    call = rpc.FinalizerServiceStub(mesh.channels["finalizer"]).SubscribeRows(timeout=WAIT_S)
    start = pb.StartSubscription(tenant=TENANT, consumer="trainer")
    await call.write(pb.SubscribeRowsRequest(start=start))
    await call.write(pb.SubscribeRowsRequest(credit=pb.RowCredit(groups=2)))
    events: list[str] = []
    while "batch" not in events:
        response = await call.read()
        assert isinstance(response, pb.SubscribeRowsResponse)
        assert response.ByteSize() < FRAME_BYTES + 64
        events.append(response.WhichOneof("event") or "none")
    assert events[0] == "begin"
    assert events[-2:] == ["end", "batch"]
    assert set(events[1:-2]) == {"chunk"}
    call.cancel()
