"""The life of a call at the edge, with the services behind it played by hand."""

import asyncio
import json

import pytest

from callforest.capture.v1 import (
    capture_admission_pb2,
    commit_coords_pb2,
)
from callforest.error.v1 import error_reason_pb2 as er
from callforest.worker.v1 import worker_service_pb2 as worker_pb
from callforest_mesh.gateway.refusals import HttpRefusal
from tests.unit.gateway.played_services import (
    COMPLETION,
    REQUEST,
    RESPONSE,
    UNCAPTURED,
    Played,
    away,
    calls_of,
    coords,
    refused,
    serve,
    staged,
)


@pytest.mark.requirement("CAP-4", "CAP-6")
async def test_call_is_announced_generated_recorded_then_served() -> None:
    played = Played()
    served = await serve(played)
    assert played.order == ["describe", "intent", "generate", "record"]
    assert served.body == RESPONSE
    (intent,), (call,), (record,) = played.intents, played.calls, played.records
    assert intent.call_id == call.call_id == call.admission.call_id == served.call_id == "c0"
    assert intent.body_digest == REQUEST.body_digest
    assert call.chat_request == REQUEST.body
    assert intent.admit_time == call.create_time == record.admit_time
    assert intent.admit_time.ToNanoseconds() == 1_700_000_000_123_456_000
    assert record.coords == coords()
    assert record.completion == COMPLETION
    assert record.response_id == "chatcmpl-c0"


@pytest.mark.requirement("CAP-4")
async def test_every_call_has_an_id_of_its_own() -> None:
    played = Played(generated=staged(failed=worker_pb.CaptureFailure(reason="stage_failed")))
    calls = calls_of(played)
    served = await asyncio.gather(*(calls.serve("k", REQUEST) for _ in range(8)))
    assert len({one.call_id for one in served}) == 8


@pytest.mark.requirement("CAP-7")
async def test_uncaptured_call_is_served_and_has_its_row_already() -> None:
    played = Played(verdict=UNCAPTURED, generated=staged(staged=None))
    assert (await serve(played)).body == RESPONSE
    assert not played.calls[0].HasField("admission")
    assert played.order == ["describe", "intent", "generate"]


@pytest.mark.requirement("CAP-7", "LED-11")
async def test_failed_capture_is_served_with_the_workers_reason() -> None:
    failed = worker_pb.CaptureFailure(reason="stage_timeout", detail="10 s")
    played = Played(generated=staged(failed=failed))
    assert (await serve(played)).body == RESPONSE
    (failure,) = played.failures
    assert (failure.reason, failure.worker_reason, failure.detail) == (
        "worker_capture_failed",
        "stage_timeout",
        "10 s",
    )
    assert not played.records


@pytest.mark.requirement("CAP-7", "LED-11")
async def test_missing_coordinates_are_a_failure() -> None:
    played = Played(generated=staged(staged=None))
    assert (await serve(played)).body == RESPONSE
    assert [one.reason for one in played.failures] == ["worker_response_missing_commit_coordinates"]


@pytest.mark.requirement("LED-13")
@pytest.mark.parametrize("foreign", [coords(capture_key="other"), coords(call_id="other")])
async def test_coordinates_of_another_call_are_never_recorded(
    foreign: commit_coords_pb2.CommitCoords,
) -> None:
    played = Played(generated=staged(staged=foreign))
    assert (await serve(played)).body == RESPONSE
    assert not played.records
    (failure,) = played.failures
    assert (failure.call_id, failure.reason) == ("c0", "invalid_worker_commit_coordinates")


@pytest.mark.requirement("LED-13", "CAP-7")
@pytest.mark.parametrize(
    "reason",
    [
        er.ERROR_REASON_COORDINATES_MISMATCH,
        er.ERROR_REASON_CALL_MISMATCH,
        er.ERROR_REASON_ATTEMPT_SEALED,
    ],
)
async def test_refused_record_is_served_where_the_ledger_marked_the_call(
    reason: er.ErrorReason.ValueType,
) -> None:
    played = Played(record_answers=[refused(reason)])
    assert (await serve(played)).body == RESPONSE
    assert played.order == ["describe", "intent", "generate", "record"]


@pytest.mark.requirement("LED-11")
async def test_record_that_the_ledger_cannot_take_becomes_a_failure() -> None:
    played = Played(record_answers=[refused(er.ERROR_REASON_INVALID_MESSAGE)])
    assert (await serve(played)).body == RESPONSE
    assert [one.reason for one in played.failures] == ["invalid_worker_commit_coordinates"]


async def test_row_is_sent_again_when_the_ledger_says_when() -> None:
    played = Played(record_answers=[refused(er.ERROR_REASON_OVERLOADED, retry_after_ms=1)])
    assert (await serve(played)).body == RESPONSE
    assert played.order == ["describe", "intent", "generate", "record", "record"]


@pytest.mark.requirement("OPS-3", "CAP-7")
async def test_a_full_ledger_leaves_the_call_pending_and_writes_the_same_row_later() -> None:
    """A failure row in the place of a sound record would mask the rollout for a full disk."""
    full = refused(er.ERROR_REASON_STORE_FULL, retry_after_ms=600_000)
    played = Played(record_answers=[full, None])
    calls = calls_of(played)
    with pytest.raises(HttpRefusal) as caught:
        await calls.serve("k", REQUEST)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 600)
    await calls.finish(10)
    assert played.order == ["describe", "intent", "generate", "record", "record"]
    assert played.records[0] == played.records[1]
    assert not played.failures


@pytest.mark.requirement("CAP-7")
async def test_nothing_is_served_while_no_row_is_known_to_be_durable() -> None:
    """After an unknown outcome only the same write may follow."""
    played = Played(record_answers=[away()])
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert played.order == ["describe", "intent", "generate", "record", "record"]
    assert played.records[0] == played.records[1]


@pytest.mark.parametrize("reason", [er.ERROR_REASON_INTERNAL, er.ERROR_REASON_STORE_CORRUPT])
async def test_fault_of_the_ledger_is_no_refusal(reason: er.ErrorReason.ValueType) -> None:
    played = Played(record_answers=[refused(reason)])
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert caught.value.status == 503
    assert not played.failures


async def test_failure_row_that_is_not_durable_serves_nothing() -> None:
    played = Played(generated=staged(staged=None), failure_answers=[away()])
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert caught.value.status == 503


@pytest.mark.requirement("CAP-7")
async def test_intent_that_is_not_durable_is_refused_before_generation() -> None:
    played = Played(verdict=away(), failure_answers=[refused(er.ERROR_REASON_CALL_NOT_ADMITTED)])
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert caught.value.status == 503
    assert not played.calls
    # It may be durable all the same: then the call must not stay pending.
    assert [one.reason for one in played.failures] == [
        "request_finished_without_staged_coordinates"
    ]


async def test_refused_verdict_is_refused_before_generation() -> None:
    closed = capture_admission_pb2.Refused(reason=er.ERROR_REASON_ATTEMPT_CLOSED, message="closed")
    played = Played(verdict=capture_admission_pb2.Verdict(refused=closed))
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert (caught.value.status, caught.value.code) == (422, "attempt_closed")
    assert played.order == ["describe", "intent"]


async def test_unknown_verdict_is_refused_before_generation() -> None:
    played = Played(verdict=capture_admission_pb2.Verdict())
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert caught.value.status == 500
    assert not played.calls


@pytest.mark.requirement("LED-11")
async def test_absent_engine_leaves_a_failure() -> None:
    played = Played(generated=away())
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert caught.value.status == 503
    assert [one.reason for one in played.failures] == [
        "request_finished_without_staged_coordinates"
    ]


@pytest.mark.requirement("CAP-6")
async def test_leaked_tokens_are_not_served() -> None:
    leaking = json.dumps({"id": "x", "prompt_token_ids": [1], "choices": []}).encode()
    played = Played(generated=staged(chat_response=leaking))
    with pytest.raises(HttpRefusal) as caught:
        await serve(played)
    assert caught.value.status == 500
    assert "prompt_token_ids" not in caught.value.message
    assert played.order == ["describe", "intent", "generate", "failure"]


@pytest.mark.requirement("LED-11")
async def test_harness_that_goes_away_ends_generation_and_leaves_a_failure() -> None:
    generating = asyncio.Event()
    ended: list[str] = []

    async def generate() -> None:
        generating.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    played = Played(generating=generate)
    calls = calls_of(played)
    harness = asyncio.ensure_future(calls.serve("k", REQUEST))
    await generating.wait()
    harness.cancel()
    await asyncio.wait({harness})
    await calls.settle(5.0)
    assert harness.cancelled()
    assert ended == ["cancelled"]
    (failure,) = played.failures
    assert failure.reason == "request_finished_without_staged_coordinates"


@pytest.mark.requirement("LED-11")
async def test_harness_that_goes_away_during_admission_never_generates() -> None:
    admitting, admit = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        admitting.set()
        await admit.wait()

    played = Played(admitting=wait)
    calls = calls_of(played)
    harness = asyncio.ensure_future(calls.serve("k", REQUEST))
    await admitting.wait()
    harness.cancel()
    await asyncio.wait({harness})
    admit.set()
    await calls.settle(5.0)
    assert played.order == ["describe", "intent", "fetch", "failure"]


async def test_staged_call_is_recorded_though_the_harness_went_away() -> None:
    """Its tokens are durable and its row is due: only the response is lost."""
    recording, record = asyncio.Event(), asyncio.Event()

    class Slow(Played):
        async def record(self, *given: object, **named: object) -> object:
            recording.set()
            await record.wait()
            return await super().record(*given, **named)

    played = Slow()
    calls = calls_of(played)
    harness = asyncio.ensure_future(calls.serve("k", REQUEST))
    await recording.wait()
    harness.cancel()
    await asyncio.wait({harness})
    record.set()
    await calls.settle(5.0)
    assert played.order == ["describe", "intent", "generate", "record"]


async def test_calls_beyond_the_bound_are_refused() -> None:
    generating, generate = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        generating.set()
        await generate.wait()

    played = Played(generating=wait)
    calls = calls_of(played, calls_max=1)
    first = asyncio.ensure_future(calls.serve("k", REQUEST))
    await generating.wait()
    with pytest.raises(HttpRefusal) as caught:
        await calls.serve("k", REQUEST)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    assert len(played.intents) == 1
    generate.set()
    assert (await first).body == RESPONSE


async def test_fault_of_the_gateway_leaves_a_failure() -> None:
    played = Played(generated=KeyError("a fault"))
    with pytest.raises(KeyError):
        await serve(played)
    assert [one.reason for one in played.failures] == [
        "request_finished_without_staged_coordinates"
    ]
