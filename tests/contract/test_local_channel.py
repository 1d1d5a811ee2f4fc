"""A channel within the process behaves as one over a socket: one suite over both."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_status import rpc_status

from callforest.error.v1 import error_reason_pb2 as er
from callforest.staging.v1 import staging_service_pb2 as pb
from callforest.staging.v1 import staging_service_pb2_grpc as rpc
from callforest_client.errors import error_of_rpc
from callforest_mesh.chassis.call_limits import CallLimits
from callforest_mesh.chassis.local_channel import LocalChannel, LocalRegistry
from callforest_mesh.chassis.server import ServerOptions
from tests.contract.channel_rig import (
    CALLER,
    NAME,
    SECRET,
    WAIT_S,
    FakeStaging,
    Rig,
    failure,
    soon,
    stage,
)


@pytest.mark.requirement("API-2", "API-6")
async def test_unary_answers_with_metadata_and_a_fresh_context(rig: Rig) -> None:
    CALLER.set("somebody")
    request = pb.StatRequest(tenant="t")
    call = rig.stub.Stat(request, timeout=WAIT_S, metadata=(("x-one", "1"), ("y-bin", b"\0")))
    assert (await call).call_count == 7
    assert (await call).call_count == 7, "a call can be awaited again"
    assert await call.code() is grpc.StatusCode.OK
    assert call.done()
    assert not call.cancelled()
    assert ("served-by", "fake") in list(await call.trailing_metadata())
    request.tenant = "changed after the call"
    assert rig.fake.request == pb.StatRequest(tenant="t"), "no message is shared"
    assert rig.fake.metadata["x-one"] == "1"
    assert rig.fake.metadata["y-bin"] == b"\0"
    assert rig.fake.callers == ["nobody"], "nothing of the caller leaks but metadata"


@pytest.mark.requirement("API-6")
async def test_refusal_arrives_as_a_rich_status(rig: Rig) -> None:
    error = await failure(rig.stub.Stat(pb.StatRequest(tenant="refused"), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert rpc_status.from_call(error) is not None
    typed = error_of_rpc(error)
    assert typed.reason == er.ERROR_REASON_CALL_NOT_FOUND
    assert typed.metadata == {"call_id": "c1"}


@pytest.mark.requirement("API-6")
@pytest.mark.parametrize("streamed", [False, True])
async def test_exception_text_does_not_leak(
    rig: Rig, caplog: pytest.LogCaptureFixture, *, streamed: bool
) -> None:
    request = pb.StatRequest(tenant="broken")
    call = rig.count()(iter([request])) if streamed else rig.stub.Stat(request, timeout=WAIT_S)
    error = await failure(call)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert SECRET not in str(error)
    incident = error_of_rpc(error).metadata["incident_id"]
    assert re.fullmatch("[0-9a-f]{16}", incident)
    assert incident in caplog.text, "the log explains the incident"
    assert SECRET in caplog.text


@pytest.mark.requirement("API-6")
async def test_malformed_bytes_and_fields_are_invalid_arguments(rig: Rig) -> None:
    garbage = await failure(rig.raw("Stat")(b"\xff\xff\xff", timeout=WAIT_S))
    empty = await failure(rig.stub.Stat(pb.StatRequest(), timeout=WAIT_S))
    for error in (garbage, empty):
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_of_rpc(error).reason == er.ERROR_REASON_INVALID_MESSAGE
    assert rig.fake.request is None, "nothing malformed reaches a handler"


async def test_garbage_in_a_stream_is_an_invalid_argument(rig: Rig) -> None:
    call = rig.channel.stream_stream(f"/{NAME}/Stage")()
    await call.write(b"\xff\xff\xff")
    error = await failure(call.read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_unknown_method_is_unimplemented(rig: Rig) -> None:
    error = await failure(rig.raw("Nothing")(b"", timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.requirement("API-6")
async def test_deadline_ends_the_call_and_cancels_the_handler(rig: Rig) -> None:
    error = await failure(rig.stub.Stat(pb.StatRequest(tenant="slow"), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await soon(rig.fake.cancelled.wait())


@pytest.mark.requirement("API-6")
async def test_deadline_does_not_stop_what_is_shielded(rig: Rig) -> None:
    error = await failure(rig.stub.Stat(pb.StatRequest(tenant="durable"), timeout=0.3))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not rig.fake.stored.is_set()
    rig.fake.released.set()
    await soon(rig.fake.stored.wait())


@pytest.mark.requirement("API-6")
async def test_cancelled_call_cancels_its_handler(rig: Rig) -> None:
    call = rig.stub.Stat(pb.StatRequest(tenant="slow"), timeout=WAIT_S)
    ended = asyncio.Event()
    call.add_done_callback(lambda _: ended.set())
    await soon(rig.fake.started.wait())
    assert call.cancel()
    await soon(rig.fake.cancelled.wait())
    await soon(ended.wait())
    with pytest.raises(asyncio.CancelledError):
        await call
    assert call.cancelled()
    assert not call.cancel(), "a call is cancelled once"
    assert await call.code() is grpc.StatusCode.CANCELLED


async def test_cancelled_waiter_cancels_its_call(rig: Rig) -> None:
    call = rig.stub.Stat(pb.StatRequest(tenant="slow"), timeout=WAIT_S)
    waiter = asyncio.ensure_future(call)
    await soon(rig.fake.started.wait())
    waiter.cancel()
    await soon(rig.fake.cancelled.wait())
    assert call.cancelled()


async def test_call_that_nobody_holds_is_cancelled(tmp_path: Path) -> None:
    rig = Rig("local", tmp_path, ServerOptions())
    await rig.open()
    call = rig.stub.Stage()
    await call.write(stage(1, "stall"))
    await soon(rig.fake.started.wait())
    assert rig.server.in_flight == 1
    del call
    gc.collect()
    await soon(rig.server.idle())
    await rig.close()


async def test_handler_may_write_to_its_context() -> None:
    """Without interceptors, which want generators."""
    registry = LocalRegistry()
    rpc.add_StagingServiceServicer_to_server(FakeStaging(), registry)
    stub = rpc.StagingServiceStub(LocalChannel(registry))
    request = pb.FetchRequest(call_ids=["a", "b", "c"])
    parts = [part async for part in stub.Fetch(request, timeout=WAIT_S)]
    assert parts == [pb.FetchResponse()] * 3


async def test_bidi_by_iterator(rig: Rig) -> None:
    async def requests() -> AsyncIterator[pb.StageRequest]:
        for sequence in (1, 2, 3):
            yield stage(sequence)

    call = rig.stub.Stage(requests(), timeout=WAIT_S)
    assert [response.results[0].sequence async for response in call] == [1, 2, 3]
    assert await call.code() is grpc.StatusCode.OK


async def test_bidi_by_reads_and_writes(rig: Rig) -> None:
    call = rig.stub.Stage(timeout=WAIT_S)
    for sequence in (4, 5):
        await call.write(stage(sequence))
        response = await call.read()
        assert response.results[0].sequence == sequence
    await call.done_writing()
    await call.done_writing()
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(stage(6))
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(stage(7))


async def test_what_was_sent_before_an_error_arrives_before_it(rig: Rig) -> None:
    call = rig.stub.Stage(timeout=WAIT_S)
    await call.write(stage(13))
    response = await call.read()
    assert response.results[0].sequence == 13
    error = await failure(call.read())
    assert error_of_rpc(error).retry_after_ms == 250
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(stage(14))


async def test_styles_do_not_mix(rig: Rig) -> None:
    call = rig.stub.Stage(iter([stage(1)]), timeout=WAIT_S)
    with pytest.raises(grpc.aio.UsageError):
        await call.write(stage(2))
    await call.read()
    with pytest.raises(grpc.aio.UsageError):
        call.__aiter__()


async def test_failing_request_iterator_cancels_its_call(rig: Rig) -> None:
    async def requests() -> AsyncIterator[pb.StageRequest]:
        yield stage(1)
        raise ValueError("the caller's own fault")

    call = rig.stub.Stage(requests(), timeout=WAIT_S)
    with pytest.raises(asyncio.CancelledError):
        async for _ in call:
            pass
    assert call.cancelled()


async def test_client_stream_answers_once(rig: Rig) -> None:
    requests = [pb.StatRequest(tenant=f"t{i}") for i in range(5)]
    assert (await rig.count()(iter(requests), timeout=WAIT_S)).call_count == 5
    call = rig.count()(timeout=WAIT_S)
    for request in requests[:2]:
        await call.write(request)
    await call.done_writing()
    assert (await call).call_count == 2


async def test_client_stream_validates_each_message(rig: Rig) -> None:
    error = await failure(rig.count()(iter([pb.StatRequest()]), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.requirement("API-6")
async def test_too_large_a_message_is_refused(rig: Rig) -> None:
    error = await failure(rig.raw("Stat")(bytes((64 << 20) + 1), timeout=WAIT_S))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rig.fake.request is None


async def test_too_much_metadata_is_refused(rig: Rig) -> None:
    request = pb.StatRequest(tenant="t")
    call = rig.stub.Stat(request, timeout=WAIT_S, metadata=(("x-large", "x" * (17 << 10)),))
    error = await failure(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_writer_waits_for_a_handler_that_does_not_read(rig: Rig) -> None:
    call = rig.stub.Stage(timeout=WAIT_S)
    large = stage(1, "stall")
    large.items[0].call.extras = bytes(1 << 20)
    written = 0

    async def push() -> None:
        nonlocal written
        for _ in range(64):
            await call.write(large)
            written += 1

    pushing = asyncio.ensure_future(push())
    await soon(rig.fake.started.wait())
    await asyncio.wait({pushing}, timeout=0.5)
    assert not pushing.done()
    assert written < 64, "64 MiB do not pile up"
    assert rig.fake.received == 1
    rig.fake.released.set()
    await soon(pushing)
    call.cancel()


async def test_handler_waits_for_a_caller_that_does_not_read(rig: Rig) -> None:
    call = rig.stub.Stage(timeout=WAIT_S)
    await call.write(stage(1, "flood"))
    await call.read()
    await asyncio.wait({asyncio.ensure_future(rig.fake.released.wait())}, timeout=0.5)
    assert rig.fake.produced < 128, "responses do not pile up without end"
    call.cancel()


@pytest.mark.requirement("API-6")
async def test_calls_over_the_limit_are_shed_and_waits_are_apart(
    open_rig: Callable[..., Awaitable[Rig]],
) -> None:
    rig = await open_rig(limits=CallLimits(calls=1, waits=1))
    slow = rig.stub.Stat(pb.StatRequest(tenant="slow"), timeout=WAIT_S)
    await soon(rig.fake.started.wait())
    error = error_of_rpc(await failure(rig.stub.Stat(pb.StatRequest(tenant="t"), timeout=WAIT_S)))
    assert error.reason == er.ERROR_REASON_OVERLOADED
    assert error.metadata == {"limit": "concurrent_calls", "limit_value": "1"}
    assert error.retry_after_ms == 100
    stream = rig.stub.Stage(timeout=WAIT_S)
    await stream.write(stage(1))
    await stream.read()
    second = rig.stub.Stage(timeout=WAIT_S)
    error = error_of_rpc(await failure(second.read()))
    assert error.metadata["limit"] == "concurrent_waits"
    rig.fake.released.set()
    assert (await slow).call_count == 7


@pytest.mark.requirement("API-6")
async def test_drain_finishes_what_was_taken_and_refuses_the_rest(rig: Rig) -> None:
    slow = rig.stub.Stat(pb.StatRequest(tenant="slow"), timeout=WAIT_S)
    await soon(rig.fake.started.wait())
    stopping = asyncio.ensure_future(rig.server.stop())
    await soon(rig.drain.wait())
    error = error_of_rpc(await failure(rig.stub.Stat(pb.StatRequest(tenant="t"), timeout=WAIT_S)))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert error.reason == er.ERROR_REASON_DRAINING
    assert not stopping.done()
    assert rig.service.stops == 0
    rig.fake.released.set()
    assert (await slow).call_count == 7
    await soon(stopping)
    assert rig.service.stops == 1


@pytest.mark.requirement("API-6")
async def test_drain_cancels_what_outlasts_the_grace(
    open_rig: Callable[..., Awaitable[Rig]],
) -> None:
    rig = await open_rig(grace_s=0.1)
    slow = rig.stub.Stat(pb.StatRequest(tenant="slow"), timeout=WAIT_S)
    await soon(rig.fake.started.wait())
    await soon(rig.server.stop())
    assert rig.fake.cancelled.is_set()
    assert rig.service.stops == 1
    assert (await failure(slow)).code() in (
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNAVAILABLE,
    )


async def test_closed_channel_ends_its_calls(rig: Rig) -> None:
    call = rig.stub.Stat(pb.StatRequest(tenant="slow"), timeout=WAIT_S)
    await soon(rig.fake.started.wait())
    await rig.channel.close()
    with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
        await call
    await soon(rig.fake.cancelled.wait())
    with pytest.raises(grpc.aio.UsageError):
        rig.stub.Stat(pb.StatRequest(tenant="t"), timeout=WAIT_S)
