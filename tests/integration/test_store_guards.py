"""Where disk or quota end, new work is refused in time, and what ends old work goes on."""

import tempfile
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.codec import staged_call_to_proto
from callforest_client.errors import RefusedError
from tests.integration.finalizer_mesh import (
    SMALL_STORE,
    FinalizerMesh,
    Player,
    publish_chain_group,
    read_again,
)
from tests.unit.ledger.calls import intent, user
from tests.unit.staging.calls import COMPLETION, Chain

pytestmark = pytest.mark.requirement("OPS-3")
LIMITS = {"disk": {"disk_reserve_bytes": 1 << 60}, "quota": {"quota_bytes": 1}}


@pytest.fixture
async def mesh() -> AsyncIterator[FinalizerMesh]:
    with tempfile.TemporaryDirectory() as folder:
        made = FinalizerMesh(Path(folder))
        await made.start()
        yield made
        await made.stop()


async def expect_full(store: str, limit: str, work: Awaitable[object]) -> None:
    with pytest.raises(RefusedError) as refused:
        await work
    assert refused.value.reason == er.ERROR_REASON_STORE_FULL
    assert refused.value.retry_after_ms == 5000
    assert refused.value.metadata["store"] == store
    assert ("disk" in refused.value.message) == (limit == "disk")
    assert int(refused.value.metadata["free_bytes"]) > 0


@pytest.mark.parametrize("limit", sorted(LIMITS))
async def test_full_stores_refuse_new_work_and_end_the_old(
    mesh: FinalizerMesh, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trained,) = await publish_chain_group(mesh, "g", 1)
    late = Player(mesh, "late")
    await late.chain(1)
    made = await late.stage("b", "a")
    request = await late.request("h", 0)
    open_player = Player(mesh, "open")
    await open_player.chain(1)
    pending = await open_player.stage("b", "a")
    for key, value in LIMITS[limit].items():
        monkeypatch.setitem(SMALL_STORE, key, value)
    for name in ("finalizer", "ledger", "staging"):
        await mesh.restart(name)

    await expect_full("staging", limit, mesh.staging.stage(Chain("new").add()))
    again = await mesh.staging.stage(staged_call_to_proto(made.call, b"other", COMPLETION))
    assert again.winner.served_response, "a repeat is answered from what is there"
    assert len(await mesh.staging.fetch(trained.key, ["a", "b"])) == 2

    await expect_full("ledger", limit, open_player.open())
    await expect_full("ledger", limit, open_player.restore("a"))
    announced = intent("c", [user("new")], key=open_player.key)
    await expect_full("ledger", limit, mesh.ledger.record_intent(announced))
    await mesh.ledger.record(open_player._record(pending, "stop"))
    sealed = await open_player.seal()
    assert (sealed.record_count, list(sealed.pending_call_ids)) == (2, [])

    await expect_full("finalizer", limit, mesh.finalizer.finalize_rollout(request))
    # A first subscription is new work too: it binds the log to its consumer.
    await expect_full("finalizer", limit, read_again(mesh, 1))
    assert await mesh.staging.delete(late.key, ["b"]) == 1
    assert await mesh.staging.drop_partition(trained.key) == 2

    monkeypatch.undo()
    for name in ("finalizer", "ledger", "staging"):
        await mesh.restart(name)
    await mesh.staging.stage(Chain("new").add())
    await Player(mesh, "new").open()
    assert (await mesh.finalizer.finalize_rollout(request)).masked
