"""Ledger, Staging, Admission and Finalizer, and rollouts made without an engine or a gateway."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np

from callforest.capture.v1 import attempt_pb2, group_batch_pb2, receipt_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.admission import AdmissionClient
from callforest_client.channel import connect
from callforest_client.codec import call_record_to_proto, staged_call_to_proto
from callforest_client.errors import RefusedError
from callforest_client.finalizer import FinalizerClient, RowSubscription
from callforest_client.ledger import LedgerClient
from callforest_client.restore_point import restore_point
from callforest_client.staging import StagingClient
from callforest_core.custody.call import CallIdentity, CallRecord, StagedCall
from callforest_core.custody.completion import complete_call
from callforest_core.custody.extras import EMPTY_EXTRAS
from callforest_core.lineage.fingerprint import FINGERPRINT_VERSION, ConversationScan
from callforest_mesh.admission.service import AdmissionOptions, AdmissionService
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer, ServerOptions
from callforest_mesh.chassis.service import MeshService
from callforest_mesh.finalizer.service import FinalizerOptions, FinalizerService
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from callforest_mesh.staging.service import StagingOptions, StagingService
from tests.integration.kinds_of_mesh import mesh_in_processes
from tests.unit.ledger.calls import failure, intent, said, user
from tests.unit.staging.calls import COMPLETION

TENANT = "acme"
WAIT_S = 30.0
FOUR = ("staging", "ledger", "admission", "finalizer")
SMALL_STORE = {"map_size_bytes": 512 << 20, "quota_bytes": 400 << 20}
GRACE = ServerOptions(grace_s=2.0)


class FinalizerMesh:
    """The four services, each on a socket or in the process; each can end and start anew.

    Args:
        folder: holds stores and sockets.
        kind: `socket`, `local` or `processes`; a service of a `local` mesh cannot be started anew
            alone, and one in a process of its own not at all.
        options: of the Finalizer, in this process.
    """

    def __init__(self, folder: Path, kind: str = "socket", **options: object) -> None:
        self.folder = folder
        self.kind = kind
        self.options: dict[str, object] = dict(options)
        self.staging_of_finalizer = lambda: self.staging
        self.services: dict[str, MeshService] = {}
        self.servers: dict[str, MeshServer] = {}
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.processes = ExitStack()

    async def start(self) -> None:
        if self.kind == "processes":
            chosen = (f"services=[{', '.join(FOUR)}]", f"tenant={TENANT}")
            configuration = self.processes.enter_context(mesh_in_processes(self.folder, *chosen))
            for name in FOUR:
                self.channels[name] = connect(configuration.addresses.of(name))
        for name in ("staging", "ledger", "admission"):
            await self.begin(name)
        self.ledger = LedgerClient(self.channels["ledger"], tenant=TENANT, timeout_s=WAIT_S)
        self.staging = StagingClient(self.channels["staging"], tenant=TENANT, timeout_s=WAIT_S)
        self.admission = AdmissionClient(
            self.channels["admission"], tenant=TENANT, timeout_s=WAIT_S
        )
        await self.begin("finalizer")
        self.finalizer = FinalizerClient(
            self.channels["finalizer"], tenant=TENANT, timeout_s=WAIT_S
        )

    async def begin(self, name: str) -> None:
        """Start a service; a socket's clients find it again by themselves."""
        if self.kind == "processes":
            return
        drain = Drain()
        service = self._make(name, drain)
        socket = self.kind == "socket"
        address = f"unix:{self.folder}/{name}.sock" if socket else ""
        server = MeshServer(service, address, drain, GRACE)
        bound = await server.start()
        self.services[name], self.servers[name] = service, server
        if name not in self.channels:
            self.channels[name] = connect(bound) if socket else server.local_channel()
        async with asyncio.timeout(WAIT_S):
            await self.channels[name].channel_ready()

    async def end(self, name: str) -> None:
        await self.servers.pop(name).stop()

    async def restart(self, name: str) -> None:
        await self.end(name)
        await self.begin(name)

    async def stop(self) -> None:
        for client in (self.ledger, self.staging, self.admission):
            await client.close()
        for name in reversed(list(self.servers)):
            await self.end(name)
        for channel in self.channels.values():
            await channel.close()
        self.processes.close()

    async def cleaned(self, *consumed: Player) -> None:
        """Wait until what was consumed is cleaned.

        Args:
            consumed: whose calls that was; another process does not say when it is done.
        """
        if self.kind == "processes":
            assert consumed
            for _ in range(1000):
                if not any([await player.staged_ids() for player in consumed]):
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("consumed calls are still staged")
        service = self.services["finalizer"]
        assert isinstance(service, FinalizerService)
        await service._cleanup.settle(TENANT)

    def _make(self, name: str, drain: Drain) -> MeshService:
        path = self.folder / name
        if name == "staging":
            return StagingService(StagingOptions(path, **SMALL_STORE), drain)
        if name == "ledger":
            return LedgerService(LedgerOptions(path, **SMALL_STORE), drain)
        if name == "admission":
            ledger = LedgerClient(self.channels["ledger"], tenant=TENANT, timeout_s=WAIT_S)
            return AdmissionService(AdmissionOptions(), drain, ledger)
        options = FinalizerOptions(
            path, **(SMALL_STORE | {"cleanup_tenants": (TENANT,)} | self.options)
        )
        return FinalizerService(options, drain, self.ledger, self.staging_of_finalizer())


@dataclass
class Made:
    """A call as the worker completed it, and all tokens of its path."""

    call: StagedCall
    path: np.ndarray
    items: list[object]
    answer: str


class Player:
    """Plays a rollout as gateway and worker would, call by call.

    Args:
        mesh: where it plays.
        rollout_id: the logical rollout.
        seed: of its tokens.
        extras: of each of its calls.
    """

    def __init__(
        self, mesh: FinalizerMesh, rollout_id: str, seed: int = 0, *, extras: bytes = EMPTY_EXTRAS
    ) -> None:
        self._mesh = mesh
        self.rollout_id = rollout_id
        self.key = ""
        self._extras = extras
        self._random = np.random.default_rng([seed, *rollout_id.encode()])
        self.made: dict[str, Made] = {}

    async def open(self) -> attempt_pb2.Attempt:
        attempt = await self._mesh.admission.open_attempt(
            self.rollout_id, request_id=str(uuid.uuid4())
        )
        self.key = attempt.capture_key
        return attempt

    async def restore(self, *call_ids: str, request_id: str = "") -> attempt_pb2.Attempt:
        """Open the next attempt with calls that were made before."""
        point = restore_point(attempt_pb2.Attempt(capture_key=self.key), call_ids)
        attempt = await self._mesh.admission.restore_attempt(
            self.rollout_id, request_id=request_id or str(uuid.uuid4()), point=point
        )
        self.key = attempt.capture_key
        return attempt

    async def call(
        self, call_id: str, parent: str | None = None, *, tokens: int = 6, finish: str = "stop"
    ) -> Made:
        """Admit, complete, stage and commit one call of `tokens` new tokens, half of them carry."""
        made = await self.stage(call_id, parent, tokens=tokens)
        await self._mesh.ledger.record(self._record(made, finish))
        return made

    async def stage(self, call_id: str, parent: str | None = None, *, tokens: int = 6) -> Made:
        """Admit, complete and stage a call, whose commit then is pending."""
        made = self._complete(call_id, parent, tokens)
        verdict = await self._mesh.admission.admit(intent(call_id, made.items, key=self.key))
        if parent is None:
            assert verdict.HasField("root"), verdict
        else:
            assert verdict.continuation.parent_call_id == parent, verdict
            owner = verdict.continuation.parent_capture_key
            assert owner == made.call.identity.parent_capture_key
        response = json.dumps({"id": f"chatcmpl-{call_id}"}).encode()
        await self._mesh.staging.stage(staged_call_to_proto(made.call, response, COMPLETION))
        return made

    async def admit(self, call_id: str) -> None:
        """Announce a call that then is pending."""
        await self._mesh.admission.admit(intent(call_id, [user(call_id)], key=self.key))

    async def fail(self, call_id: str, reason: str = "worker_capture_failed") -> None:
        await self.admit(call_id)
        await self._mesh.ledger.record_failure(failure(call_id, reason, key=self.key))

    async def seal(self) -> attempt_pb2.Attempt:
        await self._mesh.admission.close_attempt(self.key)
        await self._mesh.ledger.await_settled(self.key, wait_s=0)
        return await self._mesh.ledger.seal(self.key)

    async def chain(self, calls: int = 3, *, tokens: int = 6) -> None:
        """Open and play a chain of calls `a`, `b`, ..."""
        await self.open()
        names = [chr(ord("a") + number) for number in range(calls)]
        for name, parent in zip(names, [None, *names], strict=False):
            await self.call(name, parent, tokens=tokens)

    async def request(
        self, group_id: str, slot: int, *, reward: float = 1.0, **fields: object
    ) -> pb.FinalizeRolloutRequest:
        """Seal the attempt and make the request that finalizes it."""
        sealed = await self.seal()
        asked: dict[str, object] = {
            "group_id": group_id,
            "rollout_id": self.rollout_id,
            "slot": slot,
            "capture_key": self.key,
            "epoch": sealed.epoch,
            "revision": sealed.revision,
            "reward": reward,
        }
        return pb.FinalizeRolloutRequest(**(asked | fields))

    async def finish(
        self, group_id: str, slot: int, *, reward: float = 1.0, **fields: object
    ) -> receipt_pb2.Receipt:
        request = await self.request(group_id, slot, reward=reward, **fields)
        return await self._mesh.finalizer.finalize_rollout(request)

    async def staged_ids(self) -> list[str]:
        """Which of the calls made here are staged."""
        found = []
        for call_id, made in self.made.items():
            owner = made.call.identity.capture_key
            (outcome,) = await asyncio.gather(
                self._mesh.staging.fetch(owner, [call_id]), return_exceptions=True
            )
            if not isinstance(outcome, BaseException):
                found.append(call_id)
                continue
            assert isinstance(outcome, RefusedError), outcome
            assert outcome.reason == er.ERROR_REASON_CALL_NOT_FOUND
        return found

    def _complete(self, call_id: str, parent: str | None, tokens: int) -> Made:
        before = None if parent is None else self.made[parent]
        delta = self._random.integers(0, 2**32, tokens, dtype=np.uint32)
        carry = tokens // 2
        prefix = np.empty(0, np.uint32) if before is None else before.path
        items = [] if before is None else [*before.items, said(before.answer)]
        call = complete_call(
            self._identity(call_id, before),
            prefix=None if before is None else before.path,
            parent_chain_hash=None if before is None else before.call.chain_hash,
            prompt_ids=np.concatenate((prefix, delta[:carry])),
            generated_ids=delta[carry:],
            logprobs=-self._random.random(tokens - carry).astype(np.float32),
            weight_version=3,
            extras=self._extras,
        )
        made = Made(
            call,
            np.concatenate((prefix, delta)),
            [*items, user(f"ask {call_id}")],
            f"{self.rollout_id} says {call_id}",
        )
        self.made[call_id] = made
        return made

    def _identity(self, call_id: str, before: Made | None) -> CallIdentity:
        if before is None:
            return CallIdentity(self.key, call_id, None)
        parent = before.call.identity
        owner = "" if parent.capture_key == self.key else parent.capture_key
        return CallIdentity(self.key, call_id, parent.call_id, owner)

    def _record(self, made: Made, finish: str):
        scan = ConversationScan(made.items)
        continuation = scan.continued([said(made.answer)])
        record = CallRecord.of(
            made.call,
            f"chatcmpl-{made.call.identity.call_id}",
            admitted_at=1_700_000_000.0 + len(self.made),
            output_fingerprint=continuation.output_fingerprint,
            continuation_fingerprint=continuation.fingerprint,
            fingerprint_version=FINGERPRINT_VERSION,
            finish_reason=finish,
            status="completed" if finish != "length" else "incomplete",
        )
        return call_record_to_proto(
            record,
            self.key,
            generation_len=made.call.generation_len,
            context=(scan.item_count, scan.context_digest),
        )


async def publish_chain_group(
    mesh: FinalizerMesh, group_id: str, rollouts: int = 2, *, calls: int = 2, tokens: int = 6
) -> list[Player]:
    """Play, finalize and publish a group of healthy chains."""
    players = [Player(mesh, f"{group_id}-r{slot}") for slot in range(rollouts)]
    for slot, player in enumerate(players):
        await player.chain(calls, tokens=tokens)
        receipt = await player.finish(group_id, slot, reward=float(slot))
        assert not receipt.masked, receipt
    await mesh.finalizer.finalize_group(group_id, rollouts)
    return players


async def take(rows: RowSubscription, count: int) -> list[group_batch_pb2.GroupBatch]:
    """Take groups of a subscription, which needs the credit for them."""
    batches: list[group_batch_pb2.GroupBatch] = []
    async for batch in rows:
        batches.append(batch)
        if len(batches) == count:
            break
    return batches


async def read_again(mesh: FinalizerMesh, count: int) -> Sequence[group_batch_pb2.GroupBatch]:
    """Take the first groups behind the committed cursor over a stream of its own."""
    rows = mesh.finalizer.subscribe("trainer")
    await rows.credit(count)
    try:
        return await take(rows, count)
    finally:
        await rows.close()
