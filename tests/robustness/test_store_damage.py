"""A corrupt store never wins: what a disk changed is refused by name, and never trains."""

import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.codec import ids_to_bytes
from callforest_client.errors import RefusedError
from callforest_core.refusal import Refusal
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.store_snapshot import StoreSnapshot
from callforest_mesh.chassis.store_walk import walk
from callforest_mesh.staging.entry import partition_key
from callforest_mesh.staging.inventory import StagedInventory
from callforest_mesh.staging.service import StagingOptions, StagingService
from tests.integration import store_damage as damage
from tests.integration.finalizer_mesh import (
    SMALL_STORE,
    TENANT,
    FinalizerMesh,
    Player,
    publish_chain_group,
    read_again,
)

pytestmark = [pytest.mark.requirement("OPS-3"), pytest.mark.bugcase("B20")]
NOISES = 25


class Published:
    """A mesh that has published one group of two rollouts."""

    def __init__(self, folder: Path, mesh: FinalizerMesh, players: list[Player]) -> None:
        self.store = folder / "staging"
        self.mesh = mesh
        self.players = players

    def key(self, call_id: str, slot: int = 0) -> bytes:
        return partition_key(TENANT, self.players[slot].key) + call_id.encode()


@pytest.fixture
async def published() -> AsyncIterator[Published]:
    with tempfile.TemporaryDirectory() as folder:
        mesh = FinalizerMesh(Path(folder))
        await mesh.start()
        players = await publish_chain_group(mesh, "g", 2, calls=3, tokens=200)
        yield Published(Path(folder), mesh, players)
        await mesh.stop()


def flip_a_token(published: Published) -> None:
    made = published.players[0].made["b"].call
    damage.flip_in_file(published.store, ids_to_bytes(made.token_ids), at=17)


def swap_two_payloads(published: Published) -> None:
    damage.swap_payloads(published.store, published.key("b"), published.key("c"))


def cut_a_segment(published: Published) -> None:
    entry = damage.entry_of(published.store, published.key("b"))
    key = entry.segment.to_bytes(8, "big")
    raw = damage.stored(published.store, "segments", key)
    damage.put(published.store, "segments", key, raw[:-1])


@pytest.mark.parametrize("harm", [flip_a_token, swap_two_payloads, cut_a_segment])
async def test_a_damaged_call_is_refused_by_name_and_does_not_train(
    published: Published, harm: Callable[[Published], None]
) -> None:
    mesh = published.mesh
    await mesh.end("staging")
    harm(published)
    await mesh.begin("staging")
    with pytest.raises(RefusedError) as refused:
        await mesh.staging.fetch(published.players[0].key, ["b"])
    assert refused.value.reason == er.ERROR_REASON_STORE_CORRUPT
    assert refused.value.metadata["store"] == "staging"
    assert refused.value.metadata["key"] == f"calls/{published.key('b').hex()}"
    healthy = published.players[1]
    assert len(await mesh.staging.fetch(healthy.key, list(healthy.made))) == 3
    (batch,) = await read_again(mesh, 1)
    assert batch.drop_reason == "staged_call_corrupt: g-r0/b"
    assert not batch.rows


@pytest.mark.parametrize(
    ("kept", "fault"),
    [(lambda size: size // 8192 * 4096, "lacks"), (lambda size: size - 1, "lacks 1 bytes")],
    ids=["half", "all but a byte"],
)
async def test_a_store_that_lost_its_end_does_not_serve(
    published: Published, kept: Callable[[int], int], fault: str
) -> None:
    await published.mesh.end("staging")
    file = published.store / "data.mdb"
    with file.open("r+b") as content:
        content.truncate(kept(file.stat().st_size))
    service = StagingService(StagingOptions(published.store, **SMALL_STORE), Drain())
    with pytest.raises(Refusal, match=fault) as refused:
        await service.start()
    assert refused.value.reason == er.ERROR_REASON_STORE_CORRUPT
    assert refused.value.facts["store"] == "staging"
    assert refused.value.facts["key"]


async def test_no_noise_is_taken_for_a_call(published: Published, tmp_path: Path) -> None:
    """A sector of noise anywhere: every call is served as it was, or refused."""
    await published.mesh.end("staging")
    honest = contents(published.store)
    assert len(honest["calls"]) == 6
    pristine = (published.store / "data.mdb").read_bytes()
    chance = random.Random(20)
    noticed = 0
    for number in range(NOISES):
        noisy = bytearray(pristine)
        place = 8192 + 512 * chance.randrange((len(pristine) - 8192) // 512)
        noisy[place : place + 512] = chance.randbytes(512)
        image = tmp_path / f"image-{number}"
        image.mkdir()
        (image / "data.mdb").write_bytes(noisy)
        if walk(image):
            noticed += 1
        else:
            # The noise is in a free page, or behind what a page uses.
            assert contents(image) == honest
        shutil.rmtree(image)
    assert noticed >= NOISES // 5, "the noise must hit what is stored"


def contents(store: Path) -> dict[str, dict[bytes, bytes | None]]:
    """Give everything in a store whose counts and calls agree."""
    with StoreSnapshot(store) as snapshot:
        assert list(StagedInventory(snapshot).faults()) == []
        return {name: dict(snapshot.records(name)) for name in snapshot.databases}
