"""Damage between worker and trainer: whatever it is, the call is named and nothing trains."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import pytest

from callforest.capture.v1 import group_batch_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError, UnavailableError
from callforest_client.staging import StagingClient
from callforest_core.refusal import Refusal
from tests.integration.finalizer_mesh import (
    FinalizerMesh,
    Player,
    publish_chain_group,
    read_again,
    take,
)
from tests.integration.offline_rows import verify_offline

Lie = Callable[[list[staged_call_pb2.StagedCall]], list[staged_call_pb2.StagedCall]]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(tmp_path)
    await mesh.start()
    yield mesh
    await mesh.stop()


class LyingStaging(StagingClient):
    """Staging whose answers are changed on their way, by what the tests set."""

    lie: Lie | None = None

    @classmethod
    def of(cls, mesh: FinalizerMesh) -> "LyingStaging":
        return cls(mesh.channels["staging"], tenant="acme", timeout_s=5.0)

    async def fetch(
        self, capture_key: str, call_ids: Sequence[str]
    ) -> list[staged_call_pb2.StagedCall]:
        calls = await super().fetch(capture_key, call_ids)
        return self.lie(calls) if self.lie is not None else calls


@pytest.fixture
async def lied_to(tmp_path: Path) -> AsyncIterator[tuple[FinalizerMesh, LyingStaging]]:
    mesh = FinalizerMesh(tmp_path)
    made: list[LyingStaging] = []
    mesh.staging_of_finalizer = lambda: made.append(LyingStaging.of(mesh)) or made[-1]
    await mesh.start()
    yield mesh, made[-1]
    await mesh.stop()


async def flip_stored(mesh: FinalizerMesh, player: Player, call_id: str) -> None:
    """Flip one bit of a staged call's tokens in the store's file."""
    await mesh.end("staging")
    file = mesh.folder / "staging" / "data.mdb"
    content = bytearray(file.read_bytes())
    tokens = player.made[call_id].call.token_ids.astype("<u4").tobytes()
    places = 0
    start = content.find(tokens)
    while start >= 0:
        content[start] ^= 1
        places += 1
        start = content.find(tokens)
    assert places
    file.write_bytes(content)
    await mesh.begin("staging")


@pytest.mark.requirement("FOR-4")
@pytest.mark.bugcase("B20")
@pytest.mark.parametrize("damaged", ["a", "retry"])
async def test_a_bit_that_flips_in_the_store_masks_its_rollout_alone(
    mesh: FinalizerMesh, damaged: str
) -> None:
    """On the path or on a dead branch; ids and text stay as long and as alike as before."""
    hit, healthy = Player(mesh, "r0"), Player(mesh, "r1")
    for player in (hit, healthy):
        await player.chain(2)
        await player.call("retry", "a")
    await flip_stored(mesh, hit, damaged)
    receipt = await hit.finish("g", 0, declared_response_id="chatcmpl-b")
    assert (receipt.masked, receipt.mask_reason) == (True, "staged_call_corrupt")
    assert receipt.mask_detail == f"staged_call_corrupt: r0/{damaged}"
    assert not (await healthy.finish("g", 1, declared_response_id="chatcmpl-b")).masked
    await mesh.finalizer.finalize_group("g", 2)
    (batch,) = await read_again(mesh, 1)
    assert [row.kind for row in batch.rows] == [
        group_batch_pb2.ROW_KIND_PLACEHOLDER,
        group_batch_pb2.ROW_KIND_TRAINING,
    ]
    assert {call.capture_key for call in batch.segments} == {"r1"}
    verify_offline(batch)


@pytest.mark.bugcase("B20")
async def test_a_bit_that_flips_after_publication_drops_the_group_for_good(
    mesh: FinalizerMesh,
) -> None:
    players = await publish_chain_group(mesh, "g1")
    await publish_chain_group(mesh, "g2")
    (before,) = await read_again(mesh, 1)
    assert before.drop_reason == ""
    await flip_stored(mesh, players[1], "b")
    for _ in range(2):
        dropped, following = await read_again(mesh, 2)
        assert dropped.drop_reason == "staged_call_corrupt: g1-r1/b"
        assert (dropped.cursor, len(dropped.rows), len(dropped.segments)) == (1, 0, 0)
        assert list(dropped.receipts) == list(before.receipts)
        assert (following.cursor, following.drop_reason) == (2, "")
        await mesh.restart("finalizer")
    answer = await mesh.finalizer.finalize_group("g1", 2)
    assert (answer.cursor, answer.drop_reason) == (1, dropped.drop_reason)


async def test_a_staged_call_that_is_missing_masks(mesh: FinalizerMesh) -> None:
    player = Player(mesh, "r0")
    await player.chain(3)
    await mesh.staging.delete("r0", ["b"])
    receipt = await player.finish("g", 0)
    assert (receipt.mask_reason, receipt.mask_detail) == (
        "staged_call_missing",
        "staged_call_missing: r0/b",
    )


async def test_a_call_that_goes_missing_after_publication_drops_its_group(
    mesh: FinalizerMesh,
) -> None:
    await publish_chain_group(mesh, "g")
    await mesh.staging.delete("g-r1", ["a"])
    (batch,) = await read_again(mesh, 1)
    assert batch.drop_reason == "staged_call_missing: g-r1/a"


def flip_token(calls: list[staged_call_pb2.StagedCall]) -> list[staged_call_pb2.StagedCall]:
    column = bytearray(calls[-1].canonical.token_ids)
    column[0] ^= 1
    calls[-1].canonical.token_ids = bytes(column)
    return calls


def swap_payloads(calls: list[staged_call_pb2.StagedCall]) -> list[staged_call_pb2.StagedCall]:
    first, second = calls[0].canonical.token_ids, calls[1].canonical.token_ids
    calls[0].canonical.token_ids, calls[1].canonical.token_ids = second, first
    return calls


def cut_a_byte(calls: list[staged_call_pb2.StagedCall]) -> list[staged_call_pb2.StagedCall]:
    calls[-1].canonical.token_ids = calls[-1].canonical.token_ids[:-1]
    return calls


def change_logprob(calls: list[staged_call_pb2.StagedCall]) -> list[staged_call_pb2.StagedCall]:
    calls[-1].canonical.logprobs = bytes(len(calls[-1].canonical.logprobs))
    return calls


def change_extras(calls: list[staged_call_pb2.StagedCall]) -> list[staged_call_pb2.StagedCall]:
    calls[-1].extras = b"B\x01"
    return calls


def another_call(calls: list[staged_call_pb2.StagedCall]) -> list[staged_call_pb2.StagedCall]:
    return [*calls[:-1], calls[0]]


def one_too_few(calls: list[staged_call_pb2.StagedCall]) -> list[staged_call_pb2.StagedCall]:
    return calls[:-1]


LIES: dict[Lie, str] = {
    flip_token: "corrupt_digest",
    swap_payloads: "corrupt_digest",
    cut_a_byte: "invalid_snapshot",
    change_logprob: "corrupt_digest",
    another_call: "duplicate_snapshot",
    one_too_few: "row_count_mismatch",
}


@pytest.mark.requirement("FOR-4", "SEC-3")
@pytest.mark.bugcase("B20")
async def test_reading_a_group_gives_no_altered_call(
    lied_to: tuple[FinalizerMesh, LyingStaging],
) -> None:
    mesh, staging = lied_to
    await publish_chain_group(mesh, "g", 1)
    honest = await mesh.finalizer.group("g")
    staging.lie = flip_token
    with pytest.raises(RefusedError) as caught:
        await mesh.finalizer.group("g")
    assert caught.value.reason == er.ERROR_REASON_STORE_CORRUPT
    assert caught.value.metadata["key"].startswith("g-r0/")
    staging.lie = None
    assert await mesh.finalizer.group("g") == honest, "nothing was dropped for it"


@pytest.mark.requirement("FOR-4")
@pytest.mark.bugcase("B20")
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_what_is_read_is_held_against_the_ledger(
    lied_to: tuple[FinalizerMesh, LyingStaging], lie: Lie
) -> None:
    mesh, staging = lied_to
    player = Player(mesh, "r0")
    await player.chain(2)
    staging.lie = lie
    receipt = await player.finish("g", 0)
    assert (receipt.masked, receipt.mask_reason) == (True, LIES[lie])
    if lie is flip_token:
        assert "b" in receipt.mask_detail
    assert (await mesh.finalizer.finalize_group("g", 1)).drop_reason == "no_valid_layout"


@pytest.mark.bugcase("B20")
@pytest.mark.parametrize("lie", [*LIES, change_extras], ids=lambda lie: lie.__name__)
async def test_what_is_delivered_is_held_against_what_was_verified(
    lied_to: tuple[FinalizerMesh, LyingStaging], lie: Lie
) -> None:
    mesh, staging = lied_to
    await publish_chain_group(mesh, "g", 1)
    staging.lie = lie
    (batch,) = await read_again(mesh, 1)
    staging.lie = None
    assert batch.drop_reason.startswith(("staged_call_altered: g-r0/", "staged_call_missing"))
    assert len(batch.segments) == 0
    (again,) = await read_again(mesh, 1)
    assert again == batch


async def test_staging_that_is_away_decides_nothing(mesh: FinalizerMesh) -> None:
    """A group is dropped, and a rollout masked, for what is lost, never for what is away."""
    await publish_chain_group(mesh, "g1")
    player = Player(mesh, "r0")
    await player.chain(1)
    request = await player.request("g2", 0)
    await mesh.end("staging")
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    with pytest.raises(UnavailableError) as away:
        await take(rows, 1)
    assert away.value.reason == er.ERROR_REASON_PEER_UNAVAILABLE
    await rows.close()
    impatient = mesh.finalizer.for_tenant("acme")
    impatient._timeout_s = 2.0
    with pytest.raises(UnavailableError):
        await impatient.finalize_rollout(request)
    await mesh.begin("staging")
    (batch,) = await read_again(mesh, 1)
    assert batch.drop_reason == ""
    verify_offline(batch)
    assert not (await mesh.finalizer.finalize_rollout(request)).masked


def overloaded() -> Exception:
    return RefusedError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "too many readers",
        reason=er.ERROR_REASON_OVERLOADED,
        retry_after_ms=100,
    )


def faulty() -> Exception:
    return RefusedError(grpc.StatusCode.INTERNAL, "", reason=er.ERROR_REASON_INTERNAL)


def broken() -> Exception:
    return Refusal(er.ERROR_REASON_FRAME_BROKEN, "frames of item 0", expected="end", actual="chunk")


@pytest.mark.parametrize("fault", [overloaded, faulty, broken])
async def test_staging_that_answers_badly_decides_nothing(
    lied_to: tuple[FinalizerMesh, LyingStaging], fault: Callable[[], Exception]
) -> None:
    mesh, staging = lied_to
    await publish_chain_group(mesh, "g1")
    player = Player(mesh, "r0")
    await player.chain(1)
    request = await player.request("g2", 0)

    def fail(_calls: list[staged_call_pb2.StagedCall]) -> list[staged_call_pb2.StagedCall]:
        raise fault()

    staging.lie = fail
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    with pytest.raises(UnavailableError) as delivery:
        await take(rows, 1)
    await rows.close()
    impatient = mesh.finalizer.for_tenant("acme")
    impatient._timeout_s = 0.5
    with pytest.raises(UnavailableError):
        await impatient.finalize_rollout(request)
    assert delivery.value.reason == er.ERROR_REASON_PEER_UNAVAILABLE
    assert delivery.value.metadata == {"peer": "staging"}
    staging.lie = None
    (batch,) = await read_again(mesh, 1)
    assert batch.drop_reason == ""
    assert not (await mesh.finalizer.finalize_rollout(request)).masked
