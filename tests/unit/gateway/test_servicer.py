"""The gRPC edge: who waits for a call has a future of its answer, and leaves by ending that."""

from __future__ import annotations

import asyncio

import pytest

from callforest.capture.v1 import item_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.conversations import Conversations
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
from callforest_mesh.gateway.measuring import Measuring
from callforest_mesh.gateway.options import GatewayOptions
from callforest_mesh.gateway.reading import ChainReader
from callforest_mesh.gateway.servicer import GatewayServicer
from callforest_mesh.gateway.work import Work
from tests.unit.gateway.played_services import RESPONSE, Played, away, calls_of, staged
from tests.unit.gateway.repeated_calls import Held, until

CALL = pb.CompletionCall(
    capture_key="k",
    api=pb.COMPLETION_API_CHAT,
    request=b'{"messages":[{"role":"user","content":"go"}]}',
)
CONTEXT = item_pb2.ItemContext(sequence=1, tenant="t", timeout_ms=60_000)
LIMIT_S = 10.0


def asked(played: Played, calls: Calls) -> asyncio.Future[pb.ServedCompletion]:
    """Ask for a call as an item of a stream does."""
    measuring = Measuring(
        played, played, EngineConfiguration(played), GatewayOptions(), new_id=str, now_ns=int
    )
    work = Work(ChainReader(Conversations()), calls, measuring)
    return GatewayServicer("t", work, played, Drain())._serve(CONTEXT, CALL)


async def test_one_that_waits_has_the_response_and_what_was_added_to_the_generation() -> None:
    played = Played(generated=staged(generation_us=3_600_000_000))
    calls = calls_of(played)
    served = await asyncio.wait_for(asked(played, calls), LIMIT_S)
    assert (served.response, served.call_id, served.overhead_us) == (RESPONSE, "c0", 0)
    played.generated = staged()
    played.generated.staged.call_id = "c1"
    again = await asyncio.wait_for(asked(played, calls), LIMIT_S)
    assert (again.response, again.call_id) == (RESPONSE, "c1")
    assert 0 < again.overhead_us < 60e6
    await calls.settle(5.0)


@pytest.mark.requirement("API-6")
async def test_one_that_waits_is_refused_as_the_services_refuse() -> None:
    played = Played(verdict=away())
    calls = calls_of(played)
    with pytest.raises(Refusal) as caught:
        await asyncio.wait_for(asked(played, calls), LIMIT_S)
    assert caught.value.reason == er.ERROR_REASON_PEER_UNAVAILABLE
    assert caught.value.__cause__ is not None
    await calls.settle(5.0)


async def test_a_fault_is_told_to_one_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    calls = calls_of(played)
    monkeypatch.setattr(pb, "ServedCompletion", None)
    with pytest.raises(TypeError):
        await asyncio.wait_for(asked(played, calls), LIMIT_S)
    await calls.settle(5.0)


@pytest.mark.requirement("LED-11")
async def test_a_call_that_nobody_waits_for_is_given_up() -> None:
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, repeat_grace_s=0.0)
    waiting = asked(played, calls)
    await asyncio.wait_for(held.begun.wait(), LIMIT_S)
    waiting.cancel()
    await until(lambda: bool(played.failures))
    assert [failure.worker_reason for failure in played.failures] == ["cancelled"]
    await calls.settle(5.0)


async def test_an_answer_that_comes_as_its_reader_leaves_is_told_to_nobody() -> None:
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, repeat_grace_s=60.0)
    waiting = asked(played, calls)
    await asyncio.wait_for(held.begun.wait(), LIMIT_S)
    waiting.cancel()
    held.go.set()
    await until(lambda: bool(played.records))
    await calls.settle(5.0)
    assert waiting.cancelled()
    assert not faults
