"""The engine's configuration, which every call names, and calls that their worker refuses."""

import asyncio

import grpc
import pytest

from callforest.capture.v1 import capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_client.errors import RefusedError
from callforest_mesh.gateway.engine_configuration import EngineConfiguration
from callforest_mesh.gateway.refusals import HttpRefusal
from tests.unit.gateway.played_services import (
    DESCRIPTION,
    REQUEST,
    RESPONSE,
    ROOT,
    UNCAPTURED,
    Played,
    away,
    calls_of,
    refused,
    serve,
)
from tests.unit.gateway.repeated_calls import PENDING, earlier


@pytest.mark.requirement("CAP-7")
async def test_engines_refusal_is_passed_on_and_withdraws_the_call() -> None:
    """Nothing was generated, so nothing is lost: the attempt is not poisoned."""
    too_long = RefusedError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "maximum context length is 64 tokens",
        reason=er.ERROR_REASON_REQUEST_REFUSED,
        metadata={"parameter": "messages"},
    )
    played = Played(generated=too_long)
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert (caught.value.status, caught.value.parameter) == (400, "messages")
    assert "context length" in caught.value.message
    assert played.order == ["describe", "intent", "generate", "withdrawal"]
    (withdrawal,) = played.withdrawals
    assert (withdrawal.call_id, withdrawal.reason) == ("c0", "REQUEST_REFUSED")
    assert "context length" in withdrawal.detail


@pytest.mark.requirement("CAP-7")
@pytest.mark.parametrize(
    ("item_again", "call_again", "row"),
    [(False, False, "withdrawal"), (True, False, "failure"), (False, True, "failure")],
)
async def test_a_worker_at_its_bound_costs_a_call_unless_it_was_asked_before(
    item_again: bool, call_again: bool, row: str
) -> None:
    """A refused repeat says nothing of the first, which may have been generated."""
    full = refused(er.ERROR_REASON_OVERLOADED, retry_after_ms=1500)
    full.of_repeat = item_again
    played = Played(generated=full, verdict=earlier(PENDING) if call_again else ROOT)
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 2)
    assert played.order[-1] == row
    assert [one.reason for one in played.withdrawals] == ["OVERLOADED"] * (row == "withdrawal")


@pytest.mark.requirement("CAP-7")
async def test_withdrawal_that_is_not_durable_serves_nothing() -> None:
    played = Played(generated=refused(er.ERROR_REASON_REQUEST_REFUSED), failure_answers=[away()])
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert caught.value.status == 503


async def test_refused_call_that_is_served_uncaptured_is_not_withdrawn() -> None:
    """It has a failure row already."""
    played = Played(verdict=UNCAPTURED, generated=refused(er.ERROR_REASON_REQUEST_REFUSED))
    with pytest.raises(HttpRefusal):
        await serve(played)
    assert played.order == ["describe", "intent", "generate"]


@pytest.mark.requirement("CAP-11")
async def test_call_names_the_engines_configuration_that_was_asked_for_once() -> None:
    played = Played()
    calls = calls_of(played)
    await asyncio.gather(*(calls.serve("k", REQUEST) for _ in range(3)))
    assert played.order.count("describe") == 1
    digests = {one.configuration_digest for one in (*played.intents, *played.calls)}
    assert digests == {bytes([7]) * 32}


@pytest.mark.requirement("CAP-11")
async def test_engine_that_was_exchanged_is_asked_for_anew() -> None:
    other = worker_pb.DescribeResponse(configuration_digest=bytes([8]) * 32)
    played = Played(
        generated=refused(er.ERROR_REASON_CONFIGURATION_CHANGED), described=[DESCRIPTION, other]
    )
    calls = calls_of(played)
    for _ in range(2):
        with pytest.raises(HttpRefusal) as caught:
            await calls.serve("k", REQUEST)
        assert (caught.value.status, caught.value.code) == (422, "configuration_changed")
        assert "another attempt" in caught.value.message
    assert [one.configuration_digest[0] for one in played.intents] == [7, 8]
    assert [one.reason for one in played.withdrawals] == ["CONFIGURATION_CHANGED"] * 2


@pytest.mark.requirement("CAP-11")
@pytest.mark.parametrize(
    ("present", "announced"), [(8, [7, 8]), (7, [7])], ids=["gateway-behind", "attempt-bound"]
)
async def test_ledger_that_knows_another_configuration_is_asked_again_only_with_news(
    present: int, announced: list[int]
) -> None:
    changed = capture_admission_pb2.Refused(
        reason=er.ERROR_REASON_CONFIGURATION_CHANGED, message="another"
    )
    found = worker_pb.DescribeResponse(configuration_digest=bytes([present]) * 32)
    played = Played(
        verdict=capture_admission_pb2.Verdict(refused=changed), described=[DESCRIPTION, found]
    )
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert caught.value.code == "configuration_changed"
    assert [one.configuration_digest[0] for one in played.intents] == announced
    assert not played.calls


@pytest.mark.requirement("CAP-11")
async def test_nothing_is_announced_while_the_configuration_is_not_known() -> None:
    played = Played(described=[away()])
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert (caught.value.status, played.order) == (503, ["describe"])
    assert (await serve(played)).body == RESPONSE
    nameless = EngineConfiguration(Played(described=[worker_pb.DescribeResponse()]), required=True)
    with pytest.raises(HttpRefusal, match="not known"):
        await nameless.digest()
