"""Forest mode through Admission and the Ledger, over channels."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from callforest.capture.v1 import attempt_pb2, capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.admission import AdmissionClient
from callforest_client.errors import CallforestError
from callforest_client.ledger import LedgerClient
from callforest_mesh.admission.service import AdmissionOptions, AdmissionService
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from tests.unit.ledger.calls import (
    FIRST,
    SECOND,
    TENANT,
    failure,
    intent,
    numbered,
    record,
    said,
    user,
    withdrawal,
)
from tests.unit.ledger.forest_calls import (
    CHAIN,
    ENGINE,
    FOREST,
    forest_intent,
    forest_record,
)

WAIT_S = 30.0
ServiceOpener = Callable[..., Awaitable[grpc.aio.Channel]]


@dataclass
class Mesh:
    """A client of Admission, and one of the ledger behind it."""

    admission: AdmissionClient
    ledger: LedgerClient


@pytest.fixture
async def mesh(
    open_service: ServiceOpener, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Mesh]:
    """Serve both; Admission opens attempts in chain mode unless the test's parameter is True."""
    ledger_drain, drain = Drain(), Drain()
    options = LedgerOptions(tmp_path / "ledger", map_size_bytes=64 << 20, quota_bytes=32 << 20)
    ledger_channel = await open_service(LedgerService(options, ledger_drain), ledger_drain)
    behind = LedgerClient(ledger_channel, tenant="nobody", timeout_s=WAIT_S)
    chosen = AdmissionOptions(forest=getattr(request, "param", False))
    channel = await open_service(AdmissionService(chosen, drain, behind), drain)
    mesh = Mesh(
        AdmissionClient(channel, tenant=TENANT, timeout_s=WAIT_S),
        LedgerClient(ledger_channel, tenant=TENANT, timeout_s=WAIT_S),
    )
    yield mesh
    for client in (mesh.admission, mesh.ledger, behind):
        await client.close()


def request_id() -> str:
    return str(uuid.uuid4())


async def reason(asked: Awaitable[object]) -> er.ErrorReason.ValueType:
    with pytest.raises(CallforestError) as caught:
        await asked
    return caught.value.reason


async def test_an_attempt_keeps_the_mode_it_was_opened_in(mesh: Mesh) -> None:
    request = request_id()
    opened = await mesh.admission.open_attempt("r1", request_id=request, mode=FOREST)
    assert opened.mode == FOREST
    again = await mesh.admission.open_attempt("r1", request_id=request, mode=FOREST)
    assert again == opened
    other = mesh.admission.open_attempt("r1", request_id=request)
    assert await reason(other) == er.ERROR_REASON_MODE_MISMATCH
    assert (await mesh.ledger.manifest("r1")).attempt == opened, "nothing was opened or sealed"
    assert (await mesh.admission.open_attempt("r2", request_id=request_id())).mode == CHAIN
    verdict = await mesh.admission.admit(intent("a"))
    assert verdict.refused.reason == er.ERROR_REASON_MODE_MISMATCH
    unknown: attempt_pb2.CaptureMode.ValueType = 9  # type: ignore[assignment]  # a later release's
    odd = mesh.admission.open_attempt("r3", request_id=request_id(), mode=unknown)
    assert await reason(odd) == er.ERROR_REASON_INVALID_MESSAGE


@pytest.mark.requirement("ADM-2", "ADM-4")
async def test_a_forest_from_its_opening_to_its_manifest(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id(), mode=FOREST)
    root = forest_record("a")
    assert (await mesh.admission.admit(forest_intent("a"))).HasField("root")
    await mesh.ledger.record(root)
    verdict = await mesh.admission.admit(forest_intent("b", SECOND))
    assert verdict.continuation.parent_call_id == "a"
    assert verdict.continuation.match == capture_admission_pb2.HISTORY_MATCH_EXACT
    child = forest_record("b", SECOND, "B", parent=root)
    await mesh.ledger.record(child)
    compacted = [user("summary"), said("B"), user("go on")]
    rewritten = await mesh.admission.admit(forest_intent("c", compacted))
    assert rewritten.root.reason == capture_admission_pb2.ROOT_REASON_HISTORY_NOT_RECORDED
    await mesh.ledger.record(forest_record("c", compacted, "C"))
    shown = await mesh.ledger.get_call("r1", "b")
    assert (shown.verdict, shown.record, list(shown.failures)) == (verdict, numbered(child, 2), [])
    manifest = await mesh.ledger.manifest("r1")
    assert [row.coords.call_id for row in manifest.records] == ["a", "b", "c"]
    assert not manifest.failures
    # What a candidate was matched by is the admission's alone; links are the ancestry.
    stored = b"".join(row.SerializeToString() for row in manifest.entries)
    assert [row.coords.parent_call_id for row in manifest.records] == ["", "a", ""]
    assert verdict.continuation.SerializeToString() not in stored


@pytest.mark.requirement("ADM-2")
async def test_an_ambiguity_leaves_the_attempt_as_it_was(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id(), mode=FOREST)
    for name in ("a", "twin"):
        await mesh.admission.admit(forest_intent(name))
        await mesh.ledger.record(forest_record(name))
    before = await mesh.ledger.manifest("r1")
    verdict = await mesh.admission.admit(forest_intent("b", SECOND))
    assert verdict.refused.reason == er.ERROR_REASON_AMBIGUOUS_HISTORY
    assert "a, twin" in verdict.refused.message
    assert await mesh.ledger.manifest("r1") == before
    assert await reason(mesh.ledger.get_call("r1", "b")) == er.ERROR_REASON_CALL_NOT_FOUND


@pytest.mark.requirement("ADM-2", "CAP-11")
async def test_measuring_judges_as_admission_would_and_writes_nothing(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id(), mode=FOREST)
    await mesh.admission.admit(forest_intent("a", engine=ENGINE))
    await mesh.ledger.record(forest_record("a"))
    before = await mesh.ledger.manifest("r1")
    asked = [
        forest_intent("b", SECOND, engine=ENGINE),
        forest_intent("b", FIRST, engine=ENGINE),
        forest_intent("b", SECOND, claim="z", engine=ENGINE),
        forest_intent("b", SECOND, engine=bytes(32)),
        intent("b"),
    ]
    measured = [await mesh.admission.measure(one) for one in asked]
    assert await mesh.ledger.manifest("r1") == before
    assert [one.WhichOneof("verdict") for one in measured] == [
        "continuation",
        "root",
        "refused",
        "refused",
        "refused",
    ]
    assert [one.refused.reason for one in measured[2:]] == [
        er.ERROR_REASON_HISTORY_CLAIM_REFUSED,
        er.ERROR_REASON_CONFIGURATION_CHANGED,
        er.ERROR_REASON_MODE_MISMATCH,
    ]
    admitted = [await mesh.admission.admit(one) for one in asked[2:]]
    assert admitted[0].refused.metadata["call_id"] == "b"
    del admitted[0].refused.metadata["call_id"]
    assert admitted == measured[2:]
    assert await mesh.admission.admit(asked[0]) == measured[0]
    unknown = mesh.admission.measure(forest_intent("b", key="nobody"))
    assert await reason(unknown) == er.ERROR_REASON_ATTEMPT_NOT_FOUND


async def test_chain_mode_is_measured_alike(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id())
    await mesh.admission.admit(intent("a"))
    await mesh.ledger.record(record("a"))
    measured = await mesh.admission.measure(intent("b", SECOND))
    assert measured == await mesh.admission.admit(intent("b", SECOND))


@pytest.mark.requirement("CFG-1")
@pytest.mark.parametrize("mesh", [True], indirect=True)
async def test_an_attempt_without_a_mode_is_of_that_of_the_mesh(mesh: Mesh) -> None:
    request = request_id()
    opened = await mesh.admission.open_attempt("r1", request_id=request)
    assert opened.mode == FOREST, "resolved, and stored so"
    assert (await mesh.ledger.manifest("r1")).attempt.mode == FOREST
    assert await mesh.admission.open_attempt("r1", request_id=request, mode=FOREST) == opened
    chain = await mesh.admission.open_attempt("r2", request_id=request_id(), mode=CHAIN)
    assert chain.mode == CHAIN, "who asks for a mode gets it"


@pytest.mark.requirement("LED-1", "LED-2", "CAP-13")
async def test_a_withdrawn_call_is_settled_shown_and_announced_anew(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id(), mode=FOREST)
    await mesh.admission.admit(forest_intent("w"))
    withdrawn = withdrawal("w", detail="the context is too long")
    await mesh.ledger.record_withdrawal(withdrawn)
    settled = await mesh.ledger.await_settled("r1", wait_s=0.0)
    assert not settled.pending_call_ids
    assert not await mesh.ledger.has_rows("r1")
    manifest = await mesh.ledger.manifest("r1")
    assert manifest.withdrawals == [withdrawn]
    assert (manifest.records, manifest.failures) == ([], [])
    assert (await mesh.ledger.get_call("r1", "w")).withdrawal == withdrawn
    late = mesh.ledger.record(forest_record("w"))
    assert await reason(late) == er.ERROR_REASON_CALL_MISMATCH
    verdict = await mesh.admission.admit(forest_intent("w"))
    assert not verdict.HasField("earlier")
    await mesh.ledger.record(forest_record("w"))
    repeat = await mesh.admission.admit(forest_intent("w"))
    assert repeat.earlier.state == capture_admission_pb2.EARLIER_STATE_COMMITTED


@pytest.mark.requirement("CAP-11")
async def test_a_call_of_forest_mode_without_a_configuration_is_malformed(mesh: Mesh) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id(), mode=FOREST)
    bare = forest_intent("a", engine=b"")
    assert await reason(mesh.admission.admit(bare)) == er.ERROR_REASON_INVALID_MESSAGE
    assert await reason(mesh.admission.measure(bare)) == er.ERROR_REASON_INVALID_MESSAGE


@pytest.mark.requirement("LED-9")
@pytest.mark.parametrize("mode", [CHAIN, FOREST])
async def test_a_request_that_ended_badly_behind_its_record_is_seen_in_forest_mode_alone(
    mesh: Mesh, mode: attempt_pb2.CaptureMode.ValueType
) -> None:
    await mesh.admission.open_attempt("r1", request_id=request_id(), mode=mode)
    is_forest = mode == FOREST
    await mesh.admission.admit(forest_intent("a") if is_forest else intent("a"))
    committed = forest_record("a") if is_forest else record("a")
    await mesh.ledger.record(committed)
    ended = failure("a", "request_finished_without_staged_coordinates")
    assert (await mesh.ledger.record_failure(ended)).kept_record
    await mesh.ledger.seal("r1")
    manifest = await mesh.ledger.manifest("r1")
    assert manifest.records == [numbered(committed, 1)]
    assert manifest.failures == ([ended] if is_forest else [])
    assert manifest.attempt.failure_count == len(manifest.failures)
    assert list((await mesh.ledger.get_call("r1", "a")).failures) == manifest.failures
