"""Bug case B04 from another language: what a TypeScript harness echoes is judged as Python's is."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from callforest.capture.v1 import call_record_pb2
from callforest.gateway.v1 import gateway_service_pb2 as pb
from callforest_core.custody.tokens import TokenIds
from callforest_mesh.worker.chat_text import TURN_END
from callforest_mesh.worker.scripted import ScriptedEngine, ScriptedTurn
from tests.integration.argument_echoes import ARGUMENT_ECHOES, EMITTED, LARGE
from tests.integration.first_path_mesh import GO, FirstPathMesh, running_mesh, turn

CLIENT = Path(__file__).resolve().parents[2] / "clients/typescript"
HARNESS = CLIENT / "dist/clients/typescript/examples/echo.js"
WAIT_S = 120.0
REWRITTEN: dict[str, tuple[str, str]] = {
    # Read and written again by JavaScript, in which every number is a double.
    "rewritten": (EMITTED, "continuation"),
    "rewritten-large": (LARGE, "rewritten_history"),
}
Taken: TypeAlias = tuple[bool, str, str]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    subprocess.run(["npm", "run", "--silent", "build"], cwd=CLIENT, check=True, timeout=WAIT_S)


def script_of(emitted: list[str]) -> Callable[[TokenIds, str, int], ScriptedTurn]:
    """Answer every other call with the next tool call, and those between with text."""

    def say(_prompt: TokenIds, _call_id: str, ordinal: int) -> ScriptedTurn:
        if ordinal % 2:
            return turn(*b"ok", TURN_END)
        function = {"name": "run", "arguments": emitted[ordinal // 2 % len(emitted)]}
        call = {"id": "call_1", "type": "function", "function": function}
        message = {"content": "some", "tool_calls": [call]}
        return turn(*b"some", TURN_END, finish_reason="tool_calls", message=message)

    return say


async def echoed_by_typescript(
    gateway: str, cases: list[dict[str, str | None]]
) -> list[dict[str, object]]:
    child = await asyncio.create_subprocess_exec(
        "node",
        str(HARNESS),
        f"--gateway={gateway}",
        f"--cases={json.dumps(cases)}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WAIT_S):
            out, err = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode == 0, err.decode()
    taken: list[dict[str, object]] = json.loads(out)
    return taken


async def echoed_by_python(mesh: FirstPathMesh, attempt: str, variant: str) -> Taken:
    async def ask(*messages: object) -> pb.ServedCompletion:
        body = json.dumps({"model": "any", "messages": messages}).encode()
        return await mesh.gateway.complete(attempt, body)

    said = json.loads((await ask(GO)).response)["choices"][0]["message"]
    said["tool_calls"][0]["function"]["arguments"] = variant
    result = {"role": "tool", "tool_call_id": "call_1", "content": "done"}
    report = (await ask(GO, said, result)).context
    kind = report.difference.kind if report.HasField("difference") else None
    return report.is_continuation, report.reason, name_of(kind)


def name_of(kind: object) -> str:
    """Give what a difference is called; "" for none."""
    if kind is None:
        return ""
    assert isinstance(kind, int)
    name = call_record_pb2.DifferenceClass.Name(kind)
    return name.removeprefix("DIFFERENCE_CLASS_").lower()


@pytest.mark.requirement("ADM-2", "API-4")
@pytest.mark.bugcase("B04")
async def test_arguments_are_compared_by_one_rule_in_every_language(tmp_path: Path) -> None:
    emitted = [one.emitted for one in ARGUMENT_ECHOES.values()]
    emitted += [one for one, _ in REWRITTEN.values()]
    variants: list[str | None] = [one.variant for one in ARGUMENT_ECHOES.values()]
    variants += [None] * len(REWRITTEN)
    expected = [one.expected for one in ARGUMENT_ECHOES.values()]
    expected += [one for _, one in REWRITTEN.values()]
    names = [*ARGUMENT_ECHOES, *REWRITTEN]
    async with running_mesh(
        tmp_path, ScriptedEngine(script=script_of(emitted)), forest=True
    ) as mesh:
        theirs = await echoed_by_typescript(
            f"unix:{tmp_path}/gateway.sock",
            [
                {"attempt": await mesh.open(f"typescript-{name}"), "variant": variant}
                for name, variant in zip(names, variants, strict=True)
            ],
        )
        ours = [
            await echoed_by_python(mesh, await mesh.open(f"python-{name}"), echo.variant)
            for name, echo in ARGUMENT_ECHOES.items()
        ]
    taken = [(one["isContinuation"], one["reason"], name_of(one["difference"])) for one in theirs]
    assert dict(zip(names, taken, strict=True)) == {
        name: (True, "", "") if how == "continuation" else (False, "history_not_recorded", how)
        for name, how in zip(names, expected, strict=True)
    }
    assert ours == taken[: len(ours)]
