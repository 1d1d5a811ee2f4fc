"""The Ledger over a channel: what its callers see."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import status_pb2

from callforest.capture.v1 import attempt_pb2, item_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_service_pb2 as pb
from callforest.ledger.v1 import ledger_service_pb2_grpc as rpc
from callforest_client import unary
from callforest_client.errors import (
    CallforestError,
    RefusedError,
    UnavailableError,
    error_of,
    error_of_rpc,
)
from callforest_client.ledger import LedgerClient
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from tests.unit.ledger.calls import (
    FIRST,
    SECOND,
    TENANT,
    failure,
    first_told,
    intent,
    numbered,
    probe,
    record,
    said,
    user,
)

WAIT_S = 30.0
CHILD = Path(__file__).with_name("ledger_child.py")
ServiceOpener = Callable[..., Awaitable[grpc.aio.Channel]]


def options_of(path: Path, **changes: object) -> LedgerOptions:
    sizes = {"map_size_bytes": 64 << 20, "quota_bytes": 32 << 20}
    return LedgerOptions(path / "ledger", **{**sizes, **changes})


def request_id() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def drain() -> Drain:
    return Drain()


@pytest.fixture
async def channel(open_service: ServiceOpener, tmp_path: Path, drain: Drain) -> grpc.aio.Channel:
    return await open_service(LedgerService(options_of(tmp_path), drain), drain)


@pytest.fixture
async def client(channel: grpc.aio.Channel) -> AsyncIterator[LedgerClient]:
    client = LedgerClient(channel, tenant=TENANT, timeout_s=WAIT_S)
    yield client
    await client.close()


async def refused(asked: Awaitable[object]) -> CallforestError:
    with pytest.raises(CallforestError) as caught:
        await asked
    return caught.value


@pytest.mark.requirement("LED-1", "LED-2", "LED-5")
async def test_a_rollout_from_its_opening_to_its_seal(client: LedgerClient) -> None:
    opened = await client.open_attempt("r1", request_id=request_id())
    assert (opened.capture_key, opened.state) == ("r1", attempt_pb2.ATTEMPT_STATE_OPEN)
    assert (await client.record_intent(intent("a"))).HasField("root")
    assert not await client.has_rows("r1")
    root = record("a")
    committed = await client.record(root)
    assert (committed.revision, committed.kept_record) == (3, False)
    assert await client.has_rows("r1")
    found = await client.find_predecessor("r1", probe(SECOND))
    verdict = await client.record_intent(intent("b", SECOND))
    assert verdict == found
    assert verdict.continuation.parent_call_id == "a"
    child = record("b", SECOND, "B", parent=root)
    await client.record(child)
    await client.record_intent(intent("c", [user("aside")]))
    await client.record_failure(failure("c"))
    assert (await client.record_failure(failure("b"))).kept_record
    await client.record_intent(intent("d", [user("lost")]))
    closed = await client.close_admissions("r1")
    assert closed.state == attempt_pb2.ATTEMPT_STATE_CLOSED
    assert list(closed.pending_call_ids) == ["d"]
    assert list((await client.await_settled("r1", wait_s=0)).pending_call_ids) == ["d"]
    sealed = await client.seal("r1")
    manifest = await client.manifest("r1")
    assert manifest.attempt == sealed
    assert manifest.records == [numbered(root, 1), numbered(child, 2)]
    assert manifest.failures == [failure("c")]
    assert (sealed.record_count, sealed.failure_count) == (2, 1)
    assert list(sealed.pending_call_ids) == ["d"]


@pytest.mark.requirement("LED-2")
async def test_a_manifest_of_many_rows_comes_whole_and_in_order(
    client: LedgerClient, channel: grpc.aio.Channel
) -> None:
    await client.open_attempt("r1", request_id=request_id())
    names = [f"c{number}".ljust(100, "x") for number in range(900)]
    contexts = {name: [user(name)] for name in names}
    await asyncio.gather(*(client.record_intent(intent(name, contexts[name])) for name in names))
    for start in range(0, len(names), 300):
        rows = [record(name, contexts[name], name) for name in names[start : start + 300]]
        await asyncio.gather(*(client.record(row) for row in rows))
    manifest = await client.manifest("r1")
    assert sorted(row.coords.call_id for row in manifest.records) == sorted(names)
    again = await client.manifest("r1")
    assert manifest == again
    stub = rpc.LedgerServiceStub(channel)
    request = pb.GetManifestRequest(tenant=TENANT, capture_key="r1")
    pages = [page async for page in unary.stream(stub.GetManifest, request, timeout_s=WAIT_S)]
    assert len(pages) > 2
    assert max(page.ByteSize() for page in pages) < 1 << 20
    assert [page.HasField("attempt") for page in pages] == [True, *[False] * (len(pages) - 1)]


@pytest.mark.requirement("API-3", "LED-1")
async def test_one_bad_item_never_fails_its_stream(
    client: LedgerClient, channel: grpc.aio.Channel
) -> None:
    await client.open_attempt("r1", request_id=request_id())
    await client.record_intent(intent("a"))
    await client.record_intent(intent("b", [user("b")]))
    entries = [
        attempt_pb2.ManifestEntry(record=record("a")),
        attempt_pb2.ManifestEntry(),
        attempt_pb2.ManifestEntry(record=record("nobody")),
        attempt_pb2.ManifestEntry(failure=failure("b")),
    ]
    request = pb.CommitCallsRequest(
        items=[
            pb.CommitCallsItem(
                context=item_pb2.ItemContext(sequence=number, tenant=TENANT, timeout_ms=20_000),
                entry=entry,
            )
            for number, entry in enumerate(entries, 1)
        ]
    )
    call = rpc.LedgerServiceStub(channel).CommitCalls(timeout=WAIT_S)
    await call.write(request)
    outcomes: dict[int, pb.CommittedEntry | status_pb2.Status] = {}
    while len(outcomes) < len(entries):
        response = await call.read()
        assert isinstance(response, pb.CommitCallsResponse)
        for one in response.results:
            which = one.WhichOneof("outcome")
            outcomes[one.sequence] = one.committed if which == "committed" else one.error
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert outcomes[1] == pb.CommittedEntry(revision=4)
    assert outcomes[4] == pb.CommittedEntry(revision=5)
    reasons = [error_of(outcomes[number]).reason for number in (2, 3)]
    assert reasons == [er.ERROR_REASON_INVALID_MESSAGE, er.ERROR_REASON_CALL_NOT_ADMITTED]


@pytest.mark.requirement("API-3", "CAP-4")
async def test_many_calls_share_messages_and_are_each_announced_once(client: LedgerClient) -> None:
    await client.open_attempt("r1", request_id=request_id())
    names = [f"c{number}" for number in range(200)]
    twice = [
        await_one
        for name in names
        for await_one in (
            client.record_intent(intent(name, [user(name)])),
            client.record_intent(intent(name, [user(name)])),
        )
    ]
    verdicts = await asyncio.gather(*twice)
    assert all(verdict.HasField("root") for verdict in verdicts)
    shown = await client.await_settled("r1", wait_s=0)
    assert sorted(shown.pending_call_ids) == sorted(names)
    assert shown.revision == 1 + len(names)


@pytest.mark.requirement("API-6")
async def test_errors_name_reason_code_and_ids(client: LedgerClient) -> None:
    for asked in (
        client.close_admissions("r0"),
        client.seal("r0"),
        client.await_settled("r0", wait_s=1),
        client.manifest("r0"),
        client.find_predecessor("r0", probe(FIRST)),
        client.record(record("a", key="r0")),
        client.record_failure(failure("a", key="r0")),
    ):
        error = await refused(asked)
        assert isinstance(error, RefusedError)
        assert (error.code, error.reason, error.metadata) == (
            grpc.StatusCode.NOT_FOUND,
            er.ERROR_REASON_ATTEMPT_NOT_FOUND,
            {"capture_key": "r0"},
        )
    assert not await client.has_rows("r0")
    verdict = await client.record_intent(intent("a", key="r0"))
    assert verdict.refused.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    await client.open_attempt("r1", request_id=request_id())
    await client.record_intent(intent("a"))
    error = await refused(client.record_intent(intent("a", body="other")))
    assert (error.code, error.reason) == (
        grpc.StatusCode.ALREADY_EXISTS,
        er.ERROR_REASON_CALL_MISMATCH,
    )
    assert error.metadata == {"capture_key": "r1", "call_id": "a", "field": "body_digest"}
    await client.seal("r1")
    error = await refused(client.record(record("a")))
    assert (error.code, error.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        er.ERROR_REASON_ATTEMPT_SEALED,
    )
    assert error.metadata == {"capture_key": "r1", "call_id": "a"}


@pytest.mark.requirement("LED-13", "LED-12")
async def test_coordinates_that_leave_their_admission_poison_the_attempt(
    client: LedgerClient,
) -> None:
    await client.open_attempt("r1", request_id=request_id())
    await client.record_intent(intent("a"))
    await client.record(record("a"))
    await client.record_intent(intent("b", SECOND))
    wrong = record("b", SECOND, "B", parent=record("a"))
    wrong.coords.prev_token_count = 3
    for _ in range(2):
        error = await refused(client.record(wrong))
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert error.reason == er.ERROR_REASON_COORDINATES_MISMATCH
        assert error.metadata["field"] == "prev_token_count"
    manifest = await client.manifest("r1")
    assert [row.reason for row in manifest.failures] == ["invalid_worker_commit_coordinates"]
    assert [row.coords.call_id for row in manifest.records] == ["a"]
    follow = [*SECOND, said("B"), user("three")]
    assert (await client.record_intent(intent("c", follow))).HasField("uncaptured")


@pytest.mark.requirement("API-6")
async def test_a_rollout_must_not_be_named_like_an_attempt(channel: grpc.aio.Channel) -> None:
    stub = rpc.LedgerServiceStub(channel)
    request = pb.OpenAttemptRequest(tenant=TENANT, rollout_id="r1-a2", request_id=request_id())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.OpenAttempt(request, timeout=WAIT_S)
    error = error_of_rpc(caught.value)
    assert error.reason == er.ERROR_REASON_INVALID_MESSAGE
    assert "rollout_id" in error.message


@pytest.mark.requirement("CAP-4")
async def test_the_next_attempt_ends_the_one_before(client: LedgerClient) -> None:
    first_request, second_request = request_id(), request_id()
    first = await client.open_attempt("r1", request_id=first_request)
    await client.record_intent(intent("a"))
    second = await client.open_attempt("r1", request_id=second_request)
    assert (second.capture_key, second.attempt_number) == ("r1-a1", 1)
    assert await client.open_attempt("r1", request_id=first_request) == first
    assert await client.open_attempt("r1", request_id=second_request) == second
    error = await refused(client.record(record("a")))
    assert error.reason == er.ERROR_REASON_ATTEMPT_SEALED
    assert (await client.manifest("r1")).attempt.superseded
    assert not await client.has_rows("r1-a1")


async def test_a_wait_ends_when_the_last_call_commits(client: LedgerClient) -> None:
    await client.open_attempt("r1", request_id=request_id())
    await client.record_intent(intent("a"))
    await client.close_admissions("r1")
    wait = asyncio.ensure_future(client.await_settled("r1", wait_s=WAIT_S))
    await client.has_rows("r1")
    await client.record(record("a"))
    settled = await wait
    assert not settled.pending_call_ids
    assert settled.state == attempt_pb2.ATTEMPT_STATE_CLOSED


@pytest.mark.requirement("API-6")
async def test_a_drain_sends_waiters_away(
    client: LedgerClient, channel: grpc.aio.Channel, drain: Drain
) -> None:
    await client.open_attempt("r1", request_id=request_id())
    await client.record_intent(intent("a"))
    stub = rpc.LedgerServiceStub(channel)
    request = pb.AwaitSettledRequest(tenant=TENANT, capture_key="r1", wait_ms=600_000)
    wait = asyncio.ensure_future(_error_of_wait(stub, request))
    await client.has_rows("r1")
    drain.begin()
    error = await wait
    assert isinstance(error, UnavailableError)
    assert error.reason == er.ERROR_REASON_DRAINING


async def _error_of_wait(stub: rpc.LedgerServiceStub, request: pb.AwaitSettledRequest) -> object:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.AwaitSettled(request, timeout=WAIT_S)
    return error_of_rpc(caught.value)


@pytest.mark.requirement("LED-4")
@pytest.mark.parametrize("store", ["memory", "redis", ""])
async def test_a_store_that_can_lose_rows_is_refused_at_start(tmp_path: Path, store: str) -> None:
    drain = Drain()
    server = MeshServer(LedgerService(options_of(tmp_path, store=store), drain), "", drain)
    with pytest.raises(Refusal) as caught:
        await server.start()
    assert caught.value.reason == er.ERROR_REASON_VOLATILE_STORE
    assert caught.value.facts == ({"store": store} if store else {})
    assert not (tmp_path / "ledger").exists()


@pytest.mark.requirement("LED-1", "LED-2")
async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    before: list[object] = []
    for run in range(2):
        drain = Drain()
        server = MeshServer(LedgerService(options_of(tmp_path), drain), "", drain)
        await server.start()
        client = LedgerClient(server.local_channel(), tenant=TENANT, timeout_s=WAIT_S)
        if run == 0:
            await client.open_attempt("r1", request_id=request_id())
            await client.record_intent(intent("a"))
            await client.record(record("a"))
        verdict = await client.record_intent(intent("b", SECOND))
        before.append((verdict if run == 0 else first_told(verdict), await client.manifest("r1")))
        await client.close()
        await server.stop()
    assert before[0] == before[1]
    assert verdict.continuation.parent_call_id == "a"
