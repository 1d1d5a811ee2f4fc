"""The mesh under fuzz: its process, what was played in it, and proof that it is whole after."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc.aio
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from callforest.admission.v1 import admission_service_pb2
from callforest.capture.v1 import attempt_pb2, capture_admission_pb2, staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2
from callforest.ledger.v1 import restore_attempt_pb2
from callforest.staging.v1 import staging_service_pb2
from callforest.worker.v1 import worker_service_pb2
from callforest_client.channel import connect
from callforest_client.codec import staged_call_from_proto
from callforest_client.errors import RefusedError
from callforest_client.restore_point import restore_point
from callforest_client.rollout import OpenRollout, Outcome, RolloutOwner
from callforest_core.custody.digests import digest_opening
from callforest_core.custody.tokens import encode_floats, encode_ids
from callforest_core.lineage.items import Dialect
from callforest_mesh.assembly import Clients
from callforest_mesh.chassis.configuration import SERVICES
from callforest_mesh.gateway import core
from tests.integration.running_mesh import free_port, play
from tests.robustness.fuzz_http import CHAT_BODY, GO, RESPONSES_BODY
from tests.robustness.fuzz_mesh import CONTROL_TOKEN, ENGINE, configuration
from tests.robustness.fuzz_seeds import Fact, Seeds
from tests.unit.staging.calls import Chain

START_S: Final = 60.0
_ONE_ARENA: Final = {"MALLOC_ARENA_MAX": "1"}
"""Keeps the measure from the C library's habit of giving each thread a heap of its own: their gaps
grow for long before they settle."""
_EXTRA_OPTIONS: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_PLAYED: Final = ("o1", "o2", "o3", "o4", "x1", "x2", "c1", "s1", "d1", "d2")
_DOOMED: Final = ("x1", "x2", "c1", "s1", "d1", "d2", "nobody")
_FOR_HTTP: Final = ("h1", "h2", "h3")
KEPT: Final = ("kept-1", "kept-2")
"""Rollouts that no seed names: they are finished after the fuzz."""


@dataclass
class FuzzedMesh:
    """A mesh in a process of its own, and ways to it.

    Attributes:
        url: the gateway's.
        log: what the process wrote to standard error.
        channels: one to each server, by its short name.
        clients: typed clients.
        kept: rollouts that were played and are not finished.
        facts: values by field name, for seeds.
        doomed: the same, for seeds that end or delete things.
        whole: messages that fit together, for seeds.
        open_keys: attempts that take calls, then others.
    """

    url: str
    log: Path
    process: asyncio.subprocess.Process
    channels: dict[str, grpc.aio.Channel]
    clients: Clients
    doomed: dict[str, list[Fact]] = field(default_factory=dict)
    kept: list[tuple[OpenRollout, str]] = field(default_factory=list)
    facts: dict[str, list[Fact]] = field(default_factory=dict)
    whole: dict[str, list[Message]] = field(default_factory=dict)
    open_keys: list[str] = field(default_factory=list)

    @property
    def owner(self) -> RolloutOwner:
        """Who opens and finishes rollouts."""
        clients = self.clients
        return RolloutOwner(
            clients.admission(), clients.ledger(), clients.finalizer(), self.url, settle_wait_s=5.0
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where the gateway listens for HTTP."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.returncode is None

    async def renew(self) -> None:
        """Open new attempts for HTTP: what an attempt's calls take in memory ends with it."""
        owner = self.owner
        for index, name in enumerate(_FOR_HTTP):
            self.open_keys[index] = (await owner.open(name)).capture_key

    async def measure(self) -> dict[str, int]:
        """Ask the process what memory it holds, in KiB."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(b"measure\n")
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), START_S))

    async def stop(self) -> int:
        """End the process; give its status."""
        assert self.process.stdin
        self.process.stdin.close()
        return await asyncio.wait_for(self.process.wait(), START_S)


@asynccontextmanager
async def fuzzed_mesh(directory: Path) -> AsyncIterator[FuzzedMesh]:
    """Run the mesh in a process, with rollouts in every state."""
    port, log = free_port(), directory / "log"
    chosen = configuration(directory, port)
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.robustness.fuzz_mesh", str(directory), str(port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=os.environ | _ONE_ARENA,
        )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_end, process)
        assert process.stdout
        said = await asyncio.wait_for(process.stdout.readline(), START_S)
        assert said, log.read_text()
        addresses = {name: chosen.addresses.of(name) for name in SERVICES}
        addresses[ENGINE] = f"unix:{directory}/{ENGINE}.sock"
        channels = {}
        for name, address in addresses.items():
            channels[name] = grpc.aio.insecure_channel(address, options=_EXTRA_OPTIONS)
            stack.push_async_callback(channels[name].close)
        clients = Clients(chosen, lambda name: connect(addresses[name]), stack)
        mesh = FuzzedMesh(json.loads(said)["url"], log, process, channels, clients)
        await _play(mesh, directory)
        yield mesh


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _play(mesh: FuzzedMesh, directory: Path) -> None:
    """Bring attempts into every state, and take from them what seeds are made of."""
    owner, staging, ledger = mesh.owner, mesh.clients.staging(), mesh.clients.ledger()
    for name in KEPT:
        rollout = await owner.open(name)
        mesh.kept.append((rollout, await play(rollout.base_url)))
    rollouts = {name: await owner.open(name) for name in _PLAYED}
    last = {name: await play(one.base_url, 2) for name, one in rollouts.items()}
    admission = mesh.clients.admission()
    for name in ("c1", "s1"):
        await admission.close_attempt(rollouts[name].capture_key)
    await ledger.seal(rollouts["s1"].capture_key)
    for slot, name in enumerate(("d1", "d2")):
        outcome = Outcome(reward=1.0, declared_response_id=last[name])
        receipt = await owner.finish(rollouts[name], outcome, group_id="g1", slot=slot)
        assert not receipt.masked, receipt
    await owner.publish("g1", 2)
    keys = [one.capture_key for one in rollouts.values()]
    mesh.open_keys = [*_FOR_HTTP, *_DOOMED]
    await mesh.renew()
    manifests = {key: await ledger.manifest(key) for key in keys}
    records = [record for one in manifests.values() for record in one.records]
    calls, fetches = [], []
    for key in keys:
        ids = [record.coords.call_id for record in manifests[key].records]
        calls += [call async for call in _fetch(staging, key, ids)]
        fetches.append(
            staging_service_pb2.FetchRequest(tenant="default", capture_key=key, call_ids=ids)
        )
    mesh.facts = _facts(keys, [call.call_id for call in calls], list(last.values()), directory)
    mesh.doomed = {**mesh.facts, "capture_key": list(_DOOMED)}
    for one in manifests.values():
        for name in ("epoch", "revision"):
            mesh.facts.setdefault(name, []).append(getattr(one.attempt, name))
    for message in (*calls, *fetches, *_made_up_calls(keys), *_entries(records), *_intents(keys)):
        mesh.whole.setdefault(message.DESCRIPTOR.full_name, []).append(message)
    restores = await _restores(mesh)
    made = [*_generations(keys, calls), *_finalizations(manifests, rollouts, last), *restores]
    for message in made:
        mesh.whole.setdefault(message.DESCRIPTOR.full_name, []).append(message)


async def _restores(mesh: FuzzedMesh) -> list[Message]:
    """Make restores of rollouts that no other seed names; each is the same request every time."""
    made: list[Message] = []
    for number, kind in enumerate(
        (admission_service_pb2.RestoreAttemptRequest, restore_attempt_pb2.RestoreAttemptRequest)
    ):
        rollout = await mesh.owner.open(f"restored-{number}")
        await play(rollout.base_url, 2)
        records = (await mesh.clients.ledger().manifest(rollout.capture_key)).records
        point = restore_point(rollout.attempt, [one.coords.call_id for one in records])
        made.append(
            kind(
                tenant="default",
                rollout_id=rollout.rollout_id,
                request_id=str(uuid.UUID(int=number, version=4)),
                point=point,
            )
        )
    return made


async def _fetch(staging, key: str, ids: list[str]) -> AsyncIterator[staged_call_pb2.StagedCall]:
    for call in await staging.fetch(key, ids):
        yield call


def _facts(
    keys: list[str], call_ids: list[str], response_ids: list[str], directory: Path
) -> dict[str, list[Fact]]:
    weights = directory / "weights"
    weights.write_bytes(b"weights")
    bodies = [json.dumps({**one, "stream": False}).encode() for one in (CHAT_BODY, RESPONSES_BODY)]
    calls = [*call_ids[:8], "c1", "c2", "c3"]
    return {
        "tenant": ["default", "default", "default", "other"],
        "capture_key": [*keys, *keys, "nobody"],
        "rollout_id": [*_DOOMED, "n1"],
        "group_id": ["g1", "g2", "g3"],
        "call_id": calls,
        "call_ids": calls,
        "held_call_ids": calls,
        "parent_call_id": calls,
        "continues_call_id": calls,
        "claimed_call_id": calls,
        "native_ids": [f"msg_{one}" for one in calls],
        "declared_response_id": [*response_ids, "chatcmpl-x"],
        "response_id": response_ids,
        "consumer": ["trainer", "other"],
        "sha256": [hashlib.sha256(b"weights").digest()],
        "weight_version": [1, 2, 3, 5, 8, 1000],
        "timeout_ms": [2000, 2000, 2000, 20, 1, 30_000],
        "wait_ms": [0, 1, 10, 3_600_000],
        "path": [str(weights), str(directory), "/nowhere", "/dev/zero"],
        "traceparent": ["", "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "x"],
        "request": bodies,
        "chat_request": bodies,
        "scored_response": [b"", b'{"id":"x"}', b"{"],
        "slot": [0, 1, 2],
        "rollout_count": [1, 2],
        "after_cursor": [0, 1, 2],
        "cursor": [0, 1, 2],
        "reason": ["worker_capture_failed", "x"],
    }


def _made_up_calls(keys: list[str]) -> list[Message]:
    made: list[Message] = []
    for number, key in enumerate([*keys, "nobody"]):
        chain = Chain(key, seed=number)
        made += [chain.add(f"c{index}") for index in (1, 2, 3)]
    return made


def _entries(records) -> list[Message]:
    entries: list[Message] = [attempt_pb2.ManifestEntry(record=record) for record in records]
    for record in records[:4]:
        failure = attempt_pb2.CallFailure(
            capture_key=record.coords.capture_key, call_id="c1", reason="worker_capture_failed"
        )
        entries.append(attempt_pb2.ManifestEntry(failure=failure))
    return [*records, *entries]


def _intents(keys: list[str]) -> list[Message]:
    made: list[Message] = []
    for fields in (CHAT_BODY, {"model": "m", "messages": [GO]}):
        request = core.read_request(json.dumps(fields).encode(), Dialect.CHAT)
        for key in keys:
            for call_id in ("c1", "c2", "c3"):
                intent = core.intent_of(request, key, call_id, Timestamp(seconds=1_700_000_000))
                made += [intent, intent.chain]
    return made


def _generations(keys: list[str], calls: list[staged_call_pb2.StagedCall]) -> list[Message]:
    made: list[Message] = []
    for parent in calls:
        admission = capture_admission_pb2.CaptureAdmission(
            capture_key=parent.capture_key,
            call_id="c2",
            continuation=capture_admission_pb2.Continuation(
                parent_call_id=parent.call_id,
                prev_token_count=parent.prev_token_count + len(parent.canonical.token_ids) // 4,
                parent_chain_hash=parent.chain_hash,
            ),
        )
        made.append(_generation(parent.capture_key, "c2", admission))
    for key in keys:
        root = capture_admission_pb2.CaptureAdmission(
            capture_key=key, call_id="c1", root=capture_admission_pb2.Root()
        )
        made += [_generation(key, "c1", root), _generation(key, "c3", None)]
    return made


def _generation(
    key: str, call_id: str, admission: capture_admission_pb2.CaptureAdmission | None
) -> Message:
    return worker_service_pb2.GenerateCall(
        capture_key=key,
        call_id=call_id,
        create_time=Timestamp(seconds=1_700_000_000),
        chat_request=json.dumps(CHAT_BODY).encode(),
        admission=admission,
    )


def _finalizations(manifests, rollouts, last) -> list[Message]:
    return [
        finalizer_service_pb2.FinalizeRolloutRequest(
            tenant="default",
            group_id="g1" if name.startswith("d") else "g2",
            rollout_id=name,
            slot=int(name[1]) - 1,
            capture_key=one.capture_key,
            epoch=manifests[one.capture_key].attempt.epoch,
            revision=manifests[one.capture_key].attempt.revision,
            reward=1.0,
            declared_response_id=last[name],
        )
        for name, one in rollouts.items()
    ]


async def unsound(mesh: FuzzedMesh) -> list[str]:
    """Read every attempt and every staged call that its rows name; say what is wrong with them."""
    ledger, staging, faults = mesh.clients.ledger(), mesh.clients.staging(), []
    for key in {str(one) for one in mesh.facts["capture_key"]} - {"nobody"}:
        try:
            records = (await ledger.manifest(key)).records
        except RefusedError as error:
            if error.reason != er.ERROR_REASON_ATTEMPT_NOT_FOUND:
                raise
            continue  # forgotten, as a seed may ask of a sealed one
        for record in records:
            call_id = record.coords.call_id
            try:
                (message,) = await staging.fetch(key, [call_id])
            except (RefusedError, ValueError):
                continue  # deleted, as a seed may ask
            call = staged_call_from_proto(message)
            digest = call.recompute_digest(
                digest_opening(key), encode_ids(call.token_ids), encode_floats(call.logprobs)
            )
            if digest != call.digest:
                faults.append(f"{key}/{call_id}: staged with a digest of other tokens")
    return faults


async def finish_kept(mesh: FuzzedMesh) -> list[str]:
    """Finish what was played before, and play and finish another; say what does not train."""
    owner, faults = mesh.owner, []
    fresh = await owner.open("after")
    mesh.kept.append((fresh, await play(fresh.base_url)))
    for slot, (rollout, last) in enumerate(mesh.kept):
        outcome = Outcome(reward=float(slot), declared_response_id=last)
        receipt = await owner.finish(rollout, outcome, group_id="g-after", slot=slot)
        if receipt.masked or len(receipt.calls) != 3:
            faults.append(f"{rollout.rollout_id} does not train: {receipt}")
    published = await owner.publish("g-after", len(mesh.kept))
    if published.drop_reason:
        faults.append(f"the group was dropped: {published.drop_reason}")
    return faults


__all__ = ["CONTROL_TOKEN", "FuzzedMesh", "Seeds", "finish_kept", "fuzzed_mesh", "unsound"]
