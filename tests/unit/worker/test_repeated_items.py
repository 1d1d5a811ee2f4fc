"""An item that is sent again, since its stream broke: what is staged is not sampled twice (B21)."""

import grpc
import pytest

from callforest.capture.v1 import item_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError, UnavailableError
from callforest_core.refusal import Refusal
from callforest_mesh.worker.calls import Calls
from callforest_mesh.worker.options import WorkerOptions
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.unit.worker.played_staging import CONTEXT, PlayedStaging, call_of

AGAIN = item_pb2.ItemContext(sequence=2, tenant="t", timeout_ms=60_000, is_repeat=True)
NOT_FOUND = RefusedError(
    grpc.StatusCode.NOT_FOUND, "no such call", reason=er.ERROR_REASON_CALL_NOT_FOUND
)
AWAY = UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone")


async def worker_on(staging: PlayedStaging) -> tuple[Calls, ScriptedEngine]:
    """Start a worker as it is after the death of the one before: it knows nothing."""
    engine = ScriptedEngine()
    await engine.start()
    return Calls(engine, staging, WorkerOptions("unused")), engine


async def test_what_is_staged_is_given_and_not_sampled_again() -> None:
    staging = PlayedStaging()
    before, _ = await worker_on(staging)
    first = await before.generate(CONTEXT, call_of())
    assert not staging.fetched, "the first sending costs no look"
    behind, engine = await worker_on(staging)
    second = await behind.generate(AGAIN, call_of())
    assert not engine.prompts
    assert staging.fetched == [("k", "c")]
    assert len(staging.calls) == 1
    first.generation_us = 0
    assert second == first


async def test_what_is_not_staged_is_sampled() -> None:
    staging = PlayedStaging()
    staging.fetching = NOT_FOUND
    calls, engine = await worker_on(staging)
    generated = await calls.generate(AGAIN, call_of())
    assert generated.HasField("staged")
    assert len(engine.prompts) == len(staging.calls) == 1


async def test_nothing_is_sampled_while_nobody_knows() -> None:
    staging = PlayedStaging()
    staging.fetching = AWAY
    calls, engine = await worker_on(staging)
    with pytest.raises(UnavailableError):
        await calls.generate(AGAIN, call_of())
    assert not engine.prompts


async def test_an_item_without_time_for_the_look_is_late_and_no_outage() -> None:
    staging = PlayedStaging()
    staging.fetching = UnavailableError(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
    calls, engine = await worker_on(staging)
    short = item_pb2.ItemContext(sequence=2, tenant="t", timeout_ms=20, is_repeat=True)
    with pytest.raises(Refusal) as caught:
        await calls.generate(short, call_of())
    assert caught.value.reason == er.ERROR_REASON_ITEM_DEADLINE
    with pytest.raises(UnavailableError):
        await calls.generate(AGAIN, call_of())
    assert not engine.prompts


async def test_a_call_without_capture_has_nothing_to_look_for() -> None:
    staging = PlayedStaging()
    calls, engine = await worker_on(staging)
    await calls.generate(AGAIN, call_of(captured=False))
    assert not staging.fetched
    assert len(engine.prompts) == 1
