"""The row log's transactions where they race: publication, commits of a superseded stream."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import row_log_pb2
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.finalizer import groups
from callforest_mesh.finalizer.cleanup import Cleanup
from callforest_mesh.finalizer.delivery import Subscription, Subscriptions
from callforest_mesh.finalizer.servicer import FinalizerServicer
from callforest_mesh.finalizer.store import DATABASES, RowLog
from tests.unit.chassis.stores import HeldStore, make, putting, reach
from tests.unit.finalizer.rollouts import finalized

TENANT = "acme"


class Joining(RowLog):
    """A rollout joins the group just before each publication, as long as there are some."""

    joining: list[row_log_pb2.FinalizedRollout]

    async def publish(
        self, tenant: str, logged: row_log_pb2.LoggedGroup
    ) -> row_log_pb2.LoggedGroup | None:
        if self.joining:
            await self.keep_rollout(tenant, self.joining.pop())
        return await super().publish(tenant, logged)


@pytest.fixture
def store(tmp_path: Path) -> HeldStore:
    return make(tmp_path / "store", HeldStore, databases=[*DATABASES, "calls"])


@pytest.fixture
async def row_log(store: HeldStore) -> AsyncIterator[Joining]:
    row_log = Joining(lambda: store)
    row_log.joining = []
    row_log.open()
    yield row_log
    await row_log.close()


def subscriptions_of(row_log: RowLog) -> Subscriptions:
    staging = object()  # nothing here reaches Staging
    return Subscriptions(row_log, staging, Cleanup(row_log, staging), Drain())


def laid_out(*rollouts: row_log_pb2.FinalizedRollout) -> row_log_pb2.LoggedGroup:
    return groups.log_group("g", rollouts, row_multiple=1, abandon_reason="")


@pytest.mark.requirement("FIN-3")
async def test_a_group_is_published_with_exactly_its_rollouts_or_not_at_all(
    row_log: Joining,
) -> None:
    await row_log.keep_rollout(TENANT, finalized(0))
    await row_log.keep_rollout(TENANT, finalized(1))
    assert await row_log.publish(TENANT, laid_out(finalized(0))) is None
    assert row_log.state(TENANT).head_cursor == 0
    logged = await row_log.publish(TENANT, laid_out(finalized(0), finalized(1)))
    assert logged is not None
    assert logged.cursor == 1
    again = await row_log.publish(TENANT, laid_out(finalized(0)))
    assert again == logged, "a published group keeps its position"
    assert row_log.state(TENANT).head_cursor == 1


async def test_a_rollout_that_joins_while_its_group_is_published_is_not_left_out(
    row_log: Joining,
) -> None:
    servicer = FinalizerServicer(row_log, None, None, subscriptions_of(row_log), row_multiple=1)
    await row_log.keep_rollout(TENANT, finalized(0))
    row_log.joining = [finalized(1)]
    request = pb.FinalizeGroupRequest(tenant=TENANT, group_id="g", rollout_count=1)
    with pytest.raises(Refusal) as refused:
        await servicer.FinalizeGroup(request, None)
    assert refused.value.reason == er.ERROR_REASON_GROUP_INCOMPLETE
    assert refused.value.facts == {"group_id": "g", "expected": "1", "actual": "0,1"}
    row_log.joining = [finalized(2)]
    request.abandon_reason = "late"
    answer = await servicer.FinalizeGroup(request, None)
    assert (answer.cursor, answer.drop_reason) == (1, "late")
    logged = row_log.at(TENANT, 1)
    assert logged is not None
    assert list(logged.rollout_ids) == ["r0", "r1", "r2"], "each is cleaned with its group"


async def test_a_commit_that_waits_when_its_stream_is_superseded_takes_no_effect(
    store: HeldStore, row_log: Joining
) -> None:
    """The newer stream has read the cursor: it would send what the older one has cleaned."""
    await row_log.keep_rollout(TENANT, finalized(0))
    await row_log.publish(TENANT, laid_out(finalized(0)))
    stream = Subscription(subscriptions_of(row_log), TENANT, "trainer", takes_parts=True)
    stream.begin_behind(1)
    store.gate.clear()
    store.reached.clear()
    earlier = asyncio.ensure_future(store.write(putting(b"key", b"value")))
    await reach(store)
    commit = asyncio.ensure_future(stream._commit(1))
    await asyncio.sleep(0)
    stream.supersede()
    store.gate.set()
    await earlier
    with pytest.raises(Refusal) as refused:
        await commit
    assert refused.value.reason == er.ERROR_REASON_SUBSCRIPTION_SUPERSEDED
    assert row_log.state(TENANT).committed_cursor == 0


async def test_a_consumed_position_is_never_overwritten(row_log: Joining) -> None:
    await row_log.keep_rollout(TENANT, finalized(0))
    logged = await row_log.publish(TENANT, laid_out(finalized(0)))
    assert logged is not None
    assert await row_log.replace(TENANT, groups.dropped(logged, "lost"))
    await row_log.commit(TENANT, 1, allowed=lambda: True)
    assert not await row_log.replace(TENANT, groups.dropped(logged, "lost again"))
    kept = row_log.at(TENANT, 1)
    assert kept is not None
    assert kept.drop_reason == "lost"


async def test_the_committed_cursor_never_moves_back(row_log: Joining) -> None:
    for cursor, expected in ((3, 3), (1, 3), (4, 4)):
        state = await row_log.commit(TENANT, cursor, allowed=lambda: True)
        assert state is not None
        assert state.committed_cursor == expected


async def test_tenants_have_logs_of_their_own(row_log: Joining) -> None:
    await row_log.keep_rollout(TENANT, finalized(0))
    await row_log.publish(TENANT, laid_out(finalized(0)))
    await row_log.bind(TENANT, "trainer")
    other = row_log.state("other")
    assert (other.head_cursor, other.consumer) == (0, "")
    assert row_log.group("other", "g") is None
    assert row_log.rollout("other", "r0") is None
    assert row_log.group_rollouts("other", "g") == {}
    assert (await row_log.bind("other", "another")).consumer == "another"
