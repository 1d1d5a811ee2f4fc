"""The same request is the same call, with the services behind the gateway played by hand."""

import asyncio

import pytest

from callforest.capture.v1 import capture_admission_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_mesh.gateway.asked import Identity
from tests.unit.gateway.played_services import (
    COMPLETION,
    REQUEST,
    RESPONSE,
    ROOT,
    UNCAPTURED,
    Played,
    away,
    calls_of,
    coords,
    refused,
    staged,
)
from tests.unit.gateway.repeated_calls import (
    COMMITTED,
    FAILED,
    FIRST_S,
    KEYED,
    MARKED,
    PENDING,
    Held,
    ask,
    began,
    earlier,
    kept,
    refusal_of,
    until,
)


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize("identity", [KEYED, MARKED])
async def test_an_intent_says_by_what_its_call_is_known(identity: Identity) -> None:
    played = Played()
    assert (await ask(played, identity)).body == RESPONSE
    # Whether it is a repeat is asked before the engine's configuration, which is not known yet.
    assert played.order == ["look_up", "describe", "intent", "generate", "record"]
    for one in (*played.look_ups, *played.intents):
        assert (one.is_keyed, one.is_retry) == (identity is KEYED, identity is MARKED)
        assert (one.call_id, one.body_digest) == ("c0", REQUEST.body_digest)
    assert played.intents[0].WhichOneof("probe") == "chain"


@pytest.mark.requirement("CAP-13")
async def test_a_committed_call_is_served_from_what_is_staged() -> None:
    played = Played(verdict=earlier(COMMITTED), kept={"c0": kept()})
    served = await ask(played)
    assert (served.body, served.call_id, served.generation_us) == (RESPONSE, "c0", 0)
    assert played.order == ["look_up", "fetch"], "neither configuration nor engine is asked"


@pytest.mark.requirement("CAP-13")
async def test_a_consumed_call_is_gone() -> None:
    played = Played(verdict=earlier(COMMITTED))
    refusal = await refusal_of(ask(played))
    assert (refusal.status, refusal.code) == (422, "attempt_closed")
    assert played.order == ["look_up", "fetch"]


@pytest.mark.requirement("CAP-13")
async def test_a_staged_pending_call_is_adopted() -> None:
    played = Played(verdict=earlier(PENDING), kept={"c0": kept()})
    assert (await ask(played)).body == RESPONSE
    (record,) = played.records
    assert record.coords == coords(), "four carried, three generated"
    assert record.admit_time.seconds == FIRST_S
    assert (record.completion, record.response_id) == (COMPLETION, "chatcmpl-c0")
    assert record.fingerprints.output
    assert played.order == ["look_up", "fetch", "record"]


@pytest.mark.requirement("CAP-13")
async def test_a_pending_call_that_is_not_staged_is_generated_as_it_was_admitted() -> None:
    played = Played(verdict=earlier(PENDING))
    assert (await ask(played)).body == RESPONSE
    (call,), (record,) = played.calls, played.records
    assert call.create_time.seconds == record.admit_time.seconds == FIRST_S
    assert call.admission.call_id == "c0"
    assert played.order == ["look_up", "fetch", "describe", "measure", "generate", "record"]


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize("staging", [away(), refused(er.ERROR_REASON_STORE_CORRUPT)])
async def test_what_cannot_be_asked_of_staging_is_not_generated_again(staging: Exception) -> None:
    played = Played(verdict=earlier(PENDING), staging_answers=[staging, staging])
    refusal = await refusal_of(ask(played))
    assert refusal.status in (500, 503)
    assert played.calls == []
    assert played.failures == [], "it stays pending: a repeat may adopt it"


@pytest.mark.requirement("CAP-13", "CAP-7")
@pytest.mark.parametrize("state", ["closed", "sealed"])
async def test_a_closed_attempt_adopts_and_generates_nothing(state: str) -> None:
    reason = er.ERROR_REASON_ATTEMPT_CLOSED
    closed = capture_admission_pb2.Verdict(
        refused=capture_admission_pb2.Refused(reason=reason, metadata={"state": state})
    )
    played = Played(verdict=earlier(PENDING), measured=closed)
    refusal = await refusal_of(ask(played))
    assert refusal.code == "attempt_closed"
    assert played.calls == []
    assert [one.call_id for one in played.failures] == ["c0"], "nobody else settles it"
    adopting = Played(verdict=earlier(PENDING), measured=closed, kept={"c0": kept()})
    assert (await ask(adopting)).body == RESPONSE
    assert len(adopting.records) == 1


@pytest.mark.requirement("CAP-13", "CAP-7")
@pytest.mark.parametrize("verdict", [ROOT, UNCAPTURED])
async def test_a_failed_call_is_generated_again_without_capture(
    verdict: capture_admission_pb2.Verdict,
) -> None:
    played = Played(verdict=earlier(FAILED, verdict=verdict), generated=staged(staged=None))
    assert (await ask(played)).body == RESPONSE
    assert not played.calls[0].HasField("admission")
    assert (played.records, played.failures) == ([], [])


@pytest.mark.requirement("CAP-13")
async def test_a_failed_call_that_is_staged_is_served_and_never_committed() -> None:
    played = Played(verdict=earlier(FAILED), kept={"c0": kept()})
    assert (await ask(played)).body == RESPONSE
    assert played.order == ["look_up", "fetch"]


@pytest.mark.requirement("CAP-13")
async def test_an_intent_that_was_sent_twice_is_no_repeat() -> None:
    """A stream broke: the ledger answers with the call itself, which nobody else can name."""
    played = Played(verdict=earlier(PENDING))
    assert (await ask(played, Identity())).body == RESPONSE
    assert played.order == ["describe", "intent", "generate", "record"]


@pytest.mark.requirement("CAP-13")
async def test_a_marked_repeat_takes_the_id_of_its_call() -> None:
    played = Played(verdict=earlier(PENDING, "first"), kept={"first": kept("first")})
    served = await ask(played, MARKED)
    assert served.call_id == "first"
    assert [one.coords.call_id for one in played.records] == ["first"]


@pytest.mark.requirement("CAP-13")
async def test_a_marked_repeat_waits_for_its_call_and_holds_no_place() -> None:
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, calls_max=2)
    first = began(calls, Identity())
    await held.begun.wait()
    played.verdict = earlier(PENDING, "c0")
    repeats = []
    for _ in range(3):
        joined = began(calls, MARKED)
        repeats.append(joined)
        count = len(played.intents)
        await until(lambda count=count: len(played.intents) > count)
        await asyncio.sleep(0.01)
    held.go.set()
    assert {one.call_id for one in await asyncio.gather(first, *repeats)} == {"c0"}
    assert len(played.calls) == len(played.records) == 1
    await calls.settle(5.0)


@pytest.mark.requirement("CAP-13")
async def test_a_marked_repeat_is_not_announced_before_its_call_is() -> None:
    held = Held()

    class Slow(Played):
        async def admit(self, *given: object, **named: object) -> object:
            self.verdict = earlier(COMMITTED, "c0") if self.intents else ROOT
            return await super().admit(*given, **named)

    played = Slow(admitting=held, kept={"c0": kept()})
    calls = calls_of(played)
    first = began(calls, Identity())
    await held.begun.wait()
    again = began(calls, MARKED)
    await asyncio.sleep(0.02)
    assert len(played.intents) == 1
    assert not played.look_ups
    held.go.set()
    assert (await first).call_id == "c0"
    assert (await again).call_id == "c0"
    await calls.settle(5.0)


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


@pytest.mark.requirement("LED-11", "CAP-13")
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("pushed_back", [refused(er.ERROR_REASON_OVERLOADED), away()], ids=str)
async def test_a_call_whose_repeat_is_pushed_back_is_settled_all_the_same(
    pushed_back: Exception, is_staged: bool
) -> None:
    """The repeat has taken the duty over from the life before it, which is gone."""
    played = Played(generated=away(), kept={"c0": kept()} if is_staged else {})
    calls = calls_of(played, repeat_grace_s=30.0)
    assert (await refusal_of(calls.serve("k", REQUEST, KEYED))).status == 503
    played.verdict = pushed_back
    for _ in range(2):
        assert (await refusal_of(calls.serve("k", REQUEST, KEYED))).status in (429, 503)
    played.verdict = earlier(PENDING)
    await calls.finish(5.0)
    assert played.order[-1] == ("record" if is_staged else "failure")
    assert len(played.records) + len(played.failures) == 1


@pytest.mark.requirement("LED-11", "CAP-13")
async def test_what_a_repeat_has_settled_is_not_settled_again() -> None:
    played = Played(generated=away())
    calls = calls_of(played, repeat_grace_s=30.0)
    assert (await refusal_of(calls.serve("k", REQUEST, KEYED))).status == 503
    played.verdict, played.generated = earlier(PENDING), refused(er.ERROR_REASON_OVERLOADED)
    assert (await refusal_of(calls.serve("k", REQUEST, KEYED))).status == 429
    await calls.finish(5.0)
    assert [one.call_id for one in played.failures] == ["c0"]
    assert not played.withdrawals


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
