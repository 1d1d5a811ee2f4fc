"""Buffered events on their way: to clients that wait, that leave, and that are refused."""

import asyncio
from pathlib import Path

import openai
import pytest

from callforest_mesh.worker.engine import EngineRefusalError
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.integration.first_path_mesh import (
    GO,
    FirstPathMesh,
    events_of,
    running_mesh,
    scripted,
    turn,
)

SOON = {"keep_alive_s": 0.01}
KEEP_ALIVE = ": keep-alive"
BOTH = pytest.mark.parametrize("api", ["chat/completions", "responses"])


class Held:
    """An engine's pause that a test ends."""

    def __init__(self, error: Exception | None = None) -> None:
        self.generating, self.release = asyncio.Event(), asyncio.Event()
        self.cancelled = asyncio.Event()
        self._error = error

    async def __call__(self, _call_id: str) -> None:
        self.generating.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self._error is not None:
            raise self._error


def body_of(api: str, **fields: object) -> dict[str, object]:
    turns = "input" if api == "responses" else "messages"
    return {"model": "m", turns: [GO], "stream": True, **fields}


def asked(mesh: FirstPathMesh, key: str, api: str) -> object:
    """Begin to ask for events; to be entered."""
    url = f"{mesh.url}/rollouts/{key}/v1/{api}"
    return mesh.http.stream("POST", url, json=body_of(api))


@BOTH
@pytest.mark.requirement("CAP-2")
async def test_client_that_waits_gets_comments_then_its_events(api: str, tmp_path: Path) -> None:
    held = Held()
    async with running_mesh(tmp_path, ScriptedEngine(pause=held), gateway=SOON) as mesh:
        key = await mesh.open()
        async with asked(mesh, key, api) as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream"
            call_id = response.headers["x-callforest-call-id"]
            lines = response.aiter_lines()
            assert await anext(lines) == KEEP_ALIVE
            held.release.set()
            rest = [line async for line in lines if line.startswith("data: ")]
        (record,) = (await mesh.manifest(key)).records
    assert record.coords.call_id == call_id
    assert record.response_id in rest[0]
    assert rest[-1] == "data: [DONE]" or '"response.completed"' in rest[-1]


@pytest.mark.requirement("CAP-2")
async def test_sdk_reads_over_the_comments(tmp_path: Path) -> None:
    held = Held()
    async with running_mesh(tmp_path, ScriptedEngine(pause=held), gateway=SOON) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as client:
            chunks = await client.chat.completions.create(model="m", messages=[GO], stream=True)
            held.release.set()
            spoken = [chunk.choices[0].delta.content or "" async for chunk in chunks]
            held.release.clear()
            async with client.responses.stream(model="m", input=[GO]) as stream:
                held.release.set()
                final = await stream.get_final_response()
    # The engine's answer depends on the prompt alone.
    assert "".join(spoken) == final.output_text != ""


@BOTH
@pytest.mark.requirement("CAP-2", "API-6")
async def test_refusal_has_its_status_however_soon_comments_would_begin(
    api: str, tmp_path: Path
) -> None:
    async with running_mesh(tmp_path, ScriptedEngine(), gateway={"keep_alive_s": 1e-6}) as mesh:
        url = f"{mesh.url}/rollouts/nobody/v1/{api}"
        response = await mesh.http.post(url, json=body_of(api))
        assert (response.status_code, response.json()["error"]["code"]) == (
            404,
            "attempt_not_found",
        )
        key = await mesh.open()
        await mesh.servers["ledger"].stop()
        response = await mesh.http.post(f"{mesh.url}/rollouts/{key}/v1/{api}", json=body_of(api))
        assert response.status_code == 503
        assert not mesh.prompts()


@BOTH
@pytest.mark.requirement("CAP-2", "API-6")
async def test_engine_that_refuses_at_once_gets_a_status_and_the_requests_own_name(
    api: str, tmp_path: Path
) -> None:
    held = Held(EngineRefusalError("too long", parameter="messages"))
    held.release.set()
    async with running_mesh(tmp_path, ScriptedEngine(pause=held)) as mesh:
        key = await mesh.open()
        response = await mesh.http.post(f"{mesh.url}/rollouts/{key}/v1/{api}", json=body_of(api))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == ("input" if api == "responses" else "messages")


@pytest.mark.requirement("CAP-2", "API-6")
async def test_what_fails_behind_the_status_line_is_an_error_to_the_sdk(tmp_path: Path) -> None:
    held = Held(EngineRefusalError("too long", parameter="messages"))
    async with running_mesh(tmp_path, ScriptedEngine(pause=held), gateway=SOON) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as client:
            chunks = await client.chat.completions.create(model="m", messages=[GO], stream=True)
            held.release.set()
            with pytest.raises(openai.APIError, match="too long"):
                await anext(chunks)
            held.release.clear()
            events = await client.responses.create(model="m", input=[GO], stream=True)
            held.release.set()
            seen = [(await anext(events)).type for _ in range(2)]
            with pytest.raises(openai.APIError, match="too long"):
                await anext(events)
        manifest = await mesh.manifest(key)
    assert seen == ["response.created", "response.failed"]
    assert not manifest.failures, "nothing was generated: the calls are withdrawn"
    assert not manifest.records
    assert not manifest.attempt.pending_call_ids


@BOTH
@pytest.mark.requirement("API-6", "LED-11")
@pytest.mark.bugcase("B24")
@pytest.mark.parametrize("gateway", [{}, SOON], ids=["before a byte", "between comments"])
async def test_client_that_leaves_while_it_waits_ends_the_generation(
    api: str, gateway: dict[str, object], tmp_path: Path
) -> None:
    held, commented = Held(), asyncio.Event()
    async with running_mesh(tmp_path, ScriptedEngine(pause=held), gateway=gateway) as mesh:
        key = await mesh.open()

        async def ask() -> None:
            async with asked(mesh, key, api) as response:
                async for line in response.aiter_lines():
                    assert line in ("", KEEP_ALIVE)
                    commented.set()

        asking = asyncio.ensure_future(ask())
        await held.generating.wait()
        if gateway:
            await commented.wait()
        asking.cancel()
        await asyncio.wait({asking})
        async with asyncio.timeout(10):
            await held.cancelled.wait()
        await mesh.admission.close_attempt(key)
        assert not (await mesh.ledger.await_settled(key, wait_s=10.0)).pending_call_ids
        manifest = await mesh.manifest(key)
    assert commented.is_set() == bool(gateway)
    assert not manifest.records
    (failure,) = manifest.failures
    assert failure.reason == "request_finished_without_staged_coordinates"
    assert failure.worker_reason == "cancelled"


@BOTH
@pytest.mark.requirement("CAP-2")
@pytest.mark.bugcase("B24")
@pytest.mark.parametrize("where", ["halfway", "before the last event"])
async def test_client_that_leaves_between_events_has_its_call(
    api: str, where: str, tmp_path: Path
) -> None:
    """The row is durable before the first event, and the next request may continue the call."""
    engine = scripted(turn(10, 11, 4), turn(30, 4))
    async with running_mesh(tmp_path, engine) as mesh:
        key = await mesh.open()
        first_text = '"HAVING"'
        async with asked(mesh, key, api) as response:
            async for line in response.aiter_lines():
                if where == "halfway" or first_text in line:
                    break
        assert len((await mesh.manifest(key)).records) == 1
        said = {"role": "assistant", "content": "HAVING"}
        if api == "responses":
            events_of(await mesh.respond(key, [GO, said, GO], stream=True))
        else:
            events_of(await mesh.ask(key, GO, said, GO, stream=True))
        manifest = await mesh.manifest(key)
    first, second = manifest.records
    assert second.coords.parent_call_id == first.coords.call_id
    assert not manifest.failures
