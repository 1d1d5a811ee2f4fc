"""A forgotten attempt leaves its number behind, and nothing else."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.lmdb_store import LmdbStore
from callforest_mesh.ledger.ledger import Ledger
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.ledger.settlement import SettlementWatch
from callforest_mesh.ledger.store import DATABASES, LmdbLedgerStore
from tests.unit.chassis.stores import make
from tests.unit.ledger.calls import KEY, TENANT, intent, record

pytestmark = pytest.mark.requirement("OPS-3")
FIRST, SECOND = AttemptKey(TENANT, KEY), AttemptKey(TENANT, f"{KEY}-a1")
REQUESTS = [str(uuid.UUID(int=number)) for number in range(4)]


class Opened:
    """A ledger over a store of its own."""

    def __init__(self, path: Path) -> None:
        self.lmdb: LmdbStore = make(path, databases=DATABASES, name="ledger")
        self.store = LmdbLedgerStore(lambda: self.lmdb)
        self.store.open()
        watch = SettlementWatch("ledger", waits_max=4)
        self.ledger = Ledger(self.store, watch, cached_calls_max=1000)

    async def close(self) -> None:
        await self.store.close()
        await self.ledger.stop()


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Opened]:
    made = Opened(tmp_path / "ledger")
    yield made
    await made.close()


def reason(outcome: pytest.ExceptionInfo[Refusal]) -> er.ErrorReason.ValueType:
    return outcome.value.reason


async def test_only_a_sealed_attempt_is_forgotten(opened: Opened) -> None:
    ledger = opened.ledger
    assert await ledger.forget(FIRST) == 0, "what is not there is no error"
    await ledger.open_attempt(TENANT, KEY, REQUESTS[0])
    await ledger.record_intent(TENANT, intent("a"))
    with pytest.raises(Refusal) as refused:
        await ledger.forget(FIRST)
    assert reason(refused) == er.ERROR_REASON_ATTEMPT_NOT_SEALED
    assert refused.value.facts == {"capture_key": KEY, "state": "ATTEMPT_STATE_OPEN"}
    await ledger.close_admissions(FIRST)
    with pytest.raises(Refusal) as refused:
        await ledger.forget(FIRST)
    assert refused.value.facts["state"] == "ATTEMPT_STATE_CLOSED"
    await ledger.commit_record(TENANT, record("a"))
    await ledger.seal(FIRST)
    assert await ledger.forget(FIRST) == 5
    assert await ledger.forget(FIRST) == 0


async def test_a_forgotten_number_is_not_given_again(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "ledger")
    await opened.ledger.open_attempt(TENANT, KEY, REQUESTS[0])
    await opened.ledger.seal(FIRST)
    assert await opened.ledger.forget(FIRST) == 2
    await opened.close()
    opened = Opened(tmp_path / "ledger")
    ledger = opened.ledger
    with pytest.raises(Refusal) as refused:
        await ledger.seal(FIRST)
    assert reason(refused) == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    with pytest.raises(Refusal) as refused:
        await ledger.open_attempt(TENANT, KEY, REQUESTS[0])
    assert reason(refused) == er.ERROR_REASON_ATTEMPT_NOT_FOUND, "its first answer is gone"
    verdict = await ledger.record_intent(TENANT, intent("a"))
    assert verdict.HasField("refused")
    assert not await ledger.has_rows(FIRST)
    attempt = await ledger.open_attempt(TENANT, KEY, REQUESTS[1])
    assert (attempt.capture_key, attempt.attempt_number) == (SECOND.capture_key, 1)
    await ledger.record_intent(TENANT, intent("a", key=SECOND.capture_key))
    third = await ledger.open_attempt(TENANT, KEY, REQUESTS[2])
    assert third.attempt_number == 2
    assert await ledger.forget(SECOND) == 3, "opening the third sealed the second"
    await opened.close()


async def test_a_log_that_is_lost_is_not_taken_for_forgotten(opened: Opened) -> None:
    await opened.ledger.open_attempt(TENANT, KEY, REQUESTS[0])

    def lose(txn) -> None:
        for key, _ in list(txn.scan("events", b"")):
            txn.delete("events", key)

    await opened.lmdb.write(lose, reserve=True)
    with pytest.raises(Refusal) as refused:
        await opened.ledger.open_attempt(TENANT, KEY, REQUESTS[1])
    assert reason(refused) == er.ERROR_REASON_ATTEMPT_NOT_FOUND


async def test_others_are_untouched_and_go_on_beside_it(opened: Opened) -> None:
    ledger = opened.ledger
    other = AttemptKey(TENANT, "other")
    await ledger.open_attempt(TENANT, KEY, REQUESTS[0])
    await ledger.open_attempt(TENANT, "other", REQUESTS[1])
    await ledger.record_intent(TENANT, intent("a", key="other"))
    await ledger.seal(FIRST)
    forgotten, committed = await asyncio.gather(
        ledger.forget(FIRST), ledger.commit_record(TENANT, record("a", key="other"))
    )
    assert (forgotten, committed.revision) == (2, 3)
    assert await ledger.has_rows(other)
