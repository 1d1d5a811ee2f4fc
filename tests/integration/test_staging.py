"""The Staging service over a channel: what its callers see."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from callforest.capture.v1 import capture_admission_pb2, item_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest.staging.v1 import staging_service_pb2_grpc as rpc
from callforest_client.codec import coords_of, coords_without_columns
from callforest_client.errors import RefusedError, error_of, error_of_rpc
from callforest_client.frames import FRAME_BYTES, FRAME_FIELDS, frames_of
from callforest_client.staging import StagingClient
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer
from callforest_mesh.staging.service import StagingOptions, StagingService
from tests.unit.staging.calls import KEY, Chain

WAIT_S = 30.0
ServiceOpener = Callable[..., Awaitable[grpc.aio.Channel]]


def options_of(path: Path, **changes: object) -> StagingOptions:
    sizes = {"map_size_bytes": 256 << 20, "quota_bytes": 200 << 20}
    return StagingOptions(path=path / "staging", **{**sizes, **changes})


@pytest.fixture
def drain() -> Drain:
    return Drain()


@pytest.fixture
async def channel(open_service: ServiceOpener, tmp_path: Path, drain: Drain) -> grpc.aio.Channel:
    return await open_service(StagingService(options_of(tmp_path), drain), drain)


@pytest.fixture
async def client(channel: grpc.aio.Channel) -> AsyncIterator[StagingClient]:
    client = StagingClient(channel, tenant="tenant", timeout_s=WAIT_S)
    yield client
    await client.close()


def reason_of(outcome: object) -> er.ErrorReason.ValueType:
    assert isinstance(outcome, RefusedError), outcome
    return outcome.reason


def fields_at_fault(status: status_pb2.Status) -> list[str]:
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    return [violation.field for violation in bad.field_violations]


async def converse(
    channel: grpc.aio.Channel, messages: Sequence[pb.StageRequest]
) -> dict[int, pb.StageResult]:
    """Send messages on one stream, end it, and give the results by sequence."""

    async def requests() -> AsyncIterator[pb.StageRequest]:
        for message in messages:
            yield message

    results: dict[int, pb.StageResult] = {}
    async for response in rpc.StagingServiceStub(channel).Stage(requests(), timeout=WAIT_S):
        for result in response.results:
            assert result.sequence not in results
            results[result.sequence] = result
    return results


def item(sequence: int, **body: object) -> pb.StageItem:
    context = item_pb2.ItemContext(sequence=sequence, tenant="tenant", timeout_ms=20_000)
    return pb.StageItem(context=context, **body)


@pytest.mark.requirement("API-3", "CAP-6")
async def test_deltas_go_in_and_acknowledgements_come_out(client: StagingClient) -> None:
    chain = Chain()
    calls = [chain.add() for _ in range(40)]
    receipts = await asyncio.gather(*(client.stage(call) for call in calls))
    assert [receipt.coords for receipt in receipts] == [coords_of(call) for call in calls]
    assert not any(receipt.HasField("winner") for receipt in receipts)
    statistics = await client.stat()
    assert statistics.call_count == 40
    assert statistics.commit_count < 40
    ids = [call.call_id for call in calls]
    assert await client.fetch(KEY, ids[::-1]) == calls[::-1]


async def test_acknowledged_calls_outlive_the_service(tmp_path: Path) -> None:
    call = Chain().add()
    for _ in range(2):
        drain = Drain()
        server = MeshServer(StagingService(options_of(tmp_path), drain), "", drain)
        await server.start()
        client = StagingClient(server.local_channel(), tenant="tenant", timeout_s=WAIT_S)
        if not (await client.stat()).call_count:
            await client.stage(call)
        assert await client.fetch(KEY, [call.call_id]) == [call]
        await client.close()
        await server.stop()


async def test_the_loser_of_a_race_serves_the_winners_response(client: StagingClient) -> None:
    first, second = Chain(seed=1).add(), Chain(seed=2).add()
    await client.stage(first)
    assert not (await client.stage(first)).HasField("winner")
    receipt = await client.stage(second)
    assert receipt.coords == coords_of(first)
    assert receipt.winner.served_response == first.served_response
    assert receipt.winner.completion == first.completion


@pytest.mark.requirement("CAP-13")
async def test_a_call_without_its_columns_is_enough_for_its_record(client: StagingClient) -> None:
    chain = Chain()
    for tokens in (8, 600_000):
        call = chain.add(tokens=tokens)
        call.completion.generation_token_count = tokens - tokens // 2
        call.decision.input = capture_admission_pb2.CAPTURE_INPUT_SPLICED
        call.decision.proof = bytes(32)
        await client.stage(call)
        (plain,) = await client.fetch(KEY, [call.call_id], without_columns=True)
        assert coords_without_columns(plain) == coords_of(call)
        assert (plain.canonical.token_ids, plain.canonical.logprobs, plain.extras) == (b"",) * 3
        for name in ("served_response", "completion", "decision"):
            assert getattr(plain, name) == getattr(call, name)
        assert await client.fetch(KEY, [call.call_id]) == [call], "what is stored stays whole"
    with pytest.raises(RefusedError) as caught:
        await client.fetch(KEY, ["never"], without_columns=True)
    assert caught.value.reason == er.ERROR_REASON_CALL_NOT_FOUND


@pytest.mark.requirement("API-6")
async def test_one_bad_item_fails_alone(channel: grpc.aio.Channel) -> None:
    chain = Chain()
    good, wrong, broken, other = (chain.add() for _ in range(4))
    wrong.weight_version += 1
    broken.canonical.token_ids += b"\0"
    items = [item(1, call=good), item(2, call=wrong), item(3, call=broken), item(4, call=other)]
    results = await converse(channel, [pb.StageRequest(items=items)])
    assert results[1].receipt.coords == coords_of(good)
    assert results[4].receipt.coords == coords_of(other)
    mismatch = error_of(results[2].error)
    assert (mismatch.reason, mismatch.code) == (
        er.ERROR_REASON_DIGEST_MISMATCH,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert mismatch.metadata == {"capture_key": KEY, "call_id": wrong.call_id, "field": "digest"}
    assert error_of(results[3].error).reason == er.ERROR_REASON_INVALID_MESSAGE


@pytest.mark.requirement("API-6")
@pytest.mark.bugcase("B32")
@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
@pytest.mark.parametrize("surplus", [1, 2, 3])
async def test_columns_are_whole_words(channel: grpc.aio.Channel, field: str, surplus: int) -> None:
    call = Chain().add()
    setattr(call.canonical, field, getattr(call.canonical, field) + bytes(surplus))
    results = await converse(channel, [pb.StageRequest(items=[item(1, call=call)])])
    error = error_of(results[1].error)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == er.ERROR_REASON_INVALID_MESSAGE
    assert any(field in path for path in fields_at_fault(results[1].error))


@pytest.mark.bugcase("B10")
async def test_a_logprob_that_is_not_finite_is_not_stored(client: StagingClient) -> None:
    call = Chain().add()
    call.canonical.logprobs = call.canonical.logprobs[:-4] + np.float32(-np.inf).tobytes()
    outcome = (await asyncio.gather(client.stage(call), return_exceptions=True))[0]
    assert reason_of(outcome) == er.ERROR_REASON_INVALID_MESSAGE
    assert (await client.stat()).call_count == 0


@pytest.mark.requirement("API-6")
@pytest.mark.bugcase("B30")
async def test_large_calls_fit_through_default_channels(tmp_path: Path, drain: Drain) -> None:
    service = StagingService(options_of(tmp_path), drain)
    server = MeshServer(service, f"unix:{tmp_path}/staging.sock", drain)
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        client = StagingClient(channel, tenant="tenant", timeout_s=WAIT_S)
        chain = Chain()
        # Around one frame, around the 4 MiB of a default channel, and far beyond it.
        sizes = (FRAME_BYTES // 6 - 100, FRAME_BYTES // 6 + 100, 200_000, 1_000_000, 8)
        calls = [chain.add(tokens=size) for size in sizes]
        receipts = await asyncio.gather(*(client.stage(call) for call in calls))
        assert [receipt.coords for receipt in receipts] == [coords_of(call) for call in calls]
        assert await client.fetch(KEY, [call.call_id for call in calls]) == calls
        query = pb.PrefixQuery(capture_key=KEY, call_id=calls[-1].call_id)
        prefix = await client.fetch_prefix(query)
        tokens = b"".join(delta.token_ids for delta in prefix.deltas)
        assert tokens == chain.sequence.astype("<u4").tobytes()
        # The digest does not depend on how a call travelled: a repeat as a rival loses in frames.
        rival = Chain(seed=9).add(tokens=400_000)
        rival.served_response = bytes(2 << 20)
        outcome = await client.stage(rival)
        assert outcome.winner.served_response == calls[0].served_response
        await client.close()
    await server.stop()


@pytest.mark.bugcase("B30")
async def test_an_unframed_message_over_the_limit_is_refused(tmp_path: Path, drain: Drain) -> None:
    """A default client cannot receive 4 MiB whole; nothing we send is ever that large."""
    server = MeshServer(
        StagingService(options_of(tmp_path), drain), f"unix:{tmp_path}/staging.sock", drain
    )
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        client = StagingClient(channel, tenant="tenant", timeout_s=WAIT_S)
        call = Chain().add(tokens=900_000)
        await client.stage(call)
        request = pb.FetchRequest(tenant="tenant", capture_key=KEY, call_ids=[call.call_id])
        sizes = [
            part.ByteSize()
            async for part in rpc.StagingServiceStub(channel).Fetch(request, timeout=WAIT_S)
        ]
        assert sum(sizes) > 4 << 20
        assert max(sizes) <= 1 << 20
        await client.close()
    await server.stop()


async def test_an_item_that_comes_twice_has_its_one_result(channel: grpc.aio.Channel) -> None:
    """The second one must not be answered before the first: its caller would take that answer."""
    call = Chain().add()
    twice = [item(1, call=call), item(1, call=call), item(2, call=call)]
    results = await converse(channel, [pb.StageRequest(items=twice)])
    assert sorted(results) == [1, 2]
    assert {result.WhichOneof("outcome") for result in results.values()} == {"receipt"}


def framed(sequence: int, call: staged_call_pb2.StagedCall) -> list[pb.StageItem]:
    return [
        item(sequence, **{FRAME_FIELDS[type(frame)]: frame})
        for frame in frames_of(call.SerializeToString())
    ]


async def test_frames_interleave_and_stay_invisible_until_their_end(
    channel: grpc.aio.Channel, client: StagingClient
) -> None:
    first, second = Chain(seed=1).add("a"), Chain(seed=2).add("b")
    left, right = framed(1, first), framed(2, second)
    mixed = [left[0], right[0], right[1], left[1], right[2]]
    results = await converse(channel, [pb.StageRequest(items=mixed)])
    assert set(results) == {2}
    assert results[2].receipt.coords == coords_of(second)
    assert (await client.stat()).call_count == 1


async def test_frames_that_do_not_fit_are_refused(
    channel: grpc.aio.Channel, client: StagingClient
) -> None:
    call = Chain().add()
    begin, chunk, end = framed(1, call)
    chunk.chunk.content = chunk.chunk.content[:-1] + b"\xff"
    results = await converse(channel, [pb.StageRequest(items=[begin, chunk, end])])
    assert error_of(results[1].error).reason == er.ERROR_REASON_FRAME_BROKEN
    assert (await client.stat()).call_count == 0


async def test_a_framed_call_is_validated_too(channel: grpc.aio.Channel) -> None:
    call = Chain().add()
    call.canonical.token_ids += b"\0"
    results = await converse(channel, [pb.StageRequest(items=framed(1, call))])
    assert error_of(results[1].error).reason == er.ERROR_REASON_INVALID_MESSAGE


async def test_a_cancelled_item_may_still_be_stored_and_is_repeated_safely(
    channel: grpc.aio.Channel, client: StagingClient
) -> None:
    call = Chain().add()
    items = [item(1, call=call), item(1, cancel=item_pb2.ItemCancel())]
    results = await converse(channel, [pb.StageRequest(items=[each]) for each in items])
    assert results[1].WhichOneof("outcome") in ("error", "receipt")
    assert (await client.stage(call)).coords == coords_of(call)
    assert (await client.stat()).call_count == 1


@pytest.mark.requirement("API-6")
async def test_prefixes_name_what_is_missing(client: StagingClient) -> None:
    chain = Chain()
    calls = [chain.add() for _ in range(4)]
    await asyncio.gather(*(client.stage(call) for call in calls))
    query = pb.PrefixQuery(capture_key=KEY, call_id=calls[3].call_id)
    held = pb.PrefixQuery(
        capture_key=KEY, call_id=calls[3].call_id, held_call_ids=[calls[1].call_id, "other"]
    )
    prefix = await client.fetch_prefix(held)
    assert prefix.held_call_id == calls[1].call_id
    assert [delta.call_id for delta in prefix.deltas] == [call.call_id for call in calls[2:]]
    assert await client.delete(KEY, [calls[0].call_id]) == 1
    with pytest.raises(RefusedError) as broken:
        await client.fetch_prefix(query)
    assert broken.value.reason == er.ERROR_REASON_PREFIX_BROKEN
    assert broken.value.metadata == {
        "capture_key": KEY,
        "call_id": calls[3].call_id,
        "missing_call_id": calls[0].call_id,
    }
    query.call_id = "unknown"
    with pytest.raises(RefusedError) as unknown:
        await client.fetch_prefix(query)
    assert unknown.value.code is grpc.StatusCode.NOT_FOUND


@pytest.mark.requirement("API-6")
async def test_a_missing_call_fails_a_fetch_before_it_begins(client: StagingClient) -> None:
    call = Chain().add()
    await client.stage(call)
    with pytest.raises(RefusedError) as refused:
        await client.fetch(KEY, [call.call_id, "unknown"])
    assert refused.value.reason == er.ERROR_REASON_CALL_NOT_FOUND
    assert refused.value.metadata == {"capture_key": KEY, "call_id": "unknown"}


async def test_deletes_and_teardowns_may_be_repeated(client: StagingClient) -> None:
    chain = Chain()
    calls = [chain.add() for _ in range(5)]
    await asyncio.gather(*(client.stage(call) for call in calls))
    ids = [call.call_id for call in calls]
    assert await client.delete(KEY, ids[:2]) == 2
    assert await client.delete(KEY, ids[:2]) == 0
    assert await client.drop_partition(KEY) == 3
    assert await client.drop_partition(KEY) == 0
    outcome = (await asyncio.gather(client.stage(calls[0]), return_exceptions=True))[0]
    assert reason_of(outcome) == er.ERROR_REASON_PARTITION_DROPPED
    assert (await client.stat()).call_count == 0


async def test_tenants_do_not_see_each_other(client: StagingClient) -> None:
    call = Chain().add()
    await client.stage(call)
    stranger = client.for_tenant("stranger")
    with pytest.raises(RefusedError) as refused:
        await stranger.fetch(KEY, [call.call_id])
    assert refused.value.reason == er.ERROR_REASON_CALL_NOT_FOUND
    assert await stranger.delete(KEY, [call.call_id]) == 0
    assert await stranger.drop_partition(KEY) == 0
    assert (await client.stat()).call_count == 1


@pytest.mark.requirement("API-6")
async def test_malformed_requests_name_their_fields(channel: grpc.aio.Channel) -> None:
    stub = rpc.StagingServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.DeleteCalls(
            pb.DeleteCallsRequest(tenant="a b", capture_key=KEY, call_ids=["a"]), timeout=WAIT_S
        )
    assert error_of_rpc(refused.value).reason == er.ERROR_REASON_INVALID_MESSAGE
    assert fields_at_fault(rpc_status.from_call(refused.value)) == ["tenant"]


@pytest.mark.requirement("API-6")
async def test_a_full_store_says_when_to_come_back(
    open_service: ServiceOpener, tmp_path: Path, drain: Drain
) -> None:
    options = options_of(tmp_path, map_size_bytes=8 << 20, quota_bytes=1 << 20)
    channel = await open_service(StagingService(options, drain), drain)
    client = StagingClient(channel, tenant="tenant", timeout_s=WAIT_S)
    chain = Chain()
    calls = [chain.add(tokens=20_000) for _ in range(20)]
    outcomes = await asyncio.gather(*(client.stage(call) for call in calls), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, RefusedError)]
    assert 0 < len(refused) < len(calls)
    assert {error.reason for error in refused} == {er.ERROR_REASON_STORE_FULL}
    assert all(error.retry_after_ms for error in refused)
    stored = [
        call.call_id
        for call, outcome in zip(calls, outcomes, strict=True)
        if isinstance(outcome, pb.StagedReceipt)
    ]
    assert len(await client.fetch(KEY, stored)) == len(stored)
    assert await client.delete(KEY, stored) == len(stored)
    await client.stage(calls[-1])
    await client.close()


@pytest.mark.requirement("LED-4")
async def test_a_volatile_store_does_not_start(tmp_path: Path, drain: Drain) -> None:
    service = StagingService(options_of(tmp_path, store="memory"), drain)
    with pytest.raises(Refusal) as refused:
        await MeshServer(service, "", drain).start()
    assert refused.value.reason == er.ERROR_REASON_VOLATILE_STORE
    assert not (tmp_path / "staging").exists()
