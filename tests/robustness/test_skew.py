"""Peers of other releases: they play whole rollouts together, and what one does not know is kept.

The earlier release's schemas are kept; the next one puts an unknown field into every message.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import error_details_pb2

from callforest.capture.v1 import attempt_pb2, call_record_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.channel import connect
from callforest_client.errors import RefusedError, error_of, status_of
from callforest_client.gateway import GatewayClient
from callforest_core.refusal import Refusal
from callforest_mesh.staging.store import StagedCalls
from tests.integration.finalizer_mesh import FinalizerMesh, Player
from tests.robustness.proxied_mesh import DRIVER, ProxiedMesh, proxied_mesh
from tests.robustness.rollout_load import LoadOptions
from tests.robustness.skew_images import (
    NOTE,
    ROOT,
    Change,
    Image,
    earlier,
    forgetting,
    note,
    noting,
    todays,
    write_stubs,
)
from tests.robustness.skew_proxy import SkewProxy
from tests.robustness.test_lost_answers import faults_found

DEPTH = int(os.environ.get("DEPTH", "1"))
WAIT_S = 120.0
UNKNOWN_ENUM = 99
ASKED = {"role": "user", "content": "begin"}
CLIENT = Path(__file__).parent / "skew_client.py"
DRIVEN = ("staging", "ledger", "admission", "finalizer")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a directory whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


async def play(mesh: ProxiedMesh, groups: int) -> dict[str, object]:
    """Play groups, and give what is wrong with them."""
    load = mesh.load(LoadOptions(groups=groups, group_size=3, at_once=6))
    await load.run()
    found = await faults_found(mesh, load)
    receipts = load.history.receipts.values()
    return {
        "rollouts": len(receipts),
        "retries": len(load.attempts) - len(receipts),
        "masked": [one.mask_reason for one in receipts if one.masked],
        "faults": found.all(),
    }


class NextRelease(Player):
    """Plays as gateway and worker of a release that says more than this one knows.

    Attributes:
        staged: what was staged, by call.
        recorded: what was committed, by call.
    """

    def __init__(self, mesh: FinalizerMesh, rollout_id: str) -> None:
        noted = SimpleNamespace(
            admission=mesh.admission,
            ledger=SimpleNamespace(
                record=self._commit, await_settled=mesh.ledger.await_settled, seal=mesh.ledger.seal
            ),
            staging=SimpleNamespace(stage=self._stage),
            finalizer=mesh.finalizer,
        )
        super().__init__(noted, rollout_id)
        self._real = mesh
        self.staged: dict[str, staged_call_pb2.StagedCall] = {}
        self.recorded: dict[str, call_record_pb2.CallRecord] = {}

    async def _stage(self, call: staged_call_pb2.StagedCall) -> None:
        note(call)
        self.staged[call.call_id] = call
        await self._real.staging.stage(call)

    async def _commit(self, record: call_record_pb2.CallRecord) -> None:
        note(record)
        self.recorded[record.coords.call_id] = record
        await self._real.ledger.record(record)


@asynccontextmanager
async def finalizer_mesh(folder: Path) -> AsyncIterator[FinalizerMesh]:
    mesh = FinalizerMesh(folder)
    await mesh.start()
    try:
        yield mesh
    finally:
        await mesh.stop()


def well(rollouts: int) -> dict[str, object]:
    return {"rollouts": rollouts, "retries": 0, "masked": [], "faults": []}


def of_release(change: Callable[[Image], Change], image: Image) -> Callable[..., SkewProxy]:
    """Let each side of a link see the other as of another release."""
    changed = change(image)

    def make(upstream: str, *, seed: int) -> SkewProxy:
        return SkewProxy(upstream, image, changed)

    return make


@pytest.mark.timeout(200 * DEPTH)
@pytest.mark.requirement("API-5", "API-8")
async def test_peers_of_the_last_release_play_along(folder: Path) -> None:
    """Row 23: on every link each side sees of the other what the last release knew of it."""
    make = of_release(forgetting, earlier())
    async with proxied_mesh(folder, make=make, driven=(*DRIVEN, "gateway")) as mesh:
        told = await play(mesh, 4 * DEPTH)
        await speak_to_the_last_release(mesh)
        messages = mesh.faults().total()
    print("RESULT " + json.dumps({"release": "last", "messages": messages} | told))
    assert told == well(12 * DEPTH)
    assert messages > 400


async def speak_to_the_last_release(mesh: ProxiedMesh) -> None:
    """Be a harness of today: what services of then lack is refused, what they had is served."""
    rollout = await mesh.owner.open("r")
    body = json.dumps({"model": "scripted", "messages": [ASKED], "seed": 1}).encode()
    async with connect(mesh.proxies[DRIVER, "gateway"].address) as channel:
        gateway = GatewayClient(channel, timeout_s=WAIT_S)
        assert await gateway.list_models() == ["scripted"]
        served = await gateway.complete(rollout.capture_key, body)
        with pytest.raises(RefusedError) as caught:
            await gateway.complete(rollout.capture_key, body, api=UNKNOWN_ENUM)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        await gateway.close()
    manifest = await mesh.clients.ledger().manifest(rollout.capture_key)
    assert [one.coords.call_id for one in manifest.records] == [served.call_id]
    with pytest.raises(RefusedError) as caught:
        await mesh.owner.open("forest", mode=attempt_pb2.CAPTURE_MODE_FOREST)
    assert caught.value.reason == er.ERROR_REASON_MODE_MISMATCH, "no chain is taken for it"


@pytest.mark.timeout(200 * DEPTH)
@pytest.mark.requirement("API-5")
async def test_peers_of_the_next_release_play_along(folder: Path) -> None:
    """Each side of a link says more than the other knows; a client of the last release joins in."""
    async with proxied_mesh(folder, make=of_release(noting, todays()), driven=DRIVEN) as mesh:
        told = await play(mesh, 4 * DEPTH)
        await play_the_last_release(mesh, folder / "stubs")
        messages = mesh.faults().total()
    print("RESULT " + json.dumps({"release": "next", "messages": messages} | told))
    assert told == well(12 * DEPTH)
    assert messages > 400


async def play_the_last_release(mesh: ProxiedMesh, stubs: Path) -> None:
    """Have a process play a rollout with stubs of the earlier release, and nothing of ours."""
    stubs.mkdir()
    await asyncio.to_thread(write_stubs, stubs)
    addresses = {name: mesh.addresses.of(name) for name in (*DRIVEN, "gateway")}
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, str(CLIENT), json.dumps(addresses)),
        env={**os.environ, "PYTHONPATH": f"{stubs}{os.pathsep}{ROOT / 'generated' / 'python'}"},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(client.communicate(), WAIT_S)
    assert client.returncode == 0
    seen = json.loads(said)
    assert seen["module"].startswith(str(stubs)), "not today's stubs"
    assert len(seen["calls"]) == 3
    assert seen["staged"] == seen["calls"]
    assert (seen["masked"], seen["rows"], seen["group"]) == ("", 1, "old-group")


async def pass_through(folder: Path, rollout_id: str = "r") -> tuple[list[str], int]:
    """Have a worker and a gateway of the next release write, and a reader of it read.

    Returns:
        The messages that lost what they had, and how many were looked at.
    """
    async with finalizer_mesh(folder) as mesh:
        player = NextRelease(mesh, rollout_id)
        await player.chain(3)
        key, call_ids = player.key, list(player.made)
        staged = [player.staged[one] for one in call_ids]
        fetched = await mesh.staging.fetch(key, call_ids)
        records = (await mesh.ledger.manifest(key)).records
        await player.finish("g", 0)
        await mesh.finalizer.finalize_group("g", 1)
        batch = await mesh.finalizer.group("g")
    for record in records:
        record.ClearField("intent_number")  # the ledger's own
    rows = []
    for call in staged:
        row = type(call).FromString(call.SerializeToString())
        row.ClearField("served_response")
        rows.append(row)
    pairs = {
        "staged": (staged, fetched),
        "rows": (rows, batch.segments),
        "records": ([player.recorded[one] for one in call_ids], records),
    }
    lost = [
        f"{kind} {number}"
        for kind, (sent, read) in pairs.items()
        for number, (one, other) in enumerate(zip(sent, read, strict=True))
        if one.SerializeToString() != other.SerializeToString()
    ]
    return lost, sum(len(sent) for sent, _ in pairs.values())


@pytest.mark.requirement("API-5")
async def test_what_is_only_passed_on_loses_nothing(folder: Path) -> None:
    """Calls through Staging and rows, records through the ledger: byte for byte."""
    lost, looked_at = await pass_through(folder)
    print("RESULT " + json.dumps({"messages": looked_at, "fields_lost": len(lost)}))
    assert looked_at == 9
    assert lost == []


async def test_a_store_that_drops_what_it_does_not_know_would_be_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = StagedCalls.put

    def forgetful(self, tenant, call, *staged):
        call.DiscardUnknownFields()
        return put(self, tenant, call, *staged)

    monkeypatch.setattr(StagedCalls, "put", forgetful)
    lost, _ = await pass_through(folder)
    assert {one.partition(" ")[0] for one in lost} == {"staged", "rows"}


def test_a_reason_of_the_next_release_is_an_error_all_the_same() -> None:
    refusal = Refusal(er.ERROR_REASON_OVERLOADED, "no", retry_after_ms=7, limit="x", limit_value=1)
    status = status_of(refusal)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    info.reason = "TOO_EARLY"
    status.details[0].Pack(info)
    error = error_of(status)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 0)
    assert (error.retry_after_ms, error.metadata["limit"]) == (7, "x")


def test_other_releases_are_what_they_are_called() -> None:
    name, today = "callforest.capture.v1.Attempt", todays()
    attempt = attempt_pb2.Attempt(capture_key="r", mode=attempt_pb2.CAPTURE_MODE_FOREST)
    older = forgetting(earlier())(name, attempt.SerializeToString())
    assert attempt_pb2.Attempt.FromString(older) == attempt_pb2.Attempt(capture_key="r")
    newer = noting(today)(name, attempt.SerializeToString())
    assert newer == attempt.SerializeToString() + NOTE
    assert noting(today)(name, newer) == newer
