"""Admission before a ledger, both over channels: verdicts, tenants, and a ledger that is away."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest

from callforest.admission.v1 import admission_service_pb2 as pb
from callforest.admission.v1 import admission_service_pb2_grpc as rpc
from callforest.capture.v1 import attempt_pb2, capture_admission_pb2, item_pb2, restore_point_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.ledger.v1 import ledger_service_pb2_grpc as ledger_rpc
from callforest_client.admission import AdmissionClient
from callforest_client.channel import connect
from callforest_client.errors import (
    CallforestError,
    RefusedError,
    UnavailableError,
    error_of,
    error_of_rpc,
)
from callforest_client.ledger import LedgerClient
from callforest_mesh.admission.service import AdmissionOptions, AdmissionService
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from tests.unit.ledger.calls import SECOND, TENANT, first_told, intent, record, said, user

WAIT_S = 30.0
ServiceOpener = Callable[..., Awaitable[grpc.aio.Channel]]


@dataclass
class Mesh:
    """Admission, the ledger behind it, and a client of each."""

    admission: AdmissionClient
    ledger: LedgerClient
    channel: grpc.aio.Channel
    ledger_drain: Drain


@pytest.fixture
async def mesh(open_service: ServiceOpener, tmp_path: Path) -> AsyncIterator[Mesh]:
    ledger_drain, drain = Drain(), Drain()
    options = LedgerOptions(tmp_path / "ledger", map_size_bytes=64 << 20, quota_bytes=32 << 20)
    ledger_channel = await open_service(LedgerService(options, ledger_drain), ledger_drain)
    # The service's own client names no tenant of ours: each item brings its own.
    behind = LedgerClient(ledger_channel, tenant="nobody", timeout_s=WAIT_S)
    channel = await open_service(AdmissionService(AdmissionOptions(), drain, behind), drain)
    mesh = Mesh(
        AdmissionClient(channel, tenant=TENANT, timeout_s=WAIT_S),
        LedgerClient(ledger_channel, tenant=TENANT, timeout_s=WAIT_S),
        channel,
        ledger_drain,
    )
    yield mesh
    for client in (mesh.admission, mesh.ledger, behind):
        await client.close()


def request_id() -> str:
    return str(uuid.uuid4())


@pytest.mark.requirement("ADM-1")
async def test_a_call_is_a_root_a_continuation_or_uncaptured(mesh: Mesh) -> None:
    opened = await mesh.admission.open_attempt("r1", request_id=request_id())
    assert opened.capture_key == "r1"
    seeded = [user("given"), said("earlier"), user("go on")]
    assert (await mesh.admission.admit(intent("a"))).HasField("root")
    assert (await mesh.admission.admit(intent("seed", seeded))).HasField("root")
    await mesh.ledger.record(record("a"))
    verdict = await mesh.admission.admit(intent("b", SECOND))
    assert verdict.continuation.parent_call_id == "a"
    assert verdict.continuation.parent_chain_hash == record("a").coords.chain_hash
    broken = await mesh.admission.admit(intent("c", [user("one"), said("edited"), user("two")]))
    assert broken.uncaptured.reason == "unresolved_parent"
    [row] = (await mesh.ledger.manifest("r1")).failures
    assert (row.call_id, row.reason) == ("c", "unresolved_parent")
    assert (await mesh.admission.admit(intent("seed2", seeded))).HasField("uncaptured")


@pytest.mark.requirement("CAP-4")
async def test_the_server_names_attempts_and_calls_may_overlap(mesh: Mesh) -> None:
    first = await mesh.admission.open_attempt("r1", request_id=request_id())
    second = await mesh.admission.open_attempt("r1", request_id=request_id())
    assert (first.capture_key, second.capture_key) == ("r1", "r1-a1")
    names = [f"c{number}" for number in range(20)]
    intents = [intent(name, [user(name)], key="r1-a1") for name in names]
    verdicts = await asyncio.gather(*(mesh.admission.admit(one) for one in intents))
    assert all(verdict.HasField("root") for verdict in verdicts)
    shown = await mesh.ledger.await_settled("r1-a1", wait_s=0)
    assert sorted(shown.pending_call_ids) == sorted(names), "announced before any inference"
    for name in reversed(names):
        await mesh.ledger.record(record(name, [user(name)], name, key="r1-a1"))
    assert not (await mesh.ledger.await_settled("r1-a1", wait_s=0)).pending_call_ids


@pytest.mark.requirement("CAP-4")
async def test_a_repeat_gets_the_same_verdict(mesh: Mesh) -> None:
    request = request_id()
    opened = await mesh.admission.open_attempt("r1", request_id=request)
    assert await mesh.admission.open_attempt("r1", request_id=request) == opened
    first = await mesh.admission.admit(intent("a"))
    await mesh.ledger.record(record("a"))
    continued = await mesh.admission.admit(intent("b", SECOND))
    await mesh.admission.close_attempt("r1")
    assert first_told(await mesh.admission.admit(intent("a"))) == first
    assert first_told(await mesh.admission.admit(intent("b", SECOND))) == continued
    assert (await mesh.ledger.manifest("r1")).attempt.revision == 5


async def test_a_closed_or_unknown_attempt_is_a_verdict(mesh: Mesh) -> None:
    verdict = await mesh.admission.admit(intent("a"))
    assert verdict.refused.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    await mesh.admission.open_attempt("r1", request_id=request_id())
    closed = await mesh.admission.close_attempt("r1")
    assert closed.state == attempt_pb2.ATTEMPT_STATE_CLOSED
    verdict = await mesh.admission.admit(intent("a"))
    assert verdict.refused.reason == er.ERROR_REASON_ATTEMPT_CLOSED
    with pytest.raises(CallforestError) as caught:
        await mesh.admission.close_attempt("r2")
    assert caught.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND


@pytest.mark.requirement("API-6")
async def test_tenants_share_a_stream_and_nothing_else(mesh: Mesh) -> None:
    other = mesh.admission.for_tenant("other")
    await mesh.admission.open_attempt("r1", request_id=request_id())
    await other.open_attempt("r1", request_id=request_id())
    await mesh.admission.admit(intent("a"))
    await mesh.ledger.record(record("a"))
    ours, theirs = await asyncio.gather(
        mesh.admission.admit(intent("b", SECOND)), other.admit(intent("b", SECOND))
    )
    assert ours.HasField("continuation")
    assert theirs.HasField("root"), "a seeded history: the other tenant has no rows"


@pytest.mark.requirement("API-6")
async def test_a_mismatch_reaches_the_caller_as_the_ledger_said_it(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id())
    await mesh.admission.admit(intent("a"))
    with pytest.raises(CallforestError) as caught:
        await mesh.admission.admit(intent("a", body="other"))
    error = caught.value
    assert error.code is grpc.StatusCode.ALREADY_EXISTS
    assert error.reason == er.ERROR_REASON_CALL_MISMATCH
    assert error.metadata == {"capture_key": "r1", "call_id": "a", "field": "body_digest"}


@pytest.mark.requirement("API-6")
async def test_one_bad_item_never_fails_its_stream(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id())
    bad = intent("b")
    bad.body_digest = b"short"
    request = pb.AdmitCallsRequest(
        items=[
            pb.AdmitCallsItem(
                context=item_pb2.ItemContext(sequence=number, tenant=TENANT, timeout_ms=20_000),
                intent=one,
            )
            for number, one in enumerate((intent("a"), bad, intent("c")), 1)
        ]
    )

    async def requests() -> AsyncIterator[pb.AdmitCallsRequest]:
        yield request

    results = {}
    stub = rpc.AdmissionServiceStub(mesh.channel)
    async for response in stub.AdmitCalls(requests(), timeout=WAIT_S):
        results |= {one.sequence: one for one in response.results}
    assert results[1].verdict.HasField("root")
    assert results[3].verdict.HasField("root")
    assert error_of(results[2].error).reason == er.ERROR_REASON_INVALID_MESSAGE


@pytest.mark.requirement("API-6")
async def test_without_a_ledger_nothing_is_admitted_and_the_peer_is_named(mesh: Mesh) -> None:
    """The intent cannot be made durable, so the call must not be generated."""
    await mesh.admission.open_attempt("r1", request_id=request_id())
    await mesh.admission.admit(intent("a"))
    mesh.ledger_drain.begin()
    hurried = AdmissionClient(mesh.channel, tenant=TENANT, timeout_s=0.5)
    stub = rpc.AdmissionServiceStub(mesh.channel)
    opening = pb.OpenAttemptRequest(tenant=TENANT, rollout_id="r2", request_id=request_id())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.OpenAttempt(opening, timeout=0.5)
    error = error_of_rpc(refused.value)
    assert (error.code, error.reason, error.metadata) == (
        grpc.StatusCode.UNAVAILABLE,
        er.ERROR_REASON_PEER_UNAVAILABLE,
        {"peer": "ledger"},
    )
    with pytest.raises(UnavailableError) as late:
        await hurried.admit(intent("b"))
    # The caller's own clock may be the first to strike.
    assert late.value.reason in {er.ERROR_REASON_PEER_UNAVAILABLE, er.ERROR_REASON_ITEM_DEADLINE}
    await hurried.close()


class _Recorder:
    """Stands for the ledger's client and notes how it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, str]] = []
        self._tenant = ""

    def for_tenant(self, tenant: str) -> _Recorder:
        self._tenant = tenant
        return self

    async def record_intent(
        self, announced: attempt_pb2.CallIntent, *, timeout_s: float, traceparent: str
    ) -> capture_admission_pb2.Verdict:
        assert announced == intent("a")
        self.asked.append((self._tenant, timeout_s, traceparent))
        return capture_admission_pb2.Verdict(root=capture_admission_pb2.Root())


@pytest.mark.requirement("API-6")
async def test_time_trace_and_tenant_go_on_to_the_ledger() -> None:
    ledger, drain = _Recorder(), Drain()
    service = AdmissionService(AdmissionOptions(), drain, cast("LedgerClient", ledger))
    server = MeshServer(service, "", drain)
    await server.start()
    client = AdmissionClient(server.local_channel(), tenant=TENANT, timeout_s=2.0)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await client.admit(intent("a"), traceparent=trace)
    [(tenant, timeout_s, traceparent)] = ledger.asked
    assert (tenant, traceparent) == (TENANT, trace)
    assert 0 < timeout_s <= 1.95, "50 ms are kept for the way back"
    await client.close()
    await server.stop()


@pytest.mark.requirement("TRN-12")
async def test_an_attempt_is_restored_and_continued(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id())
    await mesh.admission.admit(intent("a"))
    await mesh.ledger.record(record("a"))
    request = request_id()
    named = restore_point_pb2.RestorePoint(capture_schema=3, capture_key="r1", call_ids=["a"])
    opened = await mesh.admission.restore_attempt("r1", request_id=request, point=named)
    assert (opened.capture_key, opened.restored_from, opened.restored_count) == ("r1-a1", "r1", 1)
    assert await mesh.admission.restore_attempt("r1", request_id=request, point=named) == opened
    verdict = await mesh.admission.admit(intent("b", SECOND, key="r1-a1"))
    assert verdict.continuation.parent_call_id == "a"
    assert verdict.continuation.parent_capture_key == "r1"
    with pytest.raises(RefusedError) as caught:
        await mesh.admission.restore_attempt("r1", request_id=request, point=named)
    assert caught.value.reason == er.ERROR_REASON_RESTORE_REFUSED
    assert caught.value.metadata["fault"] == "in_use"


class OlderLedger(ledger_rpc.LedgerServiceServicer):
    """A ledger of a release that cannot restore; it would note that it was told to seal."""


@pytest.mark.requirement("TRN-12")
async def test_a_ledger_that_cannot_restore_says_so(open_service: ServiceOpener) -> None:
    """It is no absence: a client that repeated it would never get another answer."""
    server = grpc.aio.server()
    ledger_rpc.add_LedgerServiceServicer_to_server(OlderLedger(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    drain = Drain()
    behind = LedgerClient(connect(f"127.0.0.1:{port}"), timeout_s=WAIT_S)
    channel = await open_service(AdmissionService(AdmissionOptions(), drain, behind), drain)
    admission = AdmissionClient(channel, tenant=TENANT, timeout_s=WAIT_S)
    named = restore_point_pb2.RestorePoint(capture_schema=3, capture_key="r1", call_ids=["a"])
    with pytest.raises(RefusedError) as caught:
        await admission.restore_attempt("r1", request_id=request_id(), point=named)
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    for client in (admission, behind):
        await client.close()
    await server.stop(None)
