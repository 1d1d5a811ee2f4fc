"""A request whose body does not arrive whole: known to have begun no call (CAP-12)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from callforest_mesh.demo.response_selection import ResponseSelector, SelectionLimits
from callforest_mesh.worker.scripted import ScriptedEngine
from tests.integration.first_path_mesh import running_mesh

OPENING: list[ChatCompletionMessageParam] = [{"role": "user", "content": "go"}]


async def send_half(url: str, path: str, key: str) -> bytes:
    """Send a request and half of its body; give the answer's status line."""
    address = urlsplit(url)
    body = json.dumps({"model": "scripted", "messages": OPENING}).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nIdempotency-Key: {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[: len(body) // 2])
    await writer.drain()
    async with asyncio.timeout(20):
        status = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return status


@pytest.mark.requirement("CAP-12", "CAP-7")
@pytest.mark.parametrize("forest", [True, False])
async def test_a_body_that_is_late_begins_no_call_and_may_be_sent_again(
    tmp_path: Path, forest: bool
) -> None:
    options = {"body_timeout_s": 0.3}
    async with running_mesh(
        tmp_path, ScriptedEngine(), local=True, forest=forest, gateway=options
    ) as mesh:
        key = await mesh.open()
        before = (await mesh.manifest(key)).attempt
        path = f"/rollouts/{key}/v1/chat/completions"
        assert b" 408 " in await send_half(mesh.url, path, "the-request")
        assert (await mesh.manifest(key)).attempt == before
        assert not mesh.prompts()
        whole = {"model": "scripted", "messages": OPENING}
        again = await mesh.http.post(
            f"{mesh.url}{path}", json=whole, headers={"Idempotency-Key": "the-request"}
        )
        assert again.status_code == 200
        manifest = await mesh.manifest(key)
        assert len(manifest.records) == len(mesh.prompts()) == 1
        assert not manifest.failures
        assert not manifest.attempt.pending_call_ids


@pytest.mark.requirement("CAP-12")
async def test_rejected_samples_are_captured_and_never_shown(tmp_path: Path) -> None:
    """Over a real gateway: three samples of one turn are three calls, and the next turn has one."""
    async with running_mesh(tmp_path, ScriptedEngine(), local=True, forest=True) as mesh:
        key = await mesh.open()
        async with mesh.harness(key) as sdk:
            selector = ResponseSelector(sdk, "scripted", 8, SelectionLimits(max_response_retries=2))
            seen: list[str] = []

            def third(completion: openai.types.chat.ChatCompletion) -> bool:
                seen.append(completion.id)
                return len(seen) == 3

            chosen = await selector.select_response(OPENING, third)
        records = (await mesh.manifest(key)).records
        assert [one.response_id for one in records] == seen
        assert chosen.id == seen[2]
        assert [one.coords.parent_call_id for one in records] == ["", "", ""]
