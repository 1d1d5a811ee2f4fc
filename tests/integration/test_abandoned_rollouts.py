"""Rollouts whose owner died: `gc` names them, and releases them by an age that is asked for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from callforest.capture.v1 import attempt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.codec import staged_call_to_proto
from callforest_client.errors import RefusedError
from callforest_mesh.abandoned_rollouts import AbandonedRollout, release
from callforest_mesh.store_set import StoreSet
from callforest_mesh.store_sweep import SweepPolicy, plan
from tests.integration.finalizer_mesh import TENANT, Player, publish_chain_group, read_again
from tests.integration.test_restored_custody import finished
from tests.integration.test_restored_sweep import ADMITTED_S, World
from tests.unit.ledger.calls import intent, user
from tests.unit.staging.calls import COMPLETION

pytestmark = pytest.mark.requirement("OPS-3", "LED-8")
AN_HOUR = ("--abandoned-age", "3600")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.start()
    yield made
    await made.mesh.stop()


async def call_now(world: World, player: Player) -> None:
    """Have the rollout announce a call at this moment; the others are of long ago."""
    announced = intent("now", [user("now")], key=player.key)
    announced.admit_time.GetCurrentTime()
    await world.mesh.admission.admit(announced)


async def died(world: World) -> list[Player]:
    """Play rollouts whose owners die: in the middle, and behind the seal."""
    running, sealed = world.player("died"), world.player("died-sealed")
    await running.chain(3)
    await running.stage("late", "c")
    await sealed.chain(2)
    await sealed.seal()
    return [running, sealed]


async def reason_of(asked: Awaitable[object]) -> int:
    with pytest.raises(RefusedError) as refused:
        await asked
    return refused.value.reason


async def test_without_an_age_they_are_named_with_what_they_hold(world: World) -> None:
    players = await died(world)
    lines, status = await world.sweep(86_400)
    assert status == 0
    running, sealed = sorted(lines)
    assert running.startswith("kept 2 staged calls, ")
    assert " bytes of acme/died-sealed: no receipt, last call " in running
    assert sealed.startswith("kept 4 staged calls, ")
    assert all(
        line.endswith("--abandoned-age releases what is older than it says") for line in lines
    )
    assert await world.sweep(1e12) == ([], 0), "what is not older than the retention is not named"
    for player in players:
        assert await player.staged_ids() == list(player.made)
    assert not (await finished(players[1])).masked


async def test_by_an_age_they_are_sealed_and_removed_whole(world: World) -> None:
    players = await died(world)
    slow = world.player("slow")
    await slow.chain(2)
    await call_now(world, slow)
    trained = await publish_chain_group(world.mesh, "waits", 2)
    world.players += trained
    receipted = world.player("receipted")
    await receipted.chain(2)
    await finished(receipted, "unpublished")
    waiting = await read_again(world.mesh, 1)

    lines, status = await world.sweep(1e12, *AN_HOUR)
    assert status == 0
    assert [line.split(",")[0] for line in sorted(lines)] == [
        "removed 2 staged calls",
        "removed 4 staged calls",
    ]
    for player in players:
        assert await player.staged_ids() == []
        manifest = world.mesh.ledger.manifest(player.key)
        assert await reason_of(manifest) == er.ERROR_REASON_ATTEMPT_NOT_FOUND
        late = staged_call_to_proto(player.made["a"].call, b"{}", COMPLETION)
        staged = world.mesh.staging.stage(late)
        assert await reason_of(staged) == er.ERROR_REASON_PARTITION_DROPPED
    # Nothing that is only slow, or has a receipt, was touched.
    assert await slow.staged_ids() == ["a", "b"]
    assert not (await world.mesh.ledger.seal(slow.key)).superseded
    assert await read_again(world.mesh, 1) == waiting
    for player in (*trained, receipted):
        assert await player.staged_ids() == ["a", "b"]
    await world.mesh.finalizer.finalize_group("unpublished", 1)
    _, batch = await read_again(world.mesh, 2)
    assert batch.rows
    assert not batch.drop_reason
    assert await world.verify() == []
    assert await world.sweep(1e12, *AN_HOUR) == ([], 0), "nothing is left to release"


async def test_an_owner_that_comes_back_too_late_is_refused(world: World) -> None:
    player = world.player("late")
    await player.chain(2)
    request = await player.request("g", 0)
    await world.sweep(1e12, *AN_HOUR)
    finalized = world.mesh.finalizer.finalize_rollout(request)
    assert await reason_of(finalized) == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    assert await reason_of(player.restore("a")) == er.ERROR_REASON_RESTORE_REFUSED
    await player.chain(1)
    assert player.key == "late-a1", "a number is never given again"


async def test_a_restored_rollout_goes_whole_or_stays_whole(world: World) -> None:
    """Calls of earlier attempts are staged under their owners (docs/protocol.md, section 7d)."""
    dead, slow, unused = (world.player(name) for name in ("dead", "slow", "unused"))
    for player in (dead, slow, unused):
        await player.chain(2)
        await player.restore("b")
    await dead.call("c", "b")
    await slow.call("c", "b")
    await call_now(world, slow)
    lines, status = await world.sweep(86_400, *AN_HOUR)
    assert status == 0
    removed, kept = sorted(lines, reverse=True)
    assert removed.startswith("removed 3 staged calls, ")
    assert " of acme/dead-a1: no receipt" in removed
    # It may have been restored a moment ago: its calls' age is not its own.
    assert kept.startswith("kept 2 staged calls, ")
    assert kept.endswith("its age is not known: open another attempt and seal it to release it")
    assert " of acme/unused-a1: no receipt, no call of its own; " in kept
    assert await dead.staged_ids() == []
    assert await slow.staged_ids() == ["a", "b", "c"]
    assert await unused.staged_ids() == ["a", "b"]
    assert await world.verify() == []
    receipt = await finished(unused)
    assert not receipt.masked, receipt


async def planned(world: World) -> AbandonedRollout:
    """Plan the release of the one abandoned rollout, from the stopped stores."""
    await world.mesh.stop()
    paths = {name: world.folder / name for name in ("staging", "ledger", "finalizer")}
    with StoreSet(paths, alone=True) as stores:
        policy = SweepPolicy(late_s=1e12, log_s=1e12, abandoned_s=10.0)
        (found,) = plan(stores, policy, now_s=ADMITTED_S + 100.0)
    await world.start()
    assert isinstance(found, AbandonedRollout)
    return found


async def without_receipt() -> bool:
    return False


async def with_receipt() -> bool:
    return True


@pytest.mark.parametrize("came", ["row", "attempt", "receipt"])
async def test_a_rollout_that_went_on_behind_the_plan_keeps_all(world: World, came: str) -> None:
    player = world.player("r0")
    await player.chain(2)
    found = await planned(world)
    assert (found.capture_key, found.call_count, found.age_s) == ("r0", 2, 100.0)
    if came == "row":
        await call_now(world, player)
    elif came == "attempt":
        await player.restore("b")
    has_receipt = with_receipt if came == "receipt" else without_receipt
    mesh = world.mesh
    assert not await release(found, mesh.staging, mesh.ledger, has_receipt)
    assert await player.staged_ids() == ["a", "b"]
    assert (await mesh.ledger.manifest("r0")).records
    if came != "receipt":
        state = (await mesh.ledger.manifest(player.key)).attempt.state
        assert state == attempt_pb2.ATTEMPT_STATE_OPEN, "what lives is not even sealed"


class Dying:
    """A client of which the process dies before one of its changes."""

    def __init__(self, client: object, left: list[int]) -> None:
        self._client = client
        self._left = left

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        method = getattr(self._client, name)

        async def call(*args: object, **named: object) -> object:
            if name in ("seal", "drop_partition", "forget"):
                if not self._left[0]:
                    raise ConnectionError(name)
                self._left[0] -= 1
            return await method(*args, **named)

        return call


async def test_a_release_that_is_killed_anywhere_is_ended_by_the_next(world: World) -> None:
    deaths: list[str] = []
    for step in range(10):
        player = world.player(f"r{step}")
        await player.chain(2)
        await player.restore("b")
        await player.call("c", "b")
        found = await planned(world)
        left = [step]
        mesh = world.mesh
        try:
            staging, ledger = Dying(mesh.staging, left), Dying(mesh.ledger, left)
            done = await release(found, staging, ledger, without_receipt)
        except ConnectionError as error:
            deaths.append(str(error))
            assert await world.verify() == []
            lines, status = await world.sweep(1e12, *AN_HOUR)
            assert (len(lines), status) == (1, 0)
        else:
            assert done
            break
        assert await player.staged_ids() == []
        gone = world.mesh.ledger.manifest(f"r{step}-a1")
        assert await reason_of(gone) == er.ERROR_REASON_ATTEMPT_NOT_FOUND
    assert deaths == ["seal", "drop_partition", "drop_partition", "forget", "forget"]
    assert await world.verify() == []
    assert (await world.mesh.staging.stat()).call_count == 0


async def test_two_releases_at_once_end_as_one(world: World) -> None:
    player = world.player("r0")
    await player.chain(2)
    found = await planned(world)
    mesh = world.mesh
    both = (release(found, mesh.staging, mesh.ledger, without_receipt) for _ in range(2))
    assert any(await asyncio.gather(*both))
    assert await player.staged_ids() == []
    assert await world.verify() == []
    assert found.tenant == TENANT
