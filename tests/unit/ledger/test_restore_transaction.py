"""Restoring over a store: one transaction, the repeat of a request, the order of refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.ledger.ledger import Ledger
from callforest_mesh.ledger.outline import OPEN, SEALED, AttemptKey
from callforest_mesh.ledger.settlement import SettlementWatch
from callforest_mesh.ledger.store import DATABASES, LmdbLedgerStore
from tests.unit.chassis.stores import HeldStore, make, reach
from tests.unit.ledger.calls import FIRST, KEY, SECOND, TENANT, THIRD, failure, intent, record
from tests.unit.ledger.restored_calls import SECOND_KEY, point

pytestmark = pytest.mark.requirement("TRN-12")

REQUESTS = [f"3f2b8a52-0a3a-4b5e-9a58-0d9f8d2f7b{number:02}" for number in range(10, 20)]
NEXT = AttemptKey(TENANT, SECOND_KEY)


class Bench:
    """A ledger of which one attempt has two calls, b behind a."""

    def __init__(self, store: HeldStore) -> None:
        self.held = store
        self.store = LmdbLedgerStore(lambda: store)
        self.store.open()
        self.ledger = Ledger(
            self.store, SettlementWatch("ledger", waits_max=4), cached_calls_max=100
        )

    async def fill(self) -> None:
        await self.ledger.open_attempt(TENANT, KEY, REQUESTS[0])
        first = record("a")
        await self.ledger.record_intent(TENANT, intent("a"))
        await self.ledger.commit_record(TENANT, first)
        await self.ledger.record_intent(TENANT, intent("b", SECOND))
        await self.ledger.commit_record(TENANT, record("b", SECOND, "B", parent=first))

    async def restore(
        self, *call_ids: str, request: int = 1, key: str = KEY, rollout: str = KEY
    ) -> attempt_pb2.Attempt:
        named = point(*call_ids, key=key)
        done = await self.ledger.restore_attempt(TENANT, rollout, REQUESTS[request], named)
        return done.attempt

    async def fault(self, *call_ids: str, request: int = 1, key: str = KEY) -> str:
        with pytest.raises(Refusal) as caught:
            await self.restore(*call_ids, request=request, key=key)
        assert caught.value.reason == er.ERROR_REASON_RESTORE_REFUSED
        return caught.value.facts["fault"]

    async def attempt(self, key: str = KEY) -> attempt_pb2.Attempt:
        return await self.ledger.await_settled(AttemptKey(TENANT, key), wait_s=0)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    held = make(tmp_path / "ledger", HeldStore, databases=DATABASES, name="ledger")
    made = Bench(held)
    await made.fill()
    yield made
    held.gate.set()
    await made.store.close()
    await made.ledger.stop()


async def test_the_attempt_before_is_sealed_with_what_is_pending(bench: Bench) -> None:
    await bench.ledger.record_intent(TENANT, intent("p", THIRD))
    attempt = await bench.restore("b")
    assert (attempt.capture_key, attempt.restored_from) == (SECOND_KEY, KEY)
    assert (attempt.restored_count, attempt.record_count, attempt.revision) == (2, 2, 3)
    assert attempt.state == OPEN
    before = await bench.attempt()
    assert (before.state, before.superseded) == (SEALED, True)
    assert before.pending_call_ids == ["p"]
    with pytest.raises(Refusal) as caught:
        await bench.ledger.commit_record(TENANT, record("p", THIRD, parent=record("b", SECOND)))
    assert caught.value.reason == er.ERROR_REASON_ATTEMPT_SEALED


@pytest.mark.requirement("ADM-9")
async def test_a_manifest_shows_the_owners(bench: Bench) -> None:
    await bench.restore("b")
    rows = [
        entry.record
        async for part in bench.ledger.manifest(NEXT)
        if isinstance(part, list)
        for entry in part
    ]
    assert [(row.coords.call_id, row.source_capture_key) for row in rows] == [
        ("a", KEY),
        ("b", KEY),
    ]


async def test_a_closed_and_a_sealed_attempt_can_be_restored(bench: Bench) -> None:
    await bench.ledger.close_admissions(AttemptKey(TENANT, KEY))
    await bench.restore("b")
    await bench.ledger.seal(NEXT)
    third = await bench.restore("a", key=SECOND_KEY, request=2)
    assert (third.capture_key, third.restored_from) == (f"{KEY}-a2", SECOND_KEY)


async def test_the_repeat_gets_the_first_answer(bench: Bench) -> None:
    first = await bench.restore("b", "a")
    again = await bench.restore("a", "b")
    assert again == first
    assert await bench.fault("a") == "repeat_differs"


async def test_a_used_attempt_is_not_handed_out_again(bench: Bench) -> None:
    await bench.restore("b")
    await bench.ledger.record_intent(TENANT, intent("n", THIRD, key=SECOND_KEY))
    assert await bench.fault("b") == "in_use"


async def test_a_superseded_attempt_is_not_handed_out_again(bench: Bench) -> None:
    await bench.restore("b")
    await bench.restore("b", request=2, key=SECOND_KEY)
    assert await bench.fault("b") == "in_use"


async def test_a_request_means_one_thing(bench: Bench) -> None:
    assert await bench.fault("b", request=0) == "repeat_differs"
    await bench.restore("b")
    with pytest.raises(Refusal) as caught:
        await bench.ledger.open_attempt(TENANT, KEY, REQUESTS[1])
    assert caught.value.facts["fault"] == "repeat_differs"


async def test_only_the_latest_attempt_is_restored(bench: Bench) -> None:
    await bench.ledger.open_attempt(TENANT, KEY, REQUESTS[3])
    with pytest.raises(Refusal) as caught:
        await bench.restore("b")
    assert caught.value.facts["fault"] == "not_latest"
    assert caught.value.facts["latest_capture_key"] == SECOND_KEY
    assert await bench.fault("b", key="other") == "not_latest"


async def test_a_forgotten_log_is_not_restored(bench: Bench) -> None:
    await bench.ledger.seal(AttemptKey(TENANT, KEY))
    await bench.ledger.forget(AttemptKey(TENANT, KEY))
    assert await bench.fault("b") == "log_forgotten"


async def test_a_restored_attempt_outlives_the_log_that_it_came_from(bench: Bench) -> None:
    await bench.restore("b")
    await bench.ledger.forget(AttemptKey(TENANT, KEY))
    third = await bench.restore("b", key=SECOND_KEY, request=2)
    assert third.restored_count == 2


async def test_a_rollout_without_attempt_is_not_restored(bench: Bench) -> None:
    with pytest.raises(Refusal) as caught:
        await bench.restore("b", rollout="r9", key="r9")
    assert caught.value.reason == er.ERROR_REASON_ATTEMPT_NOT_FOUND


@pytest.mark.parametrize("harm", ["poisoned", "unknown call"])
async def test_a_refusal_seals_and_opens_nothing(bench: Bench, harm: str) -> None:
    if harm == "poisoned":
        await bench.ledger.record_intent(TENANT, intent("x", [*FIRST, *FIRST]))
        await bench.ledger.commit_failure(TENANT, failure("x"))
        assert await bench.fault("b", "nowhere") == "capture_poisoned"
    else:
        assert await bench.fault("b", "nowhere") == "call_not_restorable"
    attempt = await bench.attempt()
    assert (attempt.state, attempt.superseded) == (OPEN, False)
    assert bench.store.read(lambda log: log.latest_attempt(TENANT, KEY)) == 0


async def test_a_commit_beside_a_restore_is_restored_or_refused(bench: Bench) -> None:
    """Whichever comes first, no acknowledged call is lost to a sealed attempt."""
    for round_number in range(6):
        rollout = f"s{round_number}"
        await bench.ledger.open_attempt(TENANT, rollout, REQUESTS[4])
        await bench.ledger.record_intent(TENANT, intent("a", key=rollout))
        bench.held.reached.clear()
        bench.held.gate.clear()
        holding = asyncio.ensure_future(bench.held.write(lambda txn: txn.get("rollouts", b"x")))
        await reach(bench.held)
        commit = bench.ledger.commit_record(TENANT, record("a", key=rollout))
        restoring = [bench.restore("a", rollout=rollout, key=rollout, request=5)]
        works = [commit, *restoring] if round_number % 2 else [*restoring, commit]
        waited = asyncio.gather(*works, return_exceptions=True)
        bench.held.gate.set()
        await holding
        answers = await waited
        refusals = [one for one in answers if isinstance(one, Refusal)]
        for refusal in refusals:
            assert refusal.facts["fault"] == "call_not_restorable"
        sealed = bench.store.read(lambda log, r=rollout: log.latest_attempt(TENANT, r)) == 1
        assert sealed == (not refusals)


async def test_a_restore_that_is_not_durable_is_not_seen(bench: Bench) -> None:
    bench.held.reached.clear()
    bench.held.gate.clear()
    restoring = asyncio.ensure_future(bench.restore("b"))
    await reach(bench.held)
    assert bench.store.read(lambda log: log.latest_attempt(TENANT, KEY)) == 0
    assert not restoring.done()
    bench.held.gate.set()
    assert (await restoring).capture_key == SECOND_KEY
