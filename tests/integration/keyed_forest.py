"""A rollout whose harness names each logical call by a key, from its requests to its rows.

Call ids derive from the keys, and digests cover call ids: played again in fresh stores, a rollout
has the same digests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from callforest.capture.v1 import call_record_pb2, group_batch_pb2
from callforest.finalizer.v1 import finalizer_service_pb2 as pb
from callforest_client.finalizer import FinalizerClient
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer, ServerOptions
from callforest_mesh.finalizer.service import FinalizerOptions, FinalizerService
from callforest_mesh.gateway.asked import call_id_of
from callforest_mesh.worker.scripted import Script, ScriptedEngine, ScriptedTurn
from tests.integration.first_path_mesh import SMALL_STORE, FirstPathMesh, running_mesh, spoken
from tests.integration.offline_rows import verify_offline

KEY = "r"
Message = dict[str, object]
Row = tuple[str, tuple[tuple[str, bytes, bool], ...]]
"""Its id, and of each call of its path: the name, the digest, whether the row owns its loss."""


def script_of(turns: Mapping[str, ScriptedTurn]) -> Script:
    """Answer each call by its name."""
    by_id = {call_id_of(KEY, name): turn for name, turn in turns.items()}
    return lambda _prompt, call_id, _ordinal: by_id[call_id]


@dataclass
class KeyedForest:
    """One rollout.

    Attributes:
        mesh: where it is played.
        finalizer: its client.
        served: the responses, by the names of their calls.
    """

    mesh: FirstPathMesh
    finalizer: FinalizerClient
    served: dict[str, httpx.Response] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _begun: dict[str, asyncio.Event] = field(default_factory=dict)
    _held: dict[str, asyncio.Event] = field(default_factory=dict)

    async def ask(self, name: str, *messages: Message) -> Message:
        """Make a call; give what it said, as a harness echoes it."""
        self._names[call_id_of(KEY, name)] = name
        response = await self.mesh.http.post(
            f"{self.mesh.url}/rollouts/{KEY}/v1/chat/completions",
            content=json.dumps({"model": "scripted", "messages": messages}),
            headers={"Idempotency-Key": name},
        )
        said = spoken(response)
        self.served[name] = response
        return said

    async def hold(self, name: str, *messages: Message) -> asyncio.Task[Message]:
        """Make a call that is announced when this returns, and does not finish before `finish`."""
        self.mesh.engine.pause = self._pause
        call_id = call_id_of(KEY, name)
        self._begun[call_id], self._held[call_id] = asyncio.Event(), asyncio.Event()
        task = asyncio.ensure_future(self.ask(name, *messages))
        await self._begun[call_id].wait()
        return task

    async def finish(self, name: str, task: asyncio.Task[Message]) -> Message:
        """Let a held call finish."""
        self._held[call_id_of(KEY, name)].set()
        return await task

    def said(self, name: str) -> Message:
        """What a call said."""
        return spoken(self.served[name])

    def prompts(self) -> dict[str, list[int]]:
        """The engine's prompts, by the names of their calls."""
        return {
            self._names[prompt.call_id]: prompt.token_ids.tolist()
            for prompt in self.mesh.engine.prompts
        }

    async def records(self) -> dict[str, call_record_pb2.CallRecord]:
        """The committed calls by name, in commit order."""
        manifest = await self.mesh.manifest(KEY)
        assert not manifest.failures
        return {self._names[one.coords.call_id]: one for one in manifest.records}

    async def parents(self) -> dict[str, str]:
        """Which call each call continues; "" for a root."""
        records = await self.records()
        return {
            name: self._names.get(one.coords.parent_call_id, "") for name, one in records.items()
        }

    async def finalize(self, accepted: Sequence[str]) -> group_batch_pb2.GroupBatch:
        """End the rollout with the answers that its harness accepted; give its group of one.

        The answers are shown without ids; the last of them is scored.
        """
        await self.mesh.admission.close_attempt(KEY)
        await self.mesh.ledger.await_settled(KEY, wait_s=5.0)
        sealed = await self.mesh.ledger.seal(KEY)
        shown = [{"choices": [{"message": self.said(name)}]} for name in accepted]
        request = pb.FinalizeRolloutRequest(
            group_id="g",
            rollout_id=KEY,
            slot=0,
            capture_key=KEY,
            epoch=sealed.epoch,
            revision=sealed.revision,
            reward=1.0,
            result=json.dumps({"responses": shown}).encode(),
            declared_response_id=self.served[accepted[-1]].json()["id"],
        )
        receipt = await self.finalizer.finalize_rollout(request)
        assert not receipt.masked, receipt
        await self.finalizer.finalize_group("g", 1)
        batch = await self.finalizer.group("g")
        verify_offline(batch)
        return batch

    def rows(self, batch: group_batch_pb2.GroupBatch) -> list[Row]:
        """The rows of a group."""
        rows: list[Row] = []
        for row in batch.rows:
            parts = [(batch.segments[span.segment_index], span.owns_loss) for span in row.spans]
            spans = [(self._names[part.call_id], part.digest, owns) for part, owns in parts]
            rows.append((row.row_id, tuple(spans)))
        return rows

    async def _pause(self, call_id: str) -> None:
        if call_id in self._held:
            self._begun[call_id].set()
            await self._held[call_id].wait()


@asynccontextmanager
async def keyed_forest(
    path: Path, engine: ScriptedEngine, policy: str = "returned_history"
) -> AsyncIterator[KeyedForest]:
    """Open a rollout in fresh stores.

    Args:
        path: a folder for them, made here.
        engine: generates.
        policy: selects what trains.
    """
    path.mkdir()
    async with running_mesh(path, engine, local=True, forest=True) as mesh:
        drain = Drain()
        options = FinalizerOptions(path / "finalizer", selection_policy=policy, **SMALL_STORE)
        service = FinalizerService(options, drain, mesh.ledger, mesh.staging)
        server = MeshServer(service, "", drain, ServerOptions(grace_s=5.0))
        await server.start()
        channel = server.local_channel()
        try:
            assert await mesh.open(KEY) == KEY
            yield KeyedForest(mesh, FinalizerClient(channel))
        finally:
            await channel.close()
            await server.stop()
