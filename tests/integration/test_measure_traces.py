"""A measure leaves no trace: in no file of any service, and in nothing that the gateway keeps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from callforest.capture.v1 import attempt_pb2
from callforest_client.gateway import CHAT, RESPONSES, GatewayClient
from callforest_client.rollout import Outcome
from callforest_mesh.gateway import service as gateway_service
from callforest_mesh.gateway.conversations import Conversations
from callforest_mesh.gateway.histories import Histories
from tests.integration.running_mesh import Running, running

GO = {"role": "user", "content": "go"}
SHORT = {"role": "user", "content": "stop"}
STORES = frozenset({"staging", "ledger", "finalizer", "worker"})
LOCK = "lock.mdb"
"""LMDB's table of who reads: it changes with every reader, and holds nothing."""


@dataclass
class Kept:
    """What the gateway of a mesh keeps in memory."""

    histories: list[Histories] = field(default_factory=list)
    conversations: list[Conversations] = field(default_factory=list)

    def facts(self) -> list[object]:
        """Give every kept call and conversation, by identity, and what they take."""
        facts: list[object] = []
        for one in self.histories:
            calls = {key: dict(calls) for key, calls in one._attempts.items()}
            facts.append((calls, set(one._leaves), one.size_bytes, len(one)))
            facts.append([call.child_count for kept in calls.values() for call in kept.values()])
        facts += [(dict(other._known), other._bytes) for other in self.conversations]
        return facts


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    found = Kept()

    def histories(bytes_max: int, calls_max: int) -> Histories:
        found.histories.append(Histories(bytes_max, calls_max))
        return found.histories[-1]

    def conversations() -> Conversations:
        found.conversations.append(Conversations())
        return found.conversations[-1]

    monkeypatch.setattr(gateway_service, "Histories", histories)
    monkeypatch.setattr(gateway_service, "Conversations", conversations)
    return found


def files_of(state: Path) -> dict[str, str]:
    """Digest every file below the state directory; of lock tables only that they are there."""
    return {
        file.relative_to(state).as_posix(): ""
        if file.name == LOCK
        else hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(state.rglob("*"))
        if file.is_file()
    }


async def trained(mesh: Running) -> None:
    """Have one group go all the way, so that every store holds something."""
    rollout = await mesh.owner.open("done", mode=mode_of(mesh))
    async with httpx.AsyncClient(timeout=30) as http:
        answer = await http.post(
            f"{rollout.base_url}/chat/completions", json={"model": "scripted", "messages": [GO]}
        )
    outcome = Outcome(reward=1.0, declared_response_id=answer.json()["id"], result=b"{}")
    await mesh.owner.finish(rollout, outcome, group_id="g", slot=0)
    assert (await mesh.owner.publish("g", 1)).row_ids
    weights = mesh.configuration.state_dir.parent / "weights"
    weights.write_bytes(b"new")
    digest = hashlib.sha256(b"new").digest()
    assert await mesh.clients.worker().update_weights(str(weights), 1, digest) == 1


def mode_of(mesh: Running) -> attempt_pb2.CaptureMode.ValueType:
    forest = mesh.configuration.token_capture.forest_training
    return attempt_pb2.CAPTURE_MODE_FOREST if forest else attempt_pb2.CAPTURE_MODE_CHAIN


@pytest.mark.requirement("CAP-10")
@pytest.mark.parametrize("forest", [True, False], ids=["forest", "chain"])
@pytest.mark.parametrize("api", [CHAT, RESPONSES], ids=["chat", "responses"])
async def test_nothing_of_a_measure_is_found_anywhere(
    tmp_path: Path, kept: Kept, forest: bool, api: int
) -> None:
    settings = [f"token_capture.forest_training={str(forest).lower()}"]
    if forest:
        settings.append("token_capture.selection_policy=all_captured")
    async with running("embedded", tmp_path, *settings) as mesh:
        await trained(mesh)
        state = mesh.configuration.state_dir
        rollout = await mesh.owner.open("measured", mode=mode_of(mesh))
        path = "chat/completions" if api == CHAT else "responses"
        name = "messages" if api == CHAT else "input"
        gateway = GatewayClient(mesh.clients._channel("gateway"))
        turns: list[object] = [GO]
        contexts: list[bool] = []
        async with httpx.AsyncClient(timeout=30) as http:

            async def measure(*asked: object) -> httpx.Response:
                """Measure by both APIs, and find nothing of it."""
                body = json.dumps({"model": "scripted", name: asked}).encode()
                files, memory = files_of(state), kept.facts()
                assert {file.partition("/")[0] for file in files} >= STORES
                by_http = await http.post(
                    f"{mesh.gateway_url}/context/{rollout.capture_key}/measure", content=body
                )
                if by_http.status_code == 200:
                    by_grpc = await gateway.measure(rollout.capture_key, body, api)
                    assert by_grpc.prompt_token_count == by_http.json()["prompt_token_count"]
                assert files_of(state) == files
                assert kept.facts() == memory
                return by_http

            for number in range(3):
                measured = await measure(*turns)
                contexts.append(measured.json()["is_continuation"])
                if number:
                    assert (await measure(SHORT, *turns[1:])).status_code == 200, "a rewrite"
                assert (await measure()).status_code == 400, "a refusal"
                before = files_of(state), kept.facts()
                served = await http.post(
                    f"{rollout.base_url}/{path}", json={"model": "scripted", name: turns}
                )
                after = files_of(state), kept.facts()
                assert before[0] != after[0], "the call itself is found in the files"
                assert before[1] != after[1], "and in memory"
                answer = served.json()
                echoed = answer["output"] if api == RESPONSES else [answer["choices"][0]["message"]]
                turns += [*echoed, {"role": "user", "content": f"more {number}"}]
    assert contexts == [False, True, True], "a root and continuations"
