"""B21: the gateway dies under a call at six points; its repeat is the same call.

Once the process of the gateway alone is killed, the other services being processes of their own,
in chain mode; once a process that holds the whole mesh, so that engine, Staging and ledger die with
it, in forest mode.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from callforest.capture.v1 import staged_call_pb2
from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError
from callforest_client.staging import StagingClient
from callforest_mesh.assembly import Clients, addressed
from callforest_mesh.chassis.configuration import MeshConfiguration, load
from callforest_mesh.chassis.failpoint import VARIABLE
from callforest_mesh.gateway.asked import call_id_of
from callforest_mesh.supervisor import Supervisor
from tests.integration.running_mesh import WITHOUT_TRAINER, settings

WAIT_S = 60.0
GO = {"role": "user", "content": "go"}
ON = {"role": "user", "content": "on"}
OTHERS = tuple(name for name in WITHOUT_TRAINER if name != "gateway")
# What dies, at which point, and whether the tokens of the second call are durable by then. Each
# point is passed once a call; the ledger has an attempt, and an intent and a record a call.
DEATHS = [
    ("gateway", "gateway.before_engine=exit@2", False),
    ("gateway", "gateway.after_engine=exit@2", True),
    ("gateway", "gateway.after_staging=exit@2", True),
    ("gateway", "gateway.after_append=exit@2", True),
    ("gateway", "gateway.after_commit_ack=exit@2", True),
    ("gateway", "gateway.after_reply_began=exit@2", True),
    ("mesh", "gateway.before_engine=exit@2", False),
    ("mesh", "worker.after_engine=exit@2", False),
    ("mesh", "worker.after_stage=exit@2", True),
    ("mesh", "ledger.after_append=exit@5", True),
    ("mesh", "ledger.after_durable=exit@5", True),
    ("mesh", "gateway.after_reply_began=exit@2", True),
]


@dataclass
class Mortal:
    """A mesh whose gateway's process a test starts, and a point may end."""

    kind: str
    settings: list[str]
    configuration: MeshConfiguration
    clients: Clients
    process: asyncio.subprocess.Process | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.configuration.gateway['port']}"

    async def start(self, armed: str = "", *more: str) -> None:
        """Start the process, and wait until it serves."""
        command = ("up",) if self.kind == "mesh" else ("serve", "gateway")
        words = [word for one in (*self.settings, *more) for word in ("--set", one)]
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "callforest_mesh.cli", *command, *words),
            env={**os.environ, VARIABLE: armed},
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as http:
            while True:
                assert self.process.returncode is None
                try:
                    async with http.get(f"{self.url}/healthz") as response:
                        assert response.status == 200
                        return
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.1)

    async def died(self) -> int:
        """Wait for the process to end; give how it ended."""
        assert self.process is not None
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()

    async def stop(self) -> None:
        """End the process, if it runs."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()

    async def ask(self, name: str, *messages: object) -> tuple[bytes, list[object]]:
        """Make a call under a key; give its response, and what the next one says."""
        body = {"model": "scripted", "messages": messages}
        headers = {"Idempotency-Key": name}
        url = f"{self.url}/rollouts/r/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json=body, headers=headers) as response,
        ):
            answer = await response.read()
            assert response.status == 200, answer
            message = (await response.json())["choices"][0]["message"]
        return answer, [*messages, message, ON]


@asynccontextmanager
async def mortal(kind: str, folder: Path, *more: str) -> AsyncIterator[Mortal]:
    chosen = settings(folder, *more)
    configuration = load(environment={}, settings=chosen)
    async with AsyncExitStack() as stack:
        if kind == "gateway":
            others = [*chosen, f"services=[{', '.join(OTHERS)}]"]
            arguments = [word for one in others for word in ("--set", one)]
            supervisor = Supervisor(load(environment={}, settings=others), arguments)
            stack.push_async_callback(supervisor.stop)
            await supervisor.start()
        clients = Clients(configuration, addressed(configuration), stack)
        mesh = Mortal(kind, chosen, configuration, clients)
        stack.push_async_callback(mesh.stop)
        yield mesh


async def staged_of(staging: StagingClient, call_id: str) -> staged_call_pb2.StagedCall | None:
    try:
        (call,) = await staging.fetch("r", [call_id])
    except RefusedError as error:
        if error.reason != er.ERROR_REASON_CALL_NOT_FOUND:
            raise
        return None
    return call


@pytest.mark.timeout(300)
@pytest.mark.requirement("CAP-13", "CAP-6", "LED-11")
@pytest.mark.bugcase("B21")
@pytest.mark.parametrize(("kind", "armed", "is_staged"), DEATHS)
async def test_a_response_that_is_lost_is_the_one_that_comes_again(
    kind: str, armed: str, is_staged: bool, tmp_path: Path
) -> None:
    forest = "true" if kind == "mesh" else "false"
    async with mortal(kind, tmp_path, f"token_capture.forest_training={forest}") as mesh:
        await mesh.start(armed)
        admission, ledger = mesh.clients.admission(), mesh.clients.ledger()
        staging = mesh.clients.staging()
        await admission.open_attempt("r", request_id="0b0c3b6e-6d5c-4a3e-9a43-2f1a9e6e0001")
        _, second = await mesh.ask("one", GO)
        with pytest.raises(aiohttp.ClientError):
            await mesh.ask("two", *second)
        assert await mesh.died() == -signal.SIGKILL
        if kind == "mesh":
            # What is sampled from now on is another generation, and says so.
            await mesh.start("", "worker.scripted.seed=7", "worker.scripted.weight_version=1")
        else:
            await mesh.start()
        before = await staged_of(staging, call_id_of("r", "two"))
        assert (before is not None) == is_staged
        repeated, third = await mesh.ask("two", *second)
        assert (await mesh.ask("two", *second))[0] == repeated
        await mesh.ask("three", *third)
        manifest = await ledger.manifest("r")
        assert (manifest.failures, list(manifest.attempt.pending_call_ids)) == ([], [])
        records = {one.coords.call_id: one for one in manifest.records}
        assert len(records) == len(manifest.records) == 3
        one, two, three = manifest.records
        assert two.coords.parent_call_id == one.coords.call_id
        assert three.coords.parent_call_id == two.coords.call_id, "later calls match"
        kept = await staging.fetch("r", list(records))
        assert kept[1].served_response == repeated
        assert kept[1].digest == two.coords.digest
        if before is not None:
            assert kept[1] == before, "these very tokens"
        assert (await staging.stat()).call_count == 3, "no sample of it is left beside"
        if kind == "mesh":
            versions = [call.weight_version for call in kept]
            assert versions == [0, 0 if is_staged else 1, 1]
