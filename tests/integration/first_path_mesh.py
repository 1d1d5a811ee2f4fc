"""A whole mesh without finalizer and trainer: real services, a scripted engine, a harness's SDK."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import httpx
import numpy as np
import openai

from callforest.capture.v1 import attempt_pb2
from callforest_client.admission import AdmissionClient
from callforest_client.channel import connect
from callforest_client.gateway import GatewayClient
from callforest_client.ledger import LedgerClient, Manifest
from callforest_client.staging import StagingClient
from callforest_client.worker import WorkerClient
from callforest_core.custody.tokens import TokenIds
from callforest_mesh.admission.service import AdmissionOptions, AdmissionService
from callforest_mesh.chassis.item_server import Drain
from callforest_mesh.chassis.server import MeshServer, ServerOptions
from callforest_mesh.chassis.service import MeshService
from callforest_mesh.gateway.service import GatewayOptions, GatewayService
from callforest_mesh.ledger.service import LedgerOptions, LedgerService
from callforest_mesh.staging.service import StagingOptions, StagingService
from callforest_mesh.worker.chat_text import Message
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedTurn
from callforest_mesh.worker.service import WorkerOptions, WorkerService

SMALL_STORE = {"map_size_bytes": 64 << 20, "quota_bytes": 48 << 20}
CONTROL_TOKEN = "control token"


@dataclass(frozen=True)
class WordVocabulary:
    """Ids of whole words; a text is encoded from the left, the longest word first."""

    words: dict[int, str]

    def encode(self, text: str) -> TokenIds:
        found: list[int] = []
        while text:
            known = [token for token, word in self.words.items() if text.startswith(word)]
            best = max(known, key=lambda token: len(self.words[token]))
            found.append(best)
            text = text[len(self.words[best]) :]
        return np.array(found, np.uint32)

    def decode(self, token_ids: TokenIds) -> str:
        return "".join(self.words.get(int(token), "") for token in token_ids)


@dataclass(frozen=True)
class TurnTemplate:
    """1 text 2 for a user, 3 text 4 for the assistant, then what follows each assistant turn."""

    vocabulary: WordVocabulary
    after_turn: str = ""
    terminators: frozenset[int] = frozenset({4})

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        prompt: list[int] = []
        for message in messages:
            text = self.vocabulary.encode(str(message["content"] or ""))
            if message["role"] == "assistant":
                prompt += [3, *text.tolist(), 4, *self.vocabulary.encode(self.after_turn).tolist()]
            else:
                prompt += [1, *text.tolist(), 2]
        return np.array(prompt + [3] * add_generation_prompt, np.uint32)


GO = {"role": "user", "content": "go"}
WORDS = WordVocabulary(
    {
        5: "ok",
        6: "o",
        7: "k",
        10: "H",
        11: "AVING",
        12: "HAV",
        13: "ING",
        20: "go",
        30: "some",
        31: "text",
        40: "Hi",
        41: "!",
        98: "\n",
        99: "!\n\n",
    }
)


def scripted(*turns: ScriptedTurn, after_turn: str = "") -> ScriptedEngine:
    """Make an engine of the bug cases' vocabulary that gives these turns in order."""
    return ScriptedEngine(
        vocabulary=WORDS,
        template=TurnTemplate(WORDS, after_turn),
        script=lambda _prompt, _call_id, ordinal: turns[ordinal],
    )


def turn(*token_ids: int, finish_reason: str = "stop", **changed: object) -> ScriptedTurn:
    logprobs = [-0.1 * (index + 1) for index in range(len(token_ids))]
    fields = {"token_ids": token_ids, "logprobs": logprobs, "finish_reason": finish_reason}
    return ScriptedTurn(**{**fields, **changed})


def spoken(response: httpx.Response) -> dict[str, object]:
    """Give the served message, as a harness echoes it."""
    assert response.status_code == 200, response.text
    message: dict[str, object] = response.json()["choices"][0]["message"]
    return message


def events_of(response: httpx.Response) -> list[dict[str, object]]:
    """Give the events of a buffered stream, without the marker at its end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@dataclass
class FirstPathMesh:
    """The services of one running mesh, and clients of each.

    Attributes:
        engine: None when it is in another process.
    """

    engine: ScriptedEngine | None
    forest: bool = False
    url: str = ""
    admission: AdmissionClient = field(init=False)
    ledger: LedgerClient = field(init=False)
    staging: StagingClient = field(init=False)
    worker: WorkerClient = field(init=False)
    gateway: GatewayClient = field(init=False)
    servers: dict[str, MeshServer] = field(default_factory=dict)
    http: httpx.AsyncClient = field(init=False)

    async def open(self, rollout_id: str = "r") -> str:
        """Open the rollout's next attempt; give its capture key."""
        mode = attempt_pb2.CAPTURE_MODE_FOREST if self.forest else attempt_pb2.CAPTURE_MODE_CHAIN
        attempt = await self.admission.open_attempt(
            rollout_id, request_id=str(uuid.uuid4()), mode=mode
        )
        return attempt.capture_key

    @asynccontextmanager
    async def harness(self, capture_key: str) -> AsyncIterator[openai.AsyncOpenAI]:
        """Give the SDK as a harness uses it: a base URL, nothing else."""
        base_url = f"{self.url}/rollouts/{capture_key}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            yield client

    async def ask(self, capture_key: str, *messages: object, **fields: object) -> httpx.Response:
        """Send a Chat Completions request as plain HTTP."""
        return await self.http.post(
            f"{self.url}/rollouts/{capture_key}/v1/chat/completions",
            content=json.dumps({"model": "scripted", "messages": messages, **fields}),
        )

    async def respond(self, capture_key: str, turns: object, **fields: object) -> httpx.Response:
        """Send a Responses request as plain HTTP."""
        return await self.http.post(
            f"{self.url}/rollouts/{capture_key}/v1/responses",
            content=json.dumps({"model": "scripted", "input": turns, **fields}),
        )

    async def manifest(self, capture_key: str) -> Manifest:
        """Read an attempt and its rows."""
        return await self.ledger.manifest(capture_key)

    def prompts(self) -> list[list[int]]:
        """Give the prompts that the engine received."""
        assert self.engine is not None, "it is in another process"
        return [prompt.token_ids.tolist() for prompt in self.engine.prompts]

    def assert_generated(self, count: int) -> None:
        """Check how often the engine was asked, where it can be looked at.

        One in another process cannot; what a call leaves in the ledger shows there.
        """
        assert self.engine is None or len(self.engine.prompts) == count


@asynccontextmanager
async def running_mesh(
    path: Path,
    engine: ScriptedEngine,
    *,
    local: bool = False,
    forest: bool = False,
    worker: dict[str, object] | None = None,
    gateway: dict[str, object] | None = None,
) -> AsyncIterator[FirstPathMesh]:
    """Run a mesh.

    Args:
        path: directory of the stores.
        engine: generates.
        local: within this process, or each service on a socket of its own.
        forest: in forest mode, the attempts that are opened alike.
        worker: options of the worker.
        gateway: options of the gateway.
    """
    mesh = FirstPathMesh(engine, forest)
    async with AsyncExitStack() as stack:

        async def serve(service: MeshService, drain: Drain) -> grpc.aio.Channel:
            server = MeshServer(
                service,
                "" if local else f"unix:{path}/{service.name}.sock",
                drain,
                ServerOptions(grace_s=5.0),
            )
            bound = await server.start()
            mesh.servers[service.name] = server
            stack.push_async_callback(server.stop)
            channel = server.local_channel() if local else connect(bound)
            stack.push_async_callback(channel.close)
            return channel

        drain = Drain()
        options = StagingOptions(path / "staging", **SMALL_STORE)
        mesh.staging = StagingClient(await serve(StagingService(options, drain), drain))
        drain = Drain()
        service = LedgerService(LedgerOptions(path / "ledger", **SMALL_STORE), drain)
        mesh.ledger = LedgerClient(await serve(service, drain), timeout_s=2.0)
        drain = Drain()
        admission = AdmissionService(AdmissionOptions(), drain, mesh.ledger)
        mesh.admission = AdmissionClient(await serve(admission, drain), timeout_s=2.0)
        drain = Drain()
        worker_options = WorkerOptions(path / "worker", **(worker or {}))
        hosted = WorkerService(worker_options, drain, engine, mesh.staging)
        mesh.worker = WorkerClient(await serve(hosted, drain))
        for client in (mesh.staging, mesh.ledger, mesh.admission, mesh.worker):
            stack.push_async_callback(client.close)
        drain = Drain()
        edge_options: dict[str, object] = {"control_token": CONTROL_TOKEN, "commit_timeout_s": 2.0}
        edge_options |= {"forest": forest, **(gateway or {})}
        edge = GatewayService(
            GatewayOptions(**edge_options),
            drain,
            mesh.admission,
            mesh.ledger,
            mesh.worker,
            mesh.staging,
        )
        mesh.gateway = GatewayClient(await serve(edge, drain))
        stack.push_async_callback(mesh.gateway.close)
        mesh.url = edge.url
        mesh.http = await stack.enter_async_context(httpx.AsyncClient(timeout=30.0))
        yield mesh
