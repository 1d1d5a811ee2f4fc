"""The same request is the same call, with the services behind the gateway played by hand."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

import pytest

from callforest.capture.v1 import capture_admission_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.lineage.items import Dialect
from callforest_mesh.gateway import core
from callforest_mesh.gateway.asked import Identity, call_id_of, digest_body, identify
from callforest_mesh.gateway.calls import Calls
from callforest_mesh.gateway.evidence import Claim
from callforest_mesh.gateway.life import Served
from callforest_mesh.gateway.lives import WAITERS_MAX
from callforest_mesh.gateway.refusals import HttpRefusal
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

KEYED = Identity("c0")
MARKED = Identity(is_marked=True)
OTHER = core.read_request(b'{"messages":[{"role":"user","content":"other"}]}')
PENDING = capture_admission_pb2.EARLIER_STATE_PENDING
COMMITTED = capture_admission_pb2.EARLIER_STATE_COMMITTED
FAILED = capture_admission_pb2.EARLIER_STATE_FAILED
FIRST_S = 1_600_000_000


def earlier(
    state: capture_admission_pb2.EarlierState.ValueType,
    call_id: str = "c0",
    verdict: capture_admission_pb2.Verdict = ROOT,
) -> capture_admission_pb2.Verdict:
    repeated = capture_admission_pb2.Verdict()
    repeated.CopyFrom(verdict)
    repeated.earlier.call_id, repeated.earlier.state = call_id, state
    repeated.earlier.admit_time.FromSeconds(FIRST_S)
    return repeated


def kept(call_id: str = "c0") -> staged_call_pb2.StagedCall:
    """Make a staged call as it is fetched: without its columns."""
    made = coords(call_id=call_id)
    return staged_call_pb2.StagedCall(
        capture_key="k",
        call_id=call_id,
        canonical=staged_call_pb2.CanonicalColumns(carry_token_count=4),
        served_response=RESPONSE,
        completion=COMPLETION,
        **{
            name: getattr(made, name)
            for name in ("digest", "extras_digest", "chain_hash", "cumulative_hash")
        },
    )


async def ask(played: Played, identity: Identity = KEYED, **options: object) -> Served:
    calls = calls_of(played, **options)
    try:
        return await calls.serve("k", REQUEST, identity)
    finally:
        await calls.settle(5.0)


async def refusal_of(asked: Awaitable[object]) -> HttpRefusal:
    with pytest.raises(HttpRefusal) as caught:
        await asked
    return caught.value


class Held:
    """Something that a test holds until it lets it go."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.begun.set()
        await self.go.wait()


def began(calls: Calls, identity: Identity = KEYED) -> "asyncio.Future[Served]":
    return asyncio.ensure_future(calls.serve("k", REQUEST, identity))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never held")


async def hang_up(harness: "asyncio.Future[Served]") -> None:
    harness.cancel()
    await asyncio.wait({harness})


@pytest.mark.requirement("CAP-13")
def test_a_call_is_named_by_its_attempt_and_key_alone() -> None:
    named = b"callforest-call-id-v1" + bytes(7) + b"\1k" + bytes(7) + b"\3key"
    expected = "k" + hashlib.sha256(named).hexdigest()[:40]
    assert call_id_of("k", "key") == expected == identify("k", ["key"], "1").call_id
    assert len({call_id_of(*pair) for pair in (("k", "a"), ("ka", ""), ("j", "a"))}) == 3
    assert not identify("k", ["key"], "1").is_marked
    assert identify("k", ["!" * 255]).call_id
    for keys in ([""], ["a b"], ["\x7f"], ["é"], ["a" * 256], ["a", "a"]):
        with pytest.raises(HttpRefusal) as caught:
            identify("k", keys)
        assert (caught.value.status, caught.value.parameter) == (400, "Idempotency-Key")


@pytest.mark.requirement("CAP-13")
@pytest.mark.parametrize(
    ("count", "marked"), [("1", True), ("02", True), ("0", False), ("", False), ("-1", False)]
)
def test_what_its_client_counts_marks_a_repeat(count: str, marked: bool) -> None:
    assert identify("k", [], count) == Identity(is_marked=marked)


@pytest.mark.requirement("CAP-13")
def test_the_body_digest_is_of_api_claim_and_body() -> None:
    digests = {
        digest_body(body, dialect, claim)
        for body in (b"{}", b"{ }")
        for dialect in Dialect
        for claim in (
            None,
            Claim("a", history_is_whole=False),
            Claim("a", history_is_whole=True),
            Claim("b", history_is_whole=True),
        )
    }
    assert len(digests) == 16


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
async def test_requests_of_one_key_wait_for_one_generation() -> None:
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, calls_max=1)
    first = began(calls)
    await held.begun.wait()
    others = [began(calls) for _ in range(WAITERS_MAX - 1)]
    await asyncio.sleep(0)
    too_many = await refusal_of(calls.serve("k", REQUEST, KEYED))
    assert (too_many.status, too_many.code) == (429, "overloaded")
    mismatch = await refusal_of(calls_of_other(calls))
    assert (mismatch.status, mismatch.code) == (422, "call_mismatch")
    held.go.set()
    served = await asyncio.gather(first, *others)
    assert {one.body for one in served} == {RESPONSE}
    assert len(played.calls) == len(played.records) == 1
    await calls.settle(5.0)


def calls_of_other(calls: Calls) -> Awaitable[object]:
    async def begin() -> Served:
        waiting = Identity("c0")
        return await calls.begin("k", OTHER, waiting).served()

    return begin()


@pytest.mark.requirement("CAP-13")
async def test_a_waiter_that_leaves_takes_nothing_from_the_others() -> None:
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, repeat_grace_s=0.0)
    first = began(calls)
    await held.begun.wait()
    second = began(calls)
    await asyncio.sleep(0)
    await hang_up(first)
    held.go.set()
    assert (await second).body == RESPONSE
    assert played.failures == []
    await calls.settle(5.0)


@pytest.mark.requirement("CAP-13", "LED-11")
@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_call_is_left_to_a_repeat_when_its_last_waiter_left(comes_back: bool) -> None:
    held = Held()
    played = Played(generating=held)
    calls = calls_of(played, repeat_grace_s=0.1 if not comes_back else 60.0)
    first = began(calls)
    await held.begun.wait()
    await hang_up(first)
    if comes_back:
        again = began(calls)
        await asyncio.sleep(0)
        held.go.set()
        assert (await again).body == RESPONSE
        assert len(played.calls) == 1
        assert played.failures == []
        return
    await until(lambda: bool(played.failures))
    assert [one.detail for one in played.failures] == ["the harness went away"]
    assert played.order[-2:] == ["fetch", "failure"]


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
