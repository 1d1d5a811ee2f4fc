"""A request that comes again is the same call, over HTTP, the SDK and gRPC, in both modes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from callforest.error.v1 import error_reason_pb2 as er
from callforest_client.errors import RefusedError
from callforest_client.gateway import CHAT
from callforest_mesh.gateway.asked import call_id_of
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.integration.first_path_mesh import GO, FirstPathMesh, running_mesh

MODES = pytest.mark.parametrize("forest", [False, True], ids=["chain", "forest"])
MARKED = {"x-stainless-retry-count": "1"}


class Losing(httpx.AsyncHTTPTransport):
    """A connection that loses the first responses: the gateway sent them, nobody got them."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.losses = losses
        self.lost: list[bytes] = []
        self.retry_counts: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        self.retry_counts.append(request.headers["x-stainless-retry-count"])
        if len(self.lost) < self.losses:
            self.lost.append(await response.aread())
            raise httpx.ReadError("lost", request=request)
        return response


class Held:
    """Holds the engine in its generations until it is let go."""

    def __init__(self) -> None:
        self.generating, self.go = asyncio.Event(), asyncio.Event()
        self.count = 0

    async def __call__(self, _call_id: str) -> None:
        self.count += 1
        self.generating.set()
        await self.go.wait()


async def post(mesh: FirstPathMesh, key: str, *messages: object, **headers: str) -> httpx.Response:
    body = {"model": "scripted", "messages": messages}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await mesh.http.post(
        f"{mesh.url}/rollouts/{key}/v1/chat/completions", json=body, headers=named
    )


async def marked(mesh: FirstPathMesh, key: str, *messages: object) -> httpx.Response:
    return await post(mesh, key, *messages, **MARKED)


async def rows(mesh: FirstPathMesh, key: str) -> tuple[list[str], list[str], list[str]]:
    """Give the calls that have a record, a failure row, and none."""
    manifest = await mesh.manifest(key)
    return (
        [one.coords.call_id for one in manifest.records],
        [one.call_id for one in manifest.failures],
        list(manifest.attempt.pending_call_ids),
    )


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def next_of(response: httpx.Response, *before: object) -> list[object]:
    message = response.json()["choices"][0]["message"]
    return [*before, message, {"role": "user", "content": "on"}]


@MODES
@pytest.mark.requirement("CAP-13")
@pytest.mark.bugcase("B14")
async def test_equal_requests_are_two_calls(forest: bool, tmp_path: Path) -> None:
    """(i): no key and no mark; the first was answered."""
    async with running_mesh(tmp_path, ScriptedEngine(), forest=forest) as mesh:
        key = await mesh.open()
        answers = [await post(mesh, key, GO) for _ in range(2)]
        assert {one.status_code for one in answers} == {200}
        records, failures, pending = await rows(mesh, key)
        assert (len(set(records)), failures, pending) == (2, [], [])
        ambiguous = await marked(mesh, key, GO)
        assert code_of(ambiguous) == (422, "ambiguous_retry")
        assert all(one in ambiguous.text for one in records)
        assert len(mesh.engine.prompts) == 2


@MODES
@pytest.mark.requirement("CAP-13")
@pytest.mark.bugcase("B14")
@pytest.mark.parametrize("keyed", [False, True])
async def test_the_sdk_repeats_a_lost_response_and_gets_it(
    keyed: bool, forest: bool, tmp_path: Path
) -> None:
    """(ii): one call, the same bytes, whether the SDK marks its repeat or the harness names it."""
    losing = Losing(2)
    async with (
        running_mesh(tmp_path, ScriptedEngine(), forest=forest) as mesh,
        httpx.AsyncClient(transport=losing) as http,
    ):
        key = await mesh.open()
        base_url = f"{mesh.url}/rollouts/{key}/v1"
        client = openai.AsyncOpenAI(
            base_url=base_url, api_key="any", max_retries=2, http_client=http
        )
        headers = {"Idempotency-Key": "one"} if keyed else {}
        answer = await client.chat.completions.with_raw_response.create(
            model="scripted", messages=[GO], extra_headers=headers
        )
        records, failures, _ = await rows(mesh, key)
    assert losing.retry_counts == ["0", "1", "2"]
    assert losing.lost == [answer.content] * 2
    assert (len(records), failures) == (1, [])
    assert len(mesh.engine.prompts) == 1
    if keyed:
        assert records == [call_id_of(key, "one")]


@MODES
@pytest.mark.requirement("CAP-13")
@pytest.mark.bugcase("B14")
@pytest.mark.parametrize("headers", [{"Idempotency_Key": "one"}, MARKED], ids=["key", "mark"])
async def test_a_repeat_waits_for_the_call_in_work(
    headers: dict[str, str], forest: bool, tmp_path: Path
) -> None:
    """(iii): the engine is asked once."""
    held = Held()
    async with running_mesh(tmp_path, ScriptedEngine(pause=held), forest=forest) as mesh:
        key = await mesh.open()
        first_headers = {} if headers is MARKED else headers
        first = asyncio.ensure_future(post(mesh, key, GO, **first_headers))
        await held.generating.wait()
        second = asyncio.ensure_future(post(mesh, key, GO, **headers))
        await asyncio.wait({second}, timeout=0.3)
        assert not second.done()
        held.go.set()
        answers = await asyncio.gather(first, second)
        records, failures, pending = await rows(mesh, key)
    assert answers[0].content == answers[1].content
    assert {one.headers["x-callforest-call-id"] for one in answers} == set(records)
    assert (len(records), failures, pending, held.count) == (1, [], [], 1)


@MODES
@pytest.mark.requirement("CAP-13")
@pytest.mark.bugcase("B14")
async def test_a_key_with_another_body_is_refused(forest: bool, tmp_path: Path) -> None:
    """(iv): 422, since SDKs repeat a 409."""
    other = {"role": "user", "content": "other"}
    async with running_mesh(tmp_path, ScriptedEngine(), forest=forest) as mesh:
        key = await mesh.open()
        assert (await post(mesh, key, GO, Idempotency_Key="one")).status_code == 200
        refused = await post(mesh, key, other, Idempotency_Key="one")
        assert code_of(refused) == (422, "call_mismatch")
        body = json.dumps({"messages": [other]}).encode()
        with pytest.raises(RefusedError) as caught:
            await mesh.gateway.complete(key, body, idempotency_key="one")
        assert caught.value.reason == er.ERROR_REASON_CALL_MISMATCH
        for bad in ("a b", "x" * 256, ""):
            assert code_of(await post(mesh, key, GO, Idempotency_Key=bad))[0] == 400
        assert (await rows(mesh, key))[1:] == ([], [])
        assert len(mesh.engine.prompts) == 1


@MODES
@pytest.mark.requirement("CAP-13")
@pytest.mark.bugcase("B14")
@pytest.mark.parametrize("keyed", [False, True])
async def test_a_late_repeat_still_gets_its_call(keyed: bool, forest: bool, tmp_path: Path) -> None:
    """(v): call 3 after call 4 was committed, and after the attempt was closed."""
    async with running_mesh(tmp_path, ScriptedEngine(), forest=forest) as mesh:
        key = await mesh.open()
        asked: list[list[object]] = [[GO]]
        answers = []
        for number in range(4):
            headers = {"Idempotency_Key": f"call-{number}"} if keyed else {}
            answers.append(await post(mesh, key, *asked[-1], **headers))
            asked.append(next_of(answers[-1], *asked[-1]))
        again = {"Idempotency_Key": "call-2"} if keyed else MARKED
        third = await post(mesh, key, *asked[2], **again)
        assert third.content == answers[2].content
        before = await rows(mesh, key)
        assert (len(before[0]), before[1:]) == (4, ([], []))
        await mesh.admission.close_attempt(key)
        assert (await post(mesh, key, *asked[2], **again)).content == answers[2].content
        new = {"Idempotency_Key": "new"} if keyed else MARKED
        assert code_of(await post(mesh, key, *asked[4], **new)) == (422, "attempt_closed")
        await mesh.staging.delete(key, before[0])
        assert code_of(await post(mesh, key, *asked[2], **again)) == (422, "attempt_closed")
        assert await rows(mesh, key) == before
        assert len(mesh.engine.prompts) == 4


@pytest.mark.requirement("CAP-13", "CAP-2")
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_events_are_repeated_byte_for_byte(path: str, tmp_path: Path) -> None:
    turns = {"messages": [GO]} if path == "chat/completions" else {"input": [GO]}
    body = json.dumps({"model": "scripted", "stream": True, **turns})
    async with running_mesh(tmp_path, ScriptedEngine()) as mesh:
        key = await mesh.open()
        url = f"{mesh.url}/rollouts/{key}/v1/{path}"
        answers = [
            await mesh.http.post(url, content=body, headers={"Idempotency-Key": "one"})
            for _ in range(2)
        ]
    assert answers[0].headers["content-type"] == "text/event-stream"
    assert answers[0].content == answers[1].content
    assert len(mesh.engine.prompts) == 1


@asynccontextmanager
async def hung_up(
    mesh: FirstPathMesh, key: str, held: Held
) -> AsyncIterator[Callable[[], Awaitable[httpx.Response]]]:
    """Ask, and hang up while the engine generates; give how to ask again."""

    async def ask() -> httpx.Response:
        return await post(mesh, key, GO, Idempotency_Key="one")

    asking = asyncio.ensure_future(ask())
    await held.generating.wait()
    asking.cancel()
    await asyncio.wait({asking})
    yield ask


@MODES
@pytest.mark.requirement("CAP-13", "LED-11")
@pytest.mark.bugcase("B24")
async def test_a_harness_that_comes_back_in_time_has_its_generation(
    forest: bool, tmp_path: Path
) -> None:
    held = Held()
    async with running_mesh(tmp_path, ScriptedEngine(pause=held), forest=forest) as mesh:
        key = await mesh.open()
        async with hung_up(mesh, key, held) as ask:
            again = asyncio.ensure_future(ask())
            await asyncio.wait({again}, timeout=0.2)
            held.go.set()
            assert (await again).status_code == 200
        records, failures, pending = await rows(mesh, key)
    assert (records, failures, pending) == ([call_id_of(key, "one")], [], [])
    assert held.count == 1


@MODES
@pytest.mark.requirement("CAP-13", "LED-11", "CAP-7")
@pytest.mark.bugcase("B24")
async def test_a_harness_that_comes_back_late_finds_its_call_failed(
    forest: bool, tmp_path: Path
) -> None:
    """(i): aborted after the grace, and no parent; a repeat is served without capture."""
    held = Held()
    options = {"repeat_grace_s": 0.2}
    engine = ScriptedEngine(pause=held)
    async with running_mesh(tmp_path, engine, forest=forest, gateway=options) as mesh:
        key = await mesh.open()
        async with hung_up(mesh, key, held) as ask:
            await mesh.ledger.await_settled(key, wait_s=10.0)
            for _ in range(500):
                if (await rows(mesh, key))[1]:
                    break
                await asyncio.sleep(0.02)
            call_id = call_id_of(key, "one")
            assert await rows(mesh, key) == ([], [call_id], [])
            assert list(engine.cancelled_call_ids) == [call_id]
            held.go.set()
            answer = await ask()
        assert answer.status_code == 200
        assert await rows(mesh, key) == ([], [call_id], [])
        if forest:
            after = await post(mesh, key, *next_of(answer, GO))
            assert after.headers["x-callforest-context"].startswith("root; reason=")


@pytest.mark.requirement("CAP-13")
async def test_a_delta_request_is_repeated_though_its_history_is_lost(tmp_path: Path) -> None:
    """Looked for before the histories are, and before the engine is asked what it is."""
    options: dict[str, object] = {"history_cache_calls": 1}
    async with running_mesh(tmp_path, ScriptedEngine(), forest=True, gateway=options) as mesh:
        key = await mesh.open()
        body = json.dumps({"messages": [GO]}).encode()
        first = await mesh.gateway.complete(key, body, CHAT)

        async def ask(name: str) -> bytes:
            served = await mesh.gateway.complete(
                key, body, CHAT, continues_call_id=first.call_id, idempotency_key=name
            )
            return served.response

        second = await ask("two")
        other = await mesh.open("other")
        await mesh.gateway.complete(other, body, CHAT)  # takes the only place
        assert await ask("two") == second
        with pytest.raises(RefusedError) as caught:
            await ask("three")
        assert caught.value.reason == er.ERROR_REASON_HISTORY_REQUIRED
        records, failures, pending = await rows(mesh, key)
    assert records == [first.call_id, call_id_of(key, "two")]
    assert (failures, pending) == ([], [])


@MODES
@pytest.mark.requirement("CAP-13")
async def test_a_repeat_needs_neither_worker_nor_engine(forest: bool, tmp_path: Path) -> None:
    async with running_mesh(tmp_path, ScriptedEngine(), forest=forest) as mesh:
        key = await mesh.open()
        first = await post(mesh, key, GO, Idempotency_Key="one")
        await mesh.servers["worker"].stop()
        assert (await post(mesh, key, GO, Idempotency_Key="one")).content == first.content
