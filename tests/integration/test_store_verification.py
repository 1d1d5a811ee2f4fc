"""`callforest verify --store`: an honest state directory is intact, and each fault is named."""

import asyncio
import dataclasses
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from callforest.capture.v1 import staged_call_pb2
from callforest.finalizer.v1 import row_log_pb2
from callforest.ledger.v1 import ledger_event_pb2
from callforest_client.codec import ids_to_bytes
from callforest_mesh.chassis.record_frame import CHECKSUM_BYTES, checksum
from callforest_mesh.cli import main
from callforest_mesh.finalizer.store import tenant_key, tenant_prefix
from callforest_mesh.ledger.outline import AttemptKey
from callforest_mesh.ledger.store import DATABASES, attempt_prefix
from callforest_mesh.staging.entry import partition_key
from callforest_mesh.terminal import DONE, NO
from tests.integration import store_damage as damage
from tests.integration.finalizer_mesh import (
    TENANT,
    FinalizerMesh,
    Player,
    publish_chain_group,
    take,
)
from tests.unit.chassis.stores import make

pytestmark = pytest.mark.requirement("OPS-3")


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command sets up the log of its process, which here is the tests'."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


class State:
    """A stopped state directory: a consumed group, a waiting one, pending and failed calls."""

    def __init__(self, path: Path, players: dict[str, Player]) -> None:
        self.path = path
        self.players = players

    def made(self, rollout_id: str, call_id: str) -> bytes:
        """The token ids of a call as they stand in the file."""
        return ids_to_bytes(self.players[rollout_id].made[call_id].call.token_ids)

    def call_key(self, rollout_id: str, call_id: str) -> bytes:
        return partition_key(TENANT, self.players[rollout_id].key) + call_id.encode()

    def event_key(self, rollout_id: str, revision: int) -> bytes:
        prefix = attempt_prefix(AttemptKey(TENANT, self.players[rollout_id].key))
        return prefix + revision.to_bytes(8, "big")


@pytest.fixture(scope="module")
def made_state() -> Iterator[State]:
    with tempfile.TemporaryDirectory() as folder:
        yield asyncio.run(make_state(Path(folder)))


@pytest.fixture
def state(made_state: State, tmp_path: Path) -> State:
    """Give a state directory that a test may damage."""
    for name in ("staging", "ledger", "finalizer"):
        shutil.copytree(made_state.path / name, tmp_path / name)
    return State(tmp_path, made_state.players)


async def make_state(folder: Path) -> State:
    mesh = FinalizerMesh(folder)
    await mesh.start()
    players = {one.rollout_id: one for one in await publish_chain_group(mesh, "eaten", 1, calls=3)}
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(1)
    (batch,) = await take(rows, 1)
    await rows.commit(batch.cursor)
    await rows.close()
    await mesh.cleaned()
    players |= {
        one.rollout_id: one
        for one in await publish_chain_group(mesh, "waits", 2, calls=3, tokens=400)
    }
    running = players["running"] = Player(mesh, "running")
    await running.chain(2)
    await running.stage("c", "b")  # its record is pending
    await running.fail("d")
    abandoned = players["abandoned"] = Player(mesh, "abandoned")
    await abandoned.chain(2)
    await abandoned.seal()
    await mesh.stop()
    return State(folder, players)


def verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], dict[str, int]]:
    """Run the command; give its status, the faults, and the counts of its last line."""
    status = main(["verify", "--store", str(path)])
    lines = capsys.readouterr().out.splitlines()
    word, _, counts = lines[-1].partition(" ")
    assert word == "RESULT"
    return status, [line for line in lines if line.startswith("fault ")], json.loads(counts)


def test_an_honest_state_is_intact(state: State, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.read_bytes() for file in state.path.rglob("data.mdb")}
    status, faults, counts = verify(state.path, capsys)
    assert (status, faults) == (DONE, [])
    assert counts == {
        "faults": 0,
        "stores": 3,
        "staged_calls": 11,
        "groups": 2,
        "groups_consumed": 1,
        "attempts": 5,
        "records": 13,
        "attempts_verified_whole": 4,
        "records_whose_call_is_gone": 3,
        "staged_without_record": 1,
        "receipts": 3,
        "references": 6,
    }
    for name, calls in (("staging", 11), ("ledger", None), ("finalizer", None)):
        status, faults, counts = verify(state.path / name, capsys)
        assert (status, faults) == (DONE, [])
        assert counts.get("staged_calls") == calls
    assert before == {file: file.read_bytes() for file in state.path.rglob("data.mdb")}


def flip_a_token(state: State) -> str:
    damage.flip_in_file(state.path / "staging", state.made("waits-r0", "b"), at=9)
    return "call b: its bytes do not have their checksum"


def flip_a_record(state: State) -> str:
    digest = state.players["running"].made["b"].call.digest
    damage.flip_in_file(state.path / "ledger", digest, at=3)
    return "does not have its checksum"


def swap_two_payloads(state: State) -> str:
    first, second = (state.call_key("waits-r0", name) for name in "bc")
    damage.swap_payloads(state.path / "staging", first, second)
    return "call b: its bytes do not have their checksum"


def forge_a_token(state: State) -> str:
    key = state.call_key("waits-r0", "a")
    store = state.path / "staging"
    entry = damage.entry_of(store, key)
    call = staged_call_pb2.StagedCall.FromString(damage.payload_of(store, entry))
    forged = bytearray(call.canonical.token_ids)
    forged[0] ^= 1
    call.canonical.token_ids = bytes(forged)
    payload = call.SerializeToString()
    damage.overwrite(store, entry, payload)
    sealed = dataclasses.replace(entry, checksum=checksum("calls", key, payload))
    damage.put_sealed(store, "calls", key, sealed.to_bytes())
    return "call a: the call's chain_hash is not that of its contents"


def lose_a_staged_call(state: State) -> str:
    damage.delete(state.path / "staging", "calls", state.call_key("running", "a"))
    return "running/a  dangling: it has a record, and is not staged"


def lose_a_reference(state: State) -> str:
    damage.delete(state.path / "staging", "calls", state.call_key("waits-r1", "a"))
    return "waits-r1/a  group waits waits to be trained on it; it is not there"


def lose_a_count(state: State) -> str:
    (key, *_) = damage.keys(state.path / "staging", "lives")
    damage.delete(state.path / "staging", "lives", key)
    return "calls are in it, its count says 0"


def lose_an_event(state: State) -> str:
    damage.delete(state.path / "ledger", "events", state.event_key("abandoned", 3))
    return "no event 3"


def lose_an_attempt(state: State) -> str:
    prefix = state.event_key("abandoned", 1)[:-8]
    found = [key for key in damage.keys(state.path / "ledger", "events") if key.startswith(prefix)]
    for key in found:
        damage.delete(state.path / "ledger", "events", key)
    return "orphans: 2 staged calls of an attempt that the ledger does not have"


def lose_an_intent(state: State) -> str:
    """Take the pending call's intent and what follows it out of the log."""
    store, prefix = state.path / "ledger", state.event_key("running", 1)[:-8]
    found = [key for key in damage.keys(store, "events") if key.startswith(prefix)]
    for key in found[5:]:  # behind the opening and two calls' intents and records
        damage.delete(store, "events", key)
    return "running/c  an orphan: it is staged, and was never announced"


def forge_a_record(state: State) -> str:
    store, key = state.path / "ledger", state.event_key("running", 3)
    event = ledger_event_pb2.LedgerEvent.FromString(
        damage.stored(store, "events", key)[CHECKSUM_BYTES:]
    )
    event.record.coords.weight_version += 1
    damage.put_sealed(store, "events", key, event.SerializeToString())
    return "running/a  its record commits to another call"


def forge_a_reward(state: State) -> str:
    store, key = state.path / "finalizer", tenant_key(TENANT, "waits-r0")
    finalized = row_log_pb2.FinalizedRollout.FromString(
        damage.stored(store, "rollouts", key)[CHECKSUM_BYTES:]
    )
    finalized.receipt.reward += 1
    damage.put_sealed(store, "rollouts", key, finalized.SerializeToString())
    return "the receipt of waits-r0 does not have its digest"


def rewind_the_head(state: State) -> str:
    store, key = state.path / "finalizer", tenant_prefix(TENANT)
    log = row_log_pb2.RowLogState.FromString(damage.stored(store, "state", key)[CHECKSUM_BYTES:])
    log.head_cursor = 0
    damage.put_sealed(store, "state", key, log.SerializeToString())
    return "out of order: 1, 1, 0"


def lose_a_position(state: State) -> str:
    position = tenant_prefix(TENANT) + (2).to_bytes(8, "big")
    damage.delete(state.path / "finalizer", "log", position)
    return "1 positions, not 1 to 2"


def unseal_an_attempt(state: State) -> str:
    store, prefix = state.path / "ledger", state.event_key("waits-r0", 1)[:-8]
    found = [key for key in damage.keys(store, "events") if key.startswith(prefix)]
    damage.delete(store, "events", found[-1])
    return "of an attempt that the ledger does not have sealed like that"


def cut_the_file(state: State) -> str:
    file = state.path / "staging" / "data.mdb"
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size - 1)
    return "data.mdb  ends within a page"


def lose_half_the_file(state: State) -> str:
    file = state.path / "staging" / "data.mdb"
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 8192 * 4096)
    return "a part of the file is missing or damaged"


DAMAGES = [
    flip_a_token,
    flip_a_record,
    swap_two_payloads,
    forge_a_token,
    lose_a_staged_call,
    lose_a_reference,
    lose_a_count,
    lose_an_event,
    lose_an_attempt,
    lose_an_intent,
    forge_a_record,
    forge_a_reward,
    rewind_the_head,
    lose_a_position,
    unseal_an_attempt,
    cut_the_file,
    lose_half_the_file,
]


@pytest.mark.parametrize("harm", DAMAGES, ids=[harm.__name__ for harm in DAMAGES])
def test_each_fault_is_named(
    state: State, harm: Callable[[State], str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = harm(state)
    status, faults, counts = verify(state.path, capsys)
    assert status == NO
    assert any(expected in fault for fault in faults), faults
    assert counts["faults"] == len(faults)


async def test_a_store_in_use_is_not_verified(
    state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make(state.path / "ledger", name="ledger", databases=DATABASES, map_size_bytes=1 << 29)
    assert main(["verify", "--store", str(state.path)]) == NO
    assert "another process has it open" in capsys.readouterr().err
    await store.close()
    assert main(["verify", "--store", str(state.path)]) == DONE


def test_a_directory_without_stores_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--store", str(tmp_path)]) == NO
    assert "holds no store" in capsys.readouterr().err
    (tmp_path / "data.mdb").write_bytes(b"no store at all" * 1000)
    status, faults, _ = verify(tmp_path, capsys)
    assert status == NO
    assert "data.mdb" in faults[0]
