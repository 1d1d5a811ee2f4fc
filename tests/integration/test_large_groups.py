"""Groups that no payload holds: published at once, delivered in parts, whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import grpc
import grpc.aio
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from callforest.capture.v1 import group_batch_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest.finalizer.v1 import finalizer_service_pb2_grpc as rpc
from callforest_client.errors import CallforestError, UnavailableError, error_of_rpc
from callforest_client.finalizer import FinalizerClient
from callforest_client.frames import PAYLOAD_BYTES
from callforest_client.group_assembly import GroupAssembler
from callforest_core.custody.extras import encode_extras
from callforest_mesh.cli import main
from callforest_mesh.finalizer.service import FinalizerService
from callforest_mesh.trainer.core import AdvantageOptions
from callforest_mesh.trainer.rows import gather_step
from tests.integration.finalizer_mesh import (
    TENANT,
    WAIT_S,
    FinalizerMesh,
    Player,
    publish_chain_group,
    read_again,
    take,
)
from tests.integration.offline_rows import verify_offline
from tests.integration.test_finalizer_custody import LyingStaging
from tests.robustness.skew_images import ROOT, Image, forgetting

ROUTES = encode_extras({"routes": "r" * (12 << 20)})
"""What six calls have more of than a payload of 64 MiB."""
Response = pb.SubscribeRowsResponse
BASELINE = ROOT / "proto" / "baseline.binpb"
"""The schemas of the last release."""


@pytest.fixture
async def lied_to(tmp_path: Path) -> AsyncIterator[tuple[FinalizerMesh, LyingStaging]]:
    mesh = FinalizerMesh(tmp_path, "socket", row_multiple=4)
    made: list[LyingStaging] = []
    mesh.staging_of_finalizer = lambda: made.append(LyingStaging.of(mesh)) or made[-1]
    await mesh.start()
    yield mesh, made[-1]
    await mesh.stop()


@pytest.fixture
def mesh(lied_to: tuple[FinalizerMesh, LyingStaging]) -> FinalizerMesh:
    return lied_to[0]


async def play_large(mesh: FinalizerMesh) -> list[Player]:
    """Play and finalize a group of two rollouts of three calls, and a masked one."""
    players = [Player(mesh, f"large-r{slot}", extras=ROUTES) for slot in range(3)]
    for slot, player in enumerate(players):
        await player.chain(3 if slot < 2 else 0)
        if slot == 2:
            await player.fail("a")
        receipt = await player.finish("large", slot, reward=float(slot))
        assert receipt.masked == (slot == 2)
    return players


async def publish_large(mesh: FinalizerMesh) -> list[Player]:
    players = await play_large(mesh)
    answer = await mesh.finalizer.finalize_group("large", 3)
    assert answer.drop_reason == ""
    return players


class Reader:
    """A stream that is read message by message, as a client in another language would.

    Args:
        mesh: whose rows.
        start: the first message.
    """

    def __init__(self, mesh: FinalizerMesh, start: pb.StartSubscription | None = None) -> None:
        stub = rpc.FinalizerServiceStub(mesh.channels["finalizer"])
        self.call = stub.SubscribeRows(timeout=WAIT_S)
        self._start = start or start_of(takes_parts=True)

    async def credit(self, groups: int) -> None:
        await self.call.write(pb.SubscribeRowsRequest(start=self._start))
        await self.call.write(pb.SubscribeRowsRequest(credit=pb.RowCredit(groups=groups)))

    async def commit(self, cursor: int) -> None:
        await self.call.write(pb.SubscribeRowsRequest(commit=pb.CommitCursor(cursor=cursor)))

    async def until(self, event: str) -> list[Response]:
        """Read up to the first message of a kind."""
        read: list[Response] = []
        while not read or not read[-1].HasField(event):
            response = await self.call.read()
            assert isinstance(response, Response), "the stream ended"
            read.append(response)
        return read

    async def failure(self) -> CallforestError:
        """Read to the end, which is no good one."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.until("group_end")
        return error_of_rpc(caught.value)


def be_away(_calls: object) -> NoReturn:
    raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "not there")


def start_of(**fields: object) -> pb.StartSubscription:
    return pb.StartSubscription(tenant=TENANT, consumer="trainer", **fields)


def events(read: list[Response]) -> list[str]:
    return [response.WhichOneof("event") or "none" for response in read]


def assembled(read: list[Response]) -> list[group_batch_pb2.GroupBatch]:
    assembler = GroupAssembler()
    taken = [assembler.take(response) for response in read]
    return [batch for batch in taken if batch is not None]


@pytest.mark.requirement("FIN-3", "FIN-4")
async def test_a_group_of_any_size_is_published_at_once_and_trains(
    mesh: FinalizerMesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over 64 MiB: one small record makes it visible; the very bytes come and prove themselves."""
    players = await play_large(mesh)
    service = mesh.services["finalizer"]
    assert isinstance(service, FinalizerService)
    assert (await mesh.finalizer.row_log()).head_cursor == 0
    answer = await mesh.finalizer.finalize_group("large", 3)
    logged = service._row_log.at(TENANT, 1)
    assert logged is not None
    assert logged.ByteSize() < 4096
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    assert (batch.cursor, batch.drop_reason) == (1, "")
    assert PAYLOAD_BYTES < batch.ByteSize() <= logged.size_bytes
    assert [row.row_id for row in batch.rows] == list(answer.row_ids)
    assert [receipt.slot for receipt in batch.receipts] == [0, 1, 2]
    made = {
        (player.key, call_id): one.call
        for player in players
        for call_id, one in player.made.items()
    }
    assert len(made) == len(batch.segments) == 6
    sizes = [segment.ByteSize() for segment in batch.segments]
    assert [reference.size_bytes for reference in logged.segments] == sizes
    for segment in batch.segments:
        call = made[segment.capture_key, segment.call_id]
        assert (segment.extras, segment.digest) == (call.extras, call.digest)
        assert segment.canonical.token_ids == call.token_ids.astype("<u4").tobytes()
        assert segment.canonical.logprobs == call.logprobs.astype("<f4").tobytes()
    verify_offline(batch)
    step = gather_step([batch], AdvantageOptions())
    assert [row.valid for row in step.rows] == [True, True, False, False]
    for row, player in zip(step.rows, players[:2], strict=False):
        assert np.array_equal(row.token_ids, player.made["c"].path)
    assert (await mesh.finalizer.group("large")) == batch
    await export_and_verify(mesh, tmp_path / "rows")
    assert "intact: 4 rows of 3 rollouts of group large, 18 tokens" in capsys.readouterr().out
    await rows.commit(1)
    await rows.close()
    await mesh.cleaned()
    assert [await player.staged_ids() for player in players] == [[], [], []]


async def export_and_verify(mesh: FinalizerMesh, file: Path) -> None:
    there = ["--set", f"tenant={TENANT}"]
    there += ["--set", f"addresses.finalizer=unix:{mesh.folder}/finalizer.sock"]
    assert await asyncio.to_thread(main, ["export", "large", str(file), *there]) == 0
    assert file.stat().st_size > PAYLOAD_BYTES
    assert await asyncio.to_thread(main, ["verify", str(file)]) == 0


@pytest.mark.requirement("FIN-3")
@pytest.mark.parametrize("breaks", ["client", "finalizer", "staging"])
async def test_a_stream_cut_between_parts_gives_the_group_whole_on_the_next(
    lied_to: tuple[FinalizerMesh, LyingStaging], breaks: str
) -> None:
    mesh, staging = lied_to
    await publish_large(mesh)
    reader = Reader(mesh)
    await reader.credit(1)
    read = [*await reader.until("end"), *await reader.until("end")]
    assert read[0].HasField("group_begin")
    assert assembled(read) == [], "nothing of it is visible"
    if breaks == "client":
        reader.call.cancel()
    elif breaks == "finalizer":
        await mesh.end("finalizer")
        assert isinstance(await reader.failure(), UnavailableError)
        await mesh.begin("finalizer")
    else:
        staging.lie = be_away
        assert (await reader.failure()).reason == er.ERROR_REASON_PEER_UNAVAILABLE
        staging.lie = None
    (batch,) = await read_again(mesh, 1)
    verify_offline(batch)
    (again,) = await read_again(mesh, 1)
    deterministic = again.SerializeToString(deterministic=True)
    assert batch.SerializeToString(deterministic=True) == deterministic


@pytest.mark.requirement("FIN-3")
async def test_a_large_group_comes_within_a_process_too(tmp_path: Path) -> None:
    mesh = FinalizerMesh(tmp_path, "local")
    await mesh.start()
    try:
        await publish_large(mesh)
        (batch,) = await read_again(mesh, 1)
        assert batch.ByteSize() > PAYLOAD_BYTES
        verify_offline(batch)
    finally:
        await mesh.stop()


@pytest.mark.requirement("API-5", "FIN-3")
async def test_a_consumer_of_the_last_release_is_refused_by_name_and_small_groups_come_as_before(
    mesh: FinalizerMesh,
) -> None:
    await publish_chain_group(mesh, "small", 1)
    await publish_chain_group(mesh, "framed", 1, tokens=200_000)
    await publish_large(mesh)
    await publish_chain_group(mesh, "behind", 1)
    package = "callforest.finalizer.v1."
    last_release = forgetting(Image(FileDescriptorSet.FromString(BASELINE.read_bytes())))
    start = start_of(takes_parts=True).SerializeToString()
    older = last_release(package + "StartSubscription", start)
    came: list[list[bytes]] = []
    for start in (start_of(takes_parts=True), pb.StartSubscription.FromString(older)):
        reader = Reader(mesh, start)
        await reader.credit(2)
        read = [*await reader.until("batch"), *await reader.until("end")]
        assert events(read)[:2] == ["batch", "begin"]
        came.append([response.SerializeToString() for response in read])
    assert came[0] == came[1], "byte for byte, whoever asks"
    known = [last_release(package + "SubscribeRowsResponse", one) for one in came[1]]
    assert known == came[1], "and nothing that the last release does not know"
    await reader.commit(2)
    await reader.call.write(pb.SubscribeRowsRequest(credit=pb.RowCredit(groups=1)))
    assert events([await reader.call.read()]) == ["committed"], "confirmed before the end"
    refused = await reader.failure()
    assert refused.reason == er.ERROR_REASON_GROUP_NEEDS_PARTS
    assert refused.code is grpc.StatusCode.FAILED_PRECONDITION
    assert (refused.metadata["group_id"], refused.metadata["cursor"]) == ("large", "3")
    assert int(refused.metadata["size_bytes"]) > PAYLOAD_BYTES
    leaving_out = Reader(mesh, start_of(after_cursor=3))
    await leaving_out.credit(1)
    await leaving_out.commit(3)
    assert (await leaving_out.until("batch"))[-1].batch.group_id == "behind"
    leaving_out.call.cancel()


@pytest.mark.requirement("API-5")
async def test_reading_a_group_without_parts_is_refused_alike(mesh: FinalizerMesh) -> None:
    await publish_large(mesh)
    stub = rpc.FinalizerServiceStub(mesh.channels["finalizer"])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetGroup(pb.GetGroupRequest(tenant=TENANT, group_id="large")).read()
    error = error_of_rpc(caught.value)
    assert error.reason == er.ERROR_REASON_GROUP_NEEDS_PARTS
    assert error.metadata["group_id"] == "large"


@pytest.mark.requirement("API-3", "FIN-3")
async def test_credit_counts_a_large_group_once_and_commits_do_not_wait_for_its_end(
    mesh: FinalizerMesh,
) -> None:
    await publish_chain_group(mesh, "small", 1)
    await publish_large(mesh)
    await publish_chain_group(mesh, "behind", 1)
    reader = Reader(mesh)
    await reader.credit(2)
    read = await reader.until("group_begin")
    await reader.commit(1)
    read += await reader.until("group_end")
    names = events(read)
    assert "committed" in names, "it came before the end of the large group"
    place = names.index("committed")
    assert names[place - 1] in ("group_begin", "end"), "never between the frames of a part"
    assert [batch.group_id for batch in assembled(read)] == ["small", "large"]
    await reader.commit(2)
    assert events(await reader.until("committed")) == ["committed"], "its credit is spent"
    reader.call.cancel()


@pytest.mark.requirement("API-3")
async def test_a_group_is_committed_only_when_all_of_it_was_sent(mesh: FinalizerMesh) -> None:
    await publish_large(mesh)
    reader = Reader(mesh)
    await reader.credit(1)
    await reader.until("group_begin")
    await reader.commit(1)
    refused = await reader.failure()
    assert refused.reason == er.ERROR_REASON_CURSOR_INVALID
    assert (await mesh.finalizer.row_log()).committed_cursor == 0


@pytest.mark.requirement("FIN-4", "FOR-4")
async def test_a_call_that_is_lost_between_parts_drops_the_group_at_its_position(
    mesh: FinalizerMesh,
) -> None:
    players = await publish_large(mesh)
    await publish_chain_group(mesh, "behind", 1)
    reader = Reader(mesh)
    await reader.credit(2)
    read = await reader.until("end")
    await mesh.staging.delete(players[1].key, ["c"])
    read += await reader.until("batch")
    assert read[0].HasField("group_begin")
    (dropped,) = assembled(read)
    assert (dropped.cursor, dropped.group_id) == (1, "large")
    assert dropped.drop_reason == f"staged_call_missing: {players[1].key}/c"
    assert (len(dropped.rows), len(dropped.segments)) == (0, 0)
    assert (await reader.until("batch"))[-1].batch.group_id == "behind"
    reader.call.cancel()
    first, _ = await read_again(mesh, 2)
    assert first == dropped
    gone = FinalizerClient(mesh.channels["finalizer"], tenant=TENANT, timeout_s=WAIT_S)
    assert await gone.group("large") == dropped, "it is a dropped group now"
