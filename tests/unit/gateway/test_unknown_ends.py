"""What is not known is not a failure: calls whose end nobody saw, and their repeats."""

import asyncio

import pytest

from callforest.capture.v1 import capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_mesh.gateway.asked import Identity
from tests.unit.gateway.played_services import (
    REQUEST,
    RESPONSE,
    Played,
    away,
    calls_of,
    refused,
    staged,
)
from tests.unit.gateway.repeated_calls import (
    FAILED,
    FIRST_S,
    KEYED,
    PENDING,
    Held,
    ask,
    began,
    earlier,
    kept,
    refusal_of,
)


@pytest.mark.requirement("CAP-13", "LED-11")
async def test_an_end_that_is_not_known_is_left_to_a_repeat() -> None:
    played = Played(generated=away())
    calls = calls_of(played, repeat_grace_s=60.0)
    assert (await refusal_of(calls.serve("k", REQUEST, KEYED))).status == 503
    assert played.failures == []
    played.verdict, played.generated = earlier(PENDING), staged()
    assert (await calls.serve("k", REQUEST, KEYED)).body == RESPONSE
    await calls.settle(5.0)
    assert played.failures == []
    assert len(played.records) == 1


@pytest.mark.requirement("CAP-13", "LED-11")
@pytest.mark.parametrize("is_staged", [True, False])
async def test_a_call_whose_end_is_not_known_is_adopted_or_failed(is_staged: bool) -> None:
    played = Played(generated=away(), kept={"c0": kept()} if is_staged else {})
    assert (await refusal_of(ask(played, Identity()))).status == 503
    assert len(played.records) == is_staged
    assert len(played.failures) == (not is_staged)
    assert played.order[-2] == "fetch"


@pytest.mark.requirement("CAP-13")
async def test_an_adopted_call_of_an_unknown_admission_has_its_first_admit_time() -> None:
    answers = [away(), earlier(PENDING)]

    class Late(Played):
        async def admit(self, *given: object, **named: object) -> object:
            self.verdict = answers.pop(0)
            return await super().admit(*given, **named)

    played = Late(kept={"c0": kept()})
    assert (await refusal_of(ask(played, Identity()))).status == 503
    (record,) = played.records
    assert record.admit_time.seconds == FIRST_S


@pytest.mark.requirement("CAP-13")
async def test_a_withdrawn_call_is_no_licence_to_serve() -> None:
    mismatch = refused(er.ERROR_REASON_CALL_MISMATCH)
    mismatch.metadata["field"] = "withdrawal"
    for played in (
        Played(record_answers=[mismatch]),
        Played(generated=staged(staged=None), failure_answers=[mismatch]),
    ):
        assert (await refusal_of(ask(played, Identity()))).status == 503
    mismatch.metadata["field"] = "failure"
    assert (await ask(Played(record_answers=[mismatch]), Identity())).body == RESPONSE


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (er.ERROR_REASON_CALL_MISMATCH, "call_mismatch"),
        (er.ERROR_REASON_AMBIGUOUS_RETRY, "ambiguous_retry"),
    ],
)
async def test_the_ledgers_refusals_of_repeats_are_shown(
    reason: er.ErrorReason.ValueType, code: str
) -> None:
    verdict: object = refused(reason)
    if code == "ambiguous_retry":
        facts = {"capture_key": "k", "candidates": "a,b"}
        told = capture_admission_pb2.Refused(reason=reason, metadata=facts)
        verdict = capture_admission_pb2.Verdict(refused=told)
    refusal = await refusal_of(ask(Played(verdict=verdict)))
    assert (refusal.status, refusal.code, refusal.refusal().reason) == (422, code, reason)


@pytest.mark.requirement("CAP-13")
async def test_a_state_that_is_not_known_serves_nothing() -> None:
    played = Played(verdict=earlier(9), kept={"c0": kept()})
    assert (await refusal_of(ask(played))).status == 500
    assert played.order == ["look_up"]


async def test_a_repeat_during_its_calls_last_row_waits_for_that() -> None:
    """What is being written is written; then the repeat learns of it."""
    held = Held()

    class Slow(Played):
        async def record_failure(self, *given: object, **named: object) -> object:
            await held()
            self.verdict = earlier(FAILED)
            return await super().record_failure(*given, **named)

    played = Slow(generated=away())
    calls = calls_of(played, repeat_grace_s=0.0)
    assert (await refusal_of(calls.serve("k", REQUEST, KEYED))).status == 503
    await held.begun.wait()
    played.generated = staged(staged=None)
    again = began(calls)
    await asyncio.sleep(0.01)
    intents = len(played.intents)
    held.go.set()
    assert (await again).body == RESPONSE
    assert len(played.intents) == intents + 1
    assert (len(played.failures), played.records) == (1, [])
    await calls.settle(5.0)
