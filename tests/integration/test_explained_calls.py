"""`callforest explain` of a running mesh: roots among other agents' calls, and refused requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from callforest.capture.v1 import attempt_pb2
from callforest_mesh.inspection import explain_call
from tests.integration.running_mesh import running

pytestmark = pytest.mark.requirement("OPS-4")

AGENT = {"role": "system", "content": "Agent A rules  here"}
TASK = {"role": "user", "content": "task"}
NEXT = {"role": "user", "content": "next"}


async def test_a_root_is_explained_against_its_own_agent_and_a_refusal_by_itself(
    tmp_path: Path,
) -> None:
    async with running("embedded", tmp_path, "token_capture.forest_training=true") as mesh:
        rollout = await mesh.owner.open("r1", mode=attempt_pb2.CAPTURE_MODE_FOREST)

        async def explained(call_id: str) -> tuple[list[str], int]:
            name = f"{rollout.capture_key}/{call_id}"
            return await asyncio.to_thread(explain_call, mesh.configuration, name)

        async with httpx.AsyncClient(timeout=30) as http:

            async def ask(*turns: object, **fields: object) -> httpx.Response:
                body = {"model": "scripted", "messages": turns, **fields}
                url = f"{rollout.base_url}/chat/completions"
                return await http.post(url, content=json.dumps(body))

            first = await ask(AGENT, TASK)
            said = first.json()["choices"][0]["message"]
            for number in range(6):
                other = {"role": "system", "content": f"another agent, {number}"}
                assert (await ask(other, TASK)).status_code == 200
            spaced = {**AGENT, "content": "Agent A rules here"}
            changed = await ask(spaced, TASK, said, NEXT)
            context = changed.headers["x-callforest-context"]
            assert context == "root; reason=history_not_recorded; difference=whitespace"
            lines, status = await explained(changed.headers["x-callforest-call-id"])
            own = first.headers["x-callforest-call-id"]
            assert (status, lines[2]) == (0, f"  differs: whitespace at atom 0 against {own}")

            twins = [await ask(AGENT, TASK, said, NEXT, seed=9) for _ in range(2)]
            echo = {key: twins[0].json()["choices"][0]["message"][key] for key in said}
            refused = await ask(AGENT, TASK, said, NEXT, echo, NEXT)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (422, "ambiguous_history")
            for twin in twins:
                assert twin.headers["x-callforest-call-id"] in error["message"]
            assert "x-callforest-call-id" not in refused.headers
        lines, status = await explained("refused")
        assert status == 1
        assert lines == [
            f"no call '{rollout.capture_key}/refused'",
            "  a request that was refused is no call: its refusal (422 and its code) says why",
        ]
